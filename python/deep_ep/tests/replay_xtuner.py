"""The calls of XTuner: one buffer that is made for low-latency mode, too, is used for training;
everything is asynchronous, and backwards of one micro-batch wait for events of another."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from replays import Case, Framework, Leaves
from torch import Tensor

import deep_ep
from deep_ep import EventOverlap
from deep_ep_cpp import EventHandle

FRAMEWORK = Framework(
    "XTuner",
    "1.0.1",
    "ops/comm/deepep_op.py, module/dispatcher/deepep.py",
    '`dispatcher="deepep"` of a MoE model',
)

EXPERTS = 8


def captured() -> EventOverlap:
    return EventOverlap(EventHandle())


def make_buffer(comm: Any, hidden: int) -> deep_ep.Buffer:
    ranks, nvl = comm.Get_size(), 0
    rdma = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, hidden, ranks, EXPERTS)
    for config in (
        deep_ep.Buffer.get_dispatch_config(ranks),
        deep_ep.Buffer.get_combine_config(ranks),
    ):
        nvl = max(config.get_nvl_buffer_size_hint(hidden * 2, ranks), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(hidden * 2, ranks), rdma)
    most = max(EXPERTS // ranks, deep_ep.Buffer.num_sms // 2)
    buffer = deep_ep.Buffer(
        None, nvl, rdma, low_latency_mode=True, num_qps_per_rank=most, comm=comm
    )
    assert buffer.num_nvl_bytes == nvl and buffer.num_rdma_bytes == rdma
    return buffer


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        buffer: deep_ep.Buffer,
        before: EventOverlap | None,
        ended: EventOverlap | None,
    ) -> Any:
        previous = captured() if before is None else before
        *layout, event = buffer.get_dispatch_layout(
            ids,
            EXPERTS,
            previous_event=previous,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        per_rank, per_rdma_rank, per_expert, in_rank = layout
        rows, row_ids, row_weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        if before is None:
            event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.rest = buffer, ended
        return rows, row_ids, row_weights, counts, handle, event

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, _: Any, grad_weights: Tensor, *args: Any) -> Any:
        buffer, ended = ctx.rest
        grad_x, grad_weights, event = buffer.combine(
            grad_rows,
            ctx.saved_tensors,
            topk_weights=grad_weights,
            async_finish=True,
            previous_event=captured(),
            allocate_on_comm_stream=True,
        )
        if ended is None:
            event.current_stream_wait()
        else:
            ended.event = event.event
        return grad_x, None, grad_weights, None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        handle: Any,
        buffer: deep_ep.Buffer,
        before: EventOverlap | None,
        backward_before: EventOverlap | None,
        ended: EventOverlap | None,
    ) -> Any:
        combined, _, event = buffer.combine(
            rows,
            handle,
            async_finish=True,
            previous_event=captured() if before is None else before,
            allocate_on_comm_stream=True,
        )
        if before is None:
            event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.rest = buffer, backward_before, ended
        return combined, event

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *args: Any) -> Any:
        buffer, before, ended = ctx.rest
        grad_rows, _, _, _, _, event = buffer.dispatch(
            grad,
            handle=ctx.saved_tensors,
            async_finish=True,
            previous_event=captured() if before is None else before,
            allocate_on_comm_stream=True,
        )
        if ended is None:
            event.current_stream_wait()
        else:
            ended.event = event.event
        return grad_rows, None, None, None, None, None


def before_backward(tensor: Tensor, event: EventOverlap) -> None:
    """Its gradient is computed after the event, which is there by then."""
    if tensor.grad_fn is not None:
        tensor.grad_fn.register_prehook(lambda *_: event.current_stream_wait())


def after_backward(tensor: Tensor, event: EventOverlap) -> None:
    """The event is behind its gradient."""

    def hook(*_: Any) -> None:
        event.event = captured().event

    if tensor.grad_fn is not None:
        tensor.grad_fn.register_hook(hook)


def micro_batches_by_events(first: deep_ep.Buffer, device: str) -> None:
    """Layers without and with `async_op`; every part of a handle is saved for the backward, whose
    events are filled in when they come."""
    where = device_of(first, device)
    buffer = make_buffer(first.group, 128)
    for step in range(4):
        asynchronous = step % 2 == 1
        tokens = [6, 3, 0, 8, 1, 2, 5, 4][: first.group_size]
        layers = [Leaves(Case(50 + step + i, tokens, EXPERTS), first.rank, where) for i in (0, 9)]

        def send(x: Tensor, ids: Tensor, weights: Tensor) -> Any:
            if not asynchronous:  # noqa: B023
                return Dispatch.apply(x, ids, weights, buffer, None, None)[:5]
            ended = EventOverlap(None)
            x = x * 1  # what stands before the layer
            before_backward(x, ended)
            *got, event = Dispatch.apply(x, ids, weights, buffer, captured(), ended)
            event.current_stream_wait()
            return got

        def bring(rows: Tensor, handle: Any) -> Any:
            if not asynchronous:  # noqa: B023
                return Combine.apply(rows, handle, buffer, None, None, None)[0]
            ended, before = EventOverlap(None), EventOverlap(None)
            before_backward(rows, ended)
            y, event = Combine.apply(rows, handle, buffer, captured(), before, ended)
            event.current_stream_wait()
            y = y * 1  # what stands behind it
            after_backward(y, before)
            return y

        outs = [layer.forward(send, bring) for layer in layers]
        for layer, out in reversed(list(zip(layers, outs))):
            out.backward(layer.grad)  # type: ignore[no-untyped-call]
            layer.check()


ALL = (micro_batches_by_events,)
