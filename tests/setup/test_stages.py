"""Stages are built and tested at once; what a stage lacks, fails or uses is its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run_all
import steps
from stages import CannotRunError, Stage

BURN = "import time\nwhile time.process_time() < 0.5: pass"


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (steps, run_all):
        monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(steps, "USED", used := [])
    monkeypatch.setattr(run_all, "USED", used)


def stages(monkeypatch: pytest.MonkeyPatch, **them: Stage) -> dict[str, steps.Result]:
    monkeypatch.setattr(run_all, "STAGES", them)
    return run_all.run_stages(list(them))


def test_the_next_stage_is_built_beside_tests_at_a_low_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priorities = {}

    def note(name: str) -> steps.Result:
        priorities[name] = os.nice(0)  # of this thread
        return steps.Result()

    def wait_for_the_second_build() -> steps.Result:
        deadline = time.monotonic() + 60
        while "second" not in priorities and time.monotonic() < deadline:
            time.sleep(0.01)
        priorities["test"] = os.nice(0)
        return steps.Result(passed="second" in priorities)

    results = stages(
        monkeypatch,
        first=Stage(lambda: note("first"), wait_for_the_second_build),
        second=Stage(lambda: note("second")),
    )
    assert results["first"].passed == 1
    assert priorities["second"] == min(19, priorities["test"] + run_all.BUILD_NICE)


def test_a_stage_that_is_not_built_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks() -> steps.Result:
        raise CannotRunError("no compiler")

    results = stages(
        monkeypatch,
        broken=Stage(lambda: steps.Result(failed=1), lambda: steps.Result(passed=1)),
        lacking=Stage(lacks, lambda: steps.Result(passed=1)),
        good=Stage(steps.Result, lambda: steps.Result(passed=1)),
    )
    assert [(r.passed, r.failed) for r in results.values()] == [
        (0, 1),
        (0, int(steps.IN_CI)),
        (1, 0),
    ]
    assert results["lacking"].words == ["DID NOT RUN: no compiler"]


def test_each_stage_is_charged_with_its_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def burn(log: str) -> steps.Result:
        return steps.Result(passed=int(steps.run(log, sys.executable, "-c", BURN, quiet=True)))

    results = stages(
        monkeypatch,
        one=Stage(lambda: burn("one"), lambda: burn("one-more")),
        none=Stage(),
    )
    assert results["one"].passed == 2
    assert results["one"].cpu_seconds >= 1
    assert results["none"].cpu_seconds == 0


def test_failed_tests_are_at_the_end_with_what_they_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    junit = tmp_path / "some.xml"
    junit.write_text(
        '<testsuite><testcase classname="a.b" name="fine"/>'
        '<testcase classname="a.b" name="broken"><failure>why\n.cpp:9: Failure\n1 for 2'
        + "\nmore"
        * 100
        + "\nend</failure></testcase>"
        '<testcase classname="c" name="absent" status="notrun"><skipped/></testcase></testsuite>'
    )
    some = Stage(test=lambda: steps.read_junit(junit))
    monkeypatch.setattr(run_all, "STAGES", {"some": some})
    monkeypatch.setattr(sys, "argv", ["run_all.py", "some"])
    assert run_all.main() == 1
    said = [line.strip() for line in capsys.readouterr().out.splitlines()[-20:]]
    assert said[:3] == ["failed in some: a.b broken", ".cpp:9: Failure", "1 for 2"]
    assert said[-5:] == ["more", "end", "failed in some: c absent", "", "1 passed, 2 failed"]
