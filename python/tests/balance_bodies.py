"""Layers whose busy experts have copies, for the tests of balanced experts."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

import ferry
import ferry.torch as ft
from ferry import torch_balance

RANKS, LOCAL, SLOTS, TOPK, HIDDEN, TOKENS = 8, 2, 2, 2, 16, 24
EXPERTS = RANKS * LOCAL
FIXED = {"max_recv_rows": TOKENS * TOPK}


class Experts(nn.Module):
    """Of one rank: two parameters of different shapes, all of whole numbers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(50 + rank)
        scale = torch.randint(-2, 3, (LOCAL, HIDDEN), generator=make)
        mix = torch.randint(-1, 2, (LOCAL, HIDDEN, HIDDEN), generator=make)
        self.scale, self.mix = nn.Parameter(scale.float()), nn.Parameter(mix.float())

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        # Without a wait of the CPU, so that a graph can hold it.
        at = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        out = torch.zeros_like(rows)
        for begin, end, scale, mix in zip(offsets, offsets[1:], self.scale, self.mix):
            block = torch.where((at >= begin) & (at < end), rows, 0)
            out = out + block @ mix + block * scale
        return out


def routes(rank: int, step: int, share: float, ranks: int = RANKS) -> Tensor:
    """A share of the slots names experts of rank 0 (later steps: of rank 1), and so that rank has
    share * ranks of the mean load. The others name any; some name none."""
    make = torch.Generator().manual_seed(1000 * step + rank)
    anyone = torch.randint(-1, ranks * LOCAL, (TOKENS, TOPK), generator=make)
    busy = step // 3 % ranks * LOCAL + torch.randint(0, LOCAL, (TOKENS, TOPK), generator=make)
    return torch.where(torch.rand(TOKENS, TOPK, generator=make) < share, busy, anyone)


class Pair:
    """A layer with copies and one without, with the same weights, on one rank."""

    def __init__(self, bootstrap: Any, where: dict[str, Any] | None = None, **options: Any) -> None:
        common: dict[str, Any] = {"deadline": 20.0} | (where or {})
        self.ranks = ferry.Collectives(bootstrap, **common)
        rank, size = self.ranks.rank, self.ranks.size
        self.plain_group = ferry.Group(bootstrap, experts=size * LOCAL, **common)
        self.group = ferry.Group(bootstrap, experts=size * (LOCAL + SLOTS), **common)
        self.device = torch.device(self.group.device)
        its = ("copy_rows", "max_recv_rows")
        rest = {name: value for name, value in options.items() if name not in its}
        self.plain = ft.ExpertParallel(self.plain_group, Experts(rank).to(self.device), **rest)
        self.balanced = ft.ExpertParallel(
            self.group,
            Experts(rank).to(self.device),
            **{"balance": SLOTS, "collectives": self.ranks, "copy_rows": 0} | options,
        )

    def close(self) -> None:
        self.ranks.barrier()
        for each in (self.ranks, self.plain_group, self.group):
            each.destroy()


