"""The calls of TorchTitan from 0.3.0 on, which imports `ElasticBuffer`: training in the compact
layout with handles behind numbers, inference in the expanded one without a CPU sync; and its other
choice, `HybridEPBuffer`."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from rank_buffers import ThreadComm
from replays import Case, Framework, Leaves
from torch import Tensor

from deep_ep import ElasticBuffer, HybridEPBuffer
from deep_ep.hybrid_ep_buffer import indices_to_map

FRAMEWORK = Framework(
    "TorchTitan, V2",
    "0.3.0",
    "distributed/deepep/deepep.py, distributed/deepep/hybridep.py",
    "`deepep` or `hybridep`",
)

EXPERTS, TOKENS, MOST = 8, [7, 0, 12, 3], 16


class Exchange:
    """The process's buffer, made again when it is too small, and handles by number."""

    def __init__(self, comm: ThreadComm) -> None:
        self.comm = comm
        self.buffer: ElasticBuffer | None = None
        self.handles: dict[int, Any] = {}
        self.calls = 0

    def get(self, hidden: int) -> ElasticBuffer:
        needed = ElasticBuffer.get_buffer_size_hint(
            self.comm, MOST, hidden, num_topk=2, use_fp8_dispatch=False
        )
        old = self.buffer
        if old is not None and old.group == self.comm and old.num_bytes >= needed:
            return old
        self.buffer = ElasticBuffer(
            self.comm,
            num_bytes=needed,
            num_max_tokens_per_rank=MOST,
            hidden=hidden,
            num_topk=2,
            use_fp8_dispatch=False,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return self.buffer

    def sent(self, x: Tensor, ids: Tensor, scores: Tensor, static: bool) -> Any:
        buffer = self.get(x.shape[1])
        rows, row_ids, row_scores, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=scores,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=MOST,
            num_sms=buffer.get_theoretical_num_sms(EXPERTS, ids.shape[1]),
            do_expand=static,
            do_cpu_sync=not static,
        )
        self.calls += 1
        self.handles[self.calls] = handle
        if static:
            ends = handle.psum_num_recv_tokens_per_expert
            counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int32)
        else:
            counts = torch.tensor(handle.num_recv_tokens_per_expert_list, dtype=torch.int32)
        return rows, row_ids, row_scores, counts, torch.tensor([self.calls])


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, scores: Tensor, exchange: Exchange) -> Any:
        made = exchange.sent(x, ids, scores, False)
        ctx.rest = exchange, exchange.handles[exchange.calls]
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        exchange, handle = ctx.rest
        grad_x, grad_scores, _ = exchange.buffer.combine(
            grads[0], handle=handle, topk_weights=grads[2].float()
        )
        return grad_x, None, grad_scores, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, number: Tensor, exchange: Exchange) -> Tensor:
        ctx.rest = exchange, exchange.handles.pop(int(number.item()))
        assert exchange.buffer is not None
        combined, _, event = exchange.buffer.combine(
            rows, handle=ctx.rest[1], topk_weights=None, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        exchange, handle = ctx.rest
        grad, _, _, _, _ = exchange.buffer.dispatch(
            grads[0].contiguous(), handle=handle, num_sms=handle.num_sms, do_cpu_sync=False
        )
        return grad, None, None


def elastic_training(first: Any, device: str) -> None:
    """Layers in flight, the last one wider, so that the buffer is made again while handles of the
    old one live."""
    where = device_of(first, device)
    exchange = Exchange(first.group)
    cases = [Case(120 + i, TOKENS, EXPERTS, wide) for i, wide in enumerate((128, 128, 1 << 15))]
    layers = [Leaves(case, first.rank, where) for case in cases]

    def send(*given: Tensor) -> Any:
        return Dispatch.apply(*given, exchange)

    def bring(rows: Tensor, number: Any) -> Any:
        return Combine.apply(rows, number, exchange)

    outs = [layer.forward(send, bring) for layer in layers]
    assert not exchange.handles
    for layer, out in reversed(list(zip(layers, outs))):
        out.backward(layer.grad)  # type: ignore[no-untyped-call]
        layer.check()
    first.group.allgather(None)


def elastic_inference(first: Any, device: str) -> None:
    """Expanded rows in static shapes; the number of rows of each expert is known on the device
    alone, and scores are applied to what the experts made."""
    rank, where = first.rank, device_of(first, device)
    exchange = Exchange(first.group)
    for step in range(3):
        case = Case(130 + step, TOKENS, EXPERTS)
        x, ids = case.x[rank].to(where), case.topk_idx[rank].to(where)
        with torch.inference_mode():
            rows, _, scores, counts, number = exchange.sent(
                x, ids, case.weights[rank].to(where), True
            )
            local = torch.arange(len(counts), device=where)
            expert = torch.repeat_interleave(local, counts) + case.local(rank).start
            made = torch.zeros_like(rows)
            live = len(expert)
            each = factor(expert.cpu()).to(where) * scores[:live]
            made[:live] = (rows[:live].float() * each[:, None]).to(rows.dtype)
            assert exchange.buffer is not None
            y, _, event = exchange.buffer.combine(
                made,
                handle=exchange.handles.pop(int(number.item())),
                topk_weights=None,
                async_with_compute_stream=True,
            )
            event.current_stream_wait()
        assert torch.equal(y.cpu().double(), case.dense(rank))
    first.group.allgather(None)


class HybridDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, scores: Tensor, buffer: Any, most: int | None, pad: Any
    ) -> Any:
        assert x.shape[0] <= buffer.configurer.buffer_config.max_num_of_tokens_per_rank
        routing_map, probs = indices_to_map(ids, scores.float(), x.shape[0], EXPERTS)
        rows, row_scores, _, per_expert, handle = buffer.dispatch_with_permute(
            hidden=x,
            routing_map=routing_map,
            probs=probs,
            scaling_factor=None,
            num_of_experts_per_rank=EXPERTS // buffer.group_size,
            pad_multiple=pad,
            num_permuted_tokens=most,
            non_blocking=most is not None,
        )
        ctx.rest = buffer, handle
        ctx.save_for_backward(ids)
        return rows, row_scores, per_expert, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffer, handle = ctx.rest
        (ids,) = ctx.saved_tensors
        grad_x, dense = buffer.combine_with_unpermute(
            hidden=grads[0], probs=grads[1], handle=handle
        )
        grad_scores = torch.where(ids >= 0, dense.gather(1, ids.clamp(min=0)), 0.0)
        return grad_x, None, grad_scores, None, None, None


class HybridCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Any, buffer: Any, pad: Any) -> Tensor:
        ctx.rest = buffer, handle, rows.shape[0], pad
        combined: Tensor = buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffer, handle, rows, pad = ctx.rest
        grad = buffer.dispatch_with_permute(
            hidden=grads[0].contiguous(),
            scaling_factor=None,
            handle=handle,
            num_permuted_tokens=rows,
            pad_multiple=pad,
        )[0]
        return grad, None, None, None


def hybrid_steps(first: Any, device: str) -> None:
    """Two layers by `hybridep`, with padding and without, the rows counted on the CPU or not."""
    rank, where = first.rank, device_of(first, device)
    buffer = HybridEPBuffer(
        group=first.group,
        hidden_dim=128,
        max_num_of_tokens_per_rank=MOST,
        num_local_experts=EXPERTS // first.group_size,
        use_fp8=False,
        num_sms_dispatch_api=16,
        num_sms_combine_api=16,
        load_cached_kernels=True,
        use_shared_buffer=True,
        enable_custom_allgather=True,
    )
    for pad, most in ((None, None), (32, None), (32, 512), (None, 500)):
        layers = [Leaves(Case(140 + i, TOKENS, EXPERTS), rank, where) for i in range(2)]
        outs = []
        for layer in layers:
            case = layer.case
            ids = case.topk_idx[rank].to(where)
            rows, scores, per_expert, handle = HybridDispatch.apply(  # type: ignore[no-untyped-call]
                layer.x, ids, layer.probs, buffer, most, pad
            )
            assert per_expert.tolist() == case.counts(rank, pad or 1)
            expert = torch.arange(len(per_expert)).repeat_interleave(per_expert.cpu())
            each = torch.zeros(len(rows), device=where)
            each[: len(expert)] = factor(expert + case.local(rank).start).to(where)
            made = (rows.float() * each[:, None] * scores[:, None]).to(rows.dtype)
            out = HybridCombine.apply(made, handle, buffer, pad)  # type: ignore[no-untyped-call]
            assert torch.equal(out.detach().cpu().double(), case.dense(rank))
            outs.append(out)
        for layer, out in reversed(list(zip(layers, outs))):
            out.backward(layer.grad)
            layer.check()
    first.group.allgather(None)


ALL = (elastic_training, elastic_inference, hybrid_steps)
