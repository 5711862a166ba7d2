"""What the ranks of test_gpu.py exchange: the tensors lie on the group's device, and every value is
compared with exchange_reference."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from exchange_reference import Reference

import ferry

EXPERTS, TOPK, HIDDEN = 8, 3, 128


class Case:
    """Routes, rows and weights of every rank, the same on all ranks."""

    def __init__(self, group: ferry.Group, seed: int = 1, most: int = 40) -> None:
        rng = np.random.default_rng(seed)
        size, self.rank, self.device = group.size, group.rank, group.device
        tokens = [0 if r == 1 else int(rng.integers(1, most)) for r in range(size)]
        self.reference = Reference([rng.integers(-1, EXPERTS, (t, TOPK)) for t in tokens], EXPERTS)
        # Small integers: exact in every dtype, and so are their sums.
        self.xs = [rng.integers(-4, 5, (t, HIDDEN)).astype(np.float32) for t in tokens]
        self.ws = [rng.integers(1, 4, (t, TOPK)).astype(np.float32) for t in tokens]

    def own(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """x, topk_idx and weights of this rank on its device."""
        x = torch.from_numpy(self.xs[self.rank]).to(self.device).to(dtype)
        ids = torch.from_numpy(self.reference.routes[self.rank]).to(self.device)
        return x, ids, torch.from_numpy(self.ws[self.rank]).to(self.device)

    def check_received(self, got: Any, alignment: int | None = None, weights: bool = True) -> None:
        """All tensors of a dispatch, exact or of a worst case."""
        ref, rank = self.reference, self.rank
        n = len(ref.arrivals(rank))
        same(got.topk_idx[:n], ref.arrived_ids(rank))
        assert (got.topk_idx[n:] == -1).all()
        same(got.source_token[:n], ref.source_token(rank))
        if weights:
            same(got.topk_weights[:n], ref.topk_weights(self.ws, rank))
        if alignment is None:
            same(got.x[:n], ref.gathered(self.xs, rank))
            return
        slots, offsets = ref.slot_rows(rank, alignment)
        same(got.slot_rows[:n], slots)
        same(got.expert_offsets, offsets)
        same(got.x[: offsets[-1]], ref.expert_major(self.xs, rank, alignment))

    def doubled(self) -> np.ndarray:
        """What combine gives when every rank sends back twice what it got."""
        ref = self.reference
        return ref.combine([2 * ref.gathered(self.xs, r) for r in range(ref.ranks)], self.rank)


def same(got: torch.Tensor, expected: np.ndarray) -> None:
    found = got.cpu() if got.dtype in (torch.int32, torch.int64) else got.float().cpu()
    assert np.array_equal(found.numpy(), expected)


def refused(words: str, call: Any, *arguments: Any, **more: Any) -> None:
    try:
        call(*arguments, **more)
    except ferry.InvalidArgumentError as error:
        assert re.search(words, str(error)), f"expected '{words}' in: {error}"
    else:
        raise AssertionError(f"not refused: {words}")
