"""`EPHandle`: what `dispatch` of V2 and V2.5 returns for the calls that answer it.

Ferry needs only the plan. The fields that callers read are computed when somebody looks at one; a
caller may also set them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import ferry.torch
from deep_ep.borrowed import tensor_of
from deep_ep.errors import refuse
from deep_ep.event import EventHandle
from deep_ep.handles import Exchange, prefix_of
from ferry.tensors import TORCH, array
from ferry.torch import record_stream


class Arrived:
    """What a dispatch of Ferry's says of the rows that it brought: tensors of torch once somebody
    looks, only to be read."""

    def __init__(self, origins: Any, plan: ferry.Plan) -> None:
        """Without ids in the origins the plan has them: in CPU memory those of the result are the
        caller's."""
        ids = origins.topk_idx
        self._ids = plan if ids is None else ids
        self._slots = origins.slot_rows
        self._source_token = origins.source_token

    @cached_property
    def topk_idx(self) -> Tensor:
        """i64 [n, K], local ids."""
        if not isinstance(self._ids, ferry.Plan):
            return tensor_of(self._ids)
        known: Tensor = array(self._ids.received_routes(), TORCH)
        rows = self.source_token.shape[0]
        whole = torch.full((rows, known.shape[1]), -1, dtype=torch.int64)
        whole[: len(known)] = known
        return whole

    @cached_property
    def slot_rows(self) -> Tensor | None:
        """i64 [n, K], expert-major only."""
        return None if self._slots is None else tensor_of(self._slots)

    @cached_property
    def source_token(self) -> Tensor:
        """i32 [n]."""
        return tensor_of(self._source_token)


class EPHandle:
    """Of a dispatch of T tokens with K slots, which brought n distinct tokens; R ranks, L local
    experts.

    do_expand: whether rows are expert-major. num_recv_tokens: n; num_expanded_tokens: rows of all
    experts with padding; both are the most there may be without a CPU sync.
    num_recv_tokens_per_expert_list: rows of each expert with padding; [] without a CPU sync.
    psum_num_recv_tokens_per_scaleup_rank: i32 [R], tokens from ranks up to r; of several hosts,
    from the ranks of this index on each. psum_num_recv_tokens_per_expert: i32 [L], rows of experts
    up to e with padding; expert-major the last one without. num_unaligned_recv_tokens_per_expert:
    i32 [L], without any. recv_src_metadata: i32 [n, 2 + K]: source rank * num_max_tokens_per_rank +
    token; source rank * K + first slot that is here; expert-major: the row of each slot, -1: none.
    dst_buffer_slot_idx: i32 [T, K]: for the first slot of each rank that a token goes to, how many
    tokens of this rank go there before it; -1 elsewhere. token_metadata_at_forward,
    channel_linked_list: None, as no rank forwards tokens for another one's sake.
    """

    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    num_recv_tokens: int
    num_expanded_tokens: int
    topk_idx: Tensor
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    token_metadata_at_forward: Tensor | None = None
    channel_linked_list: Tensor | None = None
    cached_recv_src_metadata_before_sort: Tensor | None = None
    _origins: Any  # Ferry's result, of which only where rows came from is kept
    _exchange: Exchange
    _ready: EventHandle | None = None

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        num_unaligned_recv_tokens_per_expert: Tensor,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: Tensor | None,
        channel_linked_list: Tensor | None,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self.__dict__.update(given, ids_dtype=topk_idx.dtype)
        # Put together anew from the fields of one: known by the memory of this one.
        origin = getattr(recv_src_metadata.untyped_storage(), "_ferry_origin", None)
        if origin is not None:
            self._exchange, self.arrived, self._ready = origin

    @classmethod
    def of(cls, exchange: Exchange, settings: dict[str, Any], origins: Any) -> EPHandle:
        """settings: the first six fields, which are the handle's from here on; without topk_idx the
        plan's own show it. What has arrived must be ready on the current stream."""
        self = cls.__new__(cls)
        fields = self.__dict__ = settings
        fields["_exchange"], fields["_origins"] = exchange, origins
        return self

    @cached_property
    def arrived(self) -> Arrived:
        return Arrived(self._origins, self._exchange.plan)

    def after(self, event: EventHandle | None) -> None:
        """What the fields are made of is there when this event is."""
        self._ready = event

    def __getattr__(self, name: str) -> Any:
        make = _FIELDS.get(name)
        if make is None or "_exchange" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._wait()
        made = make(self)
        if name == "recv_src_metadata":
            origin = (self._exchange, self.arrived, self._ready)
            made.untyped_storage()._ferry_origin = origin
        if not self._exchange.captured:
            self.__dict__[name] = made
        return made

    def _wait(self) -> None:
        if self._ready is None:
            return
        if self._exchange.captured and not torch.cuda.is_current_stream_capturing():
            return  # an event of a graph: replays are the caller's to order
        self._ready.stream_wait(None)
        arrived = self.arrived
        for tensor in (arrived.topk_idx, arrived.slot_rows, arrived.source_token):
            if tensor is not None:
                record_stream(tensor)


