"""Ranks on hosts: what they said, whether they ended well, and what was measured with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hosts import problem

import ferry

LIMIT_S = 240.0 if os.environ.get("CI") == "true" else 1200.0


def why_not() -> str:
    """Why ranks on several hosts cannot be tried here; empty: they can."""
    code = "import ferry\nferry.Group(ferry.threads(1)[0], experts=1, fabric='ofi')"
    if why := problem():
        return why
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    assert said and "UnsupportedError" in said[-1], f"ended with {done.returncode}: {done.stderr}"
    return said[-1]


def until_end(processes: list[subprocess.Popen[str]], logs: Path) -> None:
    """All ranks end well."""
    end = time.monotonic() + LIMIT_S
    for rank, process in enumerate(processes):
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, (
            f"rank {rank} ended with {code}:\n{(logs / f'rank-{rank}.txt').read_text()}"
        )


def wait_for_job(process: subprocess.Popen[str], logs: Path) -> None:
    """Ranks that were forked end well."""
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
    texts = "".join(f"{log.name}:\n{log.read_text()}" for log in sorted(logs.glob("rank-*.txt")))
    assert code == 0, f"the ranks ended with {code}:\n{texts}"


def lines_of(logs: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has said so far; other output is not JSON."""
    text = (logs / f"rank-{rank}.txt").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def wait_for(
    logs: Path, rank: int, word: str | tuple[str, ...], seconds: float = 60.0
) -> dict[str, Any]:
    """The line of a rank that has this word, or one of them."""
    words = (word,) if isinstance(word, str) else word
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for line in lines_of(logs, rank):
            if any(one in line for one in words):
                return line
        time.sleep(0.02)
    text = (logs / f"rank-{rank}.txt").read_text()
    raise AssertionError(f"rank {rank} did not say {word!r}:\n{text}")


def write_report(file: Path | None, runs: list[dict[str, Any]], **settings: object) -> None:
    """What this program has measured, as JSON; None: nothing is written."""
    if file is None:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {
        "command": f"python tests/hosts/{Path(sys.argv[0]).name} " + " ".join(sys.argv[1:]),
        "machine": f"{os.uname().machine}, {os.cpu_count()} cores",
        "ferry": ferry.__version__,
        "commit": commit,
        **settings,
        "runs": runs,
    }
    file.write_text(json.dumps(report, indent=1) + "\n")
