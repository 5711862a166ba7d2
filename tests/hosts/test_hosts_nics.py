"""Hosts with two interfaces each (network namespaces, libfabric over TCP): large transfers cross
both, and when one of them goes down the peer is named."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hosts import Hosts
from job import until_end, wait_for

pytestmark = pytest.mark.usefixtures("network")

DEADLINE = 2.0
LATE = 2.0  # seconds, of a machine that is busy
CHUNK = 256 << 10  # docs/network.md
HOSTS, VICTIM = 3, 1


def sent_soon(machines: Hosts, rank: int, nic: int, least: int) -> int:
    """What the interface has sent, as soon as it is that much: a rank has given its bytes to TCP,
    which may have some left to send."""
    end = time.monotonic() + LATE
    while (sent := machines.sent_bytes(rank, nic)) < least and time.monotonic() < end:
        time.sleep(0.02)
    return sent


def test_both_interfaces_carry_until_one_goes_down(tmp_path: Path) -> None:
    with Hosts(HOSTS, nics=2, variables={"FERRY_OFI_NICS": "eth0,eth1"}) as machines:
        program = Path(__file__).with_name("striped.py")
        command: list[str | Path] = [sys.executable, program, str(DEADLINE), tmp_path]
        processes = machines.start_ranks(1, command, tmp_path)
        for rank in range(HOSTS):
            said = wait_for(tmp_path, rank, "nics")
            nics = said["nics"]
            addresses = [machines.address(rank, nic) for nic in range(2)]
            assert [nic["address"] for nic in nics] == addresses
            assert sum(nic["bytes"] for nic in nics) == said["put_bytes"]
            for number, nic in enumerate(nics):
                assert CHUNK <= nic["bytes"] <= sent_soon(machines, rank, number, nic["bytes"]), (
                    said
                )
        start = time.monotonic()
        machines.link(VICTIM, "down", nic=1)
        for rank in range(HOSTS):
            said = wait_for(tmp_path, rank, "kind", 20)
            assert said["kind"] in ("DeadlineExceededError", "PeerFailedError"), said
            assert said["peer"] == VICTIM or rank == VICTIM, said
            assert said["when"] - start < DEADLINE + LATE, said
        (tmp_path / "again").touch()
        machines.link(VICTIM, "up", nic=1)
        until_end(processes, tmp_path)
        for rank in range(HOSTS):
            assert wait_for(tmp_path, rank, "again", 0.1)["again"] == 2
