"""One dispatch or combine on its way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import ferry
from deep_ep.borrowed import tensor_of
from deep_ep.event import EventOverlap
from deep_ep.handles import Exchange
from deep_ep.streams import Turn


class Call(NamedTuple):
    """One dispatch or combine: its name in messages, its place, its config."""

    name: str
    turn: Turn
    channels: int
    how: dict[str, Any]  # arguments of Ferry's call

    def end(
        self,
        group: ferry.Group,
        received: Any,
        names: tuple[str, ...],
        made: tuple[Tensor | None, ...] = (),
    ) -> EventOverlap:
        """What the call returns; results of Ferry that have these names, and of torch."""
        if self.turn.stream is None:
            return self.turn.end()
        results = (getattr(received, name) for name in names)
        return self.turn.end(group, (*results, *made))


def with_scales(received: Any, dtype: torch.dtype, scales: Tensor | None) -> Any:
    """The received rows, of the dtype that was sent, with what the scales were, dense, if there
    were any."""
    x = tensor_of(received.raw.x)
    if x.dtype != dtype:
        x = x.view(dtype)
    return x if scales is None else (x, tensor_of(received.raw.scales).view(scales.dtype))


def summed_apart(call: Call, exchange: Exchange, topk_weights: Tensor) -> Tensor:
    """Weights of another number of slots than the plan's, brought back as rows of their own."""
    slots = topk_weights.shape[1]
    with call.turn.context(topk_weights):
        rows = torch.nn.functional.pad(exchange.cut(topk_weights), (0, -slots % 4))
    summed: Tensor = exchange.group.combine(rows, exchange.plan, **call.how).x
    with call.turn.context():
        return summed[:, :slots].contiguous()
