"""Low-latency mode: the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.errors import refuse, require
from deep_ep.event import EventOverlap
from deep_ep.low_latency_checks import (
    Shape,
    check_combine,
    check_either,
    check_sizes,
    check_stats,
    check_tokens,
    unpacked,
)
from deep_ep.rounds import Round, Rounds
from deep_ep.runtime import Runtime
from deep_ep.streams import Turn

Handle = tuple[Tensor, Tensor, int, int, int]
Hook = Callable[[], None]


class LowLatency:
    """The low-latency half of a Buffer. The other half provides what is declared here.

    Each (num_max_dispatch_tokens_per_rank, hidden, num_experts, top-k, dtype) has buffers of its
    own, made collectively by the first dispatch with it. Results of the last two dispatches may be
    used; older tensors see what later dispatches write.
    """

    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    runtime: Runtime

    def _group_for(self, num_experts: int, device: torch.device) -> ferry.Group:
        raise NotImplementedError

    def _open_low_latency(self) -> None:
        """Called at the end of the constructor, on all ranks: prepares this half's own state."""
        self._latency_rounds: dict[Shape, Rounds] = {}

    def _close_low_latency(self) -> None:
        """Called by `destroy`, before the groups are left: drops what holds their memory."""
        self._latency_rounds.clear()

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """There is nothing to clean, whatever ran before: Ferry's flags are numbers that only grow
        and lie outside what callers can write. Waits for nobody."""
        call = "clean_low_latency_buffer"
        self._require_low_latency(call)
        check_sizes(
            call,
            num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            hidden=hidden,
            num_experts=num_experts,
        )

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Handle, EventOverlap, Hook | None]:
        """Collective. Sends every token to the experts that it names.

        Args:
            x: [T, H] bf16 (or f16, f32), T at most `num_max_dispatch_tokens_per_rank`.
            topk_idx: i64 or i32 [T, K], -1 = unused.
            cumulative_local_expert_recv_stats: i32 [L], the rows received are added.
            dispatch_wait_recv_cost_stats: i64 [R], the nanoseconds that this call waited for each
                source are added.
            use_fp8: rows arrive as e4m3 with a scale for each 128 channels.
            round_scale: scales are powers of two. use_ue8m0: as exponents, four in an i32.
            return_recv_hook: only send; the hook receives.

        Returns, with L local experts, R ranks and C = `num_max_dispatch_tokens_per_rank`: the rows
        [L, R*C, H], with fp8 a pair with their scales; the number of valid rows, i32 [L]; the
        handle: (source tokens i32 [L, R*C], layout i64 [L, R]: first row << 32 | rows, C, H,
        num_experts); the event; the hook or None.
        """
        call = "low_latency_dispatch"
        self._require_low_latency(call)
        check_either(call, async_finish, return_recv_hook)
        capacity, experts = num_max_dispatch_tokens_per_rank, num_experts
        check_sizes(call, num_max_dispatch_tokens_per_rank=capacity, num_experts=experts)
        check_tokens(call, x, topk_idx, capacity)
        options = _wire(call, use_fp8, round_scale, use_ue8m0)
        shape = Shape(capacity, x.shape[1], experts, topk_idx.shape[1], x.dtype, x.device)
        rounds = self._rounds_for(shape)
        stats = cumulative_local_expert_recv_stats
        name = "cumulative_local_expert_recv_stats"
        check_stats(call, name, stats, torch.int32, rounds.local_experts)
        options |= self._waits(call, "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats)
        turn = Turn(call, self.runtime, x.device, None, async_finish)
        made = rounds.dispatch(x, topk_idx, hook=return_recv_hook, stream=turn.stream, **options)

        def receive() -> None:
            if return_recv_hook:
                made.receive()
            if stats is not None:
                stats.add_(made.counts)

        if not return_recv_hook:
            with turn.context():
                receive()
        return (
            made.x if made.scales is None else (made.x, made.scales),
            made.counts,
            (made.source_token, made.ranges, capacity, shape.hidden, experts),
            _end(turn, x, topk_idx),
            receive if return_recv_hook else None,
        )

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Collective. Brings rows back to the owners of their tokens and sums them there: in fp32,
        in ascending slot, with one rounding.

        Args:
            x: [L, R*C, H], the dtype that was dispatched.
            topk_idx: [T, K], those of the dispatch.
            topk_weights: f32 [T, K].
            use_logfmt: rows cross in 10 bits a channel.
            zero_copy: the rows are what was written to `get_next_low_latency_combine_buffer`.
            out: [T, H], the caller's own output.
            combine_wait_recv_cost_stats: i64 [R], as for the dispatch.

        Returns [T, H], the event, the hook or None. A handle may serve again, and after two later
        dispatches; Ferry, which has forgotten its routes by then, sends them once more.
        """
        call = "low_latency_combine"
        self._require_low_latency(call)
        check_either(call, async_finish, return_recv_hook)
        require(
            not (use_logfmt and zero_copy),
            call,
            "use_logfmt",
            "True together with zero_copy",
            "one of the two: rows of zero_copy cross as they are",
        )
        shape, rounds, made = self._found(call, handle, topk_idx)
        check_combine(call, shape, x, self.group_size * shape.capacity, topk_idx, topk_weights, out)
        rows = _rows(call, rounds, made) if zero_copy else x
        options = self._waits(call, "combine_wait_recv_cost_stats", combine_wait_recv_cost_stats)
        if use_logfmt:
            options["format"] = "logfmt10"
        turn = Turn(call, self.runtime, x.device, None, async_finish)
        if made is None or not made.combinable:
            rounds, made = self._again(shape, topk_idx, turn)
        combined, receive = made.combine(
            rounds.exchange,
            rows,
            topk_weights,
            hook=return_recv_hook,
            out=out,
            stream=turn.stream,
            **options,
        )
        return combined, _end(turn, rows, topk_weights), receive if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> Tensor:
        """Memory for the rows of this handle's combine with `zero_copy`: [L, R*C, H], the dtype
        that was dispatched. What it holds is undefined."""
        call = "get_next_low_latency_combine_buffer"
        self._require_low_latency(call)
        _, rounds, made = self._found(call, handle, None)
        return _rows(call, rounds, made)

    def _require_low_latency(self, call: str) -> None:
        require(
            self.low_latency_mode,
            call,
            "this Buffer",
            "low_latency_mode=False",
            "Buffer(..., low_latency_mode=True)",
        )

    def _rounds_for(self, shape: Shape) -> Rounds:
        found = self._latency_rounds.get(shape)
        if found is None:
            group = self._group_for(shape.experts, shape.device)
            found = self._latency_rounds[shape] = Rounds(
                group, self._exchange_for(group, shape), shape.dtype
            )
        return found

    def _exchange_for(self, group: ferry.Group, shape: Shape) -> ferry.LatencyExchange:
        return ferry.LatencyExchange(
            group,
            capacity=shape.capacity,
            hidden=shape.hidden,
            topk=shape.topk,
            dtype=shape.dtype,
        )

    def _found(
        self, call: str, handle: Any, topk_idx: Tensor | None
    ) -> tuple[Shape, Rounds, Round | None]:
        """What a handle belongs to; None for the round when its buffer serves another by now."""
        source_token, _, capacity, hidden, experts = unpacked(call, handle)
        topk = None if topk_idx is None else topk_idx.shape[-1]
        fitting: tuple[Shape, Rounds, None] | None = None
        for shape, rounds in self._latency_rounds.items():
            made = rounds.find(source_token)
            if made is not None:
                return shape, rounds, made
            named = (capacity, hidden, experts, topk, source_token.device)
            if named == (shape.capacity, shape.hidden, shape.experts, shape.topk, shape.device):
                fitting = shape, rounds, None
        if fitting is None:
            refuse(call, "handle", "one of another Buffer", "one that this Buffer returned")
        return fitting

    def _again(self, shape: Shape, topk_idx: Tensor, turn: Turn) -> tuple[Rounds, Round]:
        """Collective: a dispatch that repeats only routes, whose rows come to lie as before."""
        rounds = self._rounds_for(shape._replace(again=True))
        with turn.context():
            tokens = (topk_idx.shape[0], shape.hidden)
            x = torch.zeros(tokens, dtype=shape.dtype, device=shape.device)
        return rounds, rounds.dispatch(x, topk_idx, hook=False, stream=turn.stream)

    def _waits(self, call: str, name: str, stats: Tensor | None) -> dict[str, Any]:
        check_stats(call, name, stats, torch.int64, self.group_size)
        return {} if stats is None else {"waits": stats}


def _wire(call: str, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> dict[str, Any]:
    """How rows cross."""
    if not use_fp8:
        return {}
    require(
        round_scale or not use_ue8m0,
        call,
        "use_ue8m0",
        "True without round_scale",
        "round_scale=True, as exponents say powers of two only",
    )
    rounded = "ue8m0_packed" if use_ue8m0 else "f32_pow2"
    return {"format": "e4m3", "scale_format": rounded if round_scale else "f32"}


def _rows(call: str, rounds: Rounds, made: Round | None) -> Tensor:
    """Where the caller writes the rows of a combine with zero_copy."""
    if made is None:
        refuse(call, "handle", "one of a dispatch before the last two", "a later one")
    return rounds.rows(made)


def _end(turn: Turn, *inputs: Tensor) -> EventOverlap:
    """The event of a call, which keeps what the call reads."""
    overlap = turn.end(None)
    if overlap.event is not None:
        overlap.extra_tensors = inputs
    return overlap
