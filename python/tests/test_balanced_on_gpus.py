"""Balanced experts where a GPU plans and the CPU learns nothing of it: on GPUs, and on CPUs with
what stands in for them."""

from __future__ import annotations

from typing import Any

import balance_bodies as bodies
import pytest
import torch
from gpus import needs_gpu
from rank_processes import RankProcesses
from rank_threads import run_threads
from torch.utils.checkpoint import checkpoint

import ferry
import ferry.torch as ft
from ferry import torch_experts, torch_gpu_copies


def without_gpus(patch: pytest.MonkeyPatch, beside: Any = bodies.beside) -> None:
    """Layers made from here on work as on GPUs, but that a CPU plans and moves."""
    patch.setattr(torch_experts, "plans_on_gpu", lambda *_: True)
    patch.setattr(torch_gpu_copies, "GpuBalancer", bodies.TensorBalancer)
    patch.setattr(torch_gpu_copies, "_beside", beside)
    for name in ("copy_experts", "reduce_experts"):
        patch.setattr(torch_gpu_copies, name, bodies.of_lists(getattr(ft, name)))


@pytest.mark.parametrize(("skew", "beside"), [(4, bodies.beside), (8, bodies.late)])
def test_copies_that_no_cpu_knows_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, skew: int, beside: Any
) -> None:
    without_gpus(monkeypatch, beside)
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank], **bodies.FIXED)
        bodies.training(pair, skew, 6)
        two_forwards_first(pair)
        pair.close()

    run_threads(bodies.RANKS, one)


