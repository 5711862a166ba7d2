"""Throughput over time around the death of a rank: `ferry run --elastic` beside torchrun, which
starts all ranks again from a checkpoint. Experts sleep for each row, as virtual GPUs: on few cores
the others would lose nothing when a process dies.

    python bench/elastic.py            writes bench/results/8ranks_elastic.json
    python bench/elastic.py --ranks 20 --restarts 0 --out FILE      nobody takes the place
    python bench/elastic.py --pairs 10 --steps 120 --kill 20       prints alone: the same steps from
        2 s after a process took the place on, beside a training in which nobody dies, in turns
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

import job
from observe_cost import median_of

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "results" / "8ranks_elastic.json"
LINE = re.compile(r"step (\d+) ranks (\d+) loss (\S+)")


def run(command: list[str], killed_at: int) -> dict[str, object]:
    """New steps and when rank 0 said them, in seconds after the last before the death."""
    job.say_progress(f"{Path(command[0]).name}: starting")
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
                job.say_progress(line.rstrip())
    job.say_progress("")
    if child.wait() != 0:
        raise SystemExit(f"{command[0]} ended with {child.returncode}")
    death = next(at for at, step, _ in steps if step == killed_at - 1)
    since = [(round(at - death, 3), step, ranks) for at, step, ranks in steps]
    print(f"{Path(command[0]).name}: {figures(since, killed_at)}", flush=True)
    return {"steps": since, "losses": losses}


def figures(steps: list[tuple[float, int, int]], killed_at: int) -> str:
    """What docs/elastic_figures.md says of a run."""

    def rate(some: list[tuple[float, int, int]]) -> float:
        return (some[-1][1] - some[0][1]) / (some[-1][0] - some[0][0])

    before = rate([one for one in steps if -8 <= one[0] <= 0])
    around = rate([one for one in steps if abs(one[1] - killed_at) <= 100])
    later = rate([one for one in steps if 3 <= one[0] < 10])
    steady = rate([one for one in steps if one[0] >= 2])
    gap = next(at for at, step, _ in steps if step >= killed_at)
    return (
        f"{gap:.2f} s from the last step before the death to a new one; {before:.2f} steps/s, of "
        f"which 200 steps around it had {around / before:.1%}, 3 to 10 s later "
        f"{later / before:.1%}, from 2 s on {steady / before:.1%}"
    )


def restarted(given: argparse.Namespace, train: list[str]) -> dict[str, object]:
    """The same training by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["--nproc-per-node", str(given.ranks), "--max-restarts", "1", "--standalone"]
        program = str(ROOT / "bench" / "elastic_restart.py")
        every = ["--checkpoint", str(given.checkpoint), "--port", str(given.port)]
        torchrun = str(Path(sys.executable).parent / "torchrun")
        return run([torchrun, *launch, program, folder, *every, *train], given.kill)


def pairs(given: argparse.Namespace, elastic: list[str], train: list[str]) -> None:
    """Steps of the same number have the same rows: what is left is the machine, and a cost."""
    ratios = []
    for number in range(given.pairs):
        seconds = {}
        for dies in (number % 2 == 0, number % 2 == 1):
            steps = run([*elastic, *train, *(given.death if dies else [])], given.kill)["steps"]
            seconds[dies] = {step: (at, ranks) for at, step, ranks in steps}
        after = {step: at for step, (at, _) in seconds[True].items() if step > given.kill}
        whole = min(at for step, at in after.items() if seconds[True][step][1] == given.ranks)
        first, last = min(step for step, at in after.items() if at >= whole + 2), given.steps
        times = {dies: made[last][0] - made[first][0] for dies, made in seconds.items()}
        ratios.append(times[False] / times[True])
        print(f"steps {first} to {last}: {ratios[-1]:.2%} of an undisturbed training", flush=True)
    low, middle, high = median_of(ratios)
    print(f"median of {len(ratios)} pairs {middle:.2%} ({low:.2%} to {high:.2%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill", type=int, default=105, metavar="STEP")
    parser.add_argument("--checkpoint", type=int, default=10, metavar="STEPS")
    parser.add_argument("--row-seconds", type=float, default=0.002)
    parser.add_argument(
        "--restarts", type=int, default=1, help="0: Ferry alone, torchrun would end"
    )
    parser.add_argument("--port", type=int, default=21870, help="and the next, for torchrun")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pairs", type=int, default=0)
    given = parser.parse_args()
    beside = Path(sys.executable).parent
    train = ["--steps", str(given.steps), "--row-seconds", str(given.row_seconds)]
    given.death = ["--kill", f"3:{given.kill}"]
    elastic = [
        str(beside / "ferry"),
        "run",
        "--elastic",
        f"{given.ranks // 2}:{given.ranks}",
        "--restarts",
        f"{given.restarts}",
        "--",
        sys.executable,
        str(ROOT / "examples" / "elastic_training" / "train.py"),
    ]
    if given.pairs > 0:
        pairs(given, elastic, train)
        return
    train += given.death
    runs = {"ferry": run([*elastic, *train], given.kill)}
    if given.restarts > 0:
        runs["torchrun"] = restarted(given, train)
    first: dict[int, float] = {}
    for one in runs.values():
        losses = one.pop("losses")
        assert isinstance(losses, dict)
        first = first or losses
        for step in first.keys() & losses.keys():  # all train the same
            if abs(first[step] - losses[step]) > 1e-12 * abs(first[step]):
                raise SystemExit(f"step {step}: losses {first[step]} and {losses[step]}")
    how = {
        name: value
        for name, value in vars(given).items()
        if name not in ("out", "port", "pairs", "death")
    }
    about = {"date": f"{datetime.date.today()}", "cores": len(os.sched_getaffinity(0)), **how}
    about["tokens"] = 256  # of a step, in examples/elastic_training/train.py
    given.out.write_text(json.dumps(about | {"runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
