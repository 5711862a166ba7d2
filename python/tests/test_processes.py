"""Ranks as processes: the environment, the store, torch's process groups, own all-gathers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_processes import free_port

import ferry

BODY = """
import os
import numpy as np
import ferry

def exchange(boot):
    with ferry.Group(boot, experts=6, deadline=20, memory_bytes=1 << 20) as group:
        tokens = 3 + group.rank
        x = np.full((tokens, 16), group.rank + 1, np.float32)
        routes = np.tile(np.arange(group.size) * 6 // group.size, (tokens, 1))
        plan = group.plan(routes)
        got = group.dispatch(x, plan)
        assert group.is_registered(got.x)
        sources = [3 + r for r in range(group.size)]
        assert plan.recv_rows_per_rank() == sources
        assert got.x[:, 0].tolist() == [r + 1 for r in range(group.size) for _ in range(3 + r)]
        y = group.combine(got.x, plan).x
        assert (y == group.size * (group.rank + 1)).all()
        # In one write: the ranks of torchrun share its stdout.
        print(f"good {group.rank} {group.fabric_name}\\n", end="", flush=True)
        group.barrier()
"""


STARTED: list[int] = []
"""Processes of these tests: other jobs on this machine have objects of their own."""


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", BODY + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    STARTED.append(child.pid)
    return child


def finish(children: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    results = []
    try:
        for child in children:
            out, err = child.communicate()
            results.append((child.returncode, out, err))
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return results


def environment(size: int) -> list[dict[str, str]]:
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "FERRY_SECRET": os.urandom(8).hex(),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def check_good(results: list[tuple[int, str, str]], fabric: str = "shm") -> None:
    for rank, (code, out, err) in enumerate(results):
        assert (code, out) == (0, f"good {rank} {fabric}\n"), err


def shared_memory() -> set[str]:
    """Names of what the processes of these tests made there: ferry-<namespace>.<pid>.<...>."""
    names = {path.name for path in Path("/dev/shm").iterdir() if "ferry" in path.name}
    return {name for name in names if any(f".{pid}." in name for pid in STARTED)}


def test_from_environment() -> None:
    variables = environment(3)
    check_good(finish([start("exchange(ferry.from_environment())", **v) for v in variables]))
    assert not shared_memory()


@pytest.mark.timeout(200)
def test_torchrun_needs_no_exports(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BODY + "exchange(ferry.from_environment())\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--master-port", str(free_port()), str(program)],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("FERRY_")},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["good 0 shm", "good 1 shm"]


def test_mpich_on_one_host_needs_no_secret() -> None:
    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "FERRY_PORT": str(free_port())}
    ranks = [common | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(2)]
    check_good(finish([start("exchange(ferry.from_environment())", **v) for v in ranks]))


@pytest.mark.parametrize("gone", [0, 2])
def test_the_ranks_that_are_left_meet_at_the_same_port(gone: int) -> None:
    """At once, and with the bootstrap of the first group still in hand."""
    code = f"""
        import signal
        bootstrap = ferry.from_environment()
        me, group = bootstrap.rank, ferry.Group(bootstrap, experts=6, deadline=20)
        try:
            while True:
                group.plan(np.zeros((4, 1), np.int64))
                if me == {gone}:
                    os.kill(os.getpid(), signal.SIGKILL)
        except ferry.PeerFailedError as error:
            left = [rank for rank in range(3) if rank != error.peer]
            exchange(ferry.from_environment(rank=left.index(me), size=2))
    """
    results = finish([start(code, **v) for v in environment(3)])
    assert results.pop(gone)[0] == -9
    check_good(results)


def test_torch_process_group(tmp_path: Path) -> None:
    """torch's own process group serves as the bootstrap."""
    code = """
        import torch.distributed as dist
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"],
                                rank=rank, world_size=size)
        exchange(ferry.torch.from_process_group())
        dist.destroy_process_group()
    """
    variables = [v | {"MEETING": str(tmp_path / "meeting")} for v in environment(2)]
    check_good(finish([start(code, **v) for v in variables]))


def test_wrong_secret_is_refused() -> None:
    """The stranger is told why; the store goes on waiting for the right one."""
    variables = environment(2)
    variables[1]["FERRY_SECRET"] = "wrong"
    code = """
        try:
            ferry.Group(ferry.from_environment(deadline=3), experts=2, deadline=3)
        except ferry.Error as error:
            print(type(error).__name__, flush=True)
    """
    results = finish([start(code, **v) for v in variables])
    assert [out for _, out, _ in results] == ["DeadlineExceededError\n", "RefusedError\n"], results


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "FERRY_SECRET"])
def test_missing_variables_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(1)[0].items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    monkeypatch.delenv("FERRY_PORT", raising=False)
    with pytest.raises(ferry.InvalidArgumentError, match=name):
        ferry.from_environment(deadline=1.0)


