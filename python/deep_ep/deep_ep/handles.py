"""What `dispatch` returns for the exchanges that answer it.

A handle is a tuple of tensors, as callers know it. Ferry needs only its plan, which the memory of
one of these tensors carries: so a handle that went through `save_for_backward`, or was put together
anew from the same tensors, is still known. What nobody has looked at is not computed.

Ferry sends rows straight to their place, in no channels. For callers that read them, the rows of
each pair of ranks are cut into C equal parts, C being half the SMs of the call's config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

import ferry
from deep_ep.channels import Parts
from deep_ep.config import RANKS_OF_A_HOST
from deep_ep.event import EventHandle
from ferry.tensors import TORCH, array
from ferry.torch import record_stream


class Exchange:
    """A dispatch that others answer.

    rows: of what it received, or of its results whatever was received (worst_case). sums: how many
    of them a combine brings back, where that is not all. captured: it is part of a CUDA graph, and
    every replay is another exchange.
    """

    __slots__ = ("_sums", "captured", "channels", "group", "max_recv_rows", "plan", "rows")

    def __init__(
        self,
        group: ferry.Group,
        plan: ferry.Plan,
        channels: int,
        rows: int,
        *,
        worst_case: bool,
        sums: int | None = None,
        captured: bool = False,
    ) -> None:
        self.group = group
        self.plan = plan
        self.channels = channels
        self.rows = rows
        self.max_recv_rows = rows if worst_case else 0
        self.captured = captured
        self._sums = rows if sums is None else sums

    @property
    def domains(self) -> int:
        """Of its group."""
        return self.group.domains

    def cut(self, rows: Tensor) -> Tensor:
        """The rows that a combine brings back."""
        return rows if self._sums == self.rows else rows[: self._sums]


def prefix_of(plan: ferry.Plan) -> Tensor:
    """i32 [R, R]: rows that rank r receives from ranks up to i."""
    rows: Tensor = array(plan.rank_rows(), TORCH)
    return rows.cumsum(0, dtype=torch.int32)


def attach(handle: Sequence[Any], exchange: Exchange) -> None:
    """The exchange lives as long as the memory of the handle's key, and is found by it."""
    _key(handle).untyped_storage()._ferry_exchange = exchange


def find(handle: Sequence[Any]) -> Exchange | None:
    """The exchange of a handle; None for copies of one."""
    if isinstance(handle, _Lazy):
        return handle.exchange
    found: Exchange | None = getattr(_key(handle).untyped_storage(), "_ferry_exchange", None)
    return found


def is_handle(thing: Any) -> bool:
    """Whether it has the form of a handle, intranode or internode."""
    if isinstance(thing, _Lazy):
        return True
    whole = isinstance(thing, (tuple, list)) and len(thing) in (6, 10)
    return whole and all(isinstance(one, Tensor) for one in thing)


def _key(handle: Sequence[Any]) -> Any:
    return handle[0] if len(handle) == 6 else handle[6]


