"""What the ranks of test_gpu.py do on GPUs only."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from exchange_bodies import exchange
from exchange_case import EXPERTS, HIDDEN, TOPK, Case, refused, same

import ferry
import ferry.torch as ft


def wrong_arguments(group: ferry.Group) -> None:
    """Refused before anything moves; the group goes on. On GPUs only."""
    case = Case(group)
    x, ids, _ = case.own()
    here = group.device
    plan = group.plan(ids)
    refused(f"x: got a tensor on device cpu; expected one on {here}", group.dispatch, x.cpu(), plan)
    refused("topk_idx: got a tensor on device cpu", group.plan, ids.cpu())
    refused("topk_idx: got a tensor on device cpu", group.plan, ids.cpu().numpy())
    refused("no DLPack", group.plan, [[1]])
    refused("x: got dtype complex64", group.dispatch, x.to(torch.complex64), plan)
    refused("num_sms: got 100000; expected", group.dispatch, x, plan, num_sms=100000)
    refused("num_sms: got -1; expected", group.dispatch, x, plan, num_sms=-1)
    refused(
        "stream: got a ferry.Stream with a worker", group.dispatch, x, plan, stream=ferry.Stream()
    )
    refused(
        "stream: got 'one'; expected a torch.cuda.Stream", group.dispatch, x, plan, stream="one"
    )
    if torch.cuda.device_count() > 1:
        index = (int(here.removeprefix("cuda:")) + 1) % torch.cuda.device_count()
        other = f"cuda:{index}"
        refused(f"x: got a tensor on device {other}", group.dispatch, x.to(other), plan)
        stream = torch.cuda.Stream(index)
        refused(f"stream: got a stream of {other}", group.dispatch, x, plan, stream=stream)
        made = ferry.Stream.of_cuda(0, index)
        refused(f"stream: got a stream of {other}", group.dispatch, x, plan, stream=made)
    refused("memory of others", group.record_stream, x)
    for shape, like in (((3, 16), "numpy"), ((1, 1, 1, 1), None)):
        refused("empty: (like|shape): got", group.empty, shape, "f32", like)
    group.barrier()
    exchange(group, "float32", "rank_major", 0)


def bad_routes(group: ferry.Group) -> None:
    """An id that is no expert, found on the GPU: told where it is waited for, or by the next call;
    the group goes on."""
    ids = Case(group).own()[1]
    plan = group.plan(torch.full_like(ids, EXPERTS) if group.rank == 0 else ids)
    try:
        plan.recv_rows()
    except (ferry.InvalidArgumentError, ferry.PeerFailedError) as error:
        assert "no expert" in str(error)
    else:
        raise AssertionError("a bad id was taken")
    del plan
    exchange(group, "float32", "rank_major", 0)


def streams(group: ferry.Group) -> None:
    """A torch stream, its handle, a ferry.Stream of it; the current one by default."""
    case = Case(group)
    x, ids, w = case.own()
    here = torch.device(group.device)
    side = torch.cuda.Stream(here)
    handle = side.cuda_stream
    for stream in (side, handle, ferry.Stream.of_cuda(handle, here.index)):
        side.wait_stream(torch.cuda.current_stream(here))
        torch.cuda.synchronize(here)
        plan = group.plan(ids, stream=stream)
        got = group.dispatch(x, plan, topk_weights=w, stream=stream, num_sms=5)
        with torch.cuda.stream(side):
            got.x.mul_(2)
        back = group.combine(got.x, plan, stream=stream, num_sms=1)
        torch.cuda.current_stream(here).wait_stream(side)
        same(back.x, case.doubled())
    with torch.cuda.stream(side):
        plan = group.plan(ids)
        got = group.dispatch(x, plan, topk_weights=w)
        case.check_received(got)
        got.x.mul_(2)
        same(group.combine(got.x, plan).x, case.doubled())


def cycles(seconds: float) -> int:
    """For torch.cuda._sleep, at the clock of a busy GPU, about."""
    return int(seconds * 2e9)


def nothing_blocks(group: ferry.Group) -> None:
    """With a worst case, calls return while the GPU is still busy with something before them."""
    case = Case(group)
    x, ids, w = case.own()
    rows = 40 * group.size

    def step() -> tuple[Any, Any]:
        plan = group.plan(ids)
        got = group.dispatch(x, plan, topk_weights=w, max_recv_rows=rows)
        got.x.mul_(2)
        return got, group.combine(got.x, plan)

    step()[1].event.wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles(1.0))
    start = time.perf_counter()
    got, back = step()
    spent = time.perf_counter() - start
    early = not back.event.ready()
    torch.cuda.synchronize()
    assert early, "the combine had ended before the sleep before it"
    assert spent < 0.4, spent
    assert got.event.ready() and back.event.ready()
    same(back.x, case.doubled())


def graph_replays(group: ferry.Group) -> None:
    """Captured once, replayed with other routes and rows."""
    rows, most = 40 * group.size, 40
    x = torch.zeros(most, HIDDEN, device=group.device)
    ids = torch.full((most, TOPK), -1, device=group.device)
    w = torch.zeros(most, TOPK, device=group.device)

    def step() -> tuple[Any, Any]:
        plan = group.plan(ids)
        got = group.dispatch(x, plan, topk_weights=w, max_recv_rows=rows)
        doubled = got.x * 2
        return got, group.combine(doubled, plan, topk_weights=got.topk_weights)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        got, back = step()
    for seed in range(3):
        case = Case(group, 50 + seed)
        mine = case.own()
        for static, value, empty in zip((x, ids, w), mine, (0, -1, 0)):
            static.fill_(empty)
            static[: len(value)] = value
        graph.replay()
        torch.cuda.synchronize()
        case.check_received(got)
        n = len(mine[0])
        same(back.x[:n], case.doubled())
        assert (back.x[n:] == 0).all()
    del graph, got, back


def recorded_memory_is_not_reused(group: ferry.Group) -> None:
    """A result that a slow side stream still reads is not handed out again."""
    case = Case(group)
    x, ids, _ = case.own()
    plan = group.plan(ids)
    group.dispatch(x, plan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for way in ("ferry", "torch", "view", "freed"):
        got = group.dispatch(x, plan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles(0.1))
            copied = got.x.clone()
        tensor = got.x
        del got
        if way == "ferry":
            ft.record_stream(tensor, side)
        else:
            (tensor[1:] if way == "view" else tensor).record_stream(side)
        if way == "freed":
            tensor.untyped_storage().resize_(0)
        else:
            del tensor
        for _ in range(4):  # would take the same piece
            group.dispatch(torch.full_like(x, 7), plan)
        torch.cuda.synchronize()
        same(copied, case.reference.gathered(case.xs, group.rank))
    own = torch.ones(4, device=group.device)
    ft.record_stream(own, side)  # torch's own memory
    ft.record_stream(own.cpu())


def inputs_are_kept(group: ferry.Group) -> None:
    """Memory given on a stream that is not torch's current one is held until the work is done."""
    _, ids, _ = Case(group).own()
    side = torch.cuda.Stream()
    plan = group.plan(ids)
    plan.recv_rows()
    other = torch.ones(len(ids), HIDDEN, device=group.device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.ones(len(ids), HIDDEN, device=group.device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles(0.3))
    got = group.dispatch(x, plan, stream=side)
    del x
    assert torch.cuda.memory_allocated() > before or len(ids) == 0 or got.event.ready()
    got.event.wait()
    torch.cuda.synchronize()
    group.dispatch(other, plan, stream=side)
    assert torch.cuda.memory_allocated() == before
    torch.cuda.synchronize()


class Foreign:
    """An array of some other framework."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.streams = tensor, [0]

    def __dlpack__(self, stream: int | None = None, **more: Any) -> Any:
        assert stream is not None
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def dlpack(group: ferry.Group) -> None:
    """Finished results without a stream; the producer is told the stream."""
    case = Case(group)
    x, ids, w = case.own()
    foreign = Foreign(x)
    plan = group.plan(Foreign(ids))
    got: Any = group.dispatch(foreign, plan, topk_weights=Foreign(w))
    assert got.event.ready() and foreign.streams[-1] == 1
    case.check_received(got)
    side = torch.cuda.Stream()
    got = group.dispatch(foreign, plan, topk_weights=Foreign(w), stream=side)
    assert foreign.streams[-1] == side.cuda_stream
    got.event.wait()
    case.check_received(got)
    raw = group._raw.empty([4, 16], ferry._ferry.Dtype.f32)
    taken = torch.from_dlpack(raw)
    assert taken.data_ptr() == raw.address and str(taken.device) == group.device


def cupy_arrays(group: ferry.Group) -> None:
    import cupy

    case = Case(group)
    x, ids, w = (cupy.from_dlpack(tensor) for tensor in case.own())
    torch.cuda.synchronize()
    plan = group.plan(ids)
    got = group.dispatch(x, plan, topk_weights=w)
    assert isinstance(got.x, cupy.ndarray) and group.is_registered(got.x)
    assert np.array_equal(got.x.get(), case.reference.gathered(case.xs, group.rank))
    got.x *= 2
    assert np.array_equal(group.combine(got.x, plan).x.get(), case.doubled())


def nccl(group: ferry.Group, port: int, bound: bool) -> None:
    """A second group, whose ranks meet through NCCL."""
    import torch.distributed as dist

    device = torch.device(group.device)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=group.rank,
        world_size=group.size,
        device_id=device if bound else None,
    )
    try:
        boot = ft.from_process_group()
        with ferry.Group(boot, experts=EXPERTS, backend="cuda", deadline=30.0) as other:
            assert (other.rank, other.size, other.device) == (group.rank, group.size, group.device)
            exchange(other, "float32", "rank_major", 0)
            other.barrier()
    finally:
        dist.destroy_process_group()


ALL = (
    wrong_arguments,
    bad_routes,
    streams,
    nothing_blocks,
    graph_replays,
    recorded_memory_is_not_reused,
    inputs_are_kept,
    dlpack,
)
"""For any number of ranks."""