def test_secret_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in environment(1)[0].items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("FERRY_SECRET")
    monkeypatch.delenv("FERRY_PORT", raising=False)
    secret = tmp_path / "secret"
    monkeypatch.setenv("FERRY_SECRET_FILE", str(secret))
    os.mkfifo(secret, 0o600)
    with pytest.raises(
        ferry.InvalidArgumentError, match=r"which is a pipe \(FIFO\), expected a regular"
    ):
        ferry.from_environment(deadline=1.0)
    secret.unlink()
    secret.write_text("hush-hush")
    secret.chmod(0o644)
    with pytest.raises(
        ferry.InvalidArgumentError, match=r"others may read or change \(mode 0644\)"
    ):
        ferry.from_environment(deadline=1.0)
    secret.chmod(0o600)
    assert ferry.from_environment(deadline=5.0).size == 1
    monkeypatch.setenv("FERRY_SECRET_FILE", "/dev/zero")
    with pytest.raises(ferry.InvalidArgumentError, match="which is a device, expected a regular"):
        ferry.from_environment(deadline=1.0)


def test_the_limit_that_is_in_the_way_is_named() -> None:
    code = """
        import resource
        boot = ferry.from_environment()
        which, limit = {}
        resource.setrlimit(which, (limit, limit))
        try:
            ferry.Group(boot, experts=1, fabric="shm", memory_bytes=32 << 20)
        except ferry.ExhaustedError as error:
            print(error)
    """
    space = "resource.RLIMIT_AS, int(open('/proc/self/statm').read().split()[0]) * 4096 + (8 << 20)"
    for limit, option in [("resource.RLIMIT_FSIZE, 1 << 20", "-f"), (space, "-v")]:
        [(_, out, err)] = finish([start(code.replace("{}", limit), **environment(1)[0])])
        assert f"ulimit {option}" in out, out + err
        assert "in /dev/shm" in out, out + err
        assert "33554432" in out, out + err


class FakeComm:
    """What from_mpi uses of an mpi4py communicator, for threads."""

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.slots, self.barrier = rank, size, slots, barrier

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def allgather(self, mine: bytes) -> list[bytes]:
        self.slots[self.rank] = mine
        self.barrier.wait(20)
        everyone = list(self.slots)
        self.barrier.wait(20)
        return everyone


def test_from_mpi_and_the_callers_own_all_gather() -> None:
    size = 3
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        boot = ferry.from_mpi(FakeComm(rank, size, slots, barrier))
        assert (boot.rank, boot.size) == (rank, size)
        with ferry.Group(boot, experts=3, deadline=20, memory_bytes=1 << 16) as group:
            plan = group.plan(np.array([[0, 1, 2]]))
            got = group.dispatch(np.full((1, 16), rank, np.float32), plan)
            results[rank] = got.x[:, 0].tolist()
            group.barrier()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[0.0, 1.0, 2.0]] * size


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "NoneType"),
        ([], "0 elements"),
        ([b"", b""], "2 elements"),
        ([7], "int"),
        ([b"not mine"], "own|entry"),
    ],
)
def test_all_gather_that_returns_nonsense(returned: Any, message: str) -> None:
    boot = ferry.from_all_gather(0, 1, lambda mine: returned)
    with pytest.raises(ferry.InvalidArgumentError, match=message):
        ferry.Group(boot, experts=1)


def test_what_the_all_gather_raises_comes_out() -> None:
    def fail(mine: bytes) -> list[bytes]:
        raise LookupError("from the all-gather")

    with pytest.raises(LookupError, match="from the all-gather"):
        ferry.Group(ferry.from_all_gather(0, 1, fail), experts=1)


def test_a_killed_rank_is_named_within_a_second() -> None:
    code = """
        import signal, time
        boot = ferry.from_environment()
        group = ferry.Group(boot, experts=6, deadline=30, memory_bytes=1 << 20)
        routes = np.zeros((4, 1), np.int64)
        group.plan(routes)
        if group.rank == 1:
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                group.plan(routes)
        except ferry.PeerFailedError as error:
            print(time.time(), error.peer, flush=True)
            assert "rank 1" in str(error), error
    """
    children = [start(code, **v) for v in environment(3)]
    results = finish(children)
    died = float(results[1][1])
    for rank in (0, 2):
        returncode, out, err = results[rank]
        assert returncode == 0, err
        seen, peer = out.split()
        assert peer == "1"
        assert float(seen) - died < 1.0
    deadline = time.monotonic() + 2
    while shared_memory() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not shared_memory()
