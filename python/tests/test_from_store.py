"""Ranks that meet in a store: torch's, and any object with its set, get and add."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from rank_processes import forks, free_port
from rank_threads import DEADLINE, run_threads
from test_processes import check_good, environment, finish, start

import ferry


class DictStore:
    """Of threads."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        self.deadline = deadline
        self.keys: dict[str, Any] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.keys[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.keys, self.deadline):
                raise TimeoutError(f"no key {key}")
            return self.keys[key]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.keys[key] = self.keys.get(key, 0) + amount
            return self.keys[key]


def meet(store: Any, rank: int, size: int) -> None:
    boot = ferry.from_store(store, rank, size)
    assert (boot.rank, boot.size) == (rank, size)
    with ferry.Group(boot, experts=size, deadline=DEADLINE, memory_bytes=1 << 20) as group:
        plan = group.plan(np.arange(size)[None])
        got = group.dispatch(np.full((1, 16), rank, np.float32), plan).x
        assert got[:, 0].tolist() == list(range(size))
        group.barrier()


@pytest.mark.parametrize("make", [DictStore, dist.HashStore])
def test_threads_meet_again_and_again(make: Any) -> None:
    store = make()

    def rank(number: int) -> None:
        for _ in range(3):
            meet(store, number, 3)

    run_threads(3, rank)


def test_meetings_that_are_begun_ahead_do_not_mix() -> None:
    store = DictStore()

    def rank(number: int) -> None:
        first = ferry.from_store(store, number, 2)
        second = ferry.from_store(store, number, 2)
        other = ferry.from_store(store, number, 2, name="other")
        for boot, words in ((other, b"third"), (first, b"first"), (second, b"second")):
            assert boot.all_gather(words + b"%d" % number) == [words + b"0", words + b"1"]

    run_threads(2, rank)


@pytest.mark.parametrize("store", ["file", "prefix"])
def test_processes_meet(store: str, tmp_path: Any) -> None:
    tcp = "dist.TCPStore('127.0.0.1', {port}, None, rank == 0, wait_for_workers=False)"
    makers = {
        "file": f"dist.FileStore({str(tmp_path / 'store')!r}, 3)",
        "prefix": f"dist.PrefixStore('job', {tcp})",
    }
    code = f"""
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        store = {makers[store].format(port=free_port())}
        exchange(ferry.from_store(store, rank, 3))
        store.add("end", 1)
        while store.add("end", 0) < 3:  # the server leaves last
            pass
    """
    check_good(finish([start(code, **v) for v in environment(3)]))


def meet_and_stay(path: str, rank: int, told: Any, end: Any) -> None:
    try:
        boot = ferry.from_store(dist.FileStore(path, -1), rank, 2)
        with ferry.Group(boot, experts=2, deadline=DEADLINE, memory_bytes=1 << 20) as group:
            told.put("met")
            assert end.wait(DEADLINE)
            group.barrier()
    except ferry.RefusedError as error:
        told.put(str(error))


class Jobs:
    """Of two ranks each, as processes that meet in one file."""

    def __init__(self, path: str) -> None:
        self.context, self.path = forks(), path
        self.told: Any = None
        self.ends: list[Any] = []

    def start(self, ranks: tuple[int, ...] = (0, 1)) -> tuple[list[Any], Any]:
        # Of its own: who is killed may hold a lock of it.
        self.told, end = self.context.Queue(), self.context.Event()
        self.ends.append(end)  # a process finds it by then
        job = [
            self.context.Process(
                target=meet_and_stay, args=(self.path, rank, self.told, end), daemon=True
            )
            for rank in ranks
        ]
        for process in job:
            process.start()
        return job, end

    def hear(self, count: int = 2) -> list[str]:
        return [self.told.get(timeout=60) for _ in range(count)]


def test_two_jobs_of_one_name_are_told_apart(tmp_path: Any) -> None:
    jobs = Jobs(str(tmp_path / "store"))
    first, end = jobs.start()
    assert jobs.hear() == ["met"] * 2
    for _ in range(2):  # also when it comes again
        jobs.start()
        for words in jobs.hear():
            assert "under the name 'ferry' (keys ferry/2/...)" in words
            assert "another job, which still runs; give each job a name of its own" in words
    end.set()
    for process in first:
        process.join(DEADLINE)
        assert process.exitcode == 0
    # A job that was killed is started again.
    killed, _ = jobs.start()
    assert jobs.hear() == ["met"] * 2
    for process in killed:
        process.kill()
        process.join(DEADLINE)
    _, end = jobs.start()
    end.set()
    assert jobs.hear() == ["met"] * 2


def test_who_was_there_first_meets_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the other job's processes, which were told, still run."""
    store = DictStore()

    def meet_as(pid: int) -> list[int | None]:
        monkeypatch.setattr(os, "getpid", lambda: pid)
        told: list[int | None] = [None, None]

        def rank(number: int) -> None:
            try:
                ferry.from_store(store, number, 2).all_gather(b"")
            except ferry.RefusedError as error:
                told[number] = error.peer

        run_threads(2, rank)
        return told

    first, second = os.getpid(), os.getppid()
    assert meet_as(first) == [None, None]
    for _ in range(2):
        assert meet_as(second) == [0, 0]
        assert meet_as(first) == [None, None]


def test_what_no_rank_says_is_refused() -> None:
    store = DictStore()
    store.set("ferry/2/1/0/1", b"short")
    boot = ferry.from_store(store, 0, 2)
    with pytest.raises(ferry.InvalidArgumentError, match=r"got 5 bytes of rank 1; .* at least 16"):
        boot.all_gather(b"")


