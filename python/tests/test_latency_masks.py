"""Latency mode with masks from Python. C++ tests the protocol."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from rank_threads import run_ranks

import ferry

RANKS, EXPERTS, TOKENS, HIDDEN = 3, 6, 4, 16

# Token t of every rank goes to expert t with weight 1 and to the next rank's t + 2 with weight 2.
ROUTES = np.stack([np.arange(TOKENS), np.arange(TOKENS) + 2], 1)
WEIGHTS = np.tile(np.float32([1, 2]), (TOKENS, 1))


def exchange(group: ferry.Group, *, masks: bool = True) -> ferry.LatencyExchange:
    return ferry.LatencyExchange(
        group, capacity=TOKENS, hidden=HIDDEN, topk=2, dtype="f32", masks=masks
    )


def one_round(lat: ferry.LatencyExchange, rank: int, **options: Any) -> np.ndarray:
    """Sums of one dispatch and combine, in units of this rank's rows."""
    x = np.full((TOKENS, HIDDEN), rank + 1, np.float32)
    r = lat.dispatch(x, ROUTES, **options)
    out = lat.combine(r.x, r, WEIGHTS, path="per_rank", **options).x
    assert (out == out[:, :1]).all()
    return out[:, 0] / (rank + 1)


def without(*absent: int) -> np.ndarray:
    owners = ROUTES // 2
    return np.where(np.isin(owners, absent), 0, WEIGHTS).sum(1)


def test_a_late_rank_is_masked_and_rejoins() -> None:
    late = 1
    everybody = threading.Barrier(RANKS)

    def body(group: ferry.Group) -> int:
        lat = exchange(group)
        assert np.array_equal(one_round(lat, group.rank), without())
        if group.rank == late:
            everybody.wait(20)
            with pytest.raises(ferry.EvictedError, match="rejoin"):
                one_round(lat, group.rank)
        else:
            for _ in range(3):
                assert np.array_equal(one_round(lat, group.rank), without(late))
            assert lat.masked() == [False, True, False]
            everybody.wait(20)
        lat.rejoin()
        assert lat.masked() == [False] * RANKS
        assert np.array_equal(one_round(lat, group.rank), without())
        return lat.mask_count

    assert run_ranks(RANKS, body, experts=EXPERTS, deadline=1.0) == [1, 0, 1]


def test_masks_are_set_and_cleared() -> None:
    everybody = threading.Barrier(RANKS)

    def body(group: ferry.Group) -> bool:
        lat = exchange(group)
        assert np.array_equal(one_round(lat, group.rank), without())
        everybody.wait(20)
        others = [2] if group.rank < 2 else [0, 1]
        for other in others:
            lat.set_mask(other)
        everybody.wait(20)
        assert np.array_equal(one_round(lat, group.rank), without(*others))
        assert lat.masked() == [rank in others for rank in range(RANKS)]
        everybody.wait(20)
        lat.clear_masks()
        everybody.wait(20)
        assert np.array_equal(one_round(lat, group.rank), without())
        assert lat.mask_count == 0
        with pytest.raises(ferry.InvalidArgumentError, match="peer"):
            lat.set_mask(group.rank)
        with pytest.raises(ferry.InvalidArgumentError, match="set_mask: rank"):
            lat.set_mask(-1)
        with pytest.raises(ferry.InvalidArgumentError, match="per_rank"):
            x = np.zeros((TOKENS, HIDDEN), np.float32)
            r = lat.dispatch(x, ROUTES)
            lat.combine(r.x, r, WEIGHTS)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS))


def test_without_masks_there_are_none() -> None:
    def body(group: ferry.Group) -> bool:
        lat = exchange(group, masks=False)
        calls = (lat.masked, lat.rejoin, lat.clear_masks, lambda: lat.mask_count)
        for call in (*calls, lambda: lat.set_mask(0)):
            with pytest.raises(ferry.InvalidArgumentError, match="masks"):
                call()
        shape = {"capacity": TOKENS, "hidden": HIDDEN, "topk": 2, "experts": EXPERTS}
        hints = [
            ferry.LatencyExchange.memory_hint(**shape, ranks=RANKS, dtype="f32", masks=masks)
            for masks in (False, True)
        ]
        assert group.memory().latency_bytes == hints[0]
        exchange(group)
        assert group.memory().latency_bytes == sum(hints)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS))


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("masks", [False, True])
def test_waits_are_added(masks: bool, hook: bool) -> None:
    slow = 2
    pause = 0.05

    def body(group: ferry.Group) -> np.ndarray:
        lat = exchange(group, masks=masks)
        dispatched, combined = np.zeros(RANKS, np.int64), np.zeros(RANKS, np.int64)

        def come() -> None:
            if group.rank == slow:
                threading.Event().wait(pause)

        x = np.ones((TOKENS, HIDDEN), np.float32)
        for _ in range(3):
            come()
            r = lat.dispatch(x, ROUTES, wait_ns=dispatched)
            come()
            # Weights that come with it are waited for while it sends, hook or not.
            sums = lat.combine(r.x, r, WEIGHTS, path="per_rank", wait_ns=combined, hook=hook)
            if hook:
                sums.receive()
        for wrong in (np.zeros(RANKS, np.int32), np.zeros(RANKS + 1, np.int64)):
            with pytest.raises(ferry.InvalidArgumentError, match="wait_ns"):
                lat.dispatch(x, ROUTES, wait_ns=wrong)
        return np.stack([dispatched, combined])

    for rank, waits in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        assert (waits >= 0).all()
        if rank != slow:
            assert (waits.argmax(1) == slow).all()
            assert (waits[:, slow] > 3 * pause * 1e9 / 2).all()