def step(layer: ft.ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """The result and all gradients."""
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = layer(leaves[0], ids, leaves[1])
    (y * torch.arange(HIDDEN, device=y.device) % 3).sum().backward()
    grads = [leaf.grad for leaf in (*leaves, *layer.experts.parameters())]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def over_mean(load: list[int]) -> float:
    return max(load) * len(load) / sum(load)


def training(pair: Pair, skew: float, steps: int) -> None:
    """All numbers are whole, so sums are exact in any order: results, losses, gradients and weights
    after each step are those of the layer without copies, bit for bit."""
    balancer = pair.balanced.balancer
    assert balancer is not None
    rank, size = pair.group.rank, pair.group.size
    for at in range(steps):
        make = torch.Generator().manual_seed(rank)
        x = torch.randint(-2, 3, (TOKENS, HIDDEN), generator=make).float()
        weights = torch.randint(1, 3, (TOKENS, TOPK), generator=make).float()
        given = x, routes(rank, at, skew / size, size), weights
        x, ids, weights = (each.to(pair.device) for each in given)
        plain = step(pair.plain, x, ids, weights)
        balanced = step(pair.balanced, x, ids, weights)
        assert len(plain) == len(balanced) == 5
        for one, other in zip(plain, balanced):
            assert torch.equal(one, other)
        assert over_mean([*map(int, balancer.load)]) < 1.03  # of 48 slots a rank one is 2 percent
        for layer in (pair.plain, pair.balanced):
            with torch.no_grad():  # weights differ in the next step
                for parameter in layer.experts.parameters():
                    parameter += (parameter.grad > 0).float()
                    parameter.grad = None


def decoding(pair: Pair) -> None:
    """Copies serve again."""
    balancer = pair.balanced.balancer
    assert balancer is not None
    rank, size = pair.group.rank, pair.group.size
    make = torch.Generator().manual_seed(rank)
    weights = torch.ones(TOKENS, TOPK, device=pair.device)
    for at in (0, 1, 3, 4):
        x = torch.randint(-2, 3, (TOKENS, HIDDEN), generator=make).float().to(pair.device)
        ids = routes(rank, at, 0.5, size).to(pair.device)
        plain = pair.plain.decode(x, ids, weights)
        assert torch.equal(plain, pair.balanced.decode(x, ids, weights))
        assert over_mean(balancer.load) < 1.03
        ahead = pair.balanced.decode(x, ids, weights, meanwhile=lambda: None)
        assert torch.equal(plain, ahead)
        assert not any(e >= 0 for row in balancer.fetches for e in row)


class TensorBalancer:
    """What a GpuBalancer is to GpuCopies, on a CPU. A plan changes tensors in place, as there."""

    def __init__(self, device: Any = None, **sizes: int) -> None:
        its = self._on_cpu = ferry.BatchBalancer(**sizes)
        self.experts = its.experts
        self.table, self.fetches, self.load = map(torch.tensor, (its.table, its.fetches, its.load))
        self.plan_id = torch.tensor([its.plan_id])
        self.fetched, self.places, self.fetching = its.fetched, its.places, its.fetching

    def counts(self, topk_idx: Tensor, out: Tensor) -> None:
        out.copy_(torch.as_tensor(self._on_cpu.counts(topk_idx)))

    def plan(self, counts: Tensor, again: bool) -> None:
        its = self._on_cpu
        for rank in counts[:, -1].nonzero().flatten().tolist():
            its.invalidate(rank)
        its.plan(counts[:, :-1].contiguous(), again=again)
        self.plan_id.fill_(its.plan_id)
        for name in ("table", "fetches", "load"):
            getattr(self, name).copy_(torch.tensor(getattr(its, name)))


class Late:
    """The end of moves that come as late as they may: when it is waited for."""

    def __init__(self, moves: Any) -> None:
        self._moves = [moves]

    def hold(self, tensor: Tensor) -> None: ...

    def wait(self) -> None:
        while self._moves:
            self._moves.pop()()


def beside(ranks: Any, moves: Any) -> Any:
    """What torch_gpu_copies._beside is with streams of GPUs: moves come at once."""
    moves()
    return Late(lambda: None)


def late(ranks: Any, moves: Any) -> Any:
    """The same, but that they come late."""
    return Late(moves)


def of_lists(move: Any) -> Any:
    """copy_experts or reduce_experts of CPUs, which take tables as lists."""

    def moved(ranks: Any, x: Tensor, out: Tensor, table: Tensor) -> Any:
        return move(ranks, x, out, table.tolist())

    return moved


def on_either_engine(
    boot: Any, where: dict[str, Any], body: Any, arguments: Any, options: Any
) -> None:
    """For RankProcesses: one body on this rank, with a pair of layers."""
    pair = Pair(boot, where, decode_tokens=TOPK * TOKENS, **options)
    body(pair, *arguments)
    pair.close()


def die_in_call(calls: int, during: bool) -> None:
    """This process ends itself at the `calls`-th move of weights or gradients: before it, or while
    it is under way."""
    left = [calls]

    def dying(move: Any) -> Any:
        def moved(*given: Any, **options: Any) -> Any:
            left[0] -= 1
            event = None if left[0] == 0 and not during else move(*given, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return event

        return moved

    torch_balance.copy_experts = dying(torch_balance.copy_experts)
    torch_balance.reduce_experts = dying(torch_balance.reduce_experts)
