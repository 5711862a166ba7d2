"""The calls of NeMo Automodel: autograd functions of Megatron-LM's kind, which keep the handle in
their context, and a buffer for what the build of `deep_ep` can do."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from rank_buffers import ThreadComm
from replay_megatron import Buffers, Dispatch, started
from replays import Case, Framework, Leaves
from torch import Tensor

import deep_ep

FRAMEWORK = Framework(
    "NeMo Automodel",
    "0.5.0",
    "moe/megatron/fused_a2a.py",
    "the flex dispatcher with `deepep`; not `hybridep`, `uccl_ep`",
)

EXPERTS = 8


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
        ctx.rest = buffers, handle, use_async
        return combined, None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, previous_event: Any = None) -> Any:
        buffers, handle, use_async = ctx.rest
        grad_rows, _, _, _, _, after = buffers.get(grad).dispatch(
            grad.contiguous(),
            handle=handle,
            previous_event=started(use_async),
            async_finish=use_async,
            allocate_on_comm_stream=use_async,
        )
        if use_async:
            after.current_stream_wait()
        return grad_rows, None, None, None


def train_steps(first: deep_ep.Buffer, device: str) -> None:
    """Two layers forward, then backward, by events and without; `HybridEPBuffer` is looked for."""
    comm: ThreadComm = first.group
    where = device_of(first, device)
    assert hasattr(deep_ep, "HybridEPBuffer")
    assert deep_ep.Buffer.is_sm90_compiled()  # or more than 8 ranks were refused
    buffers = Buffers(comm)
    for step in range(4):
        use_async = step % 2 == 1
        tokens = [4, 9, 0, 5, 1, 2, 5, 4][: first.group_size]
        layers = [Leaves(Case(60 + step, tokens, EXPERTS), first.rank, where) for _ in range(2)]

        def send(*given: Tensor) -> Any:
            return Dispatch.apply(*given, buffers, use_async)  # noqa: B023

        def bring(rows: Tensor, handle: Any) -> Any:
            return Combine.apply(rows, buffers, handle, use_async)[0]  # noqa: B023

        outs = [layer.forward(send, bring) for layer in layers]
        for layer, out in reversed(list(zip(layers, outs))):
            out.backward(layer.grad)  # type: ignore[no-untyped-call]
            layer.check()
    assert buffers.made == 1


ALL = (train_steps,)
