"""Throughput over time around the death of a rank: `ferry run --elastic` beside torchrun, which
starts all ranks again from a checkpoint. Experts sleep for each row, as virtual GPUs: on few cores
the others would lose nothing when a process dies.

    python bench/elastic.py            writes bench/results/8ranks_elastic.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "results" / "8ranks_elastic.json"
LINE = re.compile(r"step (\d+) ranks (\d+) loss (\S+)")


def run(command: list[str], killed_at: int) -> dict[str, object]:
    """New steps and when rank 0 said them, in seconds after the last before the death."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    steps: list[tuple[float, int, int]] = []
    losses: dict[int, float] = {}
    for line in child.stdout:
        if found := LINE.search(line):
            step, ranks = int(found[1]), int(found[2])
            losses[step] = float(found[3])
            if step > (steps[-1][1] if steps else 0):
                steps.append((time.monotonic(), step, ranks))
                if step % 20 == 0:
                    print(line, end="", file=sys.stderr, flush=True)
    if child.wait() != 0:
        raise SystemExit(f"{command[0]} ended with {child.returncode}")
    death = next(at for at, step, _ in steps if step == killed_at - 1)
    since = [(round(at - death, 3), step, ranks) for at, step, ranks in steps]
    print(f"{Path(command[0]).name}: {figures(since, killed_at)}", flush=True)
    return {"steps": since, "losses": losses}


def figures(steps: list[tuple[float, int, int]], killed_at: int) -> str:
    """What docs/elastic.md says of a run."""

    def rate(some: list[tuple[float, int, int]]) -> float:
        return (some[-1][1] - some[0][1]) / (some[-1][0] - some[0][0])

    before = rate([one for one in steps if -8 <= one[0] <= 0])
    around = rate([one for one in steps if abs(one[1] - killed_at) <= 100])
    later = rate([one for one in steps if 3 <= one[0] < 10])
    gap = next(at for at, step, _ in steps if step >= killed_at)
    return (
        f"{gap:.2f} s from the last step before the death to a new one; {before:.2f} steps/s, of "
        f"which 200 steps around it had {around / before:.1%}, 3 to 10 s later {later / before:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill", type=int, default=105, metavar="STEP")
    parser.add_argument("--checkpoint", type=int, default=10, metavar="STEPS")
    parser.add_argument("--row-seconds", type=float, default=0.002)
    parser.add_argument("--port", type=int, default=21870, help="and the next three, for torchrun")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    beside = Path(sys.executable).parent
    train = [
        *("--steps", str(given.steps), "--row-seconds", str(given.row_seconds)),
        *("--kill", f"3:{given.kill}"),
    ]
    elastic = ["--elastic", f"{given.ranks // 2}:{given.ranks}", "--restarts", "1", "--"]
    program = str(ROOT / "examples" / "elastic_training" / "train.py")
    runs = {
        "ferry": run(
            [str(beside / "ferry"), "run", *elastic, sys.executable, program, *train], given.kill
        )
    }
    with tempfile.TemporaryDirectory() as folder:
        launch = ["--nproc-per-node", str(given.ranks), "--max-restarts", "1", "--standalone"]
        program = str(ROOT / "bench" / "elastic_restart.py")
        every = ["--checkpoint", str(given.checkpoint), "--port", str(given.port)]
        command = [str(beside / "torchrun"), *launch, program, folder, *every, *train]
        runs["torchrun"] = run(command, given.kill)
    losses = [one.pop("losses") for one in runs.values()]
    assert isinstance(losses[0], dict) and isinstance(losses[1], dict)
    for step in losses[0].keys() & losses[1].keys():  # both train the same
        if abs(losses[0][step] - losses[1][step]) > 1e-12 * abs(losses[1][step]):
            raise SystemExit(f"step {step}: losses {losses[0][step]} and {losses[1][step]}")
    how = {name: value for name, value in vars(given).items() if name not in ("out", "port")}
    about = {"date": f"{datetime.date.today()}", "cores": len(os.sched_getaffinity(0)), **how}
    about["tokens"] = 256  # of a step, in examples/elastic_training/train.py
    given.out.write_text(json.dumps(about | {"runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
