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
STEPS = 60
LINE = re.compile(r"\[(\d+)\] step (\d+) ranks (\d+) loss (\S+)")


def train(*arguments: str) -> tuple[dict[int, float], list[int], str]:
    """The losses by step, the ranks after each line, and what the launcher said."""
    ferry = shutil.which("ferry", path=str(Path(sys.executable).parent))
    if ferry is None:
        pytest.skip("the command `ferry` is not installed: make package")
    command = [ferry, "run", "--elastic", "2:4", "--restarts", "4", "--", sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAM), "--steps", str(STEPS), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses: dict[int, float] = {}
    ranks: list[int] = []
    for _, step, count, loss in LINE.findall(done.stdout):
        losses[int(step)] = float(loss)
        ranks.append(int(count))
    return losses, ranks, done.stdout + done.stderr


def test_the_losses_are_those_of_a_run_in_which_nobody_dies() -> None:
    undisturbed, ranks, _ = train()
    assert sorted(undisturbed) == list(range(1, STEPS + 1))
    assert set(ranks) == {4}
    losses, ranks, said = train("--until-whole", "--kill", "0:10", "--kill", "2:30")
    assert said.count("takes its place") == 2, said
    assert 3 in ranks, said
    assert said.count("ranks [0, 1, 2, 3]") == 4, said  # at the end, of each
    # A rank that died may have been the one that had the last word about a step.
    common = losses.keys() & undisturbed.keys()
    assert len(common) >= STEPS - 2, said
    for step in common:
        assert losses[step] == pytest.approx(undisturbed[step], rel=1e-12), step


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
