"""The dispatches of one low-latency configuration, on Ferry's two buffers in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ferry
from deep_ep.arguments import check_memory
from deep_ep.borrowed import borrowed, tensor_of
from deep_ep.errors import EPException
from deep_ep.low_latency_checks import Shape, Wire
from deep_ep.survivors import Members


class Parts(NamedTuple):
    """The tensors of a dispatch."""

    x: Any
    scales: Any
    counts: Any
    source_token: Any
    ranges: Any


class Round:
    """One dispatch until its combine has ended or its buffer is needed again, whatever comes
    first. Tensors of it may be read for as long as the buffer is not given to another."""

    __slots__ = (
        "_arrived",
        "_sums",
        "counts",
        "ranges",
        "received",
        "scales",
        "source_token",
        "turn",
        "x",
    )

    def __init__(
        self,
        received: ferry.LatencyReceived[Tensor],
        turn: int,
        parts: Parts,
        arrived: Callable[[], None],
    ) -> None:
        """parts: as callers get them, which does not keep the buffer. arrived: after `receive`."""
        self.received: ferry.LatencyReceived[Tensor] | None = received
        self.turn = turn
        self._arrived = arrived
        self.x, self.scales, self.counts, self.source_token, self.ranges = parts
        self._sums: _Sums | None = None

    def receive(self) -> None:
        """The second half of a dispatch with a hook."""
        if self.received is None:
            raise EPException(
                "low_latency_dispatch: the hook was called after two later dispatches had taken "
                "the buffer; expected at most two results that are not yet received or combined"
            )
        self.received.receive()
        self._arrived()

    def combine(
        self,
        rounds: Rounds,
        rows: Tensor,
        weights: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Callable[[], None]]:
        """The sums, and what waits for them. Without a hook the buffer is free from here on."""
        assert self.received is not None, "asked only while combinable"
        summed = rounds.counted(options)
        combined = rounds.exchange.combine(rows, self.received, weights, **options)
        self.received = None
        if not options["hook"]:
            summed()
            out = options["out"]
            return (tensor_of(combined.raw.x) if out is None else out), _nothing
        self._sums = _Sums(combined, summed)
        return self._sums.x, self._sums.receive

    def end(self) -> None:
        """Gives the buffer back. Sums that nobody asked for are made first: peers have sent their
        part before they come to the call that needs the buffer, so this waits for no later call."""
        self.received = None
        if self._sums is not None:
            self._sums.receive()


class _Sums:
    """The second half of a combine with a hook; once."""

    def __init__(self, combined: ferry.LatencyCombined[Tensor], summed: Callable[[], None]) -> None:
        self.x = combined.x
        self._summed = summed
        self._combined: ferry.LatencyCombined[Tensor] | None = combined

    def receive(self) -> None:
        combined, self._combined = self._combined, None
        if combined is not None:
            combined.receive()
            self._summed()


class Rounds:
    """A LatencyExchange of a group, and its last two dispatches. members: the group is of these
    ranks alone; what is said about ranks here is said of those of the whole."""

    def __init__(
        self,
        group: ferry.Group,
        exchange: ferry.LatencyExchange,
        shape: Shape,
        members: Members | None = None,
        own_ranges: bool = False,
    ) -> None:
        """own_ranges: those of a dispatch are its own for good, as a further combine of its handle
        asks them where its rows lie; else they may lie in a buffer that later dispatches take."""
        self.group = group
        self.members = members
        self._own_ranges = own_ranges or members is not None
        self.shape = shape
        self.exchange = exchange
        self.local_experts = group.local_experts
        self._lent: dict[tuple[int, str, str], Parts] = {}
        self._turn = 0
        self._rounds: list[Round | None] = [None, None]
        self._rows: list[Tensor | None] = [None, None]

    def dispatch(self, x: Tensor, topk_idx: Tensor, wire: Wire, **options: Any) -> Round:
        """Ends the dispatch before the last and takes its buffer."""
        turn, members = self._turn, self.members
        before = self._rounds[turn]
        if before is not None:
            before.end()
        counted, on = self.counted(options), self._on(options)
        if members is not None:
            check_memory("low_latency_dispatch", topk_idx=topk_idx)
            with on():
                topk_idx = members.routes(topk_idx)
        received = self.exchange.dispatch(x, topk_idx, **wire._asdict(), **options)
        parts, arrived = self._parts(received, wire), counted
        if self._own_ranges:
            among = parts.ranges
            ranks = self.group.size if members is None else members.size
            with on(), torch.inference_mode(False):  # the hook may be called in another mode
                ranges = among.new_empty(among.shape[0], ranks)
            if ranges.is_cuda:
                ranges.record_stream(torch.cuda.current_stream(ranges.device))
            parts = parts._replace(ranges=ranges)

            def arrived() -> None:
                with on():
                    ranges.copy_(among if members is None else members.spread(among))
                counted()

        made = self._rounds[turn] = Round(received, turn, parts, arrived)
        if not options["hook"]:
            arrived()
        self._turn = 1 - turn
        return made

    def counted(self, options: dict[str, Any]) -> Callable[[], None]:
        """To be called when what the call waited for each rank is in options["wait_ns"], which is
        then added to the caller's."""
        whole, members = options.get("wait_ns"), self.members
        if whole is None or members is None:
            return _nothing
        on = self._on(options)
        with on():
            part = options["wait_ns"] = whole.new_zeros(len(members.ranks))

        def add() -> None:
            with on():
                whole.add_(members.spread(part))

        return add

    def _on(self, options: dict[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
        """Around torch's own work for a call, now and in its hook: the stream of the call."""
        stream = options.get("stream")
        if not self._own_ranges or self.shape.device.type != "cuda":
            return nullcontext
        if stream is None:
            stream = torch.cuda.current_stream(self.shape.device)
        return partial(torch.cuda.stream, stream)

    @property
    def rows_of_expert(self) -> int:
        """How many rows each local expert has room for."""
        ranks = self.group.size if self.members is None else len(self.members.ranks)
        return ranks * self.shape.capacity

    def masked(self) -> list[bool]:
        """[R]; who is no member is left out, too."""
        masked = self.exchange.masked()
        if self.members is None:
            return masked
        whole = [True] * self.members.size
        for rank, one in zip(self.members.ranks, masked):
            whole[rank] = one
        return whole

    def clear_masks(self) -> None:
        """Of all members."""
        self.exchange.clear_masks()

    def set_mask(self, rank: int, masked: bool) -> None:
        """Of a member; others stay left out."""
        if self.members is None:
            self.exchange.set_mask(rank, masked)
        elif rank in self.members.ranks:
            self.exchange.set_mask(self.members.ranks.index(rank), masked)

    def _parts(self, received: ferry.LatencyReceived[Tensor], wire: Wire) -> Parts:
        """The tensors of a result, without what keeps its buffer. A buffer lies where it lay, so
        those in the exchange's memory are made once for each buffer and each form of rows."""
        if self.local_experts == 0:
            none = received.scales is None
            return Parts(
                *(
                    None if none and name == "scales" else torch.empty_like(getattr(received, name))
                    for name in Parts._fields
                )
            )
        raw: Any = received.raw
        place = raw.x.address, wire.format, wire.scale_format
        lent = self._lent.get(place)
        if lent is None:
            lent = self._lent[place] = Parts(
                *(self._borrowed(getattr(received, name)) for name in Parts._fields)
            )
        x, scales, counts, source_token, ranges = lent
        return Parts(
            received.x if x is None else x.detach(),
            _scales(raw.scales) if scales is None else scales.detach(),
            tensor_of(raw.counts) if counts is None else counts.detach(),
            tensor_of(raw.source_token) if source_token is None else source_token.detach(),
            tensor_of(raw.ranges) if ranges is None else ranges.detach(),
        )

    def _borrowed(self, tensor: Tensor | None) -> Tensor | None:
        """None: the tensor does not lie in the exchange's memory, and is another in each result."""
        if tensor is None or not self.group.is_registered(tensor.data_ptr()):
            return None
        with torch.inference_mode(False):  # it is kept for calls of any mode
            return borrowed(tensor, self.exchange)

    def find(self, source_token: object) -> Round | None:
        """The dispatch that this tensor of a handle belongs to, if it is one of the last two."""
        for one in self._rounds:
            if one is not None and one.source_token is source_token:
                return one
        return None

    def rows(self, of: Round) -> Tensor:
        """Memory for the rows that answer this dispatch; what it holds is undefined at first."""
        found = self._rows[of.turn]
        if found is None:
            with torch.inference_mode(False):  # it is kept for calls of any mode
                shape = (*of.x.shape[:2], self.shape.hidden)
                found = torch.empty(shape, dtype=self.shape.dtype, device=of.x.device)
            self._rows[of.turn] = found
        return found


def _scales(made: Any) -> Tensor | None:
    if made is None:
        return None
    found = tensor_of(made)
    return found.view(torch.float8_e4m3fn) if found.dtype == torch.uint8 else found


def _nothing() -> None:
    pass
