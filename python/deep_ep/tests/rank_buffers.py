"""Runs a test's body on ranks that are threads, each with a Buffer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from rank_threads import run_threads

import deep_ep
import ferry

T = TypeVar("T")


class ThreadComm:
    """What the drop-in uses of an mpi4py communicator, between threads."""

    def __init__(self, bootstrap: ferry.Bootstrap) -> None:
        self._bootstrap = bootstrap

    def Get_rank(self) -> int:  # noqa: N802
        return self._bootstrap.rank

    def Get_size(self) -> int:  # noqa: N802
        return self._bootstrap.size

    def allgather(self, thing: Any) -> list[Any]:
        return [pickle.loads(one) for one in self._bootstrap.all_gather(pickle.dumps(thing))]


def run_ranks(size: int, body: Callable[[ThreadComm], T]) -> list[T]:
    """`body(comm)` on every rank; their results in rank order, or the error that came first."""
    comms = [ThreadComm(bootstrap) for bootstrap in ferry.threads(size)]
    return run_threads(size, lambda rank: body(comms[rank]))


def run_buffers(
    size: int, body: Callable[[Any], T], kind: Any = deep_ep.Buffer, **options: Any
) -> list[T]:
    """The same of `body(buffer)`, with a buffer of this kind; the ranks meet before it goes."""

    def one(comm: ThreadComm) -> T:
        buffer = kind(comm, **options)
        try:
            result = body(buffer)
        except BaseException:  # whose traceback would keep the buffer, and the others waiting
            buffer.explicitly_destroy = True
            buffer.destroy()
            raise
        comm.allgather(None)
        return result

    return run_ranks(size, one)
