"""Low-latency mode: ranks that are left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import ferry
from deep_ep.errors import refuse, require, require_integer
from deep_ep.low_latency_checks import check_tensor


class Masks:
    """The masks of a Buffer with `enable_shrink`. A rank that does not answer within FERRY_DEADLINE
    seconds, or that left, is masked by each of the others; so is who they mask themselves. It is
    neither sent to nor waited for, and what its experts would add is 0."""

    rank: int
    group_size: int
    enable_shrink: bool

    def _require_living(self) -> None:
        raise NotImplementedError

    def _latency_exchanges(self) -> Iterable[ferry.LatencyExchange]:
        raise NotImplementedError

    def _open_masks(self) -> None:
        self._latency_masked: set[int] = set()

    def _begin_masks(self, exchange: ferry.LatencyExchange) -> None:
        """A new exchange of this Buffer leaves out whom the caller left out before."""
        for rank in self._latency_masked:
            exchange.set_mask(rank, True)

    def _require_everyone(self, call: str) -> None:
        """Before buffers are made, for which all ranks must come."""
        exchanges = self._latency_exchanges() if self.enable_shrink else ()
        status = [exchange.masked() for exchange in exchanges]
        masked = [
            rank
            for rank in range(self.group_size)
            if rank in self._latency_masked or any(one[rank] for one in status)
        ]
        if masked:
            refuse(
                call,
                "this call",
                f"one that needs new buffers while ranks {masked} are masked",
                "sizes that were dispatched before, and handles of the last two dispatches that "
                "were not combined yet, as all ranks make buffers together",
            )

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask another rank for later calls, or take it back in. It may be taken back if it has
        made as many dispatches meanwhile as this rank; else its next call tells it that it was left
        behind."""
        call = "low_latency_update_mask_buffer"
        self._require_shrink(call)
        expected = f"0 to {self.group_size - 1}, another rank than this one"
        rank = require_integer(call, "rank_to_mask", rank_to_mask, 0, expected)
        other = rank < self.group_size and rank != self.rank
        # A bool is most likely the next argument, in the wrong place.
        good = other and not isinstance(rank_to_mask, bool)
        require(good, call, "rank_to_mask", rank_to_mask, expected)
        for exchange in self._latency_exchanges():
            exchange.set_mask(rank, bool(mask))
        if mask:
            self._latency_masked.add(rank)
        else:
            self._latency_masked.discard(rank)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """mask_status: i32 [R], becomes 1 for masked ranks and 0 for the others."""
        call = "low_latency_query_mask_buffer"
        self._require_shrink(call)
        check_tensor(call, "mask_status", mask_status, (torch.int32,), (self.group_size,))
        masked = [rank in self._latency_masked for rank in range(self.group_size)]
        for exchange in self._latency_exchanges():
            masked = [one or other for one, other in zip(masked, exchange.masked())]
        mask_status.copy_(torch.tensor(masked, dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks back in, as `low_latency_update_mask_buffer` does."""
        self._require_shrink("low_latency_clean_mask_buffer")
        for exchange in self._latency_exchanges():
            exchange.clear_masks()
        self._latency_masked.clear()

    def _require_shrink(self, call: str) -> None:
        if not self.enable_shrink:
            shrink = "enable_shrink="
            refuse(call, "this Buffer", f"{shrink}False", f"Buffer(..., {shrink}True)")
        self._require_living()
