"""The calls of Megatron-LM's `hybridep` backend: `HybridEPBuffer` with the permutation in dispatch
and combine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from replay_megatron import Stage, free
from replays import Case, Framework, Leaves
from torch import Tensor

from deep_ep import HybridEPBuffer

FRAMEWORK = Framework(
    "Megatron-LM, hybrid",
    "main, 02ad939",
    "moe/fused_a2a.py",
    "the flex dispatcher with `hybridep`",
)

EXPERTS, TOKENS = 8, [7, 0, 12, 3, 1, 2, 5, 4]


class Buffers:
    """The buffer of a process, made by the first dispatch; larger ones need none anew."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.buffer: Any = None

    def get(self, x: Tensor, local: int) -> Any:
        if self.buffer is None:
            self.buffer = HybridEPBuffer(
                group=self.group,
                hidden_dim=x.shape[-1],
                max_num_of_tokens_per_rank=x.shape[-2],
                num_local_experts=local,
                use_fp8=False,
                num_sms_dispatch_api=16,
                num_sms_combine_api=16,
                num_sms_preprocessing_api=108,
            )
        return self.buffer


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        buffers: Buffers,
        fused: bool,
        rows: int | None,
        pad: int | None,
    ) -> Any:
        local = routing_map.shape[1] // buffers.group.Get_size()
        made = buffers.get(x, local).dispatch_with_permute(
            hidden=x,
            routing_map=routing_map,
            probs=probs,
            scaling_factor=None,
            num_of_experts_per_rank=local,
            pad_multiple=pad,
            num_permuted_tokens=rows,
            non_blocking=rows is not None,
            **({"fuse_permute_dispatch": fused} if fused else {}),
        )
        ctx.rest = buffers, made[4], pad, fused
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffers, handle, pad, fused = ctx.rest
        grad_x, grad_probs = buffers.buffer.combine_with_unpermute(
            hidden=grads[0],
            probs=grads[1],
            handle=handle,
            pad_multiple=pad,
            **({"fuse_unpermute_combine": fused} if fused else {}),
        )
        return grad_x, None, grad_probs, None, None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, handle: Any, buffers: Buffers, rows: Any, pad: Any, fused: bool
    ) -> Any:
        combined, _ = buffers.buffer.combine_with_unpermute(
            hidden=x,
            handle=handle,
            pad_multiple=pad,
            **({"fuse_unpermute_combine": fused} if fused else {}),
        )
        ctx.rest = buffers, handle, rows, pad, fused
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffers, handle, rows, pad, fused = ctx.rest
        grad, _, _, _, _ = buffers.buffer.dispatch_with_permute(
            hidden=grads[0].contiguous(),
            scaling_factor=None,
            handle=handle,
            pad_multiple=pad,
            num_permuted_tokens=rows,
            **({"fuse_permute_dispatch": fused} if fused else {}),
        )
        return grad, None, None, None, None, None


def routes(leaves: Leaves, where: torch.device) -> tuple[Tensor, Tensor]:
    """The map of a router, and its probabilities, which gradients go through."""
    ids = leaves.case.topk_idx[leaves.rank].to(where)
    places = torch.where(ids < 0, EXPERTS, ids)
    bits = torch.zeros(len(ids), EXPERTS + 1, dtype=torch.bool, device=where)
    probs = torch.zeros(len(ids), EXPERTS + 1, device=where).scatter(1, places, leaves.probs)
    return bits.scatter(1, places, True)[:, :-1], probs[:, :-1]


def answers(rows: Tensor, probs: Tensor, per_expert: Tensor, first: int) -> Tensor:
    expert = torch.arange(len(per_expert)).repeat_interleave(per_expert.cpu())
    each = torch.zeros(len(rows), device=rows.device)
    each[: len(expert)] = factor(expert + first).to(rows.device)
    return (rows.float() * (each * probs)[:, None]).to(rows.dtype)


CHOICES = ((False, None, None), (True, None, 16), (False, 640, None), (True, 640, 16))
"""Fused, rows of a dispatch that waits for no counts, padding."""


def hybrid_layers_in_flight(first: Any, device: str) -> None:
    """Forward of all layers, then backward in the other order; a later layer is wider."""
    rank, where = first.rank, device_of(first, device)
    for fused, most, pad in CHOICES:
        buffers = Buffers(first.group)
        tokens = TOKENS[: first.group_size]
        cases = [Case(190 + i, tokens, EXPERTS, wide) for i, wide in enumerate((128, 128, 256))]
        layers, outs = [Leaves(case, rank, where) for case in cases], []
        for layer in layers:
            bits, probs = routes(layer, where)
            rows, row_probs, _, per_expert, handle = Dispatch.apply(  # type: ignore[no-untyped-call]
                layer.x, bits, probs, buffers, fused, most, pad
            )
            assert per_expert.tolist() == layer.case.counts(rank, pad or 1)
            made = answers(rows, row_probs, per_expert, layer.case.local(rank).start)
            out = Combine.apply(made, handle, buffers, most, pad, fused)  # type: ignore[no-untyped-call]
            assert torch.equal(out.detach().cpu().double(), layer.case.dense(rank))
            outs.append(out)
        for layer, out in reversed(list(zip(layers, outs))):
            out.backward(layer.grad)
            layer.check()
        first.group.allgather(None)


def stages(first: Any, where: torch.device, buffers: Any, number: int) -> Iterator[None]:
    """A layer of one micro-batch, four steps forward and four backward."""
    rank, (fused, most, pad) = first.rank, CHOICES[number]
    layer = Leaves(Case(200 + number, TOKENS[: first.group_size], EXPERTS), rank, where)
    case = layer.case
    bits, probs = routes(layer, where)

    def send(x: Tensor, probs: Tensor) -> Any:
        return Dispatch.apply(x, bits, probs, buffers, fused, most, pad)

    sent = Stage(send, frees=False)
    rows, row_probs, _, per_expert, handle = sent.forward(layer.x, probs.detach())
    yield

    def answer(rows: Tensor, probs: Tensor) -> Tensor:
        return answers(rows, probs, per_expert, case.local(rank).start)

    def gather(made: Tensor) -> Any:
        return Combine.apply(made, handle, buffers, most, pad, fused)

    experts, combined, last = Stage(answer), Stage(gather), Stage(lambda y: y * 2)
    made = experts.forward(rows, row_probs)
    yield
    summed = combined.forward(made)
    yield
    y = last.forward(summed)
    assert torch.equal(y.detach().cpu().double(), case.dense(rank) * 2)
    yield
    grads = combined.backward(*last.backward(layer.grad.clone()))
    yield
    grad_rows, grad_row_probs = experts.backward(*grads)
    yield
    grad_x, grad_probs = sent.backward(grad_rows, grad_row_probs, None, None, None)
    yield
    layer.x.grad = grad_x / 2
    probs.backward(grad_probs / 2)  # type: ignore[no-untyped-call]
    layer.check()
    free(grad_x, grad_probs)
    yield


def hybrid_stages_free_what_they_read(first: Any, device: str) -> None:
    """Micro-batches in stages that free what they read by `untyped_storage().resize_(0)`; each goes
    forward between the steps of the backward of the one before it, as with
    `--overlap-moe-expert-parallel-comm`."""
    where = device_of(first, device)
    buffers, before = Buffers(first.group), iter(())
    for number in range(len(CHOICES)):
        batch = stages(first, where, buffers, number)
        for _ in range(4):
            next(batch)
            next(before, None)
        before = batch
    assert len(list(before)) == 4
    first.group.allgather(None)


ALL = (hybrid_layers_in_flight, hybrid_stages_free_what_they_read)
