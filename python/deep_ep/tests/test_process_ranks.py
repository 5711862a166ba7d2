"""Ranks as processes: on GPUs, and in CPU memory with process groups of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bucket_bodies
import buffer_bodies
import elastic_bodies
import handle_bodies
import hybrid_bodies
import low_latency_calls
import mask_bodies
import pytest
import throughput_bodies as bodies
import torch
import torch.distributed as dist
from buffer_processes import BufferProcesses
from compatibility import replays
from devices import device_of
from gpus import needs_gpu
from rank_processes import free_port, kept

import deep_ep

EVERYWHERE = [*bodies.ALL, *handle_bodies.ALL, *buffer_bodies.ALL, bodies.captured]
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """`pool(device, size)`: processes that stay from test to test."""
    with kept(BufferProcesses) as get:
        yield get


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["ElasticBuffer", "EPBuffer"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", elastic_bodies.EVERYWHERE, ids=lambda body: body.__name__)
def test_later_buffers_on_gpus(pool: Any, body: Any, size: int, kind: str) -> None:
    pool("cuda", size).run(body, kind=kind)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", EVERYWHERE, ids=lambda body: body.__name__)
def test_on_gpus(pool: Any, body: Any, size: int) -> None:
    pool("cuda", size).run(body, num_nvl_bytes=1 << 20)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", elastic_bodies.DEFERRED, ids=lambda body: body.__name__)
def test_what_v25_adds_on_gpus(pool: Any, body: Any, size: int) -> None:
    pool("cuda", size).run(body, kind="EPBuffer")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", bucket_bodies.ALL, ids=lambda body: body.__name__)
def test_buckets_on_gpus(pool: Any, body: Any, size: int) -> None:
    pool("cuda", size).run(body)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", hybrid_bodies.ALL, ids=lambda body: body.__name__)
def test_hybrid_on_gpus(pool: Any, body: Any, size: int) -> None:
    sizes = {"hidden_dim": hybrid_bodies.HIDDEN, "max_num_of_tokens_per_rank": 32}
    pool("cuda", size).run(body, kind="HybridEPBuffer", num_local_experts=3, **sizes)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", low_latency_calls.ALL, ids=lambda body: body.__name__)
def test_low_latency_on_gpus(pool: Any, body: Any, size: int) -> None:
    pool("cuda", size).run(body, low_latency_mode=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", mask_bodies.ALL, ids=lambda body: body.__name__)
def test_masks_on_gpus(pool: Any, body: Any, size: int) -> None:
    pool("cuda", size).run(body, low_latency_mode=True, enable_shrink=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("replay", replays(), ids=lambda replay: replay.__name__)
def test_replays_on_gpus(pool: Any, replay: Any) -> None:
    pool("cuda", 4).run(replay, num_nvl_bytes=1 << 20)


def test_process_ranks_in_cpu_memory(pool: Any) -> None:
    pool("cpu", 8).run(elastic_bodies.several_in_flight, kind="ElasticBuffer")
    pool("cpu", 8).run(bucket_bodies.every_call)
    pool("cpu", 8).run(bodies.changing_experts)
    pool("cpu", 8).run(low_latency_calls.two_micro_batches_in_flight, low_latency_mode=True)


def with_process_groups(buffer: Any, device: str, port: int) -> None:
    """Buffers of process groups of torch: the default one, and ones beside it of fewer ranks.
    torch's groups are gone when tokens are exchanged. Of NCCL where each rank has a GPU."""
    device_of(buffer, device)
    where, ranks = f"tcp://127.0.0.1:{port}", buffer.group_size
    apart = device == "cuda" and ranks <= torch.cuda.device_count()
    backend = "nccl" if apart else "gloo"
    dist.init_process_group(backend, where, rank=buffer.rank, world_size=ranks)
    made = []
    try:
        for size in (size for size in (1, 2, 4, 8) if size <= ranks):
            group = dist.group.WORLD if size == ranks else dist.new_group(list(range(size)))
            if buffer.rank >= size:
                continue
            made.append(deep_ep.Buffer(group=group, num_nvl_bytes=1 << 20, explicitly_destroy=True))
            assert made[-1].group is group
            assert (made[-1].rank, made[-1].group_size) == (buffer.rank, size)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    for own in made:
        bodies.changing_experts(own, device)
    buffer.group.allgather(None)
    for own in made:
        own.destroy()


def test_process_groups_of_torch(pool: Any) -> None:
    pool("cpu", 8).run(with_process_groups, free_port())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [2, 4])
def test_process_groups_on_gpus(pool: Any, size: int) -> None:
    pool("cuda", size).run(with_process_groups, free_port())