class _Lazy(tuple[Any, ...]):
    """A tuple whose elements are made when somebody looks at one that is not there yet."""

    exchange: Exchange
    _made: tuple[Tensor, ...] | None
    _ready: EventHandle | None = None

    def __new__(cls, elements: Iterable[Any] = ()) -> Any:
        """Of callers that rebuild whatever sequence they find: a plain tuple."""
        return tuple(elements)

    @classmethod
    def _of(cls, exchange: Exchange, known: dict[int, Tensor], length: int) -> Any:
        self: Any = super().__new__(cls, (known.get(i) for i in range(length)))
        self.exchange, self._made = exchange, None
        attach(self, exchange)
        return self

    @property
    def key(self) -> Tensor:
        """The tensor whose memory carries the exchange."""
        found: Tensor = _key(self)
        return found

    def after(self, event: EventHandle | None) -> None:
        """What the handle is made of is there when this event is. Who looks at an element before
        anything waited for it waits then, on the stream that is current there."""
        self._ready = event

    def _make(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _parts(self) -> Iterable[Tensor]:
        """The tensors that `_make` reads."""
        return (one for one in super().__iter__() if one is not None)

    def _wait(self) -> None:
        if self._ready is None:
            return
        if self.exchange.captured and not torch.cuda.is_current_stream_capturing():
            return  # an event of a graph: replays are the caller's to order
        self._ready.stream_wait(None)
        for tensor in self._parts():
            record_stream(tensor)

    def _all(self) -> tuple[Any, ...]:
        if self._made is not None:
            return self._made
        self._wait()
        made = self._make()
        if not self.exchange.captured:
            self._made = made
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            known = super().__getitem__(index)
            if known is not None:
                return known
        return self._all()[index]

    def __add__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._all() + tuple(other)

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(other) + self._all()

    def __mul__(self, times: SupportsIndex) -> tuple[Any, ...]:
        return self._all() * times

    __rmul__ = __mul__

    def __contains__(self, one: object) -> bool:
        return one in self._all()

    def count(self, one: object) -> int:
        """As of the tuple of all elements."""
        return self._all().count(one)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return tuple, (self._all(),)

    def __repr__(self) -> str:
        return repr(self._all())


class IntranodeHandle(_Lazy):
    """(rank_prefix_matrix i32 [R, R], channel_prefix_matrix i32 [R, C],
    recv_channel_prefix_matrix i32 [R, C], recv_src_idx i32 [N], is_token_in_rank bool [T, R],
    send_head i32 [T, R]).

    rank_prefix_matrix[i][r]: rows that rank r receives from ranks up to i. channel_prefix_matrix:
    rows sent to each rank in channels up to c; recv_channel_prefix_matrix: rows received from each
    rank in channels before c. recv_src_idx: each row's token at its source. send_head: which row of
    its channel a token is, -1 where it does not go.
    """

    @classmethod
    def of(
        cls, exchange: Exchange, prefix: Tensor, source: Tensor, is_token_in_rank: Tensor
    ) -> IntranodeHandle:
        """prefix, source: the elements of these names; they must be ready on the current stream."""
        return cls._of(exchange, {0: prefix, 3: source, 4: is_token_in_rank}, 6)  # type: ignore[no-any-return]

    def _make(self) -> tuple[Tensor, ...]:
        prefix, source, in_rank = self[0], self[3], self[4]
        exchange = self.exchange
        parts = Parts(prefix, exchange.group.rank, exchange.channels)
        sent, came = parts.ends(sent=True), parts.ends(sent=False)
        return (
            prefix,
            sent[:, 1:].contiguous(),
            came[:, :-1].contiguous(),
            source,
            in_rank,
            parts.heads(in_rank),
        )


class InternodeHandle(_Lazy):
    """(is_token_in_rank bool [T, R], rdma_channel_prefix_matrix i32 [D, C],
    gbl_channel_prefix_matrix i32 [R, C], recv_rdma_channel_prefix_matrix i32 [D, C],
    recv_rdma_rank_prefix_sum i32 [D], recv_gbl_channel_prefix_matrix i32 [R, C],
    recv_gbl_rank_prefix_sum i32 [R], recv_src_meta u8 [N, 8], send_rdma_head i32 [T, D],
    send_nvl_head i32 [N, 8]) for R ranks on D = R / 8 hosts.

    recv_gbl_rank_prefix_sum[i]: rows received from ranks up to i. With Ferry no rank forwards rows
    to another: what the original counts of those on their way, here a rank counts of its own rows.
    recv_src_meta: two i32, the host of a row's source, and a mask of the ranks here that got it:
    this one. send_rdma_head: which row to a host a token is, -1 for none; send_nvl_head: which row
    of this rank, -1 in the columns of others.
    """

    @classmethod
    def of(
        cls, exchange: Exchange, prefix: Tensor, source: Tensor, is_token_in_rank: Tensor
    ) -> InternodeHandle:
        """The same arguments as of an IntranodeHandle."""
        received = prefix[:, exchange.group.rank].contiguous()
        self = cls._of(exchange, {0: is_token_in_rank, 6: received}, 10)
        self._prefix, self._source = prefix, source
        return self  # type: ignore[no-any-return]

    _prefix: Tensor
    _source: Tensor

    def _parts(self) -> Iterable[Tensor]:
        return (*super()._parts(), self._prefix, self._source)

    def _make(self) -> tuple[Tensor, ...]:
        in_rank, received = self[0], self[6]
        exchange, tokens = self.exchange, self[0].shape[0]
        rank, channels = exchange.group.rank, exchange.channels
        parts = Parts(self._prefix, rank, channels)
        sent, came = parts.ends(sent=True), parts.ends(sent=False)
        ranks, here = received.numel(), rank % RANKS_OF_A_HOST
        hosts = ranks // RANKS_OF_A_HOST

        def by_host(ends: Tensor) -> Tensor:
            return ends.view(hosts, RANKS_OF_A_HOST, -1).sum(1, dtype=torch.int32)

        to_host = in_rank.view(tokens, hosts, RANKS_OF_A_HOST).any(2)
        heads = to_host.cumsum(0, dtype=torch.int32) - 1
        rows = torch.arange(self._source.numel(), dtype=torch.int32, device=received.device)
        meta = torch.full((rows.numel(), 2), 1 << here, dtype=torch.int32, device=received.device)
        meta[:, 0] = torch.searchsorted(received, rows, right=True) // RANKS_OF_A_HOST
        nvl_heads = torch.full_like(rows, -1)[:, None].repeat(1, RANKS_OF_A_HOST)
        nvl_heads[:, here] = rows
        starts = received[:, None] - came[:, -1:]
        return (
            in_rank,
            by_host(sent)[:, 1:].contiguous(),
            sent[:, 1:].contiguous(),
            by_host(came)[:, 1:].contiguous(),
            received[RANKS_OF_A_HOST - 1 :: RANKS_OF_A_HOST].contiguous(),
            (starts + came[:, :-1]).contiguous(),
            received,
            meta.view(torch.uint8),
            torch.where(to_host, heads, -1).to(torch.int32),
            nvl_heads,
        )


for _kind in (IntranodeHandle, InternodeHandle):  # torch takes plain tuples alone for trees
    torch.utils._pytree.register_pytree_node(
        _kind, lambda handle: (list(handle), None), lambda elements, _: tuple(elements)
    )
