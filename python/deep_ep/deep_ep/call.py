"""One dispatch or combine on its way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import ferry
from deep_ep.borrowed import tensor_of
from deep_ep.event import EventOverlap
from deep_ep.handles import Exchange
from deep_ep.sizes import round_up
from deep_ep.streams import Turn

_SF_BYTES = 16  # where a column of scales begins


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


def column_major(scales: Tensor) -> Tensor:
    """The same values, each column dense and beginning at a multiple of 16 bytes."""
    rows, columns = scales.shape
    step = round_up(rows * scales.element_size(), _SF_BYTES) // scales.element_size()
    made = torch.empty_strided((rows, columns), (1, step), dtype=scales.dtype, device=scales.device)
    return made.copy_(scales)


def summed_apart(call: Call, exchange: Exchange, topk_weights: Tensor) -> Tensor:
    """Weights of another number of slots than the plan's, brought back as rows of their own."""
    slots = topk_weights.shape[1]
    with call.turn.context(topk_weights):
        rows = torch.nn.functional.pad(exchange.cut(topk_weights), (0, -slots % 4))
    summed: Tensor = exchange.group.combine(rows, exchange.plan, **call.how).x
    with call.turn.context():
        return summed[:, :slots].contiguous()