def exchange_of(call: str, handle: Any) -> Exchange:
    """What a handle stands for."""
    found = getattr(handle, "__dict__", {}).get("_exchange")
    if not isinstance(handle, EPHandle) or found is None:
        refuse(call, "handle", type(handle).__name__, "the EPHandle of a dispatch")
    exchange: Exchange = found
    return exchange


def _own_routes(handle: EPHandle) -> Tensor:
    found: Tensor = array(handle._exchange.plan.routes(), TORCH)
    return found.to(handle.__dict__["ids_dtype"], copy=True)


def _from_ranks(handle: EPHandle) -> Tensor:
    """i32 [R]: tokens from ranks up to r."""
    exchange = handle._exchange
    return prefix_of(exchange.plan)[:, exchange.group.rank].contiguous()


def _from_scaleup_ranks(handle: EPHandle) -> Tensor:
    came, domains = _from_ranks(handle), handle._exchange.domains
    if domains == 1:
        return came
    each = torch.diff(came, prepend=came.new_zeros(1)).view(domains, -1)
    return each.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _unaligned(handle: EPHandle) -> Tensor:
    ids = handle.arrived.topk_idx
    return ferry.torch.expert_rows(ids, handle._exchange.group.local_experts)


def _of_experts(handle: EPHandle) -> Tensor:
    rows, step = handle.num_unaligned_recv_tokens_per_expert, handle.expert_alignment
    padded = (rows + (step - 1)).div(step, rounding_mode="floor") * step
    ends = padded.cumsum(0, dtype=torch.int32)
    return ends - padded + rows if handle.do_expand else ends


def _list(handle: EPHandle) -> list[int]:
    exchange, step = handle._exchange, handle.expert_alignment
    if exchange.max_recv_rows > 0:
        return []
    return [-(-rows // step) * step for rows in exchange.plan.slots_per_expert()]


def _tokens(handle: EPHandle) -> int:
    exchange = handle._exchange
    if exchange.max_recv_rows > 0:
        return handle.num_max_tokens_per_rank * exchange.group.size
    return exchange.plan.recv_rows()


def _expanded(handle: EPHandle) -> int:
    exchange = handle._exchange
    if exchange.max_recv_rows > 0:
        if handle.do_expand:
            return exchange.max_recv_rows
        local, topk = exchange.group.local_experts, exchange.plan.topk
        slots = handle.num_max_tokens_per_rank * exchange.group.size * min(topk, local)
        return worst_rows(slots, local, handle.expert_alignment)
    return sum(handle.num_recv_tokens_per_expert_list)


def _metadata(handle: EPHandle) -> Tensor:
    ids, slots, source = (
        handle.arrived.topk_idx,
        handle.arrived.slot_rows,
        handle.arrived.source_token,
    )
    came, topk = _from_ranks(handle), ids.shape[1]
    source, ids = source[: handle.num_recv_tokens], ids[: handle.num_recv_tokens]
    rows = torch.arange(len(source), dtype=torch.int32, device=source.device)
    rank = torch.searchsorted(came, rows, right=True)
    first = (ids >= 0).int().argmax(1) if topk > 0 else torch.zeros_like(rank)
    found = torch.full((len(rows), 2 + topk), -1, dtype=torch.int32, device=source.device)
    arrived = rows < came[-1]
    tokens = rank * handle.num_max_tokens_per_rank + source
    found[:, 0] = torch.where(arrived, tokens, -1)
    found[:, 1] = torch.where(arrived, rank * topk + first, -1)
    if slots is not None:
        found[:, 2:] = torch.where(ids >= 0, slots[: len(rows)], -1)
    return found


def _sent_before(handle: EPHandle) -> Tensor:
    routes, group = handle.topk_idx.long(), handle._exchange.group
    small, more = divmod(group.experts, group.size)
    ends = torch.tensor(
        [(r + 1) * small + min(r + 1, more) for r in range(group.size)], device=routes.device
    )
    rank = torch.searchsorted(ends, routes.clamp(min=0), right=True)
    rank = torch.where(routes >= 0, rank, -1)
    earlier = (rank[:, :, None] == rank[:, None, :]).tril(-1).any(2)
    first = (rank >= 0) & ~earlier
    goes = torch.zeros(len(routes), group.size + 1, dtype=torch.int32, device=routes.device)
    goes.scatter_(1, torch.where(first, rank, group.size), 1)
    before = goes.cumsum(0, dtype=torch.int32) - goes
    return torch.where(first, before.gather(1, rank.clamp(min=0)), -1).to(torch.int32)


def worst_rows(slots: int, local_experts: int, alignment: int) -> int:
    """Expert-major rows, with padding, that can arrive in so many slots."""
    rows = slots + (alignment - 1) * local_experts
    return -(-rows // alignment) * alignment


_FIELDS: dict[str, Callable[[EPHandle], Any]] = {
    "topk_idx": _own_routes,
    "psum_num_recv_tokens_per_scaleup_rank": _from_scaleup_ranks,
    "psum_num_recv_tokens_per_expert": _of_experts,
    "num_unaligned_recv_tokens_per_expert": _unaligned,
    "recv_src_metadata": _metadata,
    "dst_buffer_slot_idx": _sent_before,
    "num_recv_tokens_per_expert_list": _list,
    "num_recv_tokens": _tokens,
    "num_expanded_tokens": _expanded,
}
