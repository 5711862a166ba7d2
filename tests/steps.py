"""What the stages of run_all.py are made of: commands with a log and a limit, and their results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "logs"
JOBS = os.environ.get("JOBS") or str(os.cpu_count() or 2)
IN_CI = os.environ.get("CI") == "true"
COMMAND_LIMIT_S = 20 * 60  # in CI; elsewhere a machine may be slow or busy, and nothing is stopped


@dataclass
class Result:
    """What one stage yielded."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    build_seconds: float = 0.0
    test_seconds: float = 0.0
    cpu_seconds: float = 0.0
    words: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # names of tests, and what they said

    def add(self, other: Result) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.build_seconds += other.build_seconds
        self.test_seconds += other.test_seconds
        self.cpu_seconds += other.cpu_seconds
        self.words += other.words
        self.failures += other.failures

    def step(self, ok: bool, what: str) -> bool:
        """A step that is no test of its own: it counts only when it fails."""
        if not ok:
            self.failed += 1
            self.words.append(f"{what} failed")
        return ok


RUNNING: set[subprocess.Popen[str]] = set()
USED: list[tuple[str, float]] = []  # by each command that has ended: its log, its CPU seconds


def stop_all() -> None:
    """For Ctrl-C, which is seen by one thread alone."""
    for child in list(RUNNING):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)  # one write: lines of two commands stay whole


def at_once(*steps: Callable[[], Result]) -> Result:
    """What all of them yield together; for steps that wait more than they compute."""
    result = Result()
    with ThreadPoolExecutor(len(steps)) as pool:
        try:
            for done in [pool.submit(step) for step in steps]:
                result.add(done.result())
        except BaseException:
            stop_all()
            raise
    return result


def wait_for(child: subprocess.Popen[str], log: str) -> int:
    """The exit status; counts what the command and all that it waited for have used."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    USED.append((log, usage.ru_utime + usage.ru_stime))
    return child.returncode


def keep_priority(child: subprocess.Popen[str]) -> None:
    """Sessions may be scheduled as groups, each with a priority of its own: the child's."""
    with suppress(OSError):
        own = os.getpriority(os.PRIO_PROCESS, child.pid)
        Path(f"/proc/{child.pid}/autogroup").write_text(str(own))


def run(
    stage: str,
    *command: str | Path,
    quiet: bool = False,
    limit: int = COMMAND_LIMIT_S,
    **variables: str,
) -> bool:
    """Runs a command in the root; its output goes to the stage's log and, line by line, to the
    terminal. `quiet` shows a line every ten seconds instead, and the end of it when it fails. After
    `limit` seconds CI stops it."""
    words = [str(word) for word in command]
    say(f"{stage:>13} $ {' '.join(words)}")
    log = LOGS / f"{stage}.log"
    last, shown, start = "", time.monotonic(), time.monotonic()
    tail: list[str] = []
    with log.open("a") as file:
        child = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        RUNNING.add(child)
        keep_priority(child)

        def stop() -> None:
            say(f"{stage:>13} stopped after {limit} s, the limit in CI (CI=true): {words[0]}")
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        if IN_CI:
            timer.start()
        try:
            for line in child.stdout or ():
                file.write(line)
                last = line.rstrip()
                tail = [*tail[-79:], last]
                if not quiet:
                    say(f"{stage:>13} {last}")
                elif time.monotonic() - shown > 10:
                    shown = time.monotonic()
                    say(f"{stage:>13} ... {int(shown - start)} s: {last[:90]}")
            code = wait_for(child, stage)
        except BaseException:  # Ctrl-C: the child has a session of its own and does not see it
            os.killpg(child.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
            RUNNING.discard(child)
    if code != 0 and quiet:
        say("\n".join(f"{stage:>13} {line}" for line in tail))
    return code == 0


def excerpt(case: ElementTree.Element) -> str:
    """What a failed test said where it first speaks of a failure, and at its end."""
    lines = "".join(case.itertext()).strip().splitlines()
    told = [n for n, line in enumerate(lines) if re.search("Failure|WARNING: |ERROR: ", line)][:1]
    chosen = {m for n in told for m in range(n, n + 8)} | set(range(len(lines) - 8, len(lines)))
    return "".join(f"\n      {lines[n]}" for n in sorted(chosen) if 0 <= n < len(lines))


def read_junit(path: Path) -> Result:
    """Counts of a JUnit file as CTest and pytest write it; a test that did not run has failed."""
    result = Result()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        did_not_run = case.get("status") == "notrun"
        if did_not_run or case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
            result.failures.append(f"{case.get('classname')} {case.get('name')}{excerpt(case)}")
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    return result


def counted(
    stage: str,
    *command: str | Path,
    junit: Path,
    limit: int = COMMAND_LIMIT_S,
    **variables: str,
) -> Result:
    """Runs a test program that writes `junit`; counts what is in there."""
    junit.unlink(missing_ok=True)
    ok = run(stage, *command, limit=limit, **variables)
    result = Result()
    if junit.exists():
        result.add(read_junit(junit))
    if not result.failed:
        result.step(ok, Path(command[0]).name)
    if ok and not result.passed:
        result.step(False, "no test found: the stage")
    return result
