"""`ferry.torch.ExpertParallel`: the experts of a layer, spread over the ranks of a group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from ferry.arguments import choice, describe, instance, integer, refuse, renamed_keywords
from ferry.collectives import Collectives
from ferry.experts import BatchBalancer, ExpertPlacement
from ferry.group import FORMATS, Group
from ferry.handles import find, register
from ferry.latency import LatencyExchange, LatencyReceived
from ferry.tensors import dense
from ferry.torch_balance import COPY_ROWS, Copies
from ferry.torch_exchange import combine, dispatch, planned
from ferry.torch_gpu_balancer import GpuBalancer
from ferry.torch_gpu_copies import GpuCopies, plans_on_gpu
from ferry.torch_placed_experts import checked, held, sum_copies
from ferry.torch_rows import row_weights
from ferry.torch_through_e4m3 import restored  # importing it defines the operator
from ferry.torch_wrapped_experts import ready, walked, watch


class ExpertParallel(nn.Module):
    """Brings tokens to their experts on all ranks and the weighted sums of what those make back.

    `forward` is for training and prefill: differentiable in x, in topk_weights and in what the
    experts hold, and torch.compile takes it in. `decode` is for small batches, in latency mode.
    Both are collective, and so is the backward: all ranks make the same calls in the same order,
    ranks without tokens, too. Router and data-parallel gradients are the caller's; before DDP or
    FSDP wraps a model with this module in it, call `ferry.torch.ignore_experts`. Copies, deep ones,
    too, share the group and the buffers of `decode`.

    Args:
        group: its `experts` are those of the layer; this rank holds `group.local_experts`.
        experts: experts(rows [M, H], offsets i64 [local experts + 1]) returns [M, H], row by row:
            expert e has the rows from offsets[e] to offsets[e + 1]. Rows from offsets[-1] on, if
            there are any, are undefined and must not touch parameters. M may be 0.
        alignment: every expert's rows are padded with zero rows to a multiple of this.
        max_recv_rows: > 0: M is this, whatever arrives, so nothing waits for the counts: for
            CUDA graphs and static shapes.
        num_sms: on GPUs: how many multiprocessors move rows; 0: a default.
        format: "as_is", or "e4m3": tokens cross to their experts in fp8 with a scale for each 128
            channels, in both modes; experts see them in x's dtype again. The gradient takes the
            quantisation for the identity.
        decode_tokens: most tokens of a rank in one `decode`; 0: no `decode`.
        decode_experts: instead of `experts` in `decode`:
            decode_experts(rows [L, N, H], counts i32 [L]) returns [L, N, H]; of expert e the first
            counts[e] rows matter. With "e4m3" the rows are e4m3 and their scales,
            f32 [L, N, ceil(H/128)], come third. None: `experts`, with all N rows of each.
        balance: > 0: slots of each rank for copies of busy experts of others, planned for each
            batch, so that all ranks work on as many rows; without decode_experts. With
            max_recv_rows copies are made, too, where a rank would have more rows. `group` has
            experts=E + group.size * balance for E experts, as many on each rank. Parameters of
            `experts` are [L, ...], an entry for each expert of this rank; it is called a second
            time for copies, with as many entries as there are slots.
        collectives: of the same ranks, for weights and gradients of copies.
        copy_rows: with `balance`: the work on how many rows a copy costs. Batches that copies would
            save less than that are left as they are.
        placement: where the experts of the layer are when they may move, as after `Group.regroup`:
            topk_idx names its experts, and `group` has experts=group.size * placement.slots.
            Parameters of `experts` are [slots, ...], and it is called with as many entries. Assign
            a new one at any time between steps, the same on all ranks. Without balance and
            decode_tokens. After each backward: `sum_copies`.
    """

    @renamed_keywords(sms="num_sms", worst_case_rows="max_recv_rows")
    def __init__(
        self,
        group: Group,
        experts: nn.Module,
        *,
        alignment: int = 1,
        max_recv_rows: int = 0,
        num_sms: int = 0,
        format: str = "as_is",
        decode_tokens: int = 0,
        decode_experts: Callable[..., Tensor] | None = None,
        balance: int = 0,
        collectives: Collectives | None = None,
        copy_rows: int = COPY_ROWS,
        placement: ExpertPlacement | None = None,
    ) -> None:
        super().__init__()
        call = "ExpertParallel"
        self.group = instance(f"{call}: group", group, Group, "a ferry.Group")
        self.experts = instance(f"{call}: experts", experts, nn.Module, "a torch.nn.Module")
        choice(f"{call}: format", format, FORMATS)
        self.format = format
        self.layout: dict[str, Any] = {
            "order": "expert_major",
            "alignment": integer(f"{call}: alignment", alignment, 1),
            "max_recv_rows": integer(f"{call}: max_recv_rows", max_recv_rows),
            "num_sms": integer(f"{call}: num_sms", num_sms),
        }
        self.decode_tokens = integer(f"{call}: decode_tokens", decode_tokens)
        self.decode_experts = decode_experts
        self._copies: Copies | None = None
        if integer(f"{call}: balance", balance) > 0:
            if decode_experts is not None:
                expected = "None with balance: `experts` run once more for copies"
                refuse(f"{call}: decode_experts", describe(decode_experts), expected)
            on_gpu = plans_on_gpu(group, collectives, self.layout["max_recv_rows"])
            made = GpuCopies if on_gpu else Copies
            self._copies = made(group, balance, collectives, copy_rows, self.layout)
        self._placement: ExpertPlacement | None = None
        if placement is not None:
            if self._copies is not None or self.decode_tokens > 0:
                got = f"one with balance={balance}, decode_tokens={decode_tokens}"
                refuse(
                    f"{call}: placement",
                    got,
                    "both 0: experts stay where balance copies them, "
                    "and latency mode has no regroup",
                )
            self._placement = checked(placement, group)
        self._exchanges: dict[tuple[int, int, torch.dtype], LatencyExchange] = {}
        # Of torch_wrapped_experts: whose experts these are; whether their gradients are means; what
        # they are cut by (None: not known), whether that is right, and whether it is wrong.
        self._place = (group.rank, group.size, group.experts)
        self._means = False
        self._cut: list[Any] | None = None
        self._judged, self._mixed = group.size == 1, False
        self._known()

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """The sum over slots of weight times expert(x): [T, H], x's dtype; 0 for tokens that no
        slot sends anywhere.

        x: f32, bf16 or f16 [T, H]. topk_idx: i64 or i32 [T, K], -1 = unused. topk_weights: f32
        [T, K].
        """
        if self._copies is not None:
            topk_idx = self._copies.places(self.experts, topk_idx, self._copies.most)
        if self._placement is not None:
            topk_idx = torch.ops.ferry.places(topk_idx, self._handle)
        plan = planned(self._handle, topk_idx)
        if self.format == "as_is":
            got = dispatch(self.group, plan, x, topk_weights=topk_weights, **self.layout)
            ids, slots, offsets = got.topk_idx, got.slot_rows, got.expert_offsets
            rows, weights = got.x, got.topk_weights
        else:
            rows, weights, ids, slots, offsets = torch.ops.ferry.dispatch_through_e4m3(
                x,
                plan.tensor,
                topk_weights,
                self.group.handle,
                plan.topk,
                self.group.local_experts,
                *(self.layout[name] for name in ("alignment", "max_recv_rows", "num_sms")),
            )
        assert weights is not None
        assert slots is not None
        if self._copies is None:
            made = self.experts(rows, offsets)
        else:
            made = self._copies.run(self.experts, rows, offsets)
        factors = row_weights(weights, ids, slots, made.shape[0])
        weighted = (made.float() * factors[:, None]).to(x.dtype)
        y = combine(self.group, plan, weighted, **self.layout)
        return y if self._copies is None else self._copies.checked(y)

    def decode(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """The same in latency mode, without gradients: at most `decode_tokens` tokens.

        meanwhile: called while the tokens are on their way, for shared experts, say. Without it
        this is one operator, which torch.compile takes in. The first call with a hidden size, top-k
        or dtype makes buffers, which takes longer.
        """
        if self.decode_tokens == 0:
            refuse("decode", "a module with decode_tokens=0", "decode_tokens, the most of a rank")
        if meanwhile is not None:
            if not callable(meanwhile):
                refuse("decode: meanwhile", describe(meanwhile), "a function or None")
            return self._decode(x, topk_idx, topk_weights, meanwhile)
        given = x.detach(), topk_idx, topk_weights.detach()
        decoded: Tensor = torch.ops.ferry.decode(*given, self._handle)
        return decoded

    @property
    def placement(self) -> ExpertPlacement | None:
        """Where the experts are."""
        return self._placement

    @placement.setter
    def placement(self, placement: ExpertPlacement) -> None:
        self._placed("placement")
        self._placement = checked(placement, self.group)

    def held(self, *tensors: Tensor) -> dict[int, list[Tensor]]:
        """With `placement`: of each expert on this rank its entry of each tensor [slots, ...], as
        views. For `Vault.put`, and for `Vault.get` to write to.

        tensors: of the parameters and of the optimizer's state; none: all parameters of `experts`.
        """
        return held(self._placed("held"), self.group.rank, self.experts, tensors)

    def sum_copies(self) -> None:
        """Collective, with `placement`: after a backward and before the optimizer's step. Adds up
        the gradients of all copies of an expert, in fp32 and in ascending place: copies stay the
        same, bit for bit. Raises what calls of the group raise when a rank dies meanwhile; then
        gradients are partly sums, and the step begins again with `zero_grad`."""
        sum_copies(self.group, self._placed("sum_copies"), self.experts)

    def _placed(self, call: str) -> ExpertPlacement:
        if self._placement is None:
            refuse(call, "a module without placement", "placement, as of the constructor")
        return self._placement

    @property
    def balancer(self) -> BatchBalancer | GpuBalancer | None:
        """With `balance`: what was planned for the newest batch. Of a GPU's own, where nothing
        waits for the CPU: with max_recv_rows, on GPUs of one domain."""
        return None if self._copies is None else self._copies.balancer

    def invalidate_copies(self) -> None:
        """The experts of this rank have changed in a way that torch does not count, as writes
        through `.data` are: their copies are fetched again."""
        if self._copies is not None:
            self._copies.invalidate()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As of every module. What walks through a model comes here, too."""
        walked(self)
        yield from super().named_modules(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.group!r}, format={self.format}, decode_tokens={self.decode_tokens}"

    def __copy__(self) -> Self:
        state = self.__dict__.copy()
        for own in ("_parameters", "_buffers", "_modules"):
            state[own] = state[own].copy()
        return type(self).__new__(type(self))._with(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for shared in (self.group, self._exchanges, self._cut, self._placement):
            memo[id(shared)] = shared
        memo[id(self)] = made = type(self).__new__(type(self))
        return made._with(copy.deepcopy(self.__dict__, memo))

    def _with(self, state: dict[str, Any]) -> Self:
        """Makes this a copy with that state."""
        self.__dict__.update(state)
        self._cut = None
        self._known()
        return self

    def _known(self) -> None:
        """The operators find it by a handle of its own, and wrappers of its experts are seen."""
        self._handle = register(self)
        watch(self)

    @torch.no_grad()
    def _decode(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        meanwhile: Callable[[], object] | None,
    ) -> Tensor:
        ready(self)
        x = dense("decode: x", x)
        topk_weights = dense("decode: topk_weights", topk_weights)
        if self._copies is not None:
            topk_idx = self._copies.places(self.experts, topk_idx)
        exchange = self._exchange(x, topk_idx)
        received = exchange.dispatch(x, topk_idx, format=self.format, hook=meanwhile is not None)
        if meanwhile is not None:
            meanwhile()
            received.receive()
        made = self._decoded(received, x.dtype).to(x.dtype)
        return exchange.combine(made, received, topk_weights).x

    def _exchange(self, x: Tensor, topk_idx: Tensor) -> LatencyExchange:
        key = (x.shape[1], topk_idx.shape[1], x.dtype)
        found = self._exchanges.get(key)
        if found is None:
            found = self._exchanges[key] = LatencyExchange(
                self.group, capacity=self.decode_tokens, hidden=key[0], topk=key[1], dtype=key[2]
            )
        return found

    def _decoded(self, received: LatencyReceived[Tensor], dtype: torch.dtype) -> Tensor:
        rows, scales = received.x, received.scales
        if self.decode_experts is not None:
            given = (rows, received.counts) if scales is None else (rows, received.counts, scales)
            return self.decode_experts(*given)
        if scales is not None:
            rows = restored(rows, scales, dtype)
        local, each, hidden = rows.shape
        offsets = torch.arange(0, local * each + 1, each, device=rows.device)
        flat = rows.reshape(-1, hidden)
        if self._copies is None:
            made: Tensor = self.experts(flat, offsets)
        else:
            made = self._copies.run(self.experts, flat, offsets)
        return made.view(local, each, -1)


def _decode(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    """The operator `ferry::decode`: what `ExpertParallel.decode` does."""
    what = "the module, kept elsewhere"
    found: ExpertParallel = find("ferry::decode: module", module, "ExpertParallel", what)
    return found._decode(x, topk_idx, topk_weights, None)


def _decode_fake(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    return x.new_empty(x.shape)  # dense, whatever x is


def _places(topk_idx: Tensor, module: int) -> Tensor:
    """The operator `ferry::places`: routes to experts as routes to their places."""
    what = "the module, kept elsewhere"
    found: ExpertParallel = find("ferry::places: module", module, "ExpertParallel", what)
    placed: Tensor = found._placed("places").places(topk_idx, found.group.rank)
    return placed


def _places_fake(topk_idx: Tensor, module: int) -> Tensor:
    return topk_idx.new_empty(topk_idx.shape, dtype=torch.int64)


torch.library.custom_op(
    "ferry::places",
    _places,
    mutates_args=(),
    schema="(Tensor topk_idx, SymInt module) -> Tensor",
).register_fake(_places_fake)
torch.library.custom_op(
    "ferry::decode",
    _decode,
    mutates_args=(),
    schema="(Tensor x, Tensor topk_idx, Tensor topk_weights, SymInt module) -> Tensor",
).register_fake(_decode_fake)
