"""Layers whose busy experts have copies, for test_balanced_experts.py."""

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


class Experts(nn.Module):
    """Of one rank: two parameters of different shapes, all of whole numbers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(50 + rank)
        scale = torch.randint(-2, 3, (LOCAL, HIDDEN), generator=make)
        mix = torch.randint(-1, 2, (LOCAL, HIDDEN, HIDDEN), generator=make)
        self.scale, self.mix = nn.Parameter(scale.float()), nn.Parameter(mix.float())

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        blocks = zip(rows.tensor_split(offsets[1:-1]), self.scale, self.mix)
        return torch.cat([block @ mix + block * scale for block, scale, mix in blocks])


def routes(rank: int, step: int, share: float) -> Tensor:
    """A share of the slots names experts of rank 0 (later steps: of rank 1), and so that rank has
    share * RANKS of the mean load. The others name any; some name none."""
    make = torch.Generator().manual_seed(1000 * step + rank)
    anyone = torch.randint(-1, EXPERTS, (TOKENS, TOPK), generator=make)
    busy = step // 3 * LOCAL + torch.randint(0, LOCAL, (TOKENS, TOPK), generator=make)
    return torch.where(torch.rand(TOKENS, TOPK, generator=make) < share, busy, anyone)


class Pair:
    """A layer with copies and one without, with the same weights, on one rank."""

    def __init__(self, bootstrap: Any, **options: Any) -> None:
        rank = bootstrap.rank
        self.ranks = ferry.Collectives(bootstrap, deadline=20)
        self.plain_group = ferry.Group(bootstrap, experts=EXPERTS, deadline=20)
        self.group = ferry.Group(bootstrap, experts=EXPERTS + RANKS * SLOTS, deadline=20)
        rest = {name: value for name, value in options.items() if name != "copy_rows"}
        self.plain = ft.ExpertParallel(self.plain_group, Experts(rank), **rest)
        self.balanced = ft.ExpertParallel(
            self.group,
            Experts(rank),
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
    (y * torch.arange(HIDDEN) % 3).sum().backward()
    grads = [leaf.grad for leaf in (*leaves, *layer.experts.parameters())]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


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
