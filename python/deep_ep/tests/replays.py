"""What the replays of frameworks share: which release they follow, small whole numbers, so that
every sum is exact in bf16 in whatever order a framework adds, a dense reference, and the experts
between dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from low_latency_reference import Batch, factor
from torch import Tensor


@dataclass(frozen=True)
class Framework:
    """A program whose calls of `deep_ep` a file replays; docs/compatibility.md shows it."""

    name: str
    release: str
    """The newest release whose files make these calls."""
    files: str
    """Those of its files that call `deep_ep`."""
    choice: str
    """How its users choose `deep_ep`."""


class Case(Batch):
    """Tokens of -4 to 4, weights of 1/2 and 1. At most 2 slots keep sums exact with scales of 1
    and 2."""

    def __init__(self, seed: int, tokens: Sequence[int], experts: int, hidden: int = 128) -> None:
        super().__init__(seed, tokens, experts, 2, hidden)
        make = torch.Generator().manual_seed(seed + 1)
        self.x = [torch.randint(-4, 5, x.shape, generator=make).bfloat16() for x in self.x]
        self.weights = [torch.randint(1, 3, w.shape, generator=make) / 2 for w in self.weights]

    def dense(self, rank: int, x: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """The sum over slots of weight times factor times x, in f64; differentiable."""
        x = self.x[rank].double() if x is None else x
        weights = self.weights[rank].double() if weights is None else weights
        ids = self.topk_idx[rank]
        each = torch.where(ids >= 0, weights * factor(ids).double(), 0.0)
        return x * each.sum(1, keepdim=True)

    def received(self, rank: int) -> list[tuple[int, int]]:
        """The (source rank, token) of the rows that a dispatch brings, one a token."""
        mine = self.local(rank)
        return [
            (source, token)
            for source in range(self.ranks)
            for token, ids in enumerate(self.topk_idx[source].tolist())
            if any(one in mine for one in ids)
        ]

    def received_rows(self, rank: int, of: Sequence[Tensor] | None = None) -> Tensor:
        """Their tokens, or the rows beside them of other tensors of all ranks."""
        of = self.x if of is None else of
        rows = [of[source][token] for source, token in self.received(rank)]
        return torch.stack(rows) if rows else of[0][:0]

    def received_ids(self, rank: int) -> Tensor:
        """Local expert ids of the slots, -1 for others."""
        first, end = self.local(rank).start, self.local(rank).stop
        ids = self.received_rows(rank, self.topk_idx)
        return torch.where((ids >= first) & (ids < end), ids - first, -1)

    def counts(self, rank: int, alignment: int = 1) -> list[int]:
        """Rows of each local expert, rounded up."""
        ids = self.received_ids(rank)
        counts = [int((ids == e).sum()) for e in range(len(self.local(rank)))]
        return [-(-count // alignment) * alignment for count in counts]


def expert_rows(x: Tensor, ids: Tensor, weights: Tensor, first: int) -> Tensor:
    """What the experts of a rank make of rank-major rows: the weighted sum of a token's local
    slots, in x's dtype. ids: local; first: the first expert of the rank."""
    each = torch.where(ids >= 0, weights * factor(ids + first), 0.0)
    return (x.float() * each.sum(1, keepdim=True)).to(x.dtype)


class Leaves:
    """A layer's inputs on a rank, which want gradients, and what arrives at its outputs."""

    def __init__(self, case: Case, rank: int, where: torch.device) -> None:
        self.case, self.rank = case, rank
        self.x = case.x[rank].clone().to(where).requires_grad_()
        self.probs = case.weights[rank].clone().to(where).requires_grad_()
        self.grad = torch.flip(case.x[rank], (0, 1)).to(where)

    def forward(
        self, dispatch: Callable[..., Any], combine: Callable[[Tensor, Any], Tensor]
    ) -> Tensor:
        """The layer by a framework's own functions. dispatch(x, ids, weights): rows, local ids,
        weights, counts, handle. combine(rows, handle)."""
        case, rank = self.case, self.rank
        ids = case.topk_idx[rank].to(self.x.device)
        rows, row_ids, row_probs, counts, handle = dispatch(self.x.contiguous(), ids, self.probs)
        assert list(counts) == case.counts(rank)
        combined = combine(expert_rows(rows, row_ids, row_probs, case.local(rank).start), handle)
        assert torch.equal(combined.detach().cpu().double(), case.dense(rank))
        return combined

    def check(self) -> None:
        """The gradients are those of the dense layer."""
        x = self.case.x[self.rank].double().requires_grad_()
        probs = self.case.weights[self.rank].double().requires_grad_()
        self.case.dense(self.rank, x, probs).backward(self.grad.cpu().double())
        for got, wanted in ((self.x.grad, x.grad), (self.probs.grad, probs.grad)):
            assert got is not None
            assert wanted is not None
            assert torch.equal(got.cpu().double(), wanted)