def test_who_comes_beside_one_that_waits_is_told(tmp_path: Any) -> None:
    jobs = Jobs(str(tmp_path / "store"))
    waits, _ = jobs.start((0,))
    store = dist.FileStore(jobs.path, -1)
    while store.add("ferry/2/1/place/0", 0) == 0:
        time.sleep(0.01)
    jobs.start((0,))
    (words,) = jobs.hear(1)
    assert "came as rank 0 before, and rank 1 has not come to meet it" in words
    waits[0].kill()


def hasty(store: Any) -> Any:
    store.set_timeout(timedelta(seconds=1))
    return store


@pytest.mark.parametrize("kind", ["dict", "hash", "file", "tcp"])
def test_a_rank_that_does_not_come_is_named(kind: str, tmp_path: Any) -> None:
    makers = {
        "dict": lambda: DictStore(1),
        "hash": lambda: hasty(dist.HashStore()),
        "file": lambda: hasty(dist.FileStore(str(tmp_path / "store"), 2)),
        "tcp": lambda: hasty(dist.TCPStore("127.0.0.1", free_port(), None, True)),
    }
    boot = ferry.from_store(makers[kind](), 0, 2)
    with pytest.raises(ferry.DeadlineExceededError, match="rank 0 waits for rank 1") as caught:
        ferry.Group(boot, experts=2)
    assert (caught.value.rank, caught.value.peer) == (0, 1)


CONFIG: dict[str, Any] = {"experts": 2, "elastic": "store", "deadline": DEADLINE}


def test_one_begins_and_another_joins() -> None:
    store, begun = DictStore(), threading.Event()

    def rank(number: int) -> None:
        if number == 1:
            assert begun.wait(DEADLINE)
            boot = ferry.from_store(store, 1, 2, join=True)
            assert (boot.joins, boot.begins) == (True, False)
            with pytest.raises(ferry.UnsupportedError, match="takes the place of a rank"):
                boot.all_gather(b"")
        else:
            boot = ferry.from_store(store, 0, 2, begin=True)
        with ferry.Group(boot, memory_bytes=1 << 16, **CONFIG) as group:
            begun.set()
            while len(group.view().ranks) < 2:
                if group.commit(group.view().step + 1):
                    group.regroup()
            group.barrier()

    run_threads(2, rank)


def test_the_key_is_random_and_no_message_shows_it() -> None:
    stores, keys = [DictStore(), DictStore()], []
    for store in stores:  # two jobs of one name do not meet
        with ferry.Group(ferry.from_store(store, 0, 2, begin=True), **CONFIG):
            again = ferry.from_store(store, 1, 2, begin=True)
            with pytest.raises(ferry.RefusedError, match=r'job at the store, name "ferry"') as no:
                ferry.Group(again, **CONFIG)
            keys.append(store.keys["ferry/2/job"])
            assert len(keys[-1]) == 16
            assert keys[-1].hex() not in str(no.value) and repr(keys[-1])[2:-1] not in str(no.value)
    assert keys[0] != keys[1]


@pytest.mark.parametrize("kind", ["dict", "file", "tcp"])
def test_who_joins_is_told_that_the_store_has_ended(kind: str, tmp_path: Any) -> None:
    if kind == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        store: Any = hasty(dist.TCPStore("127.0.0.1", server.port, None, False))
        del server
    else:
        store = DictStore(1) if kind == "dict" else hasty(dist.FileStore(str(tmp_path / "new"), -1))
    boot = ferry.from_store(store, 1, 2, join=True)
    wrong = ferry.SystemCallError if kind == "tcp" else ferry.DeadlineExceededError
    with pytest.raises(wrong, match=r"rank 1 cannot join: .*no other process can join"):
        ferry.Group(boot, **CONFIG)


def test_a_function_of_the_caller_takes_joiners() -> None:
    def nobody(mine: bytes) -> list[bytes]:
        raise AssertionError("nobody is called")

    def boot(rank: int, key: bytes, **how: bool) -> Any:
        return ferry.from_all_gather(rank, 2, nobody, job_key=key, **how)

    with ferry.Group(boot(0, b"one", begin=True), **CONFIG):
        other = ferry.Group(boot(0, b"two", begin=True), **CONFIG)
        with pytest.raises(ferry.RefusedError, match="is in one"):
            ferry.Group(boot(1, b"one", begin=True), **CONFIG)
        other.destroy()
    with pytest.raises(ferry.InvalidArgumentError, match="both join and begin"):
        boot(0, b"", join=True, begin=True)
    with pytest.raises(ferry.InvalidArgumentError, match=r"job_key: got .* str"):
        boot(0, "words")  # type: ignore[arg-type]


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(ferry.InvalidArgumentError, match=r"store: got .*dict without set\(\)"):
        ferry.from_store({}, 0, 1)
    with pytest.raises(ferry.InvalidArgumentError, match="from_store: rank: got 2"):
        ferry.from_store(DictStore(), 2, 2)
    with pytest.raises(ferry.InvalidArgumentError, match="from_store: name: got 7"):
        ferry.from_store(DictStore(), 0, 2, name=7)  # type: ignore[arg-type]
    store = DictStore()
    store.get = lambda key: "words"  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ferry.InvalidArgumentError, match=r"store.get: got 'words'"):
        ferry.from_store(store, 0, 1).all_gather(b"bytes")

    class Broken(DictStore):
        def get(self, key: str) -> bytes:
            raise ConnectionResetError("the server is gone")

    with pytest.raises(ConnectionResetError, match="the server is gone"):
        ferry.Group(ferry.from_store(Broken(), 0, 2), experts=2)


@pytest.mark.parametrize("host", ["h..x", 7, lambda: "host"])
def test_a_store_whose_host_is_none(host: Any) -> None:
    store = DictStore()
    store.host = host  # type: ignore[attr-defined]
    assert ferry.from_store(store, 0, 1).all_gather(b"bytes") == [b"bytes"]
