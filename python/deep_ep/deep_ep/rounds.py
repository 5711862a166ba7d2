"""The dispatches of one low-latency configuration, on Ferry's two buffers in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ferry
from deep_ep.borrowed import borrowed, tensor_of
from deep_ep.errors import EPException
from deep_ep.low_latency_checks import Shape, Wire


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
        "_sums",
        "counts",
        "ranges",
        "received",
        "scales",
        "source_token",
        "turn",
        "x",
    )

    def __init__(self, received: ferry.LatencyReceived[Tensor], turn: int, parts: Parts) -> None:
        """parts: as callers get them, which does not keep the buffer."""
        self.received: ferry.LatencyReceived[Tensor] | None = received
        self.turn = turn
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

    def combine(
        self,
        exchange: ferry.LatencyExchange,
        rows: Tensor,
        weights: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Callable[[], None]]:
        """The sums, and what waits for them. Without a hook the buffer is free from here on."""
        assert self.received is not None, "asked only while combinable"
        combined = exchange.combine(rows, self.received, weights, **options)
        self.received = None
        if not options["hook"]:
            out = options["out"]
            return (tensor_of(combined.raw.x) if out is None else out), _nothing
        self._sums = _Sums(combined)
        return self._sums.x, self._sums.receive

    def end(self) -> None:
        """Gives the buffer back. Sums that nobody asked for are made first: peers have sent their
        part before they come to the call that needs the buffer, so this waits for no later call."""
        self.received = None
        if self._sums is not None:
            self._sums.receive()


class _Sums:
    """The second half of a combine with a hook; once."""

    def __init__(self, combined: ferry.LatencyCombined[Tensor]) -> None:
        self.x = combined.x
        self._combined: ferry.LatencyCombined[Tensor] | None = combined

    def receive(self) -> None:
        combined, self._combined = self._combined, None
        if combined is not None:
            combined.receive()


class Rounds:
    """A LatencyExchange of a group, and its last two dispatches."""

    def __init__(self, group: ferry.Group, exchange: ferry.LatencyExchange, shape: Shape) -> None:
        self.group = group
        self.shape = shape
        self.exchange = exchange
        self.local_experts = group.local_experts
        self._lent: dict[tuple[int, Wire], Parts] = {}
        self._turn = 0
        self._rounds: list[Round | None] = [None, None]
        self._rows: list[Tensor | None] = [None, None]

    def dispatch(self, x: Tensor, topk_idx: Tensor, wire: Wire, **options: Any) -> Round:
        """Ends the dispatch before the last and takes its buffer."""
        turn = self._turn
        before = self._rounds[turn]
        if before is not None:
            before.end()
        received = self.exchange.dispatch(
            x, topk_idx, format=wire.format, scale_format=wire.scale_format, **options
        )
        made = self._rounds[turn] = Round(received, turn, self._parts(received, wire))
        self._turn = 1 - turn
        return made

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
        place = raw.x.address, wire
        lent = self._lent.get(place)
        if lent is None:
            lent = self._lent[place] = Parts(
                *(self._borrowed(getattr(received, name)) for name in Parts._fields)
            )
        x, scales, counts, source_token, ranges = lent
        return Parts(
            received.x if x is None else x.detach(),
            _other(raw.scales) if scales is None else scales.detach(),
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
                found = torch.empty(of.x.shape, dtype=self.shape.dtype, device=of.x.device)
            self._rows[of.turn] = found
        return found


def _other(made: Any) -> Tensor | None:
    return None if made is None else tensor_of(made)


def _nothing() -> None:
    pass
