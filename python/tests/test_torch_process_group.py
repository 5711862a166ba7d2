"""torch.distributed over Ferry: every call, and what torch builds on them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import process_group_bodies as bodies
import pytest
import torch
import torch.distributed as dist
from rank_processes import RankProcesses

import ferry.torch
from ferry import torch_process_group, torch_work

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
        bodies.disagreements,
        bodies.moves,
        bodies.objects_and_groups,
        bodies.asynchronous,
        bodies.forks,
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


def test_a_store_serves_one_group_after_another() -> None:
    store = dist.HashStore()

    def one(rank: int) -> float:
        time.sleep(0.2 * rank)  # rank 0 would find what rank 1 left there for the group before
        group = torch_process_group.FerryProcessGroup(store, rank, 2, timedelta(seconds=30))
        x = torch.ones(3)
        group.allreduce([x]).wait()
        group.shutdown()
        return x[0].item()

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(one, range(2))) == [2, 2]


def test_a_rank_that_leaves_is_named(run: Run) -> None:
    run(bodies.a_rank_that_leaves, ends=False)


def test_a_rank_that_leaves_a_backward_is_named(run: Run) -> None:
    run(bodies.a_rank_that_leaves_a_backward, ends=False)


@pytest.mark.parametrize("kind", ferry.errors.Error.__subclasses__())
def test_errors_are_pickled(kind: type[ferry.Error]) -> None:
    error = torch_work.for_torch(kind("rank 1 is gone", rank=0, peer=1, stage="plan"))
    same = pickle.loads(pickle.dumps(error))
    assert type(same) is type(error) and isinstance(same, kind)
    assert str(same) == "rank 1 is gone" and same.__dict__ == error.__dict__


def test_a_future_raises_what_its_call_raised() -> None:
    call: Future[None] = Future()
    future = torch_work.WorkerWork(call, [], 1.0).get_future()
    call.set_exception(torch_work.for_torch(ferry.PeerLeftError("rank 1 left", peer=1)))
    with pytest.raises(ferry.PeerLeftError, match="rank 1 left") as caught:
        future.wait()
    assert caught.value.peer == 1 and isinstance(caught.value, dist.DistBackendError)
