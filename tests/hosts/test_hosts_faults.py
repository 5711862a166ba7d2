"""A cable is pulled, a host is killed or frozen (network namespaces, libfabric over TCP): every
survivor names a rank of that host, masks its ranks, or goes on by `regroup` where it is of the
majority, or of the half that an arbiter chose. FERRY_HOSTS=all runs every case.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import Hosts
from job import lines_of, until_end, wait_for

pytestmark = pytest.mark.usefixtures("network")

HERE = Path(__file__).parent
EVERYTHING = os.environ.get("FERRY_HOSTS") == "all"
DEADLINE = 2.0
LATE = 2.0  # seconds, of a machine that is busy
HOSTS, VICTIM = 3, 1


@dataclass
class Job:
    """`each` ranks on every host; rank 0's store is on host 0."""

    machines: Hosts
    each: int
    logs: Path
    victim: int = VICTIM

    def start(self, joined: str, *options: str) -> None:
        """`joined`: by "ofi" alone, or "direct" or "hierarchical" over domains."""
        fabric, crossing = ("ofi", "automatic") if joined == "ofi" else ("automatic", joined)
        command: list[str | Path] = [sys.executable, HERE / "exchanges.py", *options]
        command += [str(DEADLINE), self.logs, fabric, crossing]
        self.processes = self.machines.start_ranks(self.each, command, self.logs)
        for rank in self.ranks:
            going = wait_for(self.logs, rank, "going")
            assert going["fabric"] == ("ofi" if joined == "ofi" else "shm+ofi")

    def harm(self, fault: str) -> float:
        """Returns when."""
        start = time.monotonic()
        if fault != "frozen":  # a host that loses its power sends no farewell either
            self.machines.link(self.victim, "down")
        if fault == "killed":
            self.machines.send(self.victim, signal.SIGKILL)
        if fault == "frozen":
            self.machines.send(self.victim, signal.SIGSTOP)
        return start

    @property
    def ranks(self) -> list[int]:
        return list(range(len(self.machines.names) * self.each))

    @property
    def victims(self) -> list[int]:
        return list(range(self.victim * self.each, (self.victim + 1) * self.each))

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.victims]

    def begin_again(self) -> None:
        """The cable is back: all ranks make a new group."""
        (self.logs / "again").touch()
        self.machines.link(self.victim, "up")
        until_end(self.processes, self.logs)
        for rank in self.ranks:
            wait_for(self.logs, rank, "again", 0.1)


JOINED = [("ofi", 1), ("ofi", 2), ("direct", 2), ("hierarchical", 2)]
ALL = [(fault, *joined) for fault in ("cable", "killed", "frozen") for joined in JOINED]
LATENCY = [case for case in ALL if case[1] != "hierarchical"]  # it always goes direct


@pytest.mark.parametrize(
    ("fault", "joined", "each"), ALL if EVERYTHING else [("cable", "hierarchical", 2)]
)
def test_throughput_mode_names_the_host(fault: str, joined: str, each: int, tmp_path: Path) -> None:
    with Hosts(HOSTS, own_boot_ids=joined != "ofi") as machines:
        job = Job(machines, each, tmp_path)
        job.start(joined)
        start = job.harm(fault)
        for rank in job.survivors:
            said = wait_for(tmp_path, rank, "kind", 20)
            assert said["peer"] in job.victims, said
            assert said["kind"] in ("DeadlineExceededError", "PeerFailedError"), said
            assert said["when"] - start < DEADLINE + LATE, said
        if fault != "cable":
            return
        for rank in job.victims:  # those behind the pulled cable see the others gone
            assert wait_for(tmp_path, rank, "kind", 20)["peer"] in job.survivors
        job.begin_again()


SILENT = 1.5  # seconds until a host that vanished is named


@pytest.mark.parametrize(
    ("fault", "joined", "each"), ALL if EVERYTHING else [("cable", "hierarchical", 2)]
)
def test_the_majority_regroups(fault: str, joined: str, each: int, tmp_path: Path) -> None:
    """Without the host that had the store; `exchanges.py` makes collectives of those left."""
    with Hosts(HOSTS, own_boot_ids=joined != "ofi") as machines:
        job = Job(machines, each, tmp_path, victim=0)
        job.start(joined, "--elastic")
        start = job.harm(fault)
        for rank in job.survivors:
            said = wait_for(tmp_path, rank, "kind", 20)
            assert said["kind"] == "PeerFailedError", said
            assert said["peer"] in job.victims, said
            assert said["when"] - start < SILENT + LATE, said
            assert wait_for(tmp_path, rank, "ranks", 20)["ranks"] == job.survivors
        if fault != "cable":
            return
        for rank in job.victims:
            said = wait_for(tmp_path, rank, "stopped", 20)
            assert "no majority of epoch 1" in said["stopped"], said
        job.begin_again()


@pytest.mark.parametrize(
    "joined", ["direct", "hierarchical", "ofi"] if EVERYTHING else ["hierarchical"]
)
def test_an_arbiter_lets_one_half_go_on(joined: str, tmp_path: Path) -> None:
    with Hosts(2, own_boot_ids=joined != "ofi") as machines:
        job = Job(machines, 2, tmp_path)
        job.start(joined, "--elastic", "--arbiter")
        job.harm("cable")
        halves = (job.survivors, job.victims)
        for rank in job.ranks:
            wait_for(tmp_path, rank, "kind", 20)
            wait_for(tmp_path, rank, ("ranks", "stopped"), 20)
        went_on = [lines_of(tmp_path, rank)[-1].get("ranks") for rank in job.ranks]
        winners = [rank for rank, view in enumerate(went_on) if view]
        assert winners in halves, went_on
        for rank in job.ranks:
            if rank in winners:
                assert went_on[rank] == winners
            else:
                assert "went on without" in wait_for(tmp_path, rank, "stopped", 1)["stopped"]
        job.begin_again()
        assert not list(tmp_path.glob("ferry-arbiter-*")), "the last rank that left removes it"


@pytest.mark.parametrize(
    ("fault", "joined", "each"), LATENCY if EVERYTHING else [("frozen", "direct", 2)]
)
def test_latency_mode_masks_the_host_and_goes_on(
    fault: str, joined: str, each: int, tmp_path: Path
) -> None:
    with Hosts(HOSTS, own_boot_ids=joined != "ofi") as machines:
        job = Job(machines, each, tmp_path)
        job.start(joined, "--latency")
        start = job.harm(fault)
        for rank in job.survivors:
            said = wait_for(tmp_path, rank, "first", 20)
            # A deadline for each call: the ranks of a host may stop a call apart.
            assert said["when"] - start < DEADLINE * each + LATE, said
            assert wait_for(tmp_path, rank, "masked", 20)["masked"] == job.victims
        if fault != "cable":
            return
        for rank in job.victims:  # they go on among themselves
            assert wait_for(tmp_path, rank, "masked", 20)["masked"] == job.survivors
        job.begin_again()
