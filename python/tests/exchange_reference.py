"""What dispatch and combine must give: the definition of tests/sequences, by rank."""

from __future__ import annotations

import numpy as np
from sequences.arithmetic import quantise
from sequences.reference import Routing, sum_ranks, sum_slots


def experts_of(rank: int, ranks: int, experts: int) -> range:
    """Contiguous blocks; the first (experts mod ranks) ranks hold one more."""
    size, more = divmod(experts, ranks)
    first = rank * size + min(rank, more)
    return range(first, first + size + (rank < more))


def quantised(x: np.ndarray, power_of_two: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes of e4m3, as bytes, and one scale for each 128 channels of finite f32 [T, H]."""
    codes, scales = quantise(x, power_of_two)
    return codes.view(np.uint8), scales


class Reference(Routing):
    """One set of routes over all ranks. `routes[r]`: int [T_r, K]."""

    def __init__(self, routes: list[np.ndarray], experts: int) -> None:
        super().__init__(routes, experts)
        self.blocks = [experts_of(rank, self.ranks, experts) for rank in range(self.ranks)]

    def topk_weights(self, weights: list[np.ndarray], rank: int) -> np.ndarray:
        return np.where(self.arrived_ids(rank) >= 0, self.gathered(weights, rank), np.float32(0))

    def source_token(self, rank: int) -> np.ndarray:
        return np.array([row.token for row in self.arrivals(rank)], np.int32)

    def expert_major(self, xs: list[np.ndarray], rank: int, alignment: int) -> np.ndarray:
        slots, offsets = self.slot_rows(rank, alignment)
        out = np.zeros((offsets[-1], xs[rank].shape[1]), xs[rank].dtype)
        for row, places in zip(self.gathered(xs, rank), slots):
            out[places[places >= 0]] = row
        return out

    def combine(self, rows: list[np.ndarray], rank: int) -> np.ndarray:
        """Rank-major rows of every rank -> [T, H] of one: fp32, ascending rank, one rounding."""
        return sum_ranks(self, rows, rank).astype(rows[rank].dtype)

    def combine_weights(self, weights: list[np.ndarray], rank: int) -> np.ndarray:
        """[n, K] of every rank -> [T, K] of one, summed over ranks."""
        return sum_ranks(self, weights, rank)

    def reduce(
        self, rows: np.ndarray, rank: int, alignment: int, weights: np.ndarray | None = None
    ) -> np.ndarray:
        """Expert-major rows of one rank -> rank-major: ascending k, `fma(w, x, acc)`, rounded."""
        return sum_slots(rows, self.slot_rows(rank, alignment)[0], weights)
