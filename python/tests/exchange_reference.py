"""What dispatch and combine must give, written from the definition, slowly, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


def experts_of(rank: int, ranks: int, experts: int) -> range:
    """Contiguous blocks; the first (experts mod ranks) ranks hold one more."""
    size, more = divmod(experts, ranks)
    first = rank * size + min(rank, more)
    return range(first, first + size + (rank < more))


@dataclass
class Row:
    source: int
    token: int
    route: list[int]  # local expert ids, -1 = not on this rank


def quantised(x: np.ndarray, power_of_two: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes of e4m3, as bytes, and one scale for each 128 channels of finite f32 [T, H]."""
    pad = -x.shape[1] % 128
    blocks = np.pad(x, ((0, 0), (0, pad))).reshape(len(x), (x.shape[1] + pad) // 128, 128)
    amax = np.maximum(np.abs(blocks).max(2, initial=0), np.float32(1e-4))
    scales, inv = amax / np.float32(448), np.float32(448) / amax
    if power_of_two:
        scales = np.exp2(np.ceil(np.log2(amax.astype(np.float64) / 448))).astype(np.float32)
        inv = 1 / scales
    codes = (blocks * inv[:, :, None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(len(x), x.shape[1] + pad)[:, : x.shape[1]].copy().view(np.uint8), scales


class Reference:
    """One set of routes over all ranks. `routes[r]`: int [T_r, K]."""

    def __init__(self, routes: list[np.ndarray], experts: int) -> None:
        self.routes = routes
        self.ranks = len(routes)
        self.experts = experts
        self.blocks = [experts_of(rank, self.ranks, experts) for rank in range(self.ranks)]

    def rows(self, rank: int) -> list[Row]:
        """What arrives: ascending source rank, then token."""
        block = self.blocks[rank]
        return [
            Row(source, token, [e - block.start if e in block else -1 for e in route.tolist()])
            for source in range(self.ranks)
            for token, route in enumerate(self.routes[source])
            if any(e in block for e in route.tolist())
        ]

    def rank_major(self, xs: list[np.ndarray], rank: int) -> np.ndarray:
        rows = [xs[row.source][row.token] for row in self.rows(rank)]
        return np.stack(rows) if rows else xs[rank][:0]

    def topk_idx(self, rank: int) -> np.ndarray:
        rows = [row.route for row in self.rows(rank)]
        return np.array(rows, np.int64).reshape(len(rows), self.routes[rank].shape[1])

    def topk_weights(self, weights: list[np.ndarray], rank: int) -> np.ndarray:
        routes = self.topk_idx(rank)
        rows = [weights[row.source][row.token] for row in self.rows(rank)]
        sent = np.array(rows, np.float32).reshape(routes.shape)
        return np.where(routes >= 0, sent, np.float32(0))

    def source_token(self, rank: int) -> np.ndarray:
        return np.array([row.token for row in self.rows(rank)], np.int32)

    def slot_rows(self, rank: int, alignment: int) -> tuple[np.ndarray, np.ndarray]:
        """Row of the expert-major output of each slot, and the first row of every expert."""
        routes = self.topk_idx(rank)
        rows = np.full(routes.shape, -1, np.int64)
        offsets = [0]
        for expert in range(len(self.blocks[rank])):
            at = offsets[-1]
            for n, k in np.argwhere(routes == expert):
                rows[n, k] = at
                at += 1
            offsets.append(offsets[-1] + -(-(at - offsets[-1]) // alignment) * alignment)
        return rows, np.array(offsets, np.int64)

    def expert_major(self, xs: list[np.ndarray], rank: int, alignment: int) -> np.ndarray:
        slots, offsets = self.slot_rows(rank, alignment)
        out = np.zeros((offsets[-1], xs[rank].shape[1]), xs[rank].dtype)
        for row, places in zip(self.rank_major(xs, rank), slots):
            out[places[places >= 0]] = row
        return out

    def combine(self, rows: list[np.ndarray], rank: int) -> np.ndarray:
        """Rank-major rows of every rank -> [T, H] of one: fp32, ascending rank, one rounding."""
        total = np.zeros((len(self.routes[rank]), rows[rank].shape[1]), np.float32)
        for peer in range(self.ranks):
            for row, data in zip(self.rows(peer), rows[peer]):
                if row.source == rank:
                    total[row.token] += data.astype(np.float32)
        return total.astype(rows[rank].dtype)

    def combine_weights(self, weights: list[np.ndarray], rank: int) -> np.ndarray:
        """[n, K] of every rank -> [T, K] of one, summed over ranks."""
        total = np.zeros(self.routes[rank].shape, np.float32)
        for peer in range(self.ranks):
            for row, data in zip(self.rows(peer), weights[peer]):
                if row.source == rank:
                    total[row.token] += data
        return total

    def reduce(
        self, rows: np.ndarray, rank: int, alignment: int, weights: np.ndarray | None = None
    ) -> np.ndarray:
        """Expert-major rows of one rank -> rank-major: ascending k, `fma(w, x, acc)`, rounded."""
        slots, _ = self.slot_rows(rank, alignment)
        total = np.zeros((len(slots), rows.shape[1]), np.float32)
        for n, places in enumerate(slots):
            for k, place in enumerate(places):
                if place < 0:
                    continue
                data = rows[place].astype(np.float64)
                if weights is not None:
                    # A product of two floats is exact in fp64; the sum rounds twice only where
                    # test data, which have few bits, never get.
                    data = data * np.float64(weights[n, k])
                total[n] = (total[n].astype(np.float64) + data).astype(np.float32)
        return total.astype(rows.dtype)
