"""Bodies of tests of handles: their contents, and who may keep them. As in throughput_bodies."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from reference import answers, arrived, combined, expert, in_rank, make_job, rows_between
from throughput_bodies import returned_weights
from throughput_calls import check_rows, dispatched, same, several_hosts
from torch import Tensor

import deep_ep
from deep_ep.handles import find


def handle_contents(buffer: Any, device: str) -> None:
    """Every element of a handle, from the definition."""
    ranks, rank = buffer.group_size, buffer.rank
    for experts, sms in ((16, 20), (19, 6), (16, 2)):
        job = make_job(ranks, experts, seed=5)
        config, there = deep_ep.Config(sms), arrived(job, rank)
        x = job.x[rank].to(device)
        handle = dispatched(buffer, device, job, x, config=config)[4]
        assert isinstance(handle, tuple) and len(handle) == (10 if several_hosts(ranks) else 6)
        between, in_ranks = rows_between(job), in_rank(job, rank)
        prefix = between.cumsum(0).int()
        channels = sms // 2
        ends = [
            torch.stack(
                [torch.minimum(-(-pair // channels) * c, pair) for c in range(channels + 1)], 1
            )
            for pair in (between[rank], between[:, rank])
        ]
        sent, came = ends
        if not several_hosts(ranks):
            same(handle[0], prefix, device)
            same(handle[1], sent[:, 1:], device)
            same(handle[2], came[:, :-1], device)
            same(handle[3], there.token.int(), device)
            same(handle[4], in_ranks, device)
            ordinal = in_ranks.cumsum(0) - 1
            each = (-(-between[rank] // channels)).clamp(min=1)
            heads = torch.where(in_ranks, ordinal % each, -1).int()
            same(handle[5], heads, device)
        else:
            hosts = ranks // 8
            received = prefix[:, rank]
            same(handle[-4], received, device)
            same(handle[0], in_ranks, device)
            same(handle[1], sent[:, 1:].view(hosts, 8, -1).sum(1).int(), device)
            same(handle[2], sent[:, 1:], device)
            same(handle[3], came[:, 1:].view(hosts, 8, -1).sum(1).int(), device)
            same(handle[4], received[7::8], device)
            starts = received - between[:, rank]
            same(handle[5], starts[:, None] + came[:, :-1], device)
            meta = torch.stack([there.source // 8, torch.full_like(there.source, 1 << rank % 8)])
            same(handle[7], meta.t().int().contiguous().view(torch.uint8), device)
            to_host = in_ranks.view(-1 if len(in_ranks) else 0, hosts, 8).any(2)
            heads = torch.where(to_host, to_host.cumsum(0) - 1, -1).int()
            same(handle[8], heads, device)
            here = torch.full((len(there.token), 8), -1, dtype=torch.int32)
            here[:, rank % 8] = torch.arange(len(there.token))
            same(handle[9], here, device)


class _Layer(torch.autograd.Function):
    """Keeps a handle as some frameworks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.buffer.combine(grads[0].contiguous(), ctx.saved_tensors)[0]
        return ctx.buffer.dispatch(back, handle=ctx.saved_tensors)[0], None, None


def saved_handles(buffer: Any, device: str) -> None:
    """A handle's tensors are as good as the handle, whoever has kept them, and copies are, too."""
    rank = buffer.rank
    first, second = (make_job(buffer.group_size, seed=seed) for seed in (6, 7))
    got = dispatched(buffer, device, first, first.x[rank].to(device))
    layer = got[0].float().requires_grad_()
    out = _Layer.apply(layer, buffer, got[4])
    kept, copies = list(got[4]), [t.cpu().clone().to(device) for t in got[4]]
    handle = got[4]
    rebuilt = type(handle)(one for one in handle)
    mapped = torch.utils._pytree.tree_map(lambda one: one.view(one.shape), handle)
    assert type(rebuilt) is type(mapped) is tuple
    assert all(isinstance(one, Tensor) for one in handle + handle)
    for made in (1 * handle, handle * 1):
        assert len(made) == len(handle) and all(isinstance(one, Tensor) for one in made)
    assert None not in handle and handle.count(None) == 0
    assert len(handle[1:4]) == 3 and [*handle][-1] is handle[-1]
    assert pickle.loads(pickle.dumps(handle))[0].equal(handle[0])
    del handle
    rows = expert(rank, got[0])
    assert find(kept) is got[4].exchange and find(copies) is None
    del got
    for _ in range(3):  # others come in between
        dispatched(buffer, device, second, second.x[rank].to(device))
    expected = combined(first, rank, answers(first, rank, first.x))
    for handle in (tuple(kept), rebuilt, mapped, copies, copies):
        same(buffer.combine(rows, tuple(handle))[0], expected, device)
        again = buffer.dispatch(first.x[rank].to(device), handle=tuple(handle))[0]
        same(again, arrived(first, rank).rows(first.x), device)
        weights = arrived(first, rank).topk_weights.to(device)
        back = buffer.combine(rows, tuple(handle), topk_weights=weights)[1]
        same(back, returned_weights(first, rank), device)
    del kept, copies, rebuilt, mapped
    out.sum().backward()
    ones = [torch.ones(len(x), x.shape[1]) for x in first.x]
    sums = [ones[s] * in_rank(first, s).sum(1, keepdim=True) for s in range(first.ranks)]
    same(layer.grad, arrived(first, rank).rows(sums), device)


def copied_worst_case(buffer: Any, device: str) -> None:
    """Copies of a handle whose dispatch had a size of its own."""
    rank = buffer.rank
    job = make_job(buffer.group_size, seed=8)
    x = job.x[rank].to(device)
    got = dispatched(buffer, device, job, x, num_worst_tokens=250)
    copies = tuple(t.clone() for t in got[4])
    rows, weights = expert(rank, got[0]), got[2].nan_to_num()
    y, back, _ = buffer.combine(rows, copies, topk_weights=weights)
    same(y, combined(job, rank, answers(job, rank, job.x)), device)
    same(back, returned_weights(job, rank), device)
    again = buffer.dispatch(x, handle=copies)[0]
    assert again.shape[0] == 250
    check_rows(again, job.x, job, rank, device, "")


def copies_of_another(buffer: Any, device: str) -> None:
    """Copies whose is_token_in_rank says something else are refused on all ranks, and no rows are
    taken for those of other tokens."""
    rank = buffer.rank
    job = make_job(buffer.group_size, seed=9, tokens_of=(5,))
    rows, *_, handle, _ = dispatched(buffer, device, job, job.x[rank].to(device))
    copies = [t.clone() for t in handle]
    in_ranks = copies[4 if len(copies) == 6 else 0]
    in_ranks[:] = True
    for call in (
        lambda: buffer.combine(rows, tuple(copies)),
        lambda: buffer.dispatch(job.x[rank].to(device), handle=tuple(copies)),
    ):
        with pytest.raises(AssertionError, match="handle: got copies"):
            call()
    expected = combined(job, rank, answers(job, rank, job.x))
    same(buffer.combine(expert(rank, rows), handle)[0], expected, device)


ALL = [handle_contents, saved_handles, copied_worst_case, copies_of_another]
