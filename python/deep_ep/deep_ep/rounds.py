"""The dispatches of one low-latency configuration, on Ferry's two buffers in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.borrowed import borrowed
from deep_ep.errors import EPException


class Round:
    """One dispatch until its combine has ended or its buffer is needed again, whatever comes
    first. Tensors of it may be read for as long as the buffer is not given to another."""

    def __init__(
        self,
        received: ferry.LatencyReceived[Tensor],
        turn: int,
        survivor: Callable[[Tensor], Tensor],
    ) -> None:
        self.turn = turn
        self.received: ferry.LatencyReceived[Tensor] | None = received
        self.x = survivor(received.x)
        self.scales = None if received.scales is None else survivor(received.scales)
        self.counts = survivor(received.counts)
        self.source_token = survivor(received.source_token)
        self.ranges = survivor(received.ranges)
        self._sums: _Sums | None = None

    @property
    def combinable(self) -> bool:
        """False once it was combined or its buffer was given to another."""
        return self.received is not None

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

    def __init__(
        self, group: ferry.Group, exchange: ferry.LatencyExchange, dtype: torch.dtype
    ) -> None:
        self._group = group
        self._dtype = dtype
        self.exchange = exchange
        self.local_experts = group.local_experts
        self._turn = 0
        self._rounds: list[Round | None] = [None, None]
        self._rows: list[Tensor | None] = [None, None]

    def dispatch(self, x: Tensor, topk_idx: Tensor, **options: Any) -> Round:
        """Ends the dispatch before the last and takes its buffer."""
        turn = self._turn
        before = self._rounds[turn]
        if before is not None:
            before.end()
        made = Round(self.exchange.dispatch(x, topk_idx, **options), turn, self._survivor)
        self._rounds[turn] = made
        self._turn = 1 - turn
        return made

    def _survivor(self, tensor: Tensor) -> Tensor:
        """The tensor for the caller: what lies in the exchange's memory must not keep the buffer;
        what does not lie there has memory of its own."""
        shared = self._group.is_registered(tensor.data_ptr())
        return borrowed(tensor, self.exchange) if shared else tensor

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
                found = torch.empty(of.x.shape, dtype=self._dtype, device=of.x.device)
            self._rows[of.turn] = found
        return found


def _nothing() -> None:
    pass
