"""Groups and bootstraps that cannot be made, or not of what each rank asks for: refused with a
message that names the argument, what was got and what was expected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from bad_calls import BadCall, Call, check_refused_by_one_rank, each

import ferry


def make(**options: Any) -> Call:
    return lambda e: ferry.Group(
        **({"bootstrap": ferry.threads(1)[0], "experts": 4, "memory_bytes": 4096} | options)
    )


def tcp(**options: Any) -> Call:
    settings = {"rank": 0, "size": 1, "port": 9, "secret": "s"} | options
    return lambda e: ferry.tcp(**settings)


def freed(element: Any) -> torch.Tensor:
    """Reading it would end the process."""
    tensor = torch.tensor(element)
    tensor.untyped_storage().resize_(0)
    return tensor


CALLS: list[BadCall] = [
    ("group: bootstrap", make(bootstrap=None), "bootstrap", "None", "ferry.Bootstrap"),
    ("group: no experts", make(experts=0), "experts", "0", "at least 1"),
    ("group: many experts", make(experts=2**21), "experts", "2097152", "1 …"),
    ("group: experts text", make(experts="64"), "experts", "64", "integer"),
    ("group: deadline 0", make(deadline=0), "deadline", "0 seconds", "more than 0"),
    ("group: deadline nan", make(deadline=float("nan")), "deadline", "nan", "more than 0"),
    ("group: long deadline", make(deadline=10**400), "deadline", "no float", "seconds"),
    ("group: deadline text", make(deadline="1"), "deadline", "1", "seconds"),
    ("group: memory", make(memory_bytes=-1), "memory_bytes", "-1", "at least 0"),
    ("group: much", make(memory_bytes=2**63), "memory_bytes", "9223.*808", " at most 64 TiB$"),
    ("group: seed", make(sim_seed=2**64), "sim_seed", "18446.*616", r" at most 2\^64 - 1$"),
    ("group: digits", make(sim_seed=10**5000), "sim_seed", "16610 bits", r" at most 2\^64 - 1$"),
    ("group: word of digits", make(fabric=10**5000), "fabric", "int", '"shm"'),
    ("group: fabric", make(fabric="nvlink"), "fabric", "nvlink", "shm"),
    ("group: backend", make(backend="gpu"), "backend", "gpu", "host"),
    ("group: arbiter", make(arbiter=3), "arbiter", "3", "a directory"),
    ("group: arbiter of zeros", make(arbiter="a\0b"), "arbiter", "3 bytes", "none of them zero"),
    ("group: no characters", make(arbiter="a\udcff"), "arbiter", "udcff", "UTF-8"),
    ("group: no name", make(elastic="\ud800"), "elastic", "ud800", "UTF-8"),
    ("group: freed number", make(experts=freed(4)), "experts", r"int64 of shape \(\)", "integer"),
    ("group: freed words", make(fabric=[freed(4.0)]), "fabric", r"\[torch.float32", '"shm"'),
    ("threads: none", lambda e: ferry.threads(0), "ranks", "0", "1 to 4096"),
    ("tcp: rank", tcp(rank=2, size=2), "rank", "2", "0"),
    ("tcp: port", tcp(port=0), "port", "0", "1 to 65535"),
    ("tcp: secret", tcp(secret=""), "secret", "empty", "job's secret"),
    ("all-gather: fn", lambda e: ferry.from_all_gather(0, 1, b""), "fn", "bytes", "function"),
    ("mpi: comm", lambda e: ferry.from_mpi(3), "comm", "int", "mpi4py"),
]


@each(CALLS)
def test_refused_by_one_rank(call: Call, argument: str, got: str, expected: str) -> None:
    check_refused_by_one_rank(call, argument, got, expected)


@pytest.mark.parametrize("field", ["experts", "deadline", "memory_bytes", "fabric", "sim_seed"])
def test_ranks_that_disagree_about_the_configuration(field: str) -> None:
    """Every rank is told which rank and which field differ."""
    other = {"experts": 9, "deadline": 19.0, "memory_bytes": 8192, "fabric": "sim", "sim_seed": 5}
    bootstraps = ferry.threads(3)

    def one(rank: int) -> None:
        config: dict[str, Any] = {"experts": 8, "deadline": 20.0, "memory_bytes": 4096}
        config["fabric"] = "sim" if field == "sim_seed" else "local"
        if rank == 1:
            config[field] = other[field]
        with pytest.raises(ferry.MismatchError, match=field) as caught:
            ferry.Group(bootstraps[rank], **config)
        assert "rank 1" in str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(3)))


def test_errors_are_also_pythons_own() -> None:
    assert issubclass(ferry.InvalidArgumentError, ValueError)
    assert issubclass(ferry.DeadlineExceededError, TimeoutError)
    assert issubclass(ferry.Error, RuntimeError)
    bootstraps = ferry.threads(2)  # rank 1 never comes
    with pytest.raises(TimeoutError) as caught:
        ferry.Group(bootstraps[0], experts=4, deadline=0.2)
    error = caught.value
    assert isinstance(error, ferry.DeadlineExceededError)
    assert (error.kind, error.rank, error.peer) == ("deadline", 0, 1)
    assert "rank 1" in str(error)
