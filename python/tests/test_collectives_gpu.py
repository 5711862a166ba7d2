"""Collectives on GPUs from Python; ranks are processes, which may share a GPU. Run on a machine
with GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import collectives_bodies as bodies
import pytest
from gpus import needs_gpu
from rank_processes import RankProcesses, kept

gpu = pytest.mark.gpu
ON_GPUS = [
    pytest.param("cuda", size, marks=[gpu, needs_gpu], id=f"cuda-{size}") for size in (1, 2, 4)
]
pytestmark = pytest.mark.timeout(280)


def make(size: int, device: str) -> RankProcesses:
    return RankProcesses(size, device, bodies.with_collectives)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """`pool(device, size)`: processes that stay from test to test."""
    with kept(make) as get:
        yield get


@pytest.mark.parametrize(("device", "size"), [pytest.param("cpu", 2, id="cpu-2"), *ON_GPUS])
def test_every_call(pool: Any, device: str, size: int) -> None:
    pool(device, size).run(bodies.everything)


@pytest.mark.parametrize(("device", "size"), [pytest.param("cpu", 2, id="cpu-2"), *ON_GPUS[1:]])
def test_every_call_in_domains(pool: Any, device: str, size: int) -> None:
    """Each rank is one, so that sums have the order of one domain."""
    pool(device, size).run(bodies.everything, domain_size=1)
    if device == "cuda":
        pool(device, size).run(bodies.on_streams, domain_size=1)


@pytest.mark.parametrize(("device", "size"), [pytest.param("cpu", 2, id="cpu-2"), *ON_GPUS[1:]])
def test_transfers(pool: Any, device: str, size: int) -> None:
    pool(device, size).run(bodies.transfers)
    pool(device, size).run(bodies.transfers, domain_size=1)
    if size == 4:
        pool(device, size).run(bodies.transfers, domain_size=2)


@pytest.mark.parametrize("body", bodies.ALL[1:], ids=lambda body: body.__name__)
@pytest.mark.parametrize(("device", "size"), ON_GPUS)
def test_on_gpus(pool: Any, device: str, size: int, body: Any) -> None:
    pool(device, size).run(body)
