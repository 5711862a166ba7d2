"""The calls of Megatron-LM's third flex backend, which has V2's buffer: the backward of a dispatch
is a combine with its handle, that of a combine a dispatch with it."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from rank_buffers import ThreadComm
from replays import Case, Framework, Leaves
from torch import Tensor

from deep_ep import ElasticBuffer

FRAMEWORK = Framework(
    "Megatron-LM, V2",
    "dev, d48bd6b",
    "moe/fused_a2a.py, moe/token_dispatcher.py",
    "the flex dispatcher with `deepepv2`",
)

EXPERTS, TOKENS = 8, [7, 7, 7, 7]


class Manager:
    """A layer's share: the buffer of the process, made again when it is too small, and a handle
    from dispatch to combine."""

    buffers: dict[ThreadComm, ElasticBuffer] = {}  # noqa: RUF012

    def __init__(self, comm: ThreadComm, num_sms: int, asynchronous: bool) -> None:
        self.comm, self.num_sms, self.asynchronous = comm, num_sms, asynchronous
        self.handle: Any = None

    def buffer(self, tokens: int, hidden: int, topk: int) -> ElasticBuffer:
        sizes = {"num_max_tokens_per_rank": tokens, "hidden": hidden, "num_topk": topk}
        needed = ElasticBuffer.get_buffer_size_hint(self.comm, **sizes)
        old = self.buffers.get(self.comm)
        if (
            old is None
            or old.group != self.comm
            or old.num_bytes < needed
            or old.num_max_tokens_per_rank < tokens
        ):
            old = self.buffers[self.comm] = ElasticBuffer(self.comm, num_bytes=needed, **sizes)
        return old

    def events(self, buffer: ElasticBuffer) -> dict[str, Any]:
        return {
            "previous_event": buffer.capture() if self.asynchronous else None,
            "async_with_compute_stream": self.asynchronous,
            "allocate_on_comm_stream": self.asynchronous,
        }

    def dispatch(self, x: Tensor, ids: Tensor, probs: Tensor) -> Any:
        buffer = self.buffer(*x.shape, ids.shape[1])
        made = Dispatch.apply(self, buffer, x.contiguous(), ids, probs.float())  # type: ignore[no-untyped-call]
        self.handle = made[-1]
        return made

    def combine(self, rows: Tensor, _: Any) -> Tensor:
        handle, self.handle = self.handle, None
        buffer = self.buffers[self.comm]
        combined: Tensor = Combine.apply(self, buffer, rows.contiguous(), handle)[0]  # type: ignore[no-untyped-call]
        return combined


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, manager: Manager, buffer: ElasticBuffer, x: Tensor, ids: Tensor, probs: Tensor
    ) -> Any:
        rows, row_ids, row_probs, handle, event = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=probs,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=x.shape[0],
            expert_alignment=1,
            num_sms=manager.num_sms,
            **manager.events(buffer),
        )
        if manager.asynchronous:
            event.current_stream_wait()
        ctx.rest = manager, buffer, handle
        counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
        return rows, row_ids, row_probs, counts, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        manager, buffer, handle = ctx.rest
        grad_x, grad_probs, event = buffer.combine(
            grads[0].contiguous(),
            handle=handle,
            topk_weights=grads[2].float(),
            num_sms=handle.num_sms,
            **manager.events(buffer),
        )
        if manager.asynchronous:
            event.current_stream_wait()
        return None, None, grad_x, None, grad_probs


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, manager: Manager, buffer: ElasticBuffer, rows: Tensor, handle: Any
    ) -> Any:
        combined, probs, event = buffer.combine(
            rows, handle=handle, num_sms=manager.num_sms, **manager.events(buffer)
        )
        if manager.asynchronous:
            event.current_stream_wait()
        ctx.rest = manager, buffer, handle
        return combined, probs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        manager, buffer, handle = ctx.rest
        grad, _, _, _, event = buffer.dispatch(
            grads[0].contiguous(),
            handle=handle,
            num_sms=manager.num_sms or handle.num_sms,
            **manager.events(buffer),
        )
        if manager.asynchronous:
            event.current_stream_wait()
        return None, None, grad, None


def elastic_layers(first: Any, device: str) -> None:
    """Layers in flight, the last one wider, by events and without, with SMs of its own and of the
    buffer's choice; all ranks have as many tokens."""
    where = device_of(first, device)
    for asynchronous in (False, True):
        for num_sms in (0, 8):
            managers = [Manager(first.group, num_sms, asynchronous) for _ in range(3)]
            cases = [Case(230 + i, TOKENS, EXPERTS, wide) for i, wide in enumerate((128, 128, 512))]
            layers = [Leaves(case, first.rank, where) for case in cases]
            outs = [one.forward(m.dispatch, m.combine) for one, m in zip(layers, managers)]
            for layer, out in reversed(list(zip(layers, outs))):
                out.backward(layer.grad)  # type: ignore[no-untyped-call]
                layer.check()
    first.group.allgather(None)
    Manager.buffers.pop(first.group, None)


ALL = (elastic_layers,)
