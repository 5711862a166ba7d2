"""Calls take tensors that require a gradient, as the original's do, and have none: callers wrap
them in autograd functions of their own, or want no gradient and do not say so."""

from __future__ import annotations

from typing import Any

import torch
from low_latency_bodies import CAPACITY, experts, own
from low_latency_reference import Batch
from rank_buffers import run_buffers
from reference import make_job
from throughput_calls import dispatched


def grown(tensor: torch.Tensor) -> torch.Tensor:
    """As a layer before makes it: one that is no leaf."""
    return tensor.clone().requires_grad_() * 1


def test_throughput_mode() -> None:
    def body(buffer: Any) -> None:
        job = make_job(buffer.group_size)
        x, idx = job.x[buffer.rank], job.topk_idx[buffer.rank]
        results = []
        for make in (torch.clone, grown):
            per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, job.experts)
            rows, _, weights, _, handle, _ = buffer.dispatch(
                make(x),
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_ranks,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=make(job.topk_weights[buffer.rank]),
            )
            again = buffer.dispatch(make(x), handle=handle)[0]
            back, sums, _ = buffer.combine(
                make(rows), handle, topk_weights=make(weights), bias=(make(x), make(x))
            )
            others = buffer.combine(make(rows), handle, topk_weights=make(weights[:, :1]))[1]
            codes = make(torch.ones(len(x), 1))
            scaled = dispatched(buffer, "cpu", job, (x.to(torch.float8_e4m3fn), codes))[0][1]
            results.append([rows, weights, again, back, sums, others, scaled])
        for plain, made in zip(*results):
            assert torch.equal(made, plain) and not made.requires_grad

    run_buffers(2, body)


def test_low_latency_mode() -> None:
    def body(buffer: Any) -> None:
        batch = Batch(3, [4, 6], 4, 2, 128)
        x, topk_idx, weights = own(buffer, batch, "cpu")
        for end in ({}, {"return_recv_hook": True}):
            for out in (None, torch.zeros_like(x).requires_grad_()):
                rows, _, handle, _, hook = buffer.low_latency_dispatch(
                    grown(x), topk_idx, CAPACITY, batch.experts, use_fp8=False, **end
                )
                if hook is not None:
                    hook()
                made = grown(experts(buffer, batch, rows))
                back, _, hook = buffer.low_latency_combine(
                    made, topk_idx, grown(weights), handle, out=out, **end
                )
                if hook is not None:
                    hook()
                assert torch.equal(back, batch.combined(buffer.rank))
                assert not rows.requires_grad and (out is None or back is out)

    run_buffers(2, body, low_latency_mode=True)
