"""A training under `ferry run --elastic` with ranks that are killed, against an undisturbed one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "elastic_training" / "train.py"
LINE = re.compile(r"\[(\d+)\] step (\d+) ranks (\d+) loss (\S+)")


def train(ranks: str, restarts: int, *arguments: str) -> tuple[dict[int, float], list[int], str]:
    """The losses by step, the ranks after each line, and what the launcher said."""
    ferry = shutil.which("ferry", path=str(Path(sys.executable).parent))
    if ferry is None:
        pytest.skip("the command `ferry` is not installed: make package")
    command = [ferry, "run", "--elastic", ranks, "--restarts", str(restarts), "--", sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses: dict[int, float] = {}
    counts: list[int] = []
    for _, step, count, loss in LINE.findall(done.stdout):
        losses[int(step)] = float(loss)
        if counts[-1:] != [int(count)]:
            counts.append(int(count))
    return losses, counts, done.stdout + done.stderr


def test_8_ranks_become_4_8_and_6_and_the_losses_are_those_of_two() -> None:
    kills = ["0:10", "2:10", "5:10", "7:10", "1:+5", "4:+5"]
    options = [word for kill in kills for word in ("--kill", kill)]
    losses, counts, said = train("2:8", 4, "--until-whole", "--seconds", "0.01", *options)
    assert said.count("takes its place") == 4, said
    assert (counts[0], min(counts), counts.count(8), counts[-1]) == (8, 4, 2, 6), said
    gaps = re.findall(r"ranks \[0, 2, 3, 5, 6, 7\], longest gap (\d+) steps", said)
    assert len(gaps) == 6, said  # at the end, of each
    assert max(map(int, gaps)) <= 3, said
    undisturbed, _, _ = train("2:2", 0, "--steps", str(max(losses)))
    # A rank that died may have been the one that had the last word about a step.
    assert len(losses) >= max(losses) - 3, said
    for step, loss in losses.items():
        assert loss == pytest.approx(undisturbed[step], rel=1e-12), step


LATE = """
import time
import ferry
boot = ferry.from_environment()
group = ferry.Group(boot, experts=3, elastic="late", deadline=2)
view, end = group.view(), time.monotonic() + 30
step = view.step + 1
if group.rank == 1 and not boot.joins:
    time.sleep(3)  # the others go on without it: evicted, it fails
while not view.joined:
    assert time.monotonic() < end
    try:
        if group.commit(step):
            view = group.regroup()
        step += 1
        time.sleep(0.01)
    except (ferry.PeerFailedError, ferry.DeadlineExceededError):
        view = group.regroup()
        step = view.step + 1
group.barrier()
print("joined", view.joined, "lost", view.lost)
"""


def test_a_process_takes_the_place_of_a_rank_that_was_late(tmp_path: Path) -> None:
    ferry = shutil.which("ferry", path=str(Path(sys.executable).parent))
    if ferry is None:
        pytest.skip("the command `ferry` is not installed: make package")
    program = tmp_path / "late.py"
    program.write_text(LATE)
    done = subprocess.run(
        [ferry, "run", "--elastic", "2:3", "--restarts", "1", "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("joined [1] lost []") == 3, done.stdout + done.stderr
