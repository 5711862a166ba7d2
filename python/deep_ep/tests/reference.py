"""What the interface says, in plain torch, from the inputs of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TOKENS = (13, 0, 7, 29, 1, 18, 5, 11)  # of the ranks, in turn


@dataclass
class Job:
    """Inputs of every rank; every rank makes all of them from the seed."""

    ranks: int
    experts: int
    x: list[Tensor]  # bf16 [T, H]
    topk_idx: list[Tensor]  # i64 [T, K]
    topk_weights: list[Tensor]  # f32 [T, K]
    _found: dict[Any, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What follows from the inputs, which nobody changes behind the first call. Ranks that are
        threads compute it once."""
        with self._lock:
            if key not in self._found:
                self._found[key] = make()
            found: T = self._found[key]
            return found

    def to(self, device: str) -> Job:
        lists = [[t.to(device) for t in ts] for ts in (self.x, self.topk_idx, self.topk_weights)]
        return Job(self.ranks, self.experts, *lists)

    def rank_of(self, expert: int) -> int:
        return next(r for r in range(self.ranks) if expert < first_expert(self, r + 1))


def first_expert(job: Job, rank: int) -> int:
    """Contiguous blocks, the first E mod R of them one longer."""
    small, more = divmod(job.experts, job.ranks)
    return rank * small + min(rank, more)


def make_job(
    ranks: int,
    experts: int = 16,
    hidden: int = 64,
    topk: int = 3,
    seed: int = 1,
    skip: float = 0.2,
    tokens_of: tuple[int, ...] = TOKENS,
) -> Job:
    """Distinct experts in a route; some slots unused, some tokens without any."""
    random = torch.Generator().manual_seed(seed)
    job = Job(ranks, experts, [], [], [])
    for rank in range(ranks):
        tokens = tokens_of[rank % len(tokens_of)]
        scores = torch.rand(tokens, experts, generator=random)
        idx = scores.argsort(1)[:, :topk].contiguous()
        idx[torch.rand(idx.shape, generator=random) < skip] = -1
        if tokens > 4:
            idx[3] = -1
        job.x.append(torch.randn(tokens, hidden, generator=random).bfloat16())
        job.topk_idx.append(idx)
        job.topk_weights.append(torch.rand(idx.shape, generator=random))
    return job


@cache
def shared_job(*args: Any, **kwargs: Any) -> Job:
    """`make_job`, of all ranks that are threads; nobody changes it."""
    return make_job(*args, **kwargs)


@cache
def lopsided_job(ranks: int, case: str) -> Job:
    """Of all ranks that are threads: all tokens to "one expert", "no token" or "no route"."""
    job = make_job(ranks, seed=9)
    for rank in range(ranks):
        if case == "no token":
            job.x[rank], job.topk_idx[rank] = job.x[rank][:0], job.topk_idx[rank][:0]
            job.topk_weights[rank] = job.topk_weights[rank][:0]
            continue
        job.topk_idx[rank][:] = -1
        if case == "one expert":
            job.topk_idx[rank][:, 1] = job.experts - 1
    return job


def in_rank(job: Job, source: int) -> Tensor:
    """bool [T, R]."""
    return job.once(("in rank", source), lambda: _in_rank(job, source))


def _in_rank(job: Job, source: int) -> Tensor:
    idx = job.topk_idx[source]
    columns = []
    for rank in range(job.ranks):
        first, end = first_expert(job, rank), first_expert(job, rank + 1)
        columns.append(((idx >= first) & (idx < end)).any(1))
    return torch.stack(columns, 1)


@dataclass
class Arrived:
    """What a rank receives: ascending source rank, then token."""

    source: Tensor  # i64 [N]
    token: Tensor  # i64 [N]
    topk_idx: Tensor  # i64 [N, K], local
    topk_weights: Tensor  # f32 [N, K]
    per_expert: list[int]

    def rows(self, of_ranks: list[Tensor]) -> Tensor:
        """The rows [N, ..] out of what each rank sends, [T, ..]."""
        dtype = of_ranks[0].dtype
        if dtype.itemsize == 1:  # not every torch can pick rows of fp8
            of_ranks = [one.view(torch.uint8) for one in of_ranks]
        picked = (of_ranks[s][self.token[self.source == s]] for s in range(len(of_ranks)))
        return torch.cat([of_ranks[0][:0], *picked]).view(dtype)


def arrived(job: Job, rank: int) -> Arrived:
    return job.once(("arrived", rank), lambda: _arrived(job, rank))


def _arrived(job: Job, rank: int) -> Arrived:
    first, end = first_expert(job, rank), first_expert(job, rank + 1)
    sources, tokens, ids, weights = [], [], [], []
    for source in range(job.ranks):
        here = in_rank(job, source)[:, rank].nonzero().flatten()
        sources.append(torch.full_like(here, source))
        tokens.append(here)
        chosen = job.topk_idx[source][here]
        local = (chosen >= first) & (chosen < end)
        ids.append(torch.where(local, chosen - first, -1))
        weights.append(torch.where(local, job.topk_weights[source][here], 0.0))
    every = torch.cat(ids)
    counts = [int((every == e).sum()) for e in range(end - first)]
    return Arrived(torch.cat(sources), torch.cat(tokens), every, torch.cat(weights), counts)


def expert(rank: int, rows: Tensor) -> Tensor:
    """What a rank makes of its rows, the same bits wherever it is computed."""
    return (rows.float() * (rank + 1) + rank).to(rows.dtype)


def combined(job: Job, source: int, rows: list[Tensor], biases: Any = ()) -> Tensor:
    """[T, ..]: fp32 from +0 in ascending rank, then the biases, rounded once. rows: of each rank,
    for what `source` sent there: [tokens of source in that rank, ..]."""
    total = torch.zeros(job.x[source].shape[0], *rows[0].shape[1:])
    for rank in range(job.ranks):
        here = in_rank(job, source)[:, rank]
        total[here] += rows[rank].float()
    for bias in biases:
        total += bias.float()
    return total.to(rows[0].dtype)


def answers(job: Job, source: int, of: list[Tensor]) -> list[Tensor]:
    """Every rank's `expert` of what `source` sent there."""
    return [expert(r, of[source][in_rank(job, source)[:, r]]) for r in range(job.ranks)]


def rows_between(job: Job) -> Tensor:
    """i32 [R, R]: rows that rank s sends to rank d."""
    return torch.stack([in_rank(job, s).sum(0) for s in range(job.ranks)]).int()
