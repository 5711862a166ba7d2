"""Throughput mode: layout, dispatch, combine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep import arguments
from deep_ep.borrowed import tensor_of
from deep_ep.call import Call, summed_apart, with_scales
from deep_ep.config import MOST_RANKS, Config, combine_config, dispatch_config, domains_of
from deep_ep.copies import check_copies, remade, routes_of
from deep_ep.errors import refuse, require, require_integer
from deep_ep.event import EventOverlap
from deep_ep.gradients import without_gradients
from deep_ep.groups import Groups
from deep_ep.handles import (
    Exchange,
    InternodeHandle,
    IntranodeHandle,
    find,
    is_handle,
    prefix_of,
)
from deep_ep.layout import layout_of, rank_routes, slots_here
from deep_ep.streams import Turn
from ferry.arguments import shown

_default_dispatch = cache(dispatch_config)
_default_combine = cache(combine_config)
_MOST_SLOTS = 64  # of a route of Ferry


class Throughput:
    """The throughput half of a Buffer. The other half provides what is declared here.

    R ranks, T tokens of this rank, H channels, K slots of a route, E experts, N rows received.
    `previous_event`: the call waits for this event instead of what is on the current stream.
    `async_finish`: the current stream does not wait for the call; the returned event is for that.
    `allocate_on_comm_stream` needs both, and asks for what happens anyway. In CPU memory every call
    returns finished results.
    """

    num_sms: int
    rank: int
    group_size: int
    runtime: Any
    _groups: Groups

    def _group_for(self, num_experts: int, device: torch.device) -> ferry.Group:
        raise NotImplementedError

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """What this rank's routes say; not collective.

        topk_idx: i64 or i32 [T, K], -1 = unused. Returns num_tokens_per_rank i32 [R],
        num_tokens_per_rdma_rank i32 [R / 8] (None up to 8 ranks), num_tokens_per_expert i32 [E],
        is_token_in_rank bool [T, R] and the event.
        """
        call = "get_dispatch_layout"
        arguments.check_routes(call, topk_idx)
        arguments.check_memory(call, topk_idx=topk_idx)
        num_experts = require_integer(call, "num_experts", num_experts, 1, "at least 1")
        when = (previous_event, async_finish, allocate_on_comm_stream)
        turn = Turn(call, self.runtime, topk_idx.device, *when)
        with turn.context(topk_idx):
            layout = layout_of(topk_idx, num_experts, self.group_size)
        return (*layout, turn.end(None, layout))

    @without_gradients
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        """Collective. Sends each token once to every rank that holds one of its experts.

        Args:
            x: [T, H], any dtype, dense, row bytes a multiple of 16; or (x, scales), x of one-byte
                elements and scales f32 or i32 [T, any], any strides.
            handle: of an earlier dispatch, to send the same way again; then no argument of routes.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert:
                as get_dispatch_layout returned them.
            topk_idx: i64 or i32 [T, K]; None: tokens go where is_token_in_rank says.
            topk_weights: f32 [T, K], carried along.
            expert_alignment: the counts of the returned list are rounded up to it; rows are not.
            num_worst_tokens: the results have so many rows whatever arrives, and the CPU waits for
                nothing. Needs topk_idx. Rows past the last are undefined, their topk_idx -1.
            config: None: the default for this number of ranks.

        Returns recv_x [N, H] (with scales [N, any], dense, beside it if x had them), recv_topk_idx
        [N, K] in local ids (-1: not here), recv_topk_weights f32 [N, K] (0 there), rows for each
        local expert ([] with num_worst_tokens), the handle and the event. Rows come in ascending
        source rank, then token. With a handle the middle four are None.
        """
        rows, scales = arguments.rows_and_scales("dispatch", x)
        arguments.check_rows("dispatch", "x", rows)
        dtype, sent = rows.dtype, arguments.carried_rows(rows)
        carried = None if scales is None else arguments.carried_scales("dispatch", rows, scales)
        when = (previous_event, async_finish, allocate_on_comm_stream)
        call = self._call("dispatch", config, _default_dispatch, rows, when)
        call.how["scales"] = carried
        if handle is not None:
            none = topk_idx is None and topk_weights is None
            require(none, call.name, "topk_idx, topk_weights", "a tensor", "None beside a handle")
            exchange = self._exchange(call, handle, rows.device)
            received = exchange.group.dispatch(
                sent, exchange.plan, max_recv_rows=exchange.max_recv_rows, **call.how
            )
            event = call.end(exchange.group, received, ("x", "scales"))
            return with_scales(received, dtype, scales), None, None, None, None, event

        arguments.check_layout(
            call.name,
            rows,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            self.group_size,
        )
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        least = "an integer, at least"
        alignment = require_integer(
            call.name, "expert_alignment", expert_alignment, 1, f"{least} 1"
        )
        worst = require_integer(call.name, "num_worst_tokens", num_worst_tokens, 0, f"{least} 0")
        if topk_idx is None:
            good = topk_weights is None and worst == 0
            require(good, call.name, "topk_idx", "None", "routes for weights, num_worst_tokens")
            group, routes = self._by_ranks(call, is_token_in_rank)
        else:
            arguments.check_routes(call.name, topk_idx)
            if topk_weights is not None:
                arguments.check_weights(call.name, topk_weights, *topk_idx.shape)
            group, routes = self._group_for(num_tokens_per_expert.numel(), rows.device), topk_idx
        received = group.dispatch(
            sent,
            topk_idx=routes,
            topk_weights=topk_weights,
            max_recv_rows=worst,
            **call.how,
        )
        assert received.plan is not None
        if topk_idx is not None:
            experts = num_tokens_per_expert.numel()
            arguments.check_sent(call.name, is_token_in_rank, topk_idx, experts)
        made = self._handle(call, group, received, is_token_in_rank, worst)
        ids, weights = None, received.topk_weights
        if topk_idx is not None:
            with call.turn.context():
                ids = received.topk_idx.to(topk_idx.dtype)
        names = ("x", "scales", "topk_weights", "topk_idx", "source_token")
        event = call.end(group, received, names, (made.key, ids))
        if call.turn.stream is not None:
            made.after(event.event)
        if worst > 0:
            counts = []
        elif topk_idx is None:
            per_expert = num_tokens_per_expert.to("cpu", torch.int32).contiguous()
            said = self._groups.all_gather(per_expert.numpy().tobytes())  # and the CPU waits
            counts = slots_here(said, self.rank)
        else:
            counts = received.plan.slots_per_expert()
        counts = [-(-count // alignment) * alignment for count in counts]
        return with_scales(received, dtype, scales), ids, weights, counts, made, event

    @without_gradients
    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Collective. Brings rows back to their tokens and adds them up, in fp32 and in ascending
        rank, and rounds once.

        Args:
            x: bf16 (f16 or f32, too) [N, H], the rows in the order of the dispatch.
            handle: of that dispatch.
            topk_weights: f32 [N, any], brought back and added up beside x.
            bias: one or two of [T, H], dtype of x, added last.
            config: of as many SMs as the dispatch had.

        Returns combined_x [T, H], combined_topk_weights f32 [T, any] or None, and the event.
        """
        arguments.check_rows("combine", "x", x)
        when = (previous_event, async_finish, allocate_on_comm_stream)
        call = self._call("combine", config, _default_combine, x, when)
        exchange = self._exchange(call, handle, x.device)
        if x.shape[0] != exchange.rows:
            refuse(call.name, "x", f"{x.shape[0]} rows", f"{exchange.rows}, as dispatch gave")
        apart = False
        if topk_weights is not None:
            arguments.check_weights(call.name, topk_weights, exchange.rows, None)
            apart = topk_weights.shape[1] != exchange.plan.topk
            if apart:
                arguments.check_memory(call.name, topk_weights=topk_weights)
        bias0, bias1 = arguments.biases(call.name, x, bias, exchange.plan)
        combined = exchange.group.combine(
            exchange.cut(x),
            exchange.plan,
            topk_weights=None if apart or topk_weights is None else exchange.cut(topk_weights),
            bias0=bias0,
            bias1=bias1,
            **call.how,
        )
        weights = None if topk_weights is None else combined.topk_weights
        if apart:
            assert topk_weights is not None
            weights = summed_apart(call, exchange, topk_weights)
        made = (weights,) if apart else ()
        event = call.end(exchange.group, combined, ("x", "topk_weights"), made)
        return tensor_of(combined.raw.x), weights, event

    # The original takes these for ranks of several hosts; here a rank's host makes no difference.
    internode_combine = combine

    def internode_dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        num_worst_tokens: int = 0,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        """`dispatch`, with its arguments in the order that the original has them here."""
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    @staticmethod
    def _unpack_bias(bias: Any) -> tuple[Any, Any]:
        """Its two parts, as callers of the original's own helper get them."""
        if isinstance(bias, tuple):
            assert len(bias) == 2, f"bias: got a tuple of {len(bias)}; expected two tensors"
            return bias
        return (bias if isinstance(bias, Tensor) else None), None

    def _call(
        self,
        name: str,
        config: Config | None,
        default: Callable[[int, int], Config],
        rows: Tensor,
        when: tuple[EventOverlap | None, bool, bool],
    ) -> Call:
        if config is None:
            config = default(min(self.group_size, MOST_RANKS), self.num_sms)
        try:
            sms = config.num_sms
        except AttributeError:
            refuse(name, "config", shown(config), "a deep_ep.Config, or None")
        require(sms % 2 == 0, name, "config.num_sms", sms, "an even number")
        turn = Turn(name, self.runtime, rows.device, *when)
        return Call(name, turn, sms // 2, {"stream": turn.stream, "num_sms": sms})

    def _handle(
        self, call: Call, group: ferry.Group, received: Any, in_rank: Tensor, worst_rows: int
    ) -> IntranodeHandle | InternodeHandle:
        exchange = Exchange(
            group,
            received.plan,
            call.channels,
            received.x.shape[0],
            worst_case=worst_rows > 0,
            captured=in_rank.is_cuda and torch.cuda.is_current_stream_capturing(),
        )
        with call.turn.context(in_rank):
            prefix = prefix_of(received.plan)
            if domains_of(self.group_size) > 1:
                return InternodeHandle.of(exchange, prefix, received.source_token, in_rank)
            return IntranodeHandle.of(exchange, prefix, received.source_token, in_rank)

    def _exchange(self, call: Call, handle: Any, device: torch.device) -> Exchange:
        """What a handle stands for. Tensors that are copies of a handle's, as after a trip of saved
        tensors to other memory, make the plan anew, on all ranks alike."""
        if not is_handle(handle):
            refuse(call.name, "handle", type(handle).__name__, "the handle of a dispatch")
        exchange = find(handle)
        if exchange is None:
            check_copies(call.name, handle, self.group_size)
            group, routes = self._by_ranks(call, routes_of(handle).to(device))
            exchange = remade(call, handle, group, group.plan(routes, stream=call.turn.stream))
        if exchange.channels != call.channels:
            refuse(
                call.name,
                "config.num_sms",
                2 * call.channels,
                f"{2 * exchange.channels}, as of the dispatch that made the handle",
            )
        return exchange

    def _by_ranks(self, call: Call, is_token_in_rank: Tensor) -> tuple[ferry.Group, Tensor]:
        """A group with one expert on each rank, and routes to them."""
        ranks = self.group_size
        good = ranks <= _MOST_SLOTS
        require(good, call.name, "topk_idx", "none", f"routes, as {ranks} ranks are over 64")
        with call.turn.context(is_token_in_rank):
            routes = rank_routes(is_token_in_rank)
        return self._group_for(ranks, is_token_in_rank.device), routes
