"""ferry.torch.BalancedSampler: who is faster gets more samples, and the gradient stays the mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import DEADLINE, run_threads
from torch import nn

import ferry
import ferry.torch as ft
from ferry.torch_sampler import divide

RANKS = 4
COSTS = [1.0, 1.0, 2.0, 2.0]  # seconds of a sample


def collectives(bootstraps: list[Any], rank: int) -> ferry.Collectives:
    return ferry.Collectives(bootstraps[rank], deadline=DEADLINE, memory_bytes=1 << 20)


def test_half_the_ranks_at_half_speed_get_half_as_much() -> None:
    bootstraps = ferry.threads(RANKS)

    def one(rank: int) -> list[list[int]]:
        with collectives(bootstraps, rank) as ranks:
            model = SimpleNamespace(collectives=ranks, steps=0, busy_seconds=0.0)
            sampler = ft.BalancedSampler(487, 24, model, every=4)
            batches = []
            for batch in sampler:
                batches.append(batch)
                model.busy_seconds += len(batch) * COSTS[rank] + 0.5  # and what each step takes
                model.steps += 1
            assert sampler.weight(len(batches[-1])) == len(batches[-1]) * RANKS / 24
            ranks.barrier()
            return batches

    every = run_threads(RANKS, one)
    assert all(len(batches) == 487 // 24 for batches in every)
    taken = [index for batches in every for batch in batches for index in batch]
    assert len(taken) == len(set(taken)) == 24 * 20 and max(taken) < 487
    times = [max(len(batch) * cost for batch, cost in zip(step, COSTS)) for step in zip(*every)]
    assert times[0] == 12 and times[-1] == 8, times  # a third less
    assert [len(batches[-1]) for batches in every] == [8, 8, 4, 4]


def test_batches_that_a_loader_asked_for_ahead_are_not_counted() -> None:
    bootstraps = ferry.threads(2)

    def one(rank: int) -> list[int]:
        with collectives(bootstraps, rank) as ranks:
            model = SimpleNamespace(collectives=ranks, steps=0, busy_seconds=0.0)
            sampler = ft.BalancedSampler(400, 12, model, every=4, shuffle=False)
            asked: list[list[int]] = []
            for batch in sampler:
                asked.append(batch)
                if len(asked) > 3:  # the training is three batches behind
                    model.busy_seconds += len(asked[-4]) * (1 + rank)
                    model.steps += 1
            ranks.barrier()
            return [len(batch) for batch in asked]

    fast, slow = run_threads(2, one)
    assert (fast[0], slow[0]) == (6, 6) and (fast[-1], slow[-1]) == (8, 4)
    assert all(now in (6, 8) for now in fast)  # exact from the first measurement on


def test_the_weighted_gradient_is_that_of_the_whole_batch() -> None:
    bootstraps = ferry.threads(RANKS)
    x = torch.randn(22, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model = nn.Linear(8, 3)
    model(x).pow(2).mean().backward()
    states = model.state_dict()

    def one(rank: int) -> None:
        with collectives(bootstraps, rank) as ranks:
            mine = nn.Linear(8, 3)
            mine.load_state_dict(states)
            ddp = ft.DistributedDataParallel(mine, ranks)
            sampler = ft.BalancedSampler(22, 22, ddp)
            sampler.shares = [1, 9, 4, 8]
            (batch,) = sampler
            (ddp(x[batch]).pow(2).mean() * sampler.weight(len(batch))).backward()
            for ours, whole in zip(mine.parameters(), model.parameters()):
                # fp32 sums of some 22 terms below 8 in two orders
                assert whole.grad is not None
                torch.testing.assert_close(ours.grad, whole.grad, rtol=0, atol=22 * 8 * 2.0**-23)

    run_threads(RANKS, one)


def test_shares() -> None:
    assert divide(7, [1, 1, 1]) == [3, 2, 2]
    assert divide(10, [1e9, 1, 1]) == [8, 1, 1]
    assert divide(3, [5, 1e-9, 1]) == [1, 1, 1]
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        speeds = torch.rand(5, generator=generator).tolist()
        shares = divide(64, speeds)
        assert sum(shares) == 64 and min(shares) >= 1
        assert all(abs(s - 64 * v / sum(speeds)) < 5 for s, v in zip(shares, speeds))


def test_what_cannot_be_is_refused() -> None:
    (bootstrap,) = ferry.threads(1)
    with ferry.Collectives(bootstrap, memory_bytes=0) as ranks:
        model = SimpleNamespace(collectives=ranks, steps=0, busy_seconds=0.0)
        for arguments, words in (((4, 8), "batch: got 8"), ((4, 0), "batch: got 0")):
            with pytest.raises(ferry.InvalidArgumentError, match=words):
                ft.BalancedSampler(*arguments, model)
        data: Any = [1, 2, 3]
        with pytest.raises(ferry.InvalidArgumentError, match=r"samples: got .* their number, 3"):
            ft.BalancedSampler(data, 2, model)
        with pytest.raises(ferry.InvalidArgumentError, match="model: got Linear; expected a ferry"):
            ft.BalancedSampler(4, 2, nn.Linear(2, 2))
