"""Channels, for callers that read them: see `handles`."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Parts:
    """The channels of an exchange, out of what every rank knows of it."""

    def __init__(self, prefix: Tensor, rank: int, channels: int) -> None:
        self._prefix, self._rank, self._channels = prefix, rank, channels

    @cached_property
    def _rows(self) -> Tensor:
        """[R, R]: rows that rank s sends to rank d."""
        return torch.diff(self._prefix, dim=0, prepend=torch.zeros_like(self._prefix[:1]))

    @cached_property
    def _each(self) -> Tensor:
        """[R, R]: rows of a channel."""
        parts = max(self._channels, 1)
        return torch.div(self._rows + (parts - 1), parts, rounding_mode="floor")

    def ends(self, *, sent: bool) -> Tensor:
        """i32 [R, C + 1]: rows of channels before the c-th, sent to or received from each rank."""
        at = (self._rank, slice(None)) if sent else (slice(None), self._rank)
        rows, each = self._rows[at], self._each[at]
        steps = torch.arange(self._channels + 1, dtype=torch.int32, device=rows.device)
        return torch.minimum(each[:, None] * steps, rows[:, None])

    def heads(self, is_token_in_rank: Tensor) -> Tensor:
        """i32 [T, R]: which row of its channel a token is, -1 where it does not go."""
        ordinal = is_token_in_rank.cumsum(0, dtype=torch.int32) - 1
        each = self._each[self._rank].clamp(min=1)
        return torch.where(is_token_in_rank, ordinal % each, -1).to(torch.int32)
