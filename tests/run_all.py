"""`make test`: every stage, its time, and the count of all tests at the end.

    run_all.py [STAGE ...]

Without stages: all but `wheels`, `debian`, `windows` and `conformance`. One thread builds the
stages in turn, another one tests them: tests mostly wait, and what they leave of the processors
builds the next stages, at a low priority.

The last line is "N passed, M failed", alone; the exit status is 1 if anything failed. A build that
fails counts as one failed test. A stage that cannot run on this machine says so in capitals, and
fails when CI=true. Then only do limits of time hold: a slow or busy machine is no failure. JOBS:
how many compilers, and how many tests, run at once. Full output: build/logs/.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from stages import STAGES, CannotRunError, set_kernel_options
from steps import IN_CI, LOGS, USED, Result, say, stop_all

LIMIT_S = 30 * 60  # of the whole, on two cores of CI
ON_DEMAND = ("wheels", "debian", "windows", "conformance")
BUILD_NICE = 15


def run_step(step: Callable[[], Result]) -> tuple[Result, float]:
    """A half of a stage, and its seconds."""
    start = time.monotonic()
    try:
        result = step()
    except CannotRunError as reason:
        result = Result(failed=int(IN_CI), words=[f"DID NOT RUN: {reason}"])
    return result, time.monotonic() - start


def build_stage(name: str) -> Result:
    (LOGS / f"{name}.log").unlink(missing_ok=True)
    result, result.build_seconds = run_step(STAGES[name].build)
    return result


def test_stage(name: str, built: Result) -> Result:
    if not built.failed and not built.words:
        result, result.test_seconds = run_step(STAGES[name].test)
        built.add(result)
    # The logs of a stage are called after it: pytest, pytest-others.
    built.cpu_seconds = sum(used for log, used in USED if log.split("-")[0] == name)
    say(line_of(name, built))
    return built


def run_stages(names: list[str]) -> dict[str, Result]:
    def be_nice() -> None:  # of this thread alone, and of what it starts
        if len(names) > 1:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BUILD_NICE)

    with ThreadPoolExecutor(1, initializer=be_nice) as builder:
        try:
            built = {name: builder.submit(build_stage, name) for name in names}
            return {name: test_stage(name, built[name].result()) for name in names}
        except BaseException:
            builder.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


def line_of(name: str, result: Result) -> str:
    counts = f"{result.passed:5} passed {result.failed:4} failed"
    if result.skipped:
        counts += f" {result.skipped} skipped"
    notes = "; ".join(result.words)
    times = (
        f"{result.build_seconds:7.1f} s building {result.test_seconds:7.1f} s testing"
        f" {result.cpu_seconds:7.1f} CPU s"
    )
    return f"-- {name:11} {times} {counts}{'  ' if notes else ''}{notes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.stages if name not in STAGES]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    set_kernel_options()
    names = arguments.stages or [name for name in STAGES if name not in ON_DEMAND]
    start = time.monotonic()
    results = run_stages(names)
    seconds = time.monotonic() - start
    total = Result()
    say("\nAll stages:")
    for name, result in results.items():
        total.add(result)
        say(line_of(name, result))
    total.words = [f"{seconds:.0f} s in all"]
    say(line_of("total", total))
    if IN_CI and seconds > LIMIT_S and not arguments.stages:
        say(f"   over the limit of {LIMIT_S} s in CI: make it faster")
    for name, result in results.items():
        for test in result.failures:
            say(f"failed in {name}: {test}")
    say(f"\n{total.passed} passed, {total.failed} failed")
    return 1 if total.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
