"""Low-latency mode: ranks that are left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import ferry
from deep_ep.errors import refuse, require, require_flags, require_integer
from deep_ep.low_latency_checks import check_tensor
from deep_ep.rounds import Rounds
from deep_ep.survivors import Survivors


class Masks:
    """The masks of a Buffer with `enable_shrink`. A rank that does not answer within FERRY_DEADLINE
    seconds, or that left, is masked by each of the others; so is who they mask themselves. It is
    neither sent to nor waited for, and what its experts would add is 0. Buffers that are made when
    ranks are gone are made among those that are left."""

    rank: int
    group_size: int
    enable_shrink: bool

    def _require_living(self) -> None:
        raise NotImplementedError

    def _latency_exchanges(self) -> Iterable[Rounds | ferry.LatencyExchange]:
        raise NotImplementedError

    def _take_back(self, rank: int) -> None:
        """Leave aside the buffers that were made without this rank."""
        raise NotImplementedError

    def _open_masks(self, group: ferry.Group | None) -> None:
        """group: of all ranks, in CPU memory; None without `enable_shrink`."""
        self._latency_masked: set[int] = set()
        self._survivors = None if group is None else Survivors(group)

    def _begin_masks(self, exchange: Rounds) -> None:
        """A new exchange of this Buffer leaves out whom the caller left out before."""
        for rank in self._latency_masked:
            exchange.set_mask(rank, True)

    def _agree(self) -> tuple[int, ...]:
        """Collective among those that are left: their ranks. All others are masked everywhere."""
        assert self._survivors is not None
        for rank in self._masked():
            self._mask_everywhere(rank)
        left = self._survivors.agree()
        for rank in range(self.group_size):
            if rank not in left:
                self._mask_everywhere(rank)
        return left

    def _mask_everywhere(self, rank: int) -> None:
        for exchange in self._latency_exchanges():
            if not exchange.masked()[rank]:
                exchange.set_mask(rank, True)

    def _masked(self) -> list[int]:
        status = [exchange.masked() for exchange in self._latency_exchanges()]
        return [
            rank
            for rank in range(self.group_size)
            if rank in self._latency_masked or any(one[rank] for one in status)
        ]

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask another rank for later calls, or take it back in. It may be taken back if it has
        made as many dispatches meanwhile as this rank, and no buffers were made or cleaned without
        it; else some next call says that a rank was evicted."""
        call = "low_latency_update_mask_buffer"
        self._require_shrink(call)
        require_flags(call, mask=mask)
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
            self._take_back(rank)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """mask_status: i32 [R], becomes 1 for masked ranks and 0 for the others.

        On a GPU it waits for the calls on the current stream, which may mask ranks."""
        call = "low_latency_query_mask_buffer"
        self._require_shrink(call)
        check_tensor(call, "mask_status", mask_status, (torch.int32,), (self.group_size,))
        if mask_status.is_cuda:
            torch.cuda.current_stream(mask_status.device).synchronize()
        masked = set(self._masked())
        status = [int(rank in masked) for rank in range(self.group_size)]
        mask_status.copy_(torch.tensor(status, dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks back in, as `low_latency_update_mask_buffer` does."""
        self._require_shrink("low_latency_clean_mask_buffer")
        for rank in range(self.group_size):
            self._take_back(rank)
        for exchange in self._latency_exchanges():
            exchange.clear_masks()
        self._latency_masked.clear()

    def _require_shrink(self, call: str) -> None:
        if not self.enable_shrink:
            shrink = "enable_shrink="
            refuse(call, "this Buffer", f"{shrink}False", f"Buffer(..., {shrink}True)")
        self._require_living()
