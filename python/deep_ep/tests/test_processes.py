"""Ranks as processes: on GPUs, and in CPU memory with process groups of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import handle_bodies
import low_latency_calls
import pytest
import replay_megatron
import replay_sglang
import replay_torchtitan
import replay_vllm
import throughput_bodies as bodies
import torch.distributed as dist
from buffer_processes import BufferProcesses
from gpus import needs_gpu
from rank_processes import free_port, kept

import deep_ep

EVERYWHERE = [*bodies.ALL, *handle_bodies.ALL, bodies.captured]
TEN_BITS = low_latency_calls.rows_come_back_in_ten_bits
not_there = pytest.mark.skip(reason="combine in ten bits is not there yet on GPUs")
LOW_LATENCY = [
    pytest.param(body, marks=not_there) if body is TEN_BITS else body
    for body in low_latency_calls.ALL
]
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """`pool(device, size)`: processes that stay from test to test."""
    with kept(BufferProcesses) as get:
        yield get


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", EVERYWHERE, ids=lambda body: body.__name__)
def test_on_gpus(pool: Any, body: Any, size: int) -> None:
    pool("cuda", size).run(body, num_nvl_bytes=1 << 20)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", LOW_LATENCY, ids=lambda body: body.__name__)
def test_low_latency_on_gpus(pool: Any, body: Any, size: int) -> None:
    pool("cuda", size).run(body, low_latency_mode=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "replay",
    (*replay_vllm.ALL, *replay_sglang.ALL, *replay_megatron.ALL, *replay_torchtitan.ALL),
    ids=lambda replay: replay.__name__,
)
def test_replays_on_gpus(pool: Any, replay: Any) -> None:
    pool("cuda", 4).run(replay, num_nvl_bytes=1 << 20)


def test_processes_in_cpu_memory(pool: Any) -> None:
    pool("cpu", 2).run(bodies.every_dispatch)
    pool("cpu", 2).run(low_latency_calls.two_micro_batches_in_flight, low_latency_mode=True)


def with_process_group(buffer: Any, device: str, port: int, new_group: bool) -> None:
    """A Buffer of a process group of torch: the default one, or one beside it."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, rank=buffer.rank, world_size=buffer.group_size)
    try:
        group = dist.new_group([0, 1]) if new_group else dist.group.WORLD
        own = deep_ep.Buffer(group, 1 << 20, explicitly_destroy=True)
        assert own.group is group
        assert (own.rank, own.group_size) == (buffer.rank, buffer.group_size)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    bodies.changing_experts(own, device)  # torch's group is gone
    own.destroy()


@pytest.mark.parametrize("new_group", [False, True])
def test_a_process_group_of_torch(pool: Any, new_group: bool) -> None:
    pool("cpu", 2).run(with_process_group, free_port(), new_group)
