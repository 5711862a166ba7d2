"""The training of examples/elastic_training as torchrun runs it: when a rank dies, all are started
again and load the newest checkpoint. `bench/elastic.py` starts it. The ranks do not import torch,
as those of the example do not, so that both start as fast.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import numpy as np

import ferry

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "elastic_training"))
import train


class Restarted(train.Trainer):
    def __init__(self, folder: Path, row_seconds: float, port: int) -> None:
        ranks, slots = int(os.environ["WORLD_SIZE"]), train.SLOTS
        port += int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        rank, secret = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RUN_ID"]
        boot = ferry.tcp(rank=rank, size=ranks, port=port, secret=secret)
        self.row_seconds, self.pending = row_seconds, None
        self.group = ferry.Group(boot, experts=ranks * slots, deadline=60)
        self.placement = ferry.ExpertPlacement(experts=train.EXPERTS, ranks=ranks, slots=slots)
        self.placement.balance(range(ranks))
        self.folder = folder
        mine = sorted(set(self.placement.held_by(self.group.rank)) - {-1})
        first = np.random.default_rng(1).normal(size=(train.EXPERTS, train.HIDDEN))
        self.weights = {expert: first[expert] for expert in mine}
        self.step = self.newest_of_all()
        if self.step > 0:
            kept = np.load(self.file(self.step))
            self.weights = {expert: kept[str(expert)] for expert in mine}

    def file(self, step: int) -> Path:
        return self.folder / f"{self.group.rank}_{step}.npz"

    def newest_of_all(self) -> int:
        written = [int(one.stem.split("_")[1]) for one in self.folder.glob(f"{self.group.rank}_*")]
        return int(self.all_gather(np.array([max(written, default=0)])).min())

    def save(self) -> None:
        whole = self.folder / f"new_{self.group.rank}.npz"
        np.savez(whole, **{str(expert): weight for expert, weight in self.weights.items()})
        whole.rename(self.file(self.step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True, help="and the next")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--row-seconds", type=float, required=True)
    parser.add_argument("--kill", required=True, metavar="RANK:STEP")
    parser.add_argument("--checkpoint", type=int, required=True, metavar="STEPS")
    given = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("torchrun has not started this; bench/elastic.py does so")
    trainer = Restarted(given.folder, given.row_seconds, given.port)
    first_time = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    while trainer.step < given.steps:
        step = trainer.step + 1
        if first_time and given.kill == f"{trainer.group.rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = trainer.gradients(step)
        trainer.apply()
        if step % given.checkpoint == 0:
            trainer.save()
        if trainer.group.rank == 0:
            print(f"step {step} ranks {trainer.group.size} loss {loss!r}", flush=True)
    trainer.group.barrier()


if __name__ == "__main__":
    main()
