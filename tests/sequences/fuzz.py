"""Random sequences of calls against the reference.

    python tests/sequences [--seed S] [--sequences N] [--seconds T] [--ranks R] [--processes]
    python tests/sequences --replay FILE

Sequence i of seed S is that of seed S + i. One that fails is made as small as it can and printed as
JSON, which --replay runs again.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sequences.generate import draw
from sequences.model import Sequence
from sequences.ranks import Failure
from sequences.run import Runner
from sequences.shrink import Shrinker, alike
from sequences.steps import meaning

QUICK_DEADLINE = 2.0  # seconds; a sequence that hangs is run many times to make it small


class Found(NamedTuple):
    sequence: Sequence
    failure: Failure
    smallest: Sequence
    smallest_failure: Failure

    def __str__(self) -> str:
        return (
            f"sequence of seed {self.sequence['seed']} failed: {in_words(self.failure)}\n"
            f"smallest that fails so: {in_words(self.smallest_failure)}\n"
            f"{as_json(self.smallest)}\n"
            "again: save this as FILE, and python tests/sequences --replay FILE"
        )


def in_words(failure: Failure) -> str:
    where = f"rank {failure['rank']}, step {failure['step']} ({failure['do']})"
    return f"{failure['kind']}: {where}: {failure['text']}"


def as_json(sequence: Sequence) -> str:
    """One line a step."""
    head = {key: value for key, value in sequence.items() if key != "steps"}
    steps = ",\n".join(f"  {json.dumps(step)}" for step in sequence["steps"])
    return f'{json.dumps(head)[:-1]}, "steps": [\n{steps}\n]}}'


def run_one(sequence: Sequence, runner: Runner) -> Failure | None:
    steps, calls = meaning(sequence)
    assert len(steps) == len(sequence["steps"]), "a sequence with illegal steps"
    return runner.run(sequence, calls)


def shrunk(sequence: Sequence, failure: Failure, deadline: float, seconds: float) -> Found:
    """`sequence` as it was if it does not fail a second time."""
    for timeout in (QUICK_DEADLINE, deadline):
        with Runner(timeout) as runner:
            again = run_one(sequence, runner)
            if alike(failure, again):
                shrinker = Shrinker(partial(run_one, runner=runner), failure, seconds)
                smallest = shrinker.shrink(sequence)
                return Found(sequence, failure, smallest, shrinker.failure)
    return Found(sequence, failure, sequence, failure)


def fuzz(
    seed: int,
    count: int,
    seconds: float,
    *,
    ranks: int = 0,
    processes: bool = False,
    deadline: float = 20.0,
    shrink_seconds: float = 120.0,
    keep_going: bool = False,
) -> tuple[int, list[Found]]:
    """Runs `count` sequences or as many as `seconds` allow; ends at the first that fails unless it
    is to keep going. How many ran, and those that failed."""
    end, found, ran = time.monotonic() + seconds, [], 0
    with Runner(deadline) as runner:
        while ran < count and time.monotonic() < end:
            sequence, calls = draw(seed + ran, processes, ranks)
            ran += 1
            failure = runner.run(sequence, calls)
            if failure is None:
                continue
            found.append(shrunk(sequence, failure, deadline, shrink_seconds))
            if not keep_going:
                break
            print(found[-1], flush=True)
    return ran, found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=20261)
    parser.add_argument("--sequences", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=0, help="0: each sequence has its own")
    parser.add_argument("--processes", action="store_true", help="ranks are processes")
    parser.add_argument("--deadline", type=float, default=20, help="seconds, of the groups")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--shrink-seconds", type=float, default=120)
    parser.add_argument("--replay", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.replay:
        with Runner(args.deadline) as runner:
            failure = run_one(json.loads(args.replay.read_text()), runner)
        print(in_words(failure) if failure else "passed")
        return int(failure is not None)
    print(f"seed {args.seed}", flush=True)
    start = time.monotonic()
    ran, found = fuzz(
        args.seed,
        args.sequences,
        args.seconds,
        ranks=args.ranks,
        processes=args.processes,
        deadline=args.deadline,
        shrink_seconds=args.shrink_seconds,
        keep_going=args.keep_going,
    )
    if found and not args.keep_going:
        print(found[0])
    taken = time.monotonic() - start
    print(f"{ran} sequences of seed {args.seed} in {taken:.0f} s, {len(found)} failed")
    return int(bool(found))
