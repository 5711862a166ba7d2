"""The dispatches of one low-latency configuration, on Ferry's two buffers in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.borrowed import borrowed
from deep_ep.errors import EPException
from deep_ep.low_latency_checks import Shape


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

    def __init__(
        self,
        received: ferry.LatencyReceived[Tensor],
        turn: int,
        lend: Callable[[Tensor], Tensor],
        all_lent: bool,
    ) -> None:
        """lend: makes of a tensor that lies in the exchange's memory, as rows do, one that does not
        keep the buffer. all_lent: others lie there, too; else they have memory of their own."""
        self.turn = turn
        self.received: ferry.LatencyReceived[Tensor] | None = received
        self.x = lend(received.x)
        self.scales = received.scales
        self.counts = received.counts
        self.source_token = received.source_token
        self.ranges = received.ranges
        if all_lent:
            self.scales = None if self.scales is None else lend(self.scales)
            self.counts = lend(self.counts)
            self.source_token = lend(self.source_token)
            self.ranges = lend(self.ranges)
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
        self, exchange: ferry.LatencyExchange, rows: Tensor, weights: Tensor, **options: Any
    ) -> tuple[Tensor, Callable[[], None]]:
        """The sums, and what waits for them. Without a hook the buffer is free from here on."""
        assert self.received is not None, "asked only while combinable"
        combined = exchange.combine(rows, self.received, weights, **options)
        self.received = None
        if not options["hook"]:
            return combined.x, _nothing
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
        self._all_lent: bool | None = None
        self._lent: dict[tuple[int, torch.dtype], Tensor] = {}
        self._turn = 0
        self._rounds: list[Round | None] = [None, None]
        self._rows: list[Tensor | None] = [None, None]

    def dispatch(self, x: Tensor, topk_idx: Tensor, **options: Any) -> Round:
        """Ends the dispatch before the last and takes its buffer."""
        turn = self._turn
        before = self._rounds[turn]
        if before is not None:
            before.end()
        received = self.exchange.dispatch(x, topk_idx, **options)
        if self._all_lent is None:
            self._all_lent = self.local_experts == 0 or self._shares(received.counts)
        made = self._rounds[turn] = Round(received, turn, self._lend, self._all_lent)
        self._turn = 1 - turn
        return made

    def _shares(self, tensor: Tensor) -> bool:
        return self.group.is_registered(tensor.data_ptr())

    def _lend(self, tensor: Tensor) -> Tensor:
        if self.local_experts == 0:
            return torch.empty_like(tensor)
        key = tensor.data_ptr(), tensor.dtype
        found = self._lent.get(key)
        if found is None:
            if not self._shares(tensor):
                return tensor
            with torch.inference_mode(False):  # it is kept for calls of any mode
                found = self._lent[key] = borrowed(tensor, self.exchange)
        return found.detach()

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


def _nothing() -> None:
    pass
