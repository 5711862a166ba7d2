"""Latency mode from Python: masks, rejoin and who was waited for. C++ tests what they do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from rank_threads import run_ranks

import ferry

RANKS, EXPERTS, CAPACITY, HIDDEN = 3, 6, 4, 128


def exchange(group: ferry.Group, **options: Any) -> ferry.LatencyExchange:
    return ferry.LatencyExchange(
        group, capacity=CAPACITY, hidden=HIDDEN, topk=RANKS, dtype="f32", **options
    )


def step(group: ferry.Group, latency: ferry.LatencyExchange, there: int) -> None:
    """One token to an expert of every rank, back as often as ranks are there."""
    x = np.full((1, HIDDEN), group.rank + 1, np.float32)
    sent = latency.dispatch(x, np.array([[0, 2, 4]]))
    assert int(sent.counts[0]) == there
    back = latency.combine(sent.x, sent, np.ones((1, RANKS), np.float32), path="per_rank")
    assert np.array_equal(back.x, x * there)


def test_ranks_are_masked_and_rejoin() -> None:
    def body(group: ferry.Group) -> bool:
        latency = exchange(group, masks=True)
        hint = ferry.LatencyExchange.memory_hint(
            capacity=CAPACITY,
            hidden=HIDDEN,
            topk=RANKS,
            experts=EXPERTS,
            ranks=RANKS,
            dtype="f32",
            masks=True,
        )
        assert group.memory().latency_bytes == hint
        others = [rank for rank in range(RANKS) if (rank == 2) != (group.rank == 2)]
        step(group, latency, RANKS)
        group.barrier()
        for rank in others:
            latency.set_mask(rank)
        assert latency.masked() == [rank in others for rank in range(RANKS)]
        for _ in range(1 + group.rank // 2):  # rank 2 makes more calls
            step(group, latency, RANKS - len(others))
        latency.rejoin()
        assert latency.masked() == [False] * RANKS
        step(group, latency, RANKS)
        group.barrier()
        latency.set_mask(others[0])
        latency.clear_masks()
        assert not any(latency.masked())
        assert latency.mask_count == 0
        with pytest.raises(ferry.InvalidArgument, match="rank"):
            latency.set_mask(group.rank)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS))


def test_a_rank_that_leaves_is_masked() -> None:
    def body(group: ferry.Group) -> bool:
        latency = exchange(group, masks=True)
        step(group, latency, RANKS)
        group.barrier()
        if group.rank != 2:
            step(group, latency, 2)
            assert latency.masked() == [False, False, True]
            assert latency.mask_count == 1
        return True

    def without_barrier(group: ferry.Group) -> bool:
        done = body(group)
        group.barrier = lambda: None  # type: ignore[method-assign]
        return done

    assert all(run_ranks(RANKS, without_barrier, experts=EXPERTS))


def test_without_masks_there_are_none() -> None:
    def body(group: ferry.Group) -> bool:
        latency = exchange(group)
        for call in (
            latency.masked,
            lambda: latency.set_mask(1),
            latency.clear_masks,
            lambda: latency.mask_count,
            latency.rejoin,
        ):
            with pytest.raises(ferry.InvalidArgument, match="masks"):
                call()
        with pytest.raises(ferry.InvalidArgument, match="masks: got 1"):
            exchange(group, masks=1)
        return True

    assert all(run_ranks(1, body, experts=EXPERTS))


def test_waits_are_added() -> None:
    """Each source's own, in nanoseconds."""

    def body(group: ferry.Group) -> bool:
        latency = exchange(group)
        x, routes = np.ones((1, HIDDEN), np.float32), np.array([[0, 2, 4]])
        waits = np.full(RANKS, 7, np.int64)
        group.barrier()
        if group.rank == 1:
            time.sleep(0.1)
        sent = latency.dispatch(x, routes, waits=waits)
        assert (waits >= 7).all()
        if group.rank != 1:  # it is a tenth of a second late
            assert waits[1] > 1_000_000
            assert waits[group.rank] < waits[1]
        sums = np.zeros(RANKS, np.int64)
        weights = np.ones((1, RANKS), np.float32)
        latency.combine(sent.x, sent, weights, waits=sums)
        assert (sums >= 0).all()
        assert sums.any()
        again = latency.dispatch(x, routes)
        for wrong in (np.zeros(RANKS, np.int32), np.zeros(RANKS - 1, np.int64)):
            with pytest.raises(ferry.InvalidArgument, match="waits"):
                latency.combine(again.x, again, weights, waits=wrong)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS))