def test_after_a_capture_copies_are_always_fetched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees what replays write to experts."""
    without_gpus(monkeypatch)
    now = [False]
    monkeypatch.setattr(torch_gpu_copies, "_capturing", lambda: now[0])
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank], **bodies.FIXED)
        x, ids = torch.ones(bodies.TOKENS, bodies.HIDDEN), bodies.routes(rank, 0, 0.5)
        weights = torch.ones(bodies.TOKENS, bodies.TOPK)
        balancer = pair.balanced.balancer
        assert balancer is not None
        fetched = []
        for capturing in (False, False, True, False):
            pair.ranks.barrier()
            now[0] = capturing
            pair.ranks.barrier()
            pair.balanced(x, ids, weights)
            fetched.append(bool((balancer.fetches >= 0).any()))
        assert fetched == [True, False, True, True]
        pair.close()

    run_threads(bodies.RANKS, one)


def two_forwards_first(pair: bodies.Pair) -> None:
    """Each backward uses the copies of its own forward, though the next has fetched others; and a
    checkpoint computes with those of its batch."""
    rank, size = pair.group.rank, pair.group.size
    make = torch.Generator().manual_seed(rank)
    x = torch.randint(-2, 3, (bodies.TOKENS, bodies.HIDDEN), generator=make).float()
    weights = torch.ones(bodies.TOKENS, bodies.TOPK)
    given = [x.to(pair.device), weights.to(pair.device)]
    for recomputed in (False, True):
        grads = []
        for layer in (pair.plain, pair.balanced):
            layer.zero_grad()
            x = given[0].clone().requires_grad_()
            sums = []
            for at in (0, 3):
                ids = bodies.routes(rank, at, 0.5, size).to(pair.device)
                call = (x, ids, given[1])
                y = checkpoint(layer, *call, use_reentrant=False) if recomputed else layer(*call)
                sums.append((y * (at + 1)).sum())
            for each in reversed(sums):
                each.backward()
            grads.append([x.grad, *(each.grad for each in layer.experts.parameters())])
        for one, other in zip(*grads):
            assert one is not None and torch.equal(one, other)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_gpus(size: int) -> None:
    """Ranks are processes, which may share a GPU."""
    processes = RankProcesses(size, "cuda", bodies.on_either_engine)
    try:
        processes.run(bodies.training, 0.8 * size, 6)
        processes.run(bodies.training, 0.8 * size, 4, **bodies.FIXED)
        processes.run(two_forwards_first, **bodies.FIXED)
        processes.run(captured, **bodies.FIXED)
        processes.run(bodies.decoding)
    finally:
        processes.stop()


def captured(pair: bodies.Pair) -> None:
    """Forward and backward in a graph, whose replays have other routes and other weights."""
    layer, rank, size = pair.balanced, pair.group.rank, pair.group.size
    assert isinstance(layer.balancer, ft.GpuBalancer)
    device = pair.device
    x = torch.ones(bodies.TOKENS, bodies.HIDDEN, device=device, requires_grad=True)
    weights = torch.ones(bodies.TOKENS, bodies.TOPK, device=device)
    ids = bodies.routes(rank, 0, 0.5, size).to(device)
    parameters = list(layer.experts.parameters())

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        y = layer(x, ids, weights)
        return y, *torch.autograd.grad(y.sum(), [x, *parameters])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward_and_backward()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        made = forward_and_backward()
    for at in (0, 3, 6):
        ids.copy_(bodies.routes(rank, at, 0.5, size))
        with torch.no_grad():
            for its in (layer, pair.plain):
                for parameter in its.experts.parameters():
                    parameter += 1
        graph.replay()
        y = pair.plain(x, ids, weights)
        wanted = y, *torch.autograd.grad(y.sum(), [x, *pair.plain.experts.parameters()])
        torch.cuda.synchronize()
        for one, other in zip(made, wanted):
            assert torch.equal(one, other)


@pytest.mark.gpu
@needs_gpu
def test_plans_on_a_gpu() -> None:
    """Those of the CPU, of batches that come again and experts that change."""
    sizes = {"experts": 64, "ranks": 8, "slots": 2}
    on_cpu, on_gpu = ferry.BatchBalancer(**sizes), ft.GpuBalancer(**sizes)
    for batch in (0, 1, 2, 1, 3, 0):
        make = torch.Generator().manual_seed(batch)
        routes = [torch.randint(-1, 8 + 8 * rank, (50, 4), generator=make) for rank in range(8)]
        counts = torch.stack([on_cpu.counts(each) for each in routes])
        for each, mine in zip(routes, counts):
            assert on_gpu.counts(each.cuda()).tolist() == mine.tolist()
            assert on_gpu.counts(each.int().cuda()).tolist() == mine.tolist()
        on_cpu.invalidate(batch)
        on_gpu.invalidate(batch)
        for each in (on_cpu, on_gpu):
            each.plan(counts if each is on_cpu else counts.cuda())
        assert on_gpu.table.tolist() == on_cpu.table
        assert on_gpu.fetches.tolist() == on_cpu.fetches
        assert on_gpu.load.tolist() == on_cpu.load
        assert on_gpu.plan_id.tolist() == [on_cpu.plan_id]
        on_cpu.fetched()
        on_gpu.fetched()
        for rank, mine in enumerate(routes):
            assert torch.equal(on_gpu.places(mine.cuda(), rank).cpu(), on_cpu.places(mine, rank))
    assert repr(on_gpu) == "ferry.torch.GpuBalancer(64 experts, 8 ranks, 2 slots, cuda:0)"
    with pytest.raises(ferry.InvalidArgumentError, match=r"ranks: got 72; expected 64 at most"):
        ft.GpuBalancer(experts=72, ranks=72, slots=1)
    with pytest.raises(ferry.InvalidArgumentError, match="counts"):
        on_gpu.plan(torch.zeros(8, 63, dtype=torch.int32, device="cuda"))


@pytest.mark.skipif(ferry.has_cuda, reason="a build with the CUDA engine")
def test_plans_on_a_gpu_need_a_build_with_cuda() -> None:
    with pytest.raises(ferry.UnsupportedError, match="FERRY_CUDA=ON"):
        ft.GpuBalancer(experts=8, ranks=4, slots=1)
    with pytest.raises(ferry.InvalidArgumentError, match="a multiple of 4"):
        ft.GpuBalancer(experts=9, ranks=4, slots=1)
