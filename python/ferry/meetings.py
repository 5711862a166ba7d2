"""Ranks that meet in a store (`from_store`), and what tells two jobs in it from each other."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct

from ferry.arguments import describe, refuse
from ferry.errors import DeadlineExceededError, RefusedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PID_BITS = 22  # Linux has no larger numbers of processes
_PLACES = struct.Struct("<QQ")  # of the rank that speaks: its process, and a former one that runs


def next_meeting(store: Any, rank: int, size: int, name: str) -> str:
    """Before the keys of this rank's next meeting. A store may outlive a group, and has its keys
    when the next one is made."""
    return f"{name}/{size}/{store.add(_counter(f'{name}/{size}', rank), 1)}"


def _counter(job: str, rank: int) -> str:
    return f"{job}/meetings/{rank}"


def is_late(error: Exception) -> bool:
    # Of torch it is RuntimeError or DistStoreError by version and store.
    return isinstance(error, TimeoutError) or "timeout" in str(error).lower()


class Meeting:
    """The n-th of a rank, with the n-th of the others. Two jobs have one name if another process
    had the rank's place in the meeting before, and either that one is not over, or the process
    still runs on this host without being in this meeting."""

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        self._store, self._rank, self._size, self._name = store, rank, size, name
        self._keys = next_meeting(store, rank, size, name)
        self._job, _, number = self._keys.rpartition("/")
        self._before = int(number) - 1  # 0: there was none
        self._rounds = itertools.count()
        self._own = _word_of(os.getpid())
        store.add(self._place(self._keys), self._own)

    def _former(self) -> int:
        """The process that had this rank's place in the meeting before, if it still runs; 0: none,
        or nobody can tell."""
        if self._before == 0:
            return 0
        former = self._store.add(self._place(f"{self._job}/{self._before}"), 0)
        if former not in (0, self._own):
            self._check_that_all_came_before()
        return former if _word_of(former % (1 << _PID_BITS)) == former else 0

    def _place(self, keys: str) -> str:
        return f"{keys}/place/{self._rank}"

    def _check_that_all_came_before(self) -> None:
        """To the meeting before, in which another process was this rank."""
        for peer in range(self._size):
            if self._store.add(_counter(self._job, peer), 0) < self._before:
                raise self._refused(
                    peer,
                    f"another process came as rank {self._rank} before, and rank {peer} has not "
                    "come to meet it: either two jobs meet in this store at once, or a meeting has "
                    "failed",
                )

    def _refused(self, peer: int, why: str) -> RefusedError:
        return RefusedError(
            f"from_store: rank {self._rank} under the name {self._name!r} (keys "
            f"{self._job}/...): {why}; give each job a name of its own, "
            "from_store(..., name=)",
            rank=self._rank,
            peer=peer,
            stage="bootstrap: all_gather",
        )

    def all_gather(self, mine: bytes) -> list[bytes]:
        number = next(self._rounds)
        if number > 0:
            return self._gather(number, mine)
        parts = self._gather(0, _PLACES.pack(self._own, self._former()) + mine)
        for peer, part in enumerate(parts):
            if len(part) < _PLACES.size:
                got = f"{len(part)} bytes of rank {peer}"
                expected = f"at least {_PLACES.size}, as of a rank with this version of Ferry"
                refuse("from_store: store.get", got, expected)
        self._check([_PLACES.unpack_from(part) for part in parts])
        return [part[_PLACES.size :] for part in parts]

    def _check(self, places: list[tuple[int, ...]]) -> None:
        """All ranks find the same."""
        here = {0, *(own for own, _ in places)}
        held = {peer: former for peer, (_, former) in enumerate(places) if former not in here}
        if self._rank in held:  # who comes next finds it there, too
            self._store.add(self._place(self._keys), held[self._rank] - self._own)
        if held:
            peer, former = min(held.items())
            raise self._refused(
                peer,
                f"the place of rank {peer} has process {former % (1 << _PID_BITS)} of another job, "
                "which still runs",
            )

    def _gather(self, number: int, mine: bytes) -> list[bytes]:
        keys = f"{self._keys}/{number}"
        self._store.set(f"{keys}/{self._rank}", mine)
        return [self._of_peer(keys, peer) for peer in range(self._size)]

    def _of_peer(self, keys: str, peer: int) -> bytes:
        try:
            value = self._store.get(f"{keys}/{peer}")
        except Exception as error:
            if not is_late(error):
                raise
            raise DeadlineExceededError(
                f"from_store: rank {self._rank} waits for rank {peer}, which has not come: "
                f"{error}; does it run, with the same store, size and name, another one after a "
                "meeting that failed?",
                rank=self._rank,
                peer=peer,
                stage="bootstrap: all_gather",
            ) from error
        if not isinstance(value, bytes):
            refuse("from_store: store.get", describe(value), "the bytes that were set")
        return value


def _word_of(pid: int) -> int:
    """Of a process of this host: its number, and above that digits that no other process has, here
    or elsewhere; 0: it does not run, or the system does not tell."""
    try:
        state, *fields = _text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
        boot = _text_of("/proc/sys/kernel/random/boot_id")
        told = boot, os.readlink("/proc/self/ns/pid"), pid, fields[18]  # when it began
    except (OSError, IndexError, ValueError):
        return 0
    if state in "ZX":
        return 0
    digits = hashlib.blake2b(repr(told).encode(), digest_size=5).digest()
    return int.from_bytes(digits, "little") << _PID_BITS | pid


def _text_of(path: str) -> str:
    with open(path) as file:  # without pathlib, which takes milliseconds to import
        return file.read()
