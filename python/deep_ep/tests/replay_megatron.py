"""The calls of Megatron-LM, and of those that took its two autograd functions over: the backward of
a dispatch is a combine with the handle of the forward, that of a combine a dispatch with it."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from rank_buffers import ThreadComm
from replays import Case, Framework, Leaves, expert_rows
from torch import Tensor

import deep_ep
from deep_ep.utils import EventHandle, EventOverlap

FRAMEWORK = Framework(
    "Megatron-LM",
    "core 0.16.1",
    "moe/fused_a2a.py",
    "the flex dispatcher with `deepep`",
)

EXPERTS = 8


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


def layers_in_flight(first: deep_ep.Buffer, device: str) -> None:
    """Forward of all layers, then backward in the other order; a later layer is wider, so the
    buffer is made again while handles of the old one live; ranks without tokens take part."""
    comm, rank = first.group, first.rank
    tokens = [7, 0, 12, 3, 1, 2, 5, 4][: first.group_size]
    where = device_of(first, device)
    for use_async in (False, True):
        buffers = Buffers(comm)
        for _ in range(2):
            cases = [Case(80 + i, tokens, EXPERTS, wide) for i, wide in enumerate((128, 128, 256))]
            layers = [Leaves(case, rank, where) for case in cases]

            def send(*given: Tensor) -> Any:
                return Dispatch.apply(*given, buffers, use_async)  # noqa: B023

            def bring(rows: Tensor, handle: Any) -> Any:
                return Combine.apply(rows, buffers, handle, use_async)  # noqa: B023

            outs = [layer.forward(send, bring) for layer in layers]
            for layer, out in reversed(list(zip(layers, outs))):
                out.backward(layer.grad)  # type: ignore[no-untyped-call]
                layer.check()
        assert buffers.made == 2
        comm.allgather(None)


class Stage:
    """A part of a layer with a graph of its own, which frees what it has read as soon as it can: in
    the forward its inputs, in the backward the gradients that it was given."""

    def __init__(self, call: Any, frees: bool = True) -> None:
        self.call, self.frees = call, frees

    def forward(self, *inputs: Any) -> Any:
        self.inputs = [
            one.detach().requires_grad_(one.is_floating_point()) if torch.is_tensor(one) else one
            for one in inputs
        ]
        made = self.call(*self.inputs)
        self.outputs = made if isinstance(made, tuple) else (made,)
        if self.frees:
            free(*inputs)
        return made

    def backward(self, *grads: Tensor | None) -> list[Tensor]:
        pairs = [(out, grad) for out, grad in zip(self.outputs, grads) if grad is not None]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        free(*grads)
        return [one.grad for one in self.inputs if torch.is_tensor(one) and one.requires_grad]


def free(*tensors: Any) -> None:
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.is_floating_point():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())
            tensor.untyped_storage().resize_(0)
            assert tensor.untyped_storage().nbytes() == 0


def stages_free_what_they_read(first: deep_ep.Buffer, device: str) -> None:
    """With `--overlap-moe-expert-parallel-comm` a layer is cut into stages that free their inputs
    and gradients by `untyped_storage().resize_(0)`, those that `deep_ep` returned among them."""
    comm, rank = first.group, first.rank
    where = device_of(first, device)
    buffers = Buffers(comm)
    for number in range(4):
        case = Case(90 + number, [7, 0, 12, 3, 1, 2, 5, 4][: first.group_size], EXPERTS)
        layer = Leaves(case, rank, where)
        ids = case.topk_idx[rank].to(where)
        use_async = number % 2 == 1

        def send(x: Tensor, probs: Tensor) -> Any:
            return Dispatch.apply(x, ids, probs, buffers, use_async)  # noqa: B023

        sent = Stage(send, frees=False)
        rows, row_ids, row_probs, _, handle = sent.forward(layer.x, layer.probs)

        def answer(rows: Tensor, probs: Tensor) -> Tensor:
            return expert_rows(rows, row_ids, probs, case.local(rank).start)  # noqa: B023

        def gather(made: Tensor) -> Any:
            return Combine.apply(made, buffers, handle, use_async)  # noqa: B023

        experts, combined = Stage(answer), Stage(gather)
        last = Stage(lambda y: y * 2)
        y = last.forward(combined.forward(experts.forward(rows, row_probs)))
        assert torch.equal(y.detach().cpu().double(), case.dense(rank) * 2)
        grads = combined.backward(*last.backward(layer.grad.clone()))
        grad_rows, grad_row_probs = experts.backward(*grads)
        grad_x, grad_probs = sent.backward(grad_rows, None, grad_row_probs)
        layer.x.grad, layer.probs.grad = grad_x / 2, grad_probs / 2
        layer.check()
        free(grad_x, grad_probs)


ALL = (layers_in_flight, stages_free_what_they_read)
