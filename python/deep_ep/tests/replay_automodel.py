"""The calls of NeMo Automodel: autograd functions of Megatron-LM's kind, which keep the handle in
their context, and a buffer for what the build of `deep_ep` can do."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from rank_buffers import ThreadComm
from replay_megatron import Buffers, Dispatch, started
from replays import Case, Framework, Leaves
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deep_ep
from deep_ep.hybrid_ep_buffer import indices_to_map

FRAMEWORK = Framework(
    "NeMo Automodel",
    "0.7.0",
    "moe/megatron/fused_a2a.py",
    "the flex dispatcher with `deepep` or `hybridep`; not `uccl_ep`",
)

EXPERTS = 8


class Recorded(torch.autograd.Function):
    """A dispatch of a checkpointed layer. Its first run is recorded, without the rows; when the
    layer is computed again, the handle of the record sends the rows the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        buffers: Buffers,
        use_async: bool,
        records: list[Any],
    ) -> Any:
        if not records:
            made = Dispatch.forward(ctx, x, ids, probs, buffers, use_async)
            records.append(made[1:])
            return made
        rest = records.pop()
        rows, *_, after = buffers.get(x).dispatch(
            x,
            handle=rest[-1],
            previous_event=started(use_async),
            async_finish=use_async,
            allocate_on_comm_stream=use_async,
        )
        if use_async:
            after.current_stream_wait()
        ctx.rest = buffers, rest[-1], use_async
        return rows, *rest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *Dispatch.backward(ctx, *grads), None


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


def recomputed_layers(first: deep_ep.Buffer, device: str) -> None:
    """Checkpointed layers, whose forward is computed again in the backward: their dispatch then
    takes the recorded handle, and the recorded ids, weights and counts."""
    where, buffers = device_of(first, device), Buffers(first.group)
    for use_async in (False, True):
        layers = [Leaves(Case(64 + i, [4, 9, 0, 5], EXPERTS), first.rank, where) for i in range(2)]
        outs = []
        for layer in layers:
            records: list[Any] = []

            def send(*given: Tensor, kept: list[Any] = records) -> Any:
                return Recorded.apply(*given, buffers, use_async, kept)  # type: ignore[no-untyped-call]  # noqa: B023

            def bring(rows: Tensor, handle: Any) -> Any:
                return Combine.apply(rows, buffers, handle, use_async)[0]  # noqa: B023

            outs.append(
                checkpoint(
                    layer.forward, send, bring, use_reentrant=False, preserve_rng_state=False
                )
            )
        for layer, out in reversed(list(zip(layers, outs))):
            out.backward(layer.grad)
            layer.check()


class HybridRecorded(torch.autograd.Function):
    """The same by `hybridep`, with indices beside probabilities of all experts in the record."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, routing_map: Tensor, probs: Tensor, buffer: Any, records: list[Any]
    ) -> Any:
        how: dict[str, Any] = {"pad_multiple": 16, "fuse_permute_dispatch": True}
        if records:
            per_expert, handle = records.pop()
            rows, row_probs, *_ = buffer.dispatch_with_permute(
                hidden=x,
                probs=probs,
                scaling_factor=None,
                handle=handle,
                num_permuted_tokens=int(per_expert.sum()),
                **how,
            )
        else:
            rows, row_probs, _, per_expert, handle = buffer.dispatch_with_permute(
                hidden=x,
                topk_idx=None,
                routing_map=routing_map,
                probs=probs,
                num_of_experts=EXPERTS,
                scaling_factor=None,
                num_of_experts_per_rank=EXPERTS // buffer.group_size,
                num_permuted_tokens=None,
                non_blocking=False,
                **how,
            )
            records.append((per_expert, handle))
        ctx.rest = buffer, handle
        return rows, row_probs, per_expert, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffer, handle = ctx.rest
        grad_x, grad_probs = buffer.combine_with_unpermute(
            hidden=grads[0],
            probs=grads[1],
            handle=handle,
            pad_multiple=16,
            fuse_unpermute_combine=True,
        )
        return grad_x, None, grad_probs, None, None


def recomputed_hybrid_layer(first: deep_ep.Buffer, device: str) -> None:
    """A checkpointed layer by `hybridep`, its dispatch recorded and repeated along the handle."""
    rank, where = first.rank, device_of(first, device)
    buffer = deep_ep.HybridEPBuffer(
        group=first.group,
        hidden_dim=128,
        max_num_of_tokens_per_rank=16,
        num_local_experts=EXPERTS // first.group_size,
        use_fp8=False,
        num_sms_dispatch_api=24,
        num_sms_combine_api=24,
        num_sms_preprocessing_api=None,
        num_blocks_permute=None,
        num_blocks_unpermute=None,
    )
    case = Case(66, [4, 9, 0, 5], EXPERTS)
    layer = Leaves(case, rank, where)
    ids = case.topk_idx[rank].to(where)
    records: list[Any] = []

    def forward() -> Tensor:
        routing_map, probs = indices_to_map(ids, layer.probs, len(ids), EXPERTS)
        rows, row_probs, per_expert, handle = HybridRecorded.apply(  # type: ignore[no-untyped-call]
            layer.x, routing_map, probs, buffer, records
        )
        expert = torch.arange(len(per_expert)).repeat_interleave(per_expert.cpu())
        each = factor(expert + case.local(rank).start).to(where)
        made = (rows.float() * each[:, None] * row_probs[:, None]).to(rows.dtype)
        return HybridAnswer.apply(made, buffer, handle)  # type: ignore[no-untyped-call, no-any-return]

    out = checkpoint(forward, use_reentrant=False, preserve_rng_state=False)
    assert torch.equal(out.detach().cpu().double(), case.dense(rank))
    out.backward(layer.grad)
    layer.check()
    assert not records


class HybridAnswer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.rest = buffer, handle, len(rows)
        how = {"pad_multiple": 16, "fuse_unpermute_combine": True}
        combined: Tensor = buffer.combine_with_unpermute(hidden=rows, handle=handle, **how)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffer, handle, rows = ctx.rest
        grad = buffer.dispatch_with_permute(
            hidden=grads[0].contiguous(),
            scaling_factor=None,
            handle=handle,
            pad_multiple=16,
            num_permuted_tokens=rows,
            fuse_permute_dispatch=True,
        )[0]
        return grad, None, None


ALL = (train_steps, recomputed_layers, recomputed_hybrid_layer)
