"""The calls of TorchTitan: everything on the communication stream, handles behind numbers, a
combine whose event is waited for later, and activation checkpoints, which dispatch once more in the
backward."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from rank_buffers import ThreadComm
from replays import Case, Framework
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deep_ep import Buffer, EventHandle, EventOverlap

FRAMEWORK = Framework(
    "TorchTitan",
    "0.2.2",
    "distributed/deepep/deepep.py",
    "`deepep`",
)

EXPERTS, TOKENS = 8, [7, 0, 12, 3]
STREAM: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}


class Exchange:
    """The process's buffer, its handles by number, and the combine that is still to be waited
    for."""

    def __init__(self, comm: ThreadComm) -> None:
        self.buffer = Buffer(None, 1 << 20, comm=comm)
        self.handles: dict[int, Any] = {}
        self.calls = 0
        self.pending: EventOverlap | None = None

    def keep(self, handle: Any) -> Tensor:
        self.calls += 1
        self.handles[self.calls] = handle
        return torch.tensor([self.calls])

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.current_stream_wait()
        self.pending = None


def now() -> EventOverlap:
    return EventOverlap(EventHandle())


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, ids: Tensor, exchange: Exchange, layout: Any
    ) -> Any:
        per_rank, per_rdma_rank, per_expert, in_rank = layout
        rows, row_ids, row_scores, counts, handle, after = exchange.buffer.dispatch(
            x=x,
            topk_idx=ids,
            topk_weights=scores.to(torch.float32),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=now(),
            **STREAM,
        )
        after.current_stream_wait()
        ctx.exchange, ctx.handle = exchange, handle
        return rows, row_ids, row_scores, torch.tensor(counts), exchange.keep(handle)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_rows, _, grad_scores, _, _ = grads
        grad_x, grad_scores, after = ctx.exchange.buffer.combine(
            x=grad_rows,
            handle=ctx.handle,
            topk_weights=grad_scores.float(),
            previous_event=now(),
            **STREAM,
        )
        after.current_stream_wait()
        return grad_x, grad_scores, None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, number: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.handle = exchange, exchange.handles.pop(int(number.item()))
        combined, _, exchange.pending = exchange.buffer.combine(
            x=rows, handle=ctx.handle, previous_event=now(), **STREAM
        )
        assert isinstance(combined, Tensor)
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, _, _, _, _, after = ctx.exchange.buffer.dispatch(
            x=grads[0],
            topk_idx=None,
            topk_weights=None,
            num_tokens_per_rank=None,
            num_tokens_per_rdma_rank=None,
            is_token_in_rank=None,
            num_tokens_per_expert=None,
            handle=ctx.handle,
            previous_event=now(),
            **STREAM,
        )
        after.current_stream_wait()
        return rows, None, None


def moe_layer(x: Tensor, scores: Tensor, case: Case, exchange: Exchange) -> Tensor:
    """Rows sorted by expert, a product for each expert, and back."""
    rank = exchange.buffer.rank
    ids = case.topk_idx[rank].to(x.device).masked_fill(scores.detach() == 0, -1)
    per_rank, per_rdma_rank, per_expert, in_rank, _ = exchange.buffer.get_dispatch_layout(
        topk_idx=ids, num_experts=EXPERTS
    )
    layout = per_rank, per_rdma_rank, per_expert, in_rank
    rows, row_ids, row_scores, counts, number = Dispatch.apply(  # type: ignore[no-untyped-call]
        x, scores, ids, exchange, layout
    )
    mask = row_ids != -1
    chosen = row_ids[mask]
    order = torch.argsort(chosen, stable=True)
    source = torch.arange(len(rows), device=rows.device).repeat_interleave(mask.sum(1))[order]
    by_expert, by_score = rows[source], row_scores[mask][order]
    made = []
    for e, part in enumerate(by_expert.split(counts.tolist())):
        own = float(factor(torch.tensor(case.local(rank).start + e)))
        made.append((part.float() * own).to(part.dtype))
    weighted = (torch.cat(made).float() * by_score[:, None]).to(x.dtype)
    back = torch.zeros_like(rows).index_add(0, source, weighted)
    combined: Tensor = Combine.apply(back, number, exchange)  # type: ignore[no-untyped-call]
    exchange.wait()
    return combined


def layers_with_and_without_checkpoints(first: Buffer, device: str) -> None:
    """A checkpointed layer is dispatched and combined once more before its backward."""
    exchange, rank, where = Exchange(first.group), first.rank, device_of(first, device)
    for again in (False, True):
        cases = [Case(90 + i, TOKENS, EXPERTS) for i in range(3)]
        leaves = [
            [of[rank].clone().to(where).requires_grad_() for of in (case.x, case.weights)]
            for case in cases
        ]
        total = torch.zeros((), device=where)
        for case, (x, scores) in zip(cases, leaves):
            call = (x, scores, case, exchange)
            out = checkpoint(moe_layer, *call, use_reentrant=False) if again else moe_layer(*call)
            assert torch.equal(out.detach().cpu().double(), case.dense(rank))
            total = total + (out.float() * torch.flip(x.detach(), (0, 1)).float()).sum()
        total.backward()  # type: ignore[no-untyped-call]
        for case, mine in zip(cases, leaves):
            own = [of[rank].double().requires_grad_() for of in (case.x, case.weights)]
            case.dense(rank, *own).backward(torch.flip(case.x[rank], (0, 1)).double())  # type: ignore[no-untyped-call]
            for got, wanted in zip(mine, own):
                assert got.grad is not None
                assert wanted.grad is not None
                assert torch.equal(got.grad.cpu().double(), wanted.grad)
    first.group.allgather(None)


def inference_keeps_no_handle(first: Buffer, device: str) -> None:
    """Layers under `torch.inference_mode()`, whose handles are forgotten after the combine."""
    exchange, rank, where = Exchange(first.group), first.rank, device_of(first, device)
    case = Case(99, TOKENS, EXPERTS)
    with torch.inference_mode():
        for _ in range(3):
            out = moe_layer(case.x[rank].to(where), case.weights[rank].to(where), case, exchange)
            assert torch.equal(out.cpu().double(), case.dense(rank))
    assert not exchange.handles
    first.group.allgather(None)


ALL = (layers_with_and_without_checkpoints, inference_keeps_no_handle)
