"""The same command on every host (network namespaces)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from hosts import Hosts
from job import until_end

pytestmark = pytest.mark.usefixtures("network")


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
