"""Runs a test's body on ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ferry

T = TypeVar("T")
DEADLINE = 20.0  # seconds; a test that reaches it has failed


def run_threads(size: int, one: Callable[[int], T]) -> list[T]:
    """`one(rank)` on every rank; their results in rank order, or the error that came first, whose
    notes have all of them."""
    errors: list[tuple[int, BaseException]] = []

    def noted(rank: int) -> T:
        try:
            return one(rank)
        except BaseException as error:
            errors.append((rank, error))
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(noted, rank) for rank in range(size)]
    if errors:
        # A rank that fails leaves; what the others say about that is not the cause.
        left = (ferry.PeerLeftError, ferry.PeerFailedError)
        errors.sort(key=lambda each: isinstance(each[1], left))
        for rank, error in errors:
            errors[0][1].add_note(f"rank {rank}: {type(error).__name__}: {error}")
        raise errors[0][1]
    return [future.result() for future in futures]


def run_ranks(size: int, body: Callable[[ferry.Group], T], **config: Any) -> list[T]:
    """The same of `body(group)`."""
    config = {"experts": 8, "deadline": DEADLINE, "memory_bytes": 1 << 20} | config
    bootstraps = ferry.threads(size)

    def one(rank: int) -> T:
        with ferry.Group(bootstraps[rank], **config) as group:
            result = body(group)
            group.barrier()
            return result

    return run_threads(size, one)
