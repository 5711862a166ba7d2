"""Random sequences of calls against the reference, 30 s in all; and the fuzzer itself."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sequences.compare import WrongError
from sequences.fuzz import Found, as_json, fuzz
from sequences.generate import draw
from sequences.model import Call, Calls, Sequence, whole
from sequences.ranks import Failure, Held, Rank
from sequences.run import Runner
from sequences.shrink import Shrinker
from sequences.steps import meaning

SEED = int(os.environ.get("FERRY_TEST_SEED", "20261"))
DEADLINE = 30.0  # seconds; nothing waits for it but what fails


def run(processes: bool, seconds: float) -> None:
    kind = "processes" if processes else "threads"
    print(f"seed {SEED}, ranks are {kind}")
    found: list[Found]
    ran, found = fuzz(
        SEED, 10**6, seconds, processes=processes, deadline=DEADLINE, shrink_seconds=60
    )
    print(f"{ran} sequences")
    assert not found, str(found[0])
    assert ran > 0


@pytest.mark.slow
@pytest.mark.timeout(600)  # one that fails is run many times more
def test_ranks_that_are_threads() -> None:
    run(processes=False, seconds=20)


@pytest.mark.slow
@pytest.mark.timeout(600)  # one that fails is run many times more
def test_ranks_that_are_processes() -> None:
    run(processes=True, seconds=10)


def test_a_seed_has_one_sequence() -> None:
    for seed in range(20):
        sequence, calls = draw(seed)
        assert as_json(sequence) == as_json(draw(seed)[0])
        steps, again = meaning(sequence)
        assert steps == sequence["steps"]
        assert len(again) == len(calls)


def test_any_steps_may_be_left_out() -> None:
    for seed in range(20):
        sequence, _ = draw(seed)
        less = sequence | {"steps": sequence["steps"][::2]}
        steps, _ = meaning(less)
        assert meaning(less | {"steps": steps})[0] == steps


def first_with(kind: str, **fields: Any) -> Sequence:
    """A sequence that has such a step and is longer than it has to be."""
    for seed in range(500):
        sequence, _ = draw(seed)
        for step in sequence["steps"]:
            there = step["do"] == kind and all(step[k] == v for k, v in fields.items())
            if there and len(sequence["steps"]) > 10:
                return sequence
    raise AssertionError("no such sequence")


def test_a_failing_sequence_is_made_small() -> None:
    """Planted: combining from expert-major rows fails when weights are applied."""

    def fails(sequence: Sequence) -> Failure | None:
        steps, calls = meaning(sequence)
        for at, (step, ranks) in enumerate(zip(steps, calls)):
            if step["do"] == "combine" and step["apply"] and ranks[0] and not ranks[0].errors:
                failure = {"kind": "wrong", "do": "combine", "what": "x", "text": "planted"}
                return failure | {"rank": 0, "step": at}
        return None

    sequence = first_with("combine", apply=True)
    failure = fails(sequence)
    assert failure is not None
    smallest = Shrinker(fails, failure, seconds=30).shrink(sequence)
    made = [step["do"] for step in smallest["steps"]]
    assert made in (["plan", "dispatch", "combine"], ["dispatch", "combine"])
    assert smallest["ranks"] == 1
    combine = smallest["steps"][-1]
    assert (combine["hidden"], combine["biases"], combine["special"]) == (4, 0, False)
    assert fails(smallest) is not None


def run_calls(runner: Runner, sequence: Sequence, calls: list[Calls]) -> Failure:
    found = runner.run(sequence, calls)
    assert found is not None
    return found


def one_plan() -> tuple[Sequence, Any]:
    sequence, _ = draw(1)
    plan = {"do": "plan", "as": "p", "seed": 1, "tokens": [3] * 4, "topk": 2}
    plan |= {"style": "any", "idx": "i64"}
    sequence |= {"ranks": 2, "steps": [plan, {"do": "barrier"}]}
    return sequence, meaning(sequence)[1]


def test_what_is_wrong_is_seen() -> None:
    """Planted in what is expected: another count, a call that one rank does not make, a refusal."""
    with Runner(2.0) as runner:
        sequence, calls = one_plan()
        assert runner.run(sequence, calls) is None
        calls[0][1].parts[2] = whole("recv_rows", np.array(77))
        wrong = run_calls(runner, sequence, calls)
        assert (wrong["kind"], wrong["do"], wrong["what"]) == ("wrong", "plan", "recv_rows")
        _, calls = one_plan()
        late = run_calls(runner, sequence, [calls[0], [None, calls[1][1]]])
        assert (late["kind"], late["what"]) == ("error", "DeadlineExceededError")
        _, calls = one_plan()
        for call in calls[0]:
            call.errors = ("ExhaustedError",)
        accepted = run_calls(runner, sequence, calls)
        assert (accepted["kind"], accepted["step"]) == ("not refused", 0)


def test_a_worker_that_dies_is_seen() -> None:
    sequence, calls = one_plan()
    sequence |= {"processes": True, "fabric": "shm"}
    with Runner(2.0) as runner:
        assert runner.run(sequence, calls) is None
        runner.workers[1][0].kill()
        assert run_calls(runner, sequence, calls)["kind"] == "crash"
        assert runner.run(sequence, calls) is None  # with new workers


def test_a_result_that_changes_is_seen() -> None:
    x = np.ones((2, 4), np.float32)
    nobody: Any = SimpleNamespace(rank=0)
    rank = Rank(nobody, nobody)
    rank.held["r"] = Held(SimpleNamespace(x=x), Call("dispatch", parts=[whole("x", x.copy())]))
    rank.look_again()
    x[1, 2] = 5
    with pytest.raises(WrongError, match=r"first at \(1, 2\): 5.0 for 1.0") as caught:
        rank.look_again()
    assert caught.value.kind == "overwritten"
