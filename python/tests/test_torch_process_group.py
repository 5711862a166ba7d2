"""torch.distributed over Ferry: every call, and what torch builds on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_group_bodies as bodies
import pytest
import torch
import torch.distributed as dist
from rank_processes import RankProcesses

import ferry.torch

pytestmark = pytest.mark.timeout(120)

Run = Any


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(4, "cpu", bodies.with_ferry)
    yield made
    made.stop()


@pytest.fixture
def run(processes: RankProcesses, tmp_path: Path) -> Run:
    """`run(body, ...)` on four ranks."""
    meeting = str(tmp_path / "meeting")
    return lambda body, *arguments, **config: processes.run(body, meeting, *arguments, **config)


def test_the_import_registers_it() -> None:
    assert ferry.torch is not None
    assert "ferry" in dist.Backend.backend_list
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"  # as before


@pytest.mark.parametrize(
    "body",
    [
        bodies.reductions,
        bodies.refusals,
        bodies.moves,
        bodies.objects_and_groups,
        bodies.asynchronous,
        bodies.transfers,
        bodies.data_parallel,
        bodies.other_devices,
    ],
    ids=lambda body: body.__name__,
)
def test_calls(run: Run, body: Any) -> None:
    run(body)


@pytest.mark.skipif(torch.__version__ < "2.6", reason="fully_shard is elsewhere")
def test_fully_shard_and_checkpoints(run: Run, tmp_path: Path) -> None:
    run(bodies.fully_sharded, str(tmp_path))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_functional_collectives(run: Run, compiled: bool) -> None:
    run(bodies.functional, compiled)


def test_a_rank_that_leaves_is_named(run: Run) -> None:
    run(bodies.a_rank_that_leaves, ends=False)
