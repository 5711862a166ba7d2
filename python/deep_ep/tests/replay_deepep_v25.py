"""The calls that DeepEP V2.5's README shows: deferred epilogues, their backward, decoding, experts
that are copied, buckets."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from replays import Case, Framework, Leaves
from torch import Tensor

import deep_ep

FRAMEWORK = Framework("DeepEP, V2.5", "2.5.0", "README.md", "itself")

EXPERTS, TOKENS, MOST = 8, [7, 0, 12, 3], 16


def forward(buffer: Any, x: Any, ids: Tensor, weights: Tensor, sync: bool, event: Any) -> Any:
    """What its `dispatch_forward` calls."""
    return buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=weights,
        num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST,
        expert_alignment=4,
        num_sms=buffer.get_theoretical_num_sms(EXPERTS, 2),
        previous_event=event,
        async_with_compute_stream=True,
        allocate_on_comm_stream=event is not None,
        do_cpu_sync=sync,
        do_expand=True,
        do_zero_padding=True,
        use_tma_aligned_col_major_sf=True,
        defer_epilogue=True,
    )


def answers(rows: Tensor, weights: Tensor, handle: Any, first: int) -> tuple[Tensor, Tensor]:
    """Of the experts: rows times their factor times their weight; and the factors."""
    each = torch.zeros(len(rows), device=rows.device)
    begin = 0
    for local, end in enumerate(handle.psum_num_recv_tokens_per_expert.tolist()):
        each[begin:end] = float(factor(torch.tensor(first + local)))
        begin = -(-end // handle.expert_alignment) * handle.expert_alignment
    live = torch.where(each[:, None] != 0, rows.float() * (each * weights)[:, None], 0.0)
    return live.to(rows.dtype), each


def _buffer(first: Any, **more: Any) -> Any:
    return deep_ep.EPBuffer(
        first.group, num_max_tokens_per_rank=MOST, hidden=128, num_topk=2, **more
    )


def deferred_training(first: Any, device: str) -> None:
    """Three layers forward, each wait as late as can be, then their backward along the handles."""
    rank, where = first.rank, device_of(first, device)
    buffer = _buffer(first)
    sms = buffer.get_theoretical_num_sms(EXPERTS, 2)
    layers = [Leaves(Case(210 + i, TOKENS, EXPERTS), rank, where) for i in range(3)]
    kept = []
    for number, layer in enumerate(layers):
        case, event = layer.case, buffer.capture() if number % 2 else None
        ids, weights = case.topk_idx[rank].to(where), layer.probs.detach()
        sent = forward(buffer, layer.x.detach(), ids, weights, True, event)
        rows, none, row_weights, handle = sent.current_stream_wait()
        assert none is None
        made, each = answers(rows, row_weights, handle, case.local(rank).start)
        shared = layer.x.detach()
        back = buffer.combine(
            made,
            handle=handle,
            bias=(shared, shared) if number == 2 else shared,
            num_sms=sms,
            previous_event=event,
            async_with_compute_stream=True,
            allocate_on_comm_stream=event is not None,
            defer_epilogue=True,
        )
        y, _ = back.wait()
        biases = case.x[rank].double() * (2 if number == 2 else 1)
        assert torch.equal(y.cpu().double(), case.dense(rank) + biases)
        kept.append((rows, row_weights, each, handle))
    for layer, (rows, weights, each, handle) in reversed(list(zip(layers, kept))):
        grad, _, _, _, event = buffer.dispatch(
            layer.grad,
            handle=handle,
            num_sms=sms,
            async_with_compute_stream=True,
            do_expand=True,
            do_zero_padding=True,
            use_tma_aligned_col_major_sf=True,
        )
        event.current_stream_wait()
        grad_rows = (grad.float() * (each * weights)[:, None]).to(grad.dtype)
        grad_weights = (grad.float() * rows.float()).sum(1) * each
        more, layer.probs.grad, event = buffer.combine(
            grad_rows,
            handle=handle,
            bias=layer.grad,  # of the shared experts
            topk_weights=grad_weights,
            num_sms=sms,
            async_with_compute_stream=True,
        )
        event.wait()
        layer.x.grad = more - layer.grad
        layer.check()
    first.group.allgather(None)


def deferred_decoding(first: Any, device: str) -> None:
    """Without a CPU sync, in bf16 and in e4m3; new routes in every step."""
    rank, where = first.rank, device_of(first, device)
    buffer = _buffer(first, use_fp8_dispatch=True)
    for step in range(4):
        case = Case(220 + step, TOKENS, EXPERTS)
        x: Any = case.x[rank].to(where)
        if step % 2:
            x = (x.to(torch.float8_e4m3fn), torch.ones(len(x), 1, device=where))
        given = [one[rank].to(where) for one in (case.topk_idx, case.weights)]
        rows, _, weights, handle = forward(buffer, x, *given, False, None).wait()
        if step % 2:
            values, scales = rows
            assert scales.stride(0) == 1
            live = torch.arange(len(values), device=where) < handle.num_expanded_tokens
            rows = torch.where(live[:, None], values.float(), 0.0).bfloat16()
        made, _ = answers(rows, weights, handle, case.local(rank).start)
        y, _ = buffer.combine(
            made, handle, async_with_compute_stream=True, defer_epilogue=True
        ).wait()
        assert torch.equal(y.cpu().double(), case.dense(rank))
    first.group.allgather(None)


def copies_and_buckets(first: Any, device: str) -> None:
    """A busy expert on every rank; gradients of dense layers in a bucket."""
    rank, ranks, where = first.rank, first.group_size, device_of(first, device)
    plan = deep_ep.BufferAllocator()
    weights = plan.allocate((1, 64), torch.bfloat16)
    grads = plan.allocate((1, 64), torch.float32)
    buffer = _buffer(first, lb_allocation_plan_or_num_bytes=plan)
    local = EXPERTS // ranks
    mapping = torch.tensor([[-1 if r == 0 else 0] for r in range(ranks)], dtype=torch.int32)
    own = torch.full((local, 64), float(rank + 1), device=weights.device).bfloat16()
    mapping = mapping.to(weights.device)
    buffer.lb_prefetch_weights(weights, own, mapping).wait()
    assert rank == 0 or (weights == 1).all()
    grads.fill_(1)
    expert_grads = torch.ones(local, 64, device=weights.device)
    buffer.lb_reduce_grads(grads, expert_grads, mapping).wait()
    assert (expert_grads[0] == (ranks if rank == 0 else 1)).all()

    plan = deep_ep.BufferAllocator()
    x = plan.allocate((ranks, 1024), torch.float32)
    bucket = deep_ep.BucketBuffer(first.group, plan)
    x[rank].fill_(rank)
    gathered = bucket.all_gather(x[rank]).wait()
    assert gathered.view(ranks, -1)[:, 0].tolist() == list(range(ranks))
    x.fill_(1)
    assert (bucket.reduce_scatter(x).wait() == ranks).all()
    x.fill_(1)
    assert (bucket.all_reduce(x).wait() == ranks).all()
    external = torch.full((8,), float(rank), device=x.device)
    with bucket.session():
        assert (bucket.all_reduce(external).wait() == sum(range(ranks))).all()
    assert where.type == device
    first.group.allgather(None)


ALL = (deferred_training, deferred_decoding, copies_and_buckets)
