"""The demo model over the simulated network, which delays, splits and reorders by a seed: its
losses are those of one rank. FERRY_HOSTS=all runs it: a minute.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ferry

STEPS = 40
STEP_TOLERANCE = 1e-4  # of the demo, examples/moe_lm/report.py
DEMO = Path(__file__).resolve().parents[2] / "examples" / "moe_lm"
pytestmark = pytest.mark.skipif(
    os.environ.get("FERRY_HOSTS") != "all", reason="a minute: FERRY_HOSTS=all runs it"
)


class Sums:
    """As much of torch.distributed as the demo takes, between threads: sums in rank order."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.parts: list[Any] = [None] * ranks
        self.here = threading.local()

    def all_reduce(self, tensor: Any) -> None:
        self.parts[self.here.rank] = tensor.clone()
        self.barrier.wait()
        tensor.zero_()
        for part in self.parts:
            tensor += part
        self.barrier.wait()


def train(ranks: int, monkeypatch: pytest.MonkeyPatch, **fabric: Any) -> list[float]:
    """The loss of each step."""
    pytest.importorskip("torch").set_num_threads(1)
    monkeypatch.setattr(sys, "path", [str(DEMO), *sys.path])
    worker = importlib.import_module("worker")
    settings = importlib.import_module("settings").Settings(
        steps=STEPS, batch=12, shares=12, context=16
    )
    sums = Sums(ranks)
    monkeypatch.setattr(worker, "dist", sums)
    monkeypatch.setattr(worker, "load_corpus", functools.cache(worker.load_corpus))
    worker.load_corpus()
    losses: list[list[float]] = [[] for _ in range(ranks)]

    def rank(bootstrap: Any) -> None:
        with ferry.Group(bootstrap, experts=settings.experts, **fabric) as group:
            sums.here.rank = group.rank
            trainer = worker.Trainer(settings, group)
            for step in range(STEPS):
                losses[group.rank].append(trainer.step(step))

    threads = [threading.Thread(target=rank, args=(boot,)) for boot in ferry.threads(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(one) for one in losses] == [STEPS] * ranks
    return losses[0]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "fabric"),
    [
        (3, {"fabric": "sim"}),
        (4, {"network": "sim", "domain_size": 2, "crossing": "direct"}),
        (4, {"network": "sim", "domain_size": 2, "crossing": "hierarchical"}),
    ],
)
def test_losses_are_those_of_one_rank(
    ranks: int, fabric: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = train(ranks, monkeypatch, sim_seed=seed, **fabric)
    one = train(1, monkeypatch)
    for step, (a, b) in enumerate(zip(several, one, strict=True)):
        assert abs(a - b) <= STEP_TOLERANCE * abs(b), f"step {step}: {a} and {b}"
