"""The same command on every host (network namespaces)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from hosts import Hosts
from job import lines_of, until_end, wait_for

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


ELASTIC = """
import os, signal, time, ferry
boot = ferry.from_environment()
group = ferry.Group(boot, experts=6, elastic="hosts", arbiter={arbiter!r}, deadline=30)
victims = {victims}
back = boot.joins and len(group.view().ranks) == 6
while not back:
    try:
        step = group.view().step + 1
        if group.rank in victims and step == 5 and not boot.joins:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()
        time.sleep(0.05)  # others shall have processors, too
        changed = group.commit(step)
    except (ferry.PeerFailedError, ferry.DeadlineExceededError):
        changed = True
    if changed:
        view = group.regroup()
        back = view.epoch > 2 and len(view.ranks) == 6
group.barrier()
print("rank", group.rank, "joined" if boot.joins else "stayed", "ranks", len(group.view().ranks))
"""


@pytest.mark.parametrize("victims", [[3], [0], [2, 3]], ids=["one", "rank_0", "a_host"])
def test_each_host_starts_its_own_ranks_again(victims: list[int], tmp_path: Path) -> None:
    program = shutil.which(Path(sys.executable).with_name("ferry")) or shutil.which("ferry")
    if program is None:
        pytest.skip("no `ferry` program beside this Python or on PATH")
    arbiter = tmp_path / "shared"
    arbiter.mkdir(mode=0o700)
    code = ELASTIC.format(victims=victims, arbiter=str(arbiter))
    with Hosts(3, own_boot_ids=True) as machines:
        addresses = ",".join(machines.address(host) for host in range(3))
        command = [program, "run", "--hosts", addresses, "--elastic", "1:2", "--restarts", "2"]
        command += ["--port", "29400", "--", sys.executable, "-c", code]
        started = [
            machines.start(host, command, tmp_path / f"rank-{host}.txt", FERRY_SECRET="hush")
            for host in range(3)
        ]
        until_end(started, tmp_path)
    for host in range(3):
        said = (tmp_path / f"rank-{host}.txt").read_text()
        for rank in (2 * host, 2 * host + 1):
            how = "joined" if rank in victims else "stayed"
            assert f"[{rank}] rank {rank} {how} ranks 6\n" in said, said


PARTED = """
import json, time, ferry
boot = ferry.from_environment()
group = ferry.Group(boot, experts=10, elastic="parted", arbiter={arbiter!r}, deadline=10)
def say(**what):
    print(json.dumps({{"rank": group.rank}} | what), flush=True)
back = boot.joins and len(group.view().ranks) == 10
step = 0
while not back:
    try:
        step = group.view().step + 1
        group.barrier()
        time.sleep(0.05)  # others shall have processors, too
        changed = group.commit(step)
        if step == 5 and not boot.joins:
            say(going=True)
    except (ferry.PeerFailedError, ferry.DeadlineExceededError):
        changed = True
    if changed:
        try:
            view = group.regroup()
        except ferry.DeadlineExceededError as error:
            say(stopped=str(error), step=step)
            raise SystemExit(1)
        say(ranks=view.ranks, epoch=view.epoch, step=view.step)
        back = view.epoch > 2 and len(view.ranks) == 10
group.barrier()
say(ends="joined" if boot.joins else "stayed", ranks=group.view().ranks)
"""


def test_a_minority_stops_and_joins_again_when_the_network_is_whole(tmp_path: Path) -> None:
    program = shutil.which(Path(sys.executable).with_name("ferry")) or shutil.which("ferry")
    if program is None:
        pytest.skip("no `ferry` program beside this Python or on PATH")
    arbiter = tmp_path / "shared"
    arbiter.mkdir(mode=0o700)
    majority, minority = [0, 1, 2], [3, 4]  # hosts, of two ranks each
    with Hosts(5, own_boot_ids=True) as machines:
        addresses = ",".join(machines.address(host) for host in range(5))
        # Restarts for processes that a busy machine makes late, too.
        command = [program, "run", "--hosts", addresses, "--elastic", "1:2", "--restarts", "9"]
        command += ["--port", "29400", "--no-prefix", "--", sys.executable, "-c"]
        command.append(PARTED.format(arbiter=str(arbiter)))
        started = [
            machines.start(host, command, tmp_path / f"rank-{host}.txt", FERRY_SECRET="hush")
            for host in range(5)
        ]
        for host in range(5):
            wait_for(tmp_path, host, "going")
        machines.part(minority)
        for host in majority:
            assert wait_for(tmp_path, host, "ranks")["ranks"] == list(range(6))
        for host in minority:
            said = wait_for(tmp_path, host, "stopped")["stopped"]
            assert "no majority of epoch 1" in said, said
        machines.heal()
        until_end(started, tmp_path)
    for host in range(5):
        ended = [line for line in lines_of(tmp_path, host) if "ends" in line]
        how = "joined" if host in minority else "stayed"
        assert [line["ends"] for line in ended] == [how, how]
        assert all(line["ranks"] == list(range(10)) for line in ended)
