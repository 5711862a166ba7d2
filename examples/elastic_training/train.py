"""Trains a small layer of experts on ranks that may be killed at any time.

    ferry run --elastic 2:4 --restarts 3 -- python examples/elastic_training/train.py

Kill a rank (`kill -9`, or --kill RANK:STEP): the others go on within milliseconds, with its experts
as it had put them into the vault, and the process that takes its place gets experts from there,
too. The losses are those of a run in which nobody dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import numpy as np

import ferry

EXPERTS, SLOTS, TOKENS, HIDDEN, RATE = 8, 6, 256, 64, 0.05
LOSSES = (ferry.PeerFailedError, ferry.PeerLeftError, ferry.DeadlineExceededError)


class Trainer:
    """One rank: its experts' weights, and what it exchanges them with."""

    def __init__(self, deadline: float, row_seconds: float = 0.0) -> None:
        self.row_seconds = row_seconds  # that a GPU would compute on each row
        self.boot = ferry.from_environment(deadline=deadline)
        self.group = ferry.Group(
            self.boot, experts=self.boot.size * SLOTS, deadline=deadline, elastic="experts"
        )
        self.placement = ferry.ExpertPlacement(experts=EXPERTS, ranks=self.boot.size, slots=SLOTS)
        self.step = 0  # that the weights are of
        self.weights: dict[int, np.ndarray] = {}
        self.pending: np.ndarray | None = None
        most = {slot: np.empty(HIDDEN) for slot in range(SLOTS)}
        self.vault = ferry.Vault(self.group, ferry.Vault.bytes_of(most))

    def settle(self, view: ferry.GroupView) -> None:
        """At the beginning and after a change: the newest weights that all have put, of the experts
        that this rank now has."""
        self.placement = ferry.ExpertPlacement(experts=EXPERTS, ranks=self.group.size, slots=SLOTS)
        self.placement.balance(view.ranks)
        mine = sorted(set(self.placement.held_by(self.group.rank)) - {-1})
        step = self.vault.recover(mine)
        if step is None:  # everybody begins with the same
            first = np.random.default_rng(1).normal(size=(EXPERTS, HIDDEN))
            self.weights = {expert: first[expert] for expert in mine}
            self.step = 0
            self.vault.put(0, self.weights)
            return
        self.weights = {expert: np.empty(HIDDEN) for expert in mine}
        for expert, weight in self.weights.items():
            self.vault.get(expert, weight)
        self.step = step

    def gradients(self, step: int) -> float:
        """The loss; leaves the gradients of all experts in `pending`."""
        view = self.group.view()
        random = np.random.default_rng(step)
        x = random.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
        routes = random.integers(0, EXPERTS, (TOKENS, 1))
        share = np.array_split(np.arange(TOKENS), len(view.ranks))[
            view.ranks.index(self.group.rank)
        ]
        x, routes = x[share], routes[share]
        plan = self.group.plan(self.placement.places(routes, self.group.rank))
        got = self.group.dispatch(x, plan)
        time.sleep(self.row_seconds * len(got.x))
        experts = np.array(self.placement.held_by(self.group.rank))[got.topk_idx[:, 0]]
        y = np.empty(got.x.shape, np.float64)
        for expert in set(experts.tolist()):
            rows = experts == expert
            y[rows] = np.tanh(got.x[rows] * self.weights[expert])
        out = self.group.combine(y.astype(np.float32), plan).x
        error = out - np.sin(x)
        back = self.group.dispatch(2 * error / TOKENS, plan).x.astype(np.float64)
        slopes = back * (1 - y * y) * got.x
        sums = np.zeros(EXPERTS * HIDDEN + 1)
        for expert in set(experts.tolist()):
            sums[expert * HIDDEN : (expert + 1) * HIDDEN] = slopes[experts == expert].sum(axis=0)
        sums[-1] = (error.astype(np.float64) ** 2).sum() / TOKENS
        sums = self.all_gather(sums).sum(axis=0)  # in f64: all copies take the same step
        self.pending = sums[:-1].reshape(EXPERTS, HIDDEN)
        return float(sums[-1])

    def all_gather(self, mine: np.ndarray) -> np.ndarray:
        """A row of each rank, of 64-bit numbers. By the group, which goes on without ranks that
        die: Collectives would have to be made anew, a rendezvous of all ranks."""
        everybody = np.array([[rank * SLOTS for rank in self.group.view().ranks]])
        row = np.pad(mine, (0, mine.size % 2)).view(np.float32)  # carried as bits, 16 bytes each
        got = self.group.dispatch(row[np.newaxis], self.group.plan(everybody))
        return got.x.view(mine.dtype)[:, : mine.size]

    def apply(self) -> None:
        for expert, weight in self.weights.items():
            self.weights[expert] = weight - RATE * self.pending[expert]
        self.pending = None
        self.step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.0, help="that a step takes at least")
    parser.add_argument(
        "--row-seconds", type=float, default=0.0, help="and on each row of a rank, as on a GPU"
    )
    parser.add_argument("--until-whole", action="store_true", help="then on, until all are back")
    parser.add_argument("--deadline", type=float, default=20.0)
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="RANK:STEP",
        help="at this step; +STEP: so many after all were back",
    )
    given = parser.parse_args()
    try:
        trainer = Trainer(given.deadline, given.row_seconds)
    except ferry.InvalidArgumentError as error:  # no launcher has started ranks
        parser.error(f"{error}. Here: ferry run --elastic 2:4 -- python {sys.argv[0]}")
    view = trainer.group.view()
    changed = True
    was_lost = trainer.boot.joins
    whole_at: int | None = None  # the step at which all were back
    newest = began = longest_gap = 0  # steps begun for one new step

    def more() -> bool:  # the same on all ranks
        if given.until_whole and whole_at is None:
            return True
        return trainer.step < max(given.steps, (whole_at or 0) + 20 * given.until_whole)

    def is_killed(step: int) -> bool:
        names = {f"{trainer.group.rank}:{step}"} if not trainer.boot.joins else set()
        if whole_at is not None:
            names.add(f"{trainer.group.rank}:+{step - whole_at}")
        return not names.isdisjoint(given.kill)

    while changed or more():
        try:
            if changed:
                trainer.settle(view)
                changed = False
                was_lost = was_lost or bool(view.lost or view.joined)
                if whole_at is None and was_lost and len(view.ranks) == trainer.group.size:
                    whole_at = trainer.step
                continue
            step = trainer.step + 1
            if is_killed(step):
                os.kill(os.getpid(), signal.SIGKILL)
            began += 1
            loss = trainer.gradients(step)
            time.sleep(given.seconds)
            one_waits = trainer.group.commit(step)
            trainer.apply()
            trainer.vault.put(step, trainer.weights)
            if step > newest:
                newest, longest_gap, began = step, max(longest_gap, began), 0
            if trainer.group.rank == view.ranks[0]:
                print(f"step {step} ranks {len(view.ranks)} loss {loss!r}", flush=True)
            if one_waits and more():
                view, changed = trainer.group.regroup(), True
        except LOSSES as loss_of_a_rank:
            print(f"rank {trainer.group.rank}: {loss_of_a_rank}", flush=True)
            view, changed = trainer.group.regroup(), True
            print(f"rank {trainer.group.rank}: {view}", flush=True)
    print(
        f"rank {trainer.group.rank}: ends at step {trainer.step}, ranks {view.ranks}, "
        f"longest gap {longest_gap} steps",
        flush=True,
    )
    trainer.group.barrier()


if __name__ == "__main__":
    main()
