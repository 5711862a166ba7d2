"""Bodies of tests of the Buffer itself: what its constructor takes, what callers read of it, its
plain memory, its streams and events. As in throughput_bodies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from devices import device_of
from reference import answers, arrived, combined, expert, shared_job
from throughput_calls import check_rows, dispatched, same, several_hosts

import deep_ep


def round_trip(buffer: Any, device: str, seed: int) -> None:
    job, rank = shared_job(buffer.group_size, seed=seed), buffer.rank
    got = dispatched(buffer, device, job, job.x[rank].to(device))
    check_rows(got[0], job.x, job, rank, device, seed)
    y = buffer.combine(expert(rank, got[0]), got[4])[0]
    same(y, combined(job, rank, answers(job, rank, job.x)), device, seed)


def every_argument_of_the_constructor(first: Any, device: str) -> None:
    """By name and by place; sizes that differ among the ranks; the least and the most of all."""
    comm = first.group
    some = {
        "num_nvl_bytes": 128 << (comm.Get_rank() % 3),
        "num_rdma_bytes": 256,
        "low_latency_mode": True,
        "num_qps_per_rank": 1,
        "allow_nvlink_for_low_latency_mode": False,
        "allow_mnnvl": True,
        "use_fabric": True,
        "explicitly_destroy": True,
        "enable_shrink": True,
    }
    for number, given in enumerate(({}, some, {"explicitly_destroy": True})):
        if number < 2:
            buffer = deep_ep.Buffer(group=None, comm=comm, **given)
        else:
            buffer = deep_ep.Buffer(None, *some.values(), comm)
        wanted = some if number != 0 else dict.fromkeys(some, 0)
        for name, value in wanted.items():
            if not name.startswith(("num_qps", "allow", "use")):  # which nobody reads
                assert getattr(buffer, name) == value, name
        assert (buffer.rank, buffer.group_size) == (comm.Get_rank(), comm.Get_size())
        assert buffer.group is comm and buffer.num_sms == deep_ep.Buffer.num_sms
        round_trip(buffer, device, number)
        comm.allgather(None)
        if buffer.explicitly_destroy:
            buffer.destroy()


def what_callers_read(buffer: Any, device: str) -> None:
    device_of(buffer, device)
    ranks, rank, runtime = buffer.group_size, buffer.rank, buffer.runtime
    hosts = ranks // 8 if several_hosts(ranks) else 1
    assert runtime.is_available() and runtime.get_num_rdma_ranks() == hosts
    assert runtime.get_rdma_rank() == (rank // 8 if hosts > 1 else 0)
    assert runtime.get_root_rdma_rank(False) == 0
    assert runtime.get_root_rdma_rank(True) == rank % 8
    on_gpu = torch.cuda.is_available()
    assert runtime.get_local_device_id() == (torch.cuda.current_device() if on_gpu else -1)
    assert runtime.get_local_ipc_handle() == runtime.get_local_nvshmem_unique_id() == b""
    runtime.sync([], [], None)
    assert buffer.main_context is buffer.context is runtime
    buffer.print_memory_usage()
    # test_endings.py lets a rank leave, test_replaced.py kills one.
    assert buffer.regroup() == buffer.view().ranks == list(range(ranks))
    assert not buffer.commit(3) and buffer.view().step == 3
    if device == "cuda":
        stream = buffer.get_comm_stream()
        assert isinstance(stream, torch.cuda.Stream) and stream != torch.cuda.current_stream()
        assert buffer.get_comm_stream() == stream == runtime.get_comm_stream()


def plain_memory(first: Any, device: str) -> None:
    """Every dtype, size and offset of both buffers; what is written there stays, whatever is
    exchanged."""
    where = device_of(first, device)
    sizes = {False: 1024, True: 512}
    given = {"num_nvl_bytes": 1024, "num_rdma_bytes": 512, "low_latency_mode": True}
    buffer = deep_ep.Buffer(None, comm=first.group, **given)
    if device == "cuda":
        torch.zeros(1, device=where)  # the place of the memory is that of torch's CUDA
    for network, dtype in itertools.product(sizes, (torch.int8, torch.bfloat16, torch.int64)):
        whole, count = sizes[network], sizes[network] // dtype.itemsize
        flat = buffer.get_local_buffer_tensor(dtype, use_rdma_buffer=network)
        assert (flat.dtype, flat.shape) == (dtype, (count,))
        flat.copy_(torch.arange(count) % 100)
        round_trip(buffer, device, 7)
        shaped = buffer.get_local_buffer_tensor(dtype, torch.Size((2, 8)), use_rdma_buffer=network)
        same(shaped, (torch.arange(16) % 100).to(dtype).view(2, 8), flat.device.type)
        later = buffer.get_local_buffer_tensor(
            dtype=dtype, size=None, offset=128, use_rdma_buffer=network
        )
        same(
            later, (torch.arange(count) % 100).to(dtype)[128 // dtype.itemsize :], flat.device.type
        )
        for wrong in ({"size": torch.Size((count + 1,))}, {"offset": 2 * whole}, {"offset": -1}):
            with pytest.raises(AssertionError, match="get_local_buffer_tensor"):
                buffer.get_local_buffer_tensor(dtype, use_rdma_buffer=network, **wrong)
    first.group.allgather(None)


def waits_of_events(buffer: Any, device: str) -> None:
    """Results are there after each way to wait for an event: a call, a block, another stream."""
    job, rank = shared_job(buffer.group_size, seed=12), buffer.rank
    x = job.x[rank].to(device)
    for way in ("call", "block", "called block", "handle", "capture"):
        got = dispatched(buffer, device, job, x, way="async")
        event = got[5]
        if way == "call":
            event.current_stream_wait()
        elif way == "block":
            with event as same_event:
                assert same_event is event
        elif way == "called block":
            with event():
                pass
        elif way == "handle":
            event.event.current_stream_wait()
        else:
            event.current_stream_wait()
            deep_ep.EventOverlap(deep_ep.EventHandle(), (x,)).current_stream_wait()
            deep_ep.Buffer.capture().current_stream_wait()
        check_rows(got[0], job.x, job, rank, device, way)
        assert got[3] == arrived(job, rank).per_expert


ALL = [every_argument_of_the_constructor, what_callers_read, plain_memory, waits_of_events]
