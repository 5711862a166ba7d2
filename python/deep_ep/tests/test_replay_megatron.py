"""The calls of Megatron-LM, and of those that took its two autograd functions over: the backward of
a dispatch is a combine with the handle of the forward, that of a combine a dispatch with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES, device_of
from rank_buffers import ThreadComm, run_ranks
from replays import Case, expert_rows
from torch import Tensor

import deep_ep
from deep_ep.utils import EventHandle, EventOverlap

RANKS, EXPERTS = 4, 8


class Buffers:
    """The buffer of a process: made again when it is too small or the group is another."""

    def __init__(self, comm: ThreadComm) -> None:
        self.comm = comm
        self.buffer: deep_ep.Buffer | None = None
        self.made = 0

    def get(self, x: Tensor) -> deep_ep.Buffer:
        ranks, row = self.comm.Get_size(), x.size(1) * max(x.element_size(), 2)
        nvl = rdma = 0
        for config in (
            deep_ep.Buffer.get_dispatch_config(ranks),
            deep_ep.Buffer.get_combine_config(ranks),
        ):
            nvl = max(config.get_nvl_buffer_size_hint(row, ranks), nvl)
            rdma = max(config.get_rdma_buffer_size_hint(row, ranks), rdma)
        old = self.buffer
        if (
            old is None
            or old.group != self.comm
            or old.num_nvl_bytes < nvl
            or old.num_rdma_bytes < rdma
        ):
            self.buffer = deep_ep.Buffer(None, nvl, rdma, comm=self.comm)
            self.made += 1
        assert self.buffer is not None
        return self.buffer


def started(use_async: bool) -> EventOverlap | None:
    return EventOverlap(EventHandle()) if use_async else None


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, probs: Tensor, buffers: Buffers, use_async: bool
    ) -> Any:
        buffer = buffers.get(x)
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            ids,
            EXPERTS,
            previous_event=started(use_async),
            async_finish=use_async,
            allocate_on_comm_stream=use_async,
        )
        rows, row_ids, row_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=use_async,
            allocate_on_comm_stream=use_async,
        )
        if use_async:
            after.current_stream_wait()
        ctx.rest = buffers, handle, use_async
        return rows, row_ids, row_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_rows, _, grad_probs, _, _ = grads
        buffers, handle, use_async = ctx.rest
        grad_x, grad_probs, after = buffers.get(grad_rows).combine(
            grad_rows.contiguous(),
            handle,
            topk_weights=grad_probs.float(),
            previous_event=started(use_async),
            async_finish=use_async,
            allocate_on_comm_stream=use_async,
        )
        if use_async:
            after.current_stream_wait()
        return grad_x, None, grad_probs, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffers: Buffers, handle: Any, use_async: bool) -> Any:
        combined, _, after = buffers.get(rows).combine(
            rows,
            handle=handle,
            async_finish=use_async,
            previous_event=started(use_async),
            allocate_on_comm_stream=use_async,
        )
        if use_async:
            after.current_stream_wait()
        ctx.rest = buffers, use_async
        # As xtuner keeps it: every part of an intranode handle is a tensor.
        ctx.save_for_backward(*handle)
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffers, use_async = ctx.rest
        grad_rows, _, _, _, _, after = buffers.get(grads[0]).dispatch(
            grads[0].contiguous(),
            handle=ctx.saved_tensors,
            previous_event=started(use_async),
            async_finish=use_async,
            allocate_on_comm_stream=use_async,
        )
        if use_async:
            after.current_stream_wait()
        return grad_rows, None, None, None


class Leaves:
    """Inputs of a rank that want gradients, and what arrives at their outputs."""

    def __init__(self, case: Case, rank: int, where: torch.device) -> None:
        self.case, self.rank = case, rank
        self.x = case.x[rank].clone().to(where).requires_grad_()
        self.probs = case.weights[rank].clone().to(where).requires_grad_()
        self.grad = torch.flip(case.x[rank], (0, 1)).to(where)

    def layer(self, buffers: Buffers, use_async: bool) -> Tensor:
        case, rank = self.case, self.rank
        ids = case.topk_idx[rank].to(self.x.device)
        rows, row_ids, row_probs, counts, handle = Dispatch.apply(  # type: ignore[no-untyped-call]
            self.x.contiguous(), ids, self.probs, buffers, use_async
        )
        assert counts.tolist() == case.counts(rank)
        made = expert_rows(rows, row_ids, row_probs, case.local(rank).start)
        combined: Tensor = Combine.apply(made, buffers, handle, use_async)  # type: ignore[no-untyped-call]
        assert torch.equal(combined.detach().cpu().double(), case.dense(rank))
        return combined

    def check(self) -> None:
        x = self.case.x[self.rank].double().requires_grad_()
        probs = self.case.weights[self.rank].double().requires_grad_()
        self.case.dense(self.rank, x, probs).backward(self.grad.cpu().double())
        assert x.grad is not None
        assert probs.grad is not None
        assert self.x.grad is not None
        assert self.probs.grad is not None
        assert torch.equal(self.x.grad.cpu().double(), x.grad)
        assert torch.equal(self.probs.grad.cpu().double(), probs.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, RANKS])
def test_layers_in_flight(ranks: int, use_async: bool, device: str) -> None:
    """Forward of all layers, then backward in the other order, twice; a later layer is wider, so
    the buffer is made again while handles of the old one live; ranks without tokens take part."""

    def body(comm: ThreadComm) -> None:
        buffers, rank = Buffers(comm), comm.Get_rank()
        for _ in range(2):
            cases = [
                Case(80 + i, [7, 0, 12, 3][:ranks], EXPERTS, h)
                for i, h in enumerate((128, 128, 256))
            ]
            where = device_of(buffers.get(cases[0].x[rank]), device)
            layers = [Leaves(case, rank, where) for case in cases]
            outs = [layer.layer(buffers, use_async) for layer in layers]
            for layer, out in reversed(list(zip(layers, outs))):
                out.backward(layer.grad)
                layer.check()
        assert buffers.made == 2
        comm.allgather(None)

    run_ranks(ranks, body)
