"""What the ranks of test_gpu.py do, most of it on either engine: the tensors lie on the group's
device, and every value is compared with exchange_reference."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from exchange_reference import Reference, quantised

import ferry
import ferry.torch as ft

EXPERTS, TOPK, HIDDEN = 8, 3, 128


class Case:
    """Routes, rows and weights of every rank, the same on all ranks."""

    def __init__(self, group: ferry.Group, seed: int = 1, most: int = 40) -> None:
        rng = np.random.default_rng(seed)
        size, self.rank, self.device = group.size, group.rank, group.device
        tokens = [0 if r == 1 else int(rng.integers(1, most)) for r in range(size)]
        self.reference = Reference([rng.integers(-1, EXPERTS, (t, TOPK)) for t in tokens], EXPERTS)
        # Small integers: exact in every dtype, and so are their sums.
        self.xs = [rng.integers(-4, 5, (t, HIDDEN)).astype(np.float32) for t in tokens]
        self.ws = [rng.integers(1, 4, (t, TOPK)).astype(np.float32) for t in tokens]

    def own(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """x, topk_idx and weights of this rank on its device."""
        x = torch.from_numpy(self.xs[self.rank]).to(self.device).to(dtype)
        ids = torch.from_numpy(self.reference.routes[self.rank]).to(self.device)
        return x, ids, torch.from_numpy(self.ws[self.rank]).to(self.device)

    def check_received(self, got: Any, alignment: int | None = None, weights: bool = True) -> None:
        """All tensors of a dispatch, exact or of a worst case."""
        ref, rank = self.reference, self.rank
        n = len(ref.rows(rank))
        same(got.topk_idx[:n], ref.topk_idx(rank))
        assert (got.topk_idx[n:] == -1).all()
        same(got.source_token[:n], ref.source_token(rank))
        if weights:
            same(got.topk_weights[:n], ref.topk_weights(self.ws, rank))
        if alignment is None:
            same(got.x[:n], ref.rank_major(self.xs, rank))
            return
        slots, offsets = ref.slot_rows(rank, alignment)
        same(got.slot_rows[:n], slots)
        same(got.expert_offsets, offsets)
        same(got.x[: offsets[-1]], ref.expert_major(self.xs, rank, alignment))

    def doubled(self) -> np.ndarray:
        """What combine gives when every rank sends back twice what it got."""
        ref = self.reference
        return ref.combine([2 * ref.rank_major(self.xs, r) for r in range(ref.ranks)], self.rank)


def same(got: torch.Tensor, expected: np.ndarray) -> None:
    found = got.cpu() if got.dtype in (torch.int32, torch.int64) else got.float().cpu()
    assert np.array_equal(found.numpy(), expected)


def exchange(
    group: ferry.Group, dtype_name: str, order: str, worst_case: int, out: bool = False
) -> None:
    """Plan, dispatch and combine, twice with the same plan; both orders."""
    case = Case(group)
    x, ids, w = case.own(getattr(torch, dtype_name))
    alignment = 4 if order == "expert_major" else None
    layout: dict[str, Any] = {"order": order, "alignment": alignment or 1}
    plan = group.plan(ids)
    for _ in range(2):
        given: dict[str, Any] = {}
        if out:
            rows = worst_case or plan.recv_rows()
            given = {"out": torch.empty(rows, HIDDEN, dtype=x.dtype, device=x.device)}
        got = group.dispatch(x, plan, topk_weights=w, worst_case_rows=worst_case, **layout, **given)
        case.check_received(got, alignment)
        assert got.x.device == x.device and got.x.dtype == x.dtype
        assert group.is_registered(got.x) != out
        assert got.event.ready() or x.is_cuda
        if order == "rank_major":
            got.x.mul_(2)
            back = group.combine(got.x, plan, topk_weights=got.topk_weights, **layout)
            same(back.x, case.doubled())
            back.event.wait(deadline=20.0)
            assert back.event.ready()
        else:
            back = group.combine(got.x, plan, **layout)
            ones = case.reference.routes[case.rank] >= 0
            same(back.x, case.xs[case.rank] * ones.sum(1, keepdims=True))


def biases_and_own_output(group: ferry.Group) -> None:
    case = Case(group)
    x, ids, _ = case.own(torch.bfloat16)
    plan = group.plan(ids)
    rows = group.empty((plan.recv_rows(), HIDDEN), torch.bfloat16)
    assert rows.device == x.device and group.is_registered(rows)
    rows.copy_(group.dispatch(x, plan).x).mul_(2)
    y = torch.empty_like(x)
    ordinary = rows.clone()
    for given in (rows, ordinary):
        y.zero_()
        combined = group.combine(given, plan, bias0=x, bias1=torch.ones_like(x), out=y, sms=0)
        assert combined.x is y
        same(y, case.doubled() + case.xs[case.rank] + 1)


def fp8(group: ferry.Group) -> None:
    """fp8 rows with scales in any stride."""
    case = Case(group)
    x, ids, _ = case.own(torch.float8_e4m3fn)
    columns = torch.arange(2 * len(x), device=x.device, dtype=torch.float32).view(2, -1)
    got = group.dispatch(x, group.plan(ids), scales=columns.t())
    case.check_received(got, weights=False)
    assert got.x.dtype == torch.float8_e4m3fn and got.x.device == x.device
    ref = case.reference
    rows = ref.rows(group.rank)
    counts = [len(route) for route in ref.routes]
    assert got.scales is not None
    same(got.scales[:, 0], np.array([row.token for row in rows], np.float32))
    same(got.scales[:, 1], np.array([row.token + counts[row.source] for row in rows], np.float32))


def quantised_on_the_way(group: ferry.Group) -> None:
    """Rows become e4m3 with scales in flight, or were that before: the same bytes arrive."""
    case = Case(group)
    rng = np.random.default_rng(5)
    shift = [rng.normal(size=x.shape).astype(np.float32) for x in case.xs]
    xs = [(a + b).astype(ml_dtypes.bfloat16).astype(np.float32) for a, b in zip(case.xs, shift)]
    for x in xs:
        x[1:2] = 0
    own = torch.from_numpy(xs[case.rank]).to(case.device)
    ids = torch.from_numpy(case.reference.routes[case.rank]).to(case.device)
    plan = group.plan(ids)
    ref, rank, n = case.reference, case.rank, len(case.reference.rows(case.rank))
    for pow2 in (False, True):
        codes = [quantised(x, pow2)[0] for x in xs]
        scales = [quantised(x, pow2)[1] for x in xs]
        given: dict[str, Any] = {"format": "e4m3", "scale_format": "f32_pow2" if pow2 else "f32"}
        results = [group.dispatch(x, plan, **given) for x in (own, own.bfloat16())]
        results.append(group.dispatch(own, plan, worst_case_rows=160, **given))
        out = torch.empty(n, HIDDEN, dtype=torch.float8_e4m3fn, device=own.device)
        results.append(group.dispatch(own, plan, out=out, **given))
        assert results[-1].x.data_ptr() == out.data_ptr()
        ready = torch.from_numpy(codes[rank]).to(case.device).view(torch.float8_e4m3fn)
        made = torch.from_numpy(scales[rank]).to(case.device)
        some = rank % 2 == 1  # bring what the others' rows become
        results.append(
            group.dispatch(ready, plan, scales=made) if some else group.dispatch(own, plan, **given)
        )
        for got in results:
            assert got.x.dtype == torch.float8_e4m3fn and got.x.device == own.device
            assert got.scales is not None and got.scales.shape == (len(got.x), 1)
            same(got.x[:n].view(torch.uint8), ref.rank_major(codes, rank).astype(np.float32))
            same(got.scales[:n], ref.rank_major(scales, rank))
        by_expert = group.dispatch(own, plan, order="expert_major", alignment=4, **given)
        assert by_expert.scales is not None
        plain = by_expert.x.view(torch.uint8)
        same(plain, ref.expert_major(codes, rank, 4).astype(np.float32))
        same(by_expert.scales, ref.expert_major(scales, rank, 4))


def quantised_by_torch(group: ferry.Group) -> None:
    """The same through ferry.torch, by either kind of plan."""
    case = Case(group)
    x, ids, w = case.own(torch.bfloat16)
    codes = [quantised(each)[0] for each in case.xs]
    scales = [quantised(each)[1] for each in case.xs]
    ref, rank, n = case.reference, case.rank, len(case.reference.rows(case.rank))
    for plan in (group.plan(ids), ft.plan(group, ids)):
        assert ft.dispatch(group, plan, x).scales is None
        for worst_case in (0, 160):
            got = ft.dispatch(group, plan, x, w, worst_case_rows=worst_case, format="e4m3")
            assert got.x.dtype == torch.float8_e4m3fn and got.scales is not None
            same(got.x[:n].view(torch.uint8), ref.rank_major(codes, rank).astype(np.float32))
            same(got.scales[:n], ref.rank_major(scales, rank))
            same(got.topk_weights[:n], ref.topk_weights(case.ws, rank))
            assert not got.x[n:].view(torch.uint8).any() and not got.scales[n:].any()
        for name in ("x", "topk_weights"):
            wants = {"x": x, "topk_weights": w}
            wants[name] = wants[name].clone().requires_grad_()
            with pytest.raises(ferry.InvalidArgument, match=rf"{name}: .*gradient.*detach"):
                ft.dispatch(group, plan, **wants, format="e4m3")
            with torch.no_grad():
                ft.dispatch(group, plan, **wants, format="e4m3", scale_format="f32_pow2")


def memory_goes_back(group: ferry.Group) -> None:
    case = Case(group)
    x, ids, _ = case.own()
    group.barrier()
    before = group.memory().arena_used_bytes
    for _ in range(3):
        plan = group.plan(ids)
        got = group.dispatch(x, plan)
        assert len(got.x) == plan.recv_rows()
        view = got.x[1:3]
        del got
        if len(view):
            assert group.memory().arena_used_bytes > before
        del view, plan
        gc.collect()
        limit = time.monotonic() + 5
        while group.memory().arena_used_bytes > before and time.monotonic() < limit:
            time.sleep(0.01)
        assert group.memory().arena_used_bytes == before
    assert group.memory().arena_used_bytes <= group.memory().arena_bytes


def results_outlive_the_group(group: ferry.Group) -> Any:
    case = Case(group)
    x, ids, _ = case.own()
    got = group.dispatch(x, group.plan(ids))
    group.barrier()
    group.destroy()
    gc.collect()
    same(got.x, case.reference.rank_major(case.xs, group.rank))


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
    refused("sms: got 100000; expected", group.dispatch, x, plan, sms=100000)
    refused("sms: got -1; expected", group.dispatch, x, plan, sms=-1)
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


def refused(words: str, call: Any, *arguments: Any, **more: Any) -> None:
    import re

    try:
        call(*arguments, **more)
    except ferry.InvalidArgument as error:
        assert re.search(words, str(error)), f"expected '{words}' in: {error}"
    else:
        raise AssertionError(f"not refused: {words}")


def bad_routes(group: ferry.Group) -> None:
    """An id that is no expert, found on the GPU: told where it is waited for, or by the next call;
    the group goes on."""
    ids = Case(group).own()[1]
    plan = group.plan(torch.full_like(ids, EXPERTS) if group.rank == 0 else ids)
    try:
        plan.recv_rows()
    except (ferry.InvalidArgument, ferry.PeerFailed) as error:
        assert "no expert" in str(error)
    else:
        raise AssertionError("a bad id was taken")
    del plan
    exchange(group, "float32", "rank_major", 0)


# On GPUs only.


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
        got = group.dispatch(x, plan, topk_weights=w, stream=stream, sms=5)
        with torch.cuda.stream(side):
            got.x.mul_(2)
        back = group.combine(got.x, plan, stream=stream, sms=1)
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
        got = group.dispatch(x, plan, topk_weights=w, worst_case_rows=rows)
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
        got = group.dispatch(x, plan, topk_weights=w, worst_case_rows=rows)
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
    for _ in range(3):
        got = group.dispatch(x, plan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles(0.1))
            copied = got.x.clone()
        tensor = got.x
        del got
        ft.record_stream(tensor, side)
        del tensor
        for _ in range(4):  # would take the same piece
            group.dispatch(torch.full_like(x, 7), plan)
        torch.cuda.synchronize()
        same(copied, case.reference.rank_major(case.xs, group.rank))
    own = torch.ones(4, device=group.device)
    ft.record_stream(own, side)  # torch's own memory
    ft.record_stream(own.cpu())


def inputs_are_kept(group: ferry.Group) -> None:
    """Arrays given on a stream that is not torch's current one live until the work is done."""
    _, ids, _ = Case(group).own()
    side = torch.cuda.Stream()
    plan = group.plan(ids)
    plan.recv_rows()
    x = torch.ones(len(ids), HIDDEN, device=group.device)
    kept = weakref.ref(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles(0.3))
    got = group.dispatch(x, plan, stream=side)
    del x
    assert kept() is not None or got.event.ready()
    got.event.wait()
    torch.cuda.synchronize()
    group.dispatch(torch.ones(len(ids), HIDDEN, device=group.device), plan, stream=side)
    assert kept() is None
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
    assert np.array_equal(got.x.get(), case.reference.rank_major(case.xs, group.rank))
    got.x *= 2
    assert np.array_equal(group.combine(got.x, plan).x.get(), case.doubled())


def gradients(group: ferry.Group, worst_case: int) -> None:
    """The plain autograd functions, with plans of Group.plan."""
    import compiled_bodies as bodies

    x, ids, w = bodies.inputs(group, 4)
    x.requires_grad_()
    w.requires_grad_()
    plan = group.plan(ids)
    got = ft.dispatch(group, plan, x, topk_weights=w, worst_case_rows=worst_case, sms=3)
    assert got.topk_weights is not None
    rows = got.x * got.topk_weights.sum(1, keepdim=True)
    y = ft.combine(group, plan, rows, worst_case_rows=worst_case, sms=3)
    y.pow(2).sum().mul(0.5).backward()
    y_ref, x_ref, w_ref = bodies.expected(ids, x, w)
    assert torch.equal(y.detach(), y_ref)
    assert x.grad is not None and torch.equal(x.grad, x_ref)
    assert w.grad is not None and w_ref is not None and torch.equal(w.grad, w_ref)


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
