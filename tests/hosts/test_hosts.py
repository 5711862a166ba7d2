"""Ranks on several hosts (network namespaces), joined by libfabric over TCP.

FERRY_HOSTS=all runs every number of hosts and ranks: minutes. Otherwise a sample.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, problem

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
WORKER = ROOT / "examples" / "moe_lm" / "worker.py"
EVERYTHING = os.environ.get("FERRY_HOSTS") == "all"
STEPS = 40
STEP_TOLERANCE = 1e-4  # of the demo, examples/moe_lm/report.py
DEADLINE = 2.0
LIMIT_S = 240.0


def has_network() -> str:
    """Why Ferry has no network here; empty: it has."""
    code = "import ferry\nferry.Group(ferry.threads(1)[0], experts=1, fabric='ofi')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module", autouse=True)
def network() -> None:
    if why := problem() or has_network():
        pytest.skip(why)


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


def lines_of(logs: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has said so far; other output is not JSON."""
    text = (logs / f"rank-{rank}.txt").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def wait_for(logs: Path, rank: int, word: str, seconds: float = 60.0) -> dict[str, Any]:
    """The line of a rank that has this word."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for line in lines_of(logs, rank):
            if word in line:
                return line
        time.sleep(0.02)
    text = (logs / f"rank-{rank}.txt").read_text()
    raise AssertionError(f"rank {rank} did not say {word!r}:\n{text}")


# The demo: the losses of several hosts are those of one.


def train(hosts: int, each: int, folder: Path, fabric: str, rate: str = "") -> dict[str, Any]:
    """Trains the demo model; rank 0's result."""
    out = folder / f"{hosts}x{each}"
    out.mkdir()
    command: list[str | Path] = [
        sys.executable,
        WORKER,
        "--out",
        out,
        "--steps",
        str(STEPS),
        "--fabric",
        fabric,
    ]
    # Parts for 1 … 16 ranks, and a smaller model's worth of data.
    command += ["--batch", "48", "--shares", "48", "--context", "16", "--held-out", "48"]
    with Hosts(hosts) as machines:
        if rate:
            machines.shape(rate)
        until_end(machines.start_ranks(each, command, out), out)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


SHAPES = [(h, r) for h in (2, 3, 4) for r in (1, 2, 4)] if EVERYTHING else [(2, 1)]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(1, 1, tmp_path_factory.mktemp("one"), "automatic")


def compare(several: dict[str, Any], one: dict[str, Any]) -> None:
    assert several["fabric"] == "ofi"
    assert len(several["losses"]) == STEPS
    for step, (a, b) in enumerate(zip(several["losses"], one["losses"], strict=True)):
        assert abs(a - b) <= STEP_TOLERANCE * abs(b), f"step {step}: {a} and {b}"


@pytest.mark.parametrize(("hosts", "each"), SHAPES)
def test_hosts_train_as_one(
    hosts: int, each: int, tmp_path: Path, one_host: dict[str, Any]
) -> None:
    compare(train(hosts, each, tmp_path, "ofi"), one_host)


@pytest.mark.skipif(not EVERYTHING, reason="minutes: FERRY_HOSTS=all runs it")
def test_hosts_train_over_a_slow_link(tmp_path: Path, one_host: dict[str, Any]) -> None:
    if shutil.which("tc") is None:
        pytest.skip("no `tc` (iproute2) here")
    compare(train(2, 2, tmp_path, "ofi", "200mbit"), one_host)


# Faults: every survivor names a rank of the host that is gone, within its deadline.


FAULTS = ["cable", "killed", "frozen"] if EVERYTHING else ["cable"]


@pytest.mark.parametrize("fault", FAULTS)
def test_survivors_name_the_host(fault: str, tmp_path: Path) -> None:
    victim = 1
    with Hosts(3) as machines:
        command: list[str | Path] = [sys.executable, HERE / "exchanges.py", str(DEADLINE), tmp_path]
        processes = machines.start_ranks(1, command, tmp_path)
        for rank in range(3):
            wait_for(tmp_path, rank, "going")
        start = time.monotonic()
        if fault != "frozen":  # a host that loses its power sends no farewell either
            machines.link(victim, "down")
        if fault == "killed":
            machines.send(victim, signal.SIGKILL)
        if fault == "frozen":
            machines.send(victim, signal.SIGSTOP)
        for rank in (0, 2):
            said = wait_for(tmp_path, rank, "kind", 20)
            assert said["peer"] == victim, said
            assert said["kind"] in ("DeadlineExceeded", "PeerFailed"), said
            assert said["when"] - start < DEADLINE + 2, said
        if fault != "cable":
            return
        # The host behind the pulled cable sees the others gone.
        assert wait_for(tmp_path, victim, "kind", 20)["peer"] in (0, 2)
        machines.link(victim, "up")
        (tmp_path / "again").touch()
        until_end(processes, tmp_path)
        for rank in range(3):
            wait_for(tmp_path, rank, "again", 0.1)


# Launching: the same command on every host.

PROGRAM = """
import os, ferry
with ferry.Group(ferry.from_environment(), experts=4, fabric="ofi") as group:
    group.barrier()
    print("rank", group.rank, "of", group.size, "at", os.environ["FERRY_HOST"])
"""


def test_ferry_run_on_two_hosts(tmp_path: Path) -> None:
    program = shutil.which(Path(sys.executable).with_name("ferry")) or shutil.which("ferry")
    if program is None:
        pytest.skip("no `ferry` program beside this Python or on PATH")
    with Hosts(2) as machines:
        addresses = ",".join(machines.address(host) for host in range(2))
        command = [program, "run", "--hosts", addresses, "-n", "2", "--port", "29400", "--"]
        command += [sys.executable, "-c", PROGRAM]
        started = [
            machines.start(host, command, tmp_path / f"rank-{host}.txt", FERRY_SECRET="hush")
            for host in range(2)
        ]
        until_end(started, tmp_path)
    for host in range(2):
        said = sorted((tmp_path / f"rank-{host}.txt").read_text().splitlines())
        assert said == [
            f"[{rank}] rank {rank} of 4 at 10.77.0.{host + 1}" for rank in (2 * host, 2 * host + 1)
        ]
