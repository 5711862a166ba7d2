"""The calls of vLLM's `deepep_v2`: prefill in expanded rows with exact counts, decode in static
shapes without a CPU sync, a handle for each of two micro-batches, and a combine that shared experts
overlap."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from replays import Case, Framework
from torch import Tensor

import deep_ep

FRAMEWORK = Framework(
    "vLLM, V2",
    "main, 02bd2a4",
    "model_executor/layers/fused_moe/prepare_finalize/deepep_v2.py",
    "`--all2all-backend deepep_v2`",
)

EXPERTS, TOKENS, MOST = 8, [7, 0, 12, 3], 64


class PrepareAndFinalize:
    """One of its objects: `decode` chooses the layout that CUDA graphs take."""

    def __init__(self, buffer: Any, first: int, decode: bool) -> None:
        self.buffer, self.first, self.decode = buffer, first, decode
        self.handles: list[Any] = [None, None]

    def prepare(self, x: Any, ids: Tensor, weights: Tensor, batch: int, most: int) -> Any:
        bound = min(1 << max(most - 1, 0).bit_length(), MOST) if self.decode else None
        rows, row_ids, row_weights, handle, event = self.buffer.dispatch(
            x=x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=bound,
            do_expand=not self.decode,
            do_cpu_sync=not self.decode,
            async_with_compute_stream=False,
        )
        self.handles[batch] = handle
        assert event.event is None
        counts = handle.num_recv_tokens_per_expert_list
        if not counts and row_ids is None:
            raise AssertionError("neither counts nor ids")
        if row_ids is None:
            local = torch.arange(len(counts)) + self.first
            row_ids = torch.repeat_interleave(local, torch.tensor(counts)).unsqueeze(1)
            return rows, row_ids, row_weights.unsqueeze(1)
        last = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        here = torch.arange(len(row_ids), device=row_ids.device)[:, None] < last
        row_ids = torch.where((row_ids >= 0) & here, row_ids + self.first, -1)
        return rows, row_ids, row_weights

    def finalize(self, made: Tensor, out: Tensor, batch: int, asynchronous: bool) -> Any:
        combined, _, event = self.buffer.combine(
            x=made,
            handle=self.handles[batch],
            topk_weights=None,
            async_with_compute_stream=asynchronous,
            allocate_on_comm_stream=asynchronous,
        )

        def receiver() -> None:
            if event.event is not None:
                event.current_stream_wait()
            out.copy_(combined, non_blocking=True)

        return receiver


def experts(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Of each row, the weighted sum of its experts; rows that nobody has are nothing."""
    ids = ids.to(rows.device)
    each = torch.where(ids >= 0, factor(ids.cpu()).to(rows.device) * weights, 0.0).sum(1)
    return torch.where(each[:, None] != 0, rows.float() * each[:, None], 0.0).to(torch.bfloat16)


def _buffer(first: Any) -> Any:
    return deep_ep.ElasticBuffer(
        first.group,
        num_max_tokens_per_rank=MOST,
        hidden=128,
        num_topk=2,
        prefer_overlap_with_compute=False,
    )


def prefill_and_decode(first: Any, device: str) -> None:
    """The same batches both ways, of two micro-batches in turn; one rank has no tokens."""
    rank, where = first.rank, device_of(first, device)
    buffer = _buffer(first)
    for decode in (False, True):
        own = Case(0, TOKENS, EXPERTS).local(rank).start
        layer = PrepareAndFinalize(buffer, own, decode)
        for step in range(3):
            cases = [Case(150 + 2 * step + batch, TOKENS, EXPERTS) for batch in range(2)]
            given = []
            for batch, case in enumerate(cases):
                x, ids = case.x[rank].to(where), case.topk_idx[rank].to(where)
                weights = case.weights[rank].to(where)
                given.append(layer.prepare(x, ids, weights, batch, max(TOKENS)))
            for batch, case in enumerate(cases):
                out = torch.zeros_like(case.x[rank]).to(where)
                receive = layer.finalize(experts(*given[batch]), out, batch, step % 2 == 1)
                shared = out + 1  # meanwhile
                receive()
                assert torch.equal(out.cpu().double(), case.dense(rank)) and (shared == 1).all()
    first.group.allgather(None)


def quantised_before_dispatch(first: Any, device: str) -> None:
    """Rows of e4m3 with f32 scales, and of MXFP8 with four exponents in an i32."""
    rank, where = first.rank, device_of(first, device)
    buffer = _buffer(first)
    case = Case(160, TOKENS, EXPERTS)
    ids, weights = case.topk_idx[rank].to(where), case.weights[rank].to(where)
    for decode in (False, True):
        layer = PrepareAndFinalize(buffer, case.local(rank).start, decode)
        for packed in (False, True):
            values = case.x[rank].to(torch.float8_e4m3fn).to(where)
            scales: Tensor = torch.full((len(values), 1), 2.0, device=where)
            if packed:
                exponents = torch.full((len(values), 4), 128, dtype=torch.uint8, device=where)
                scales = exponents.contiguous().view(torch.int32)
            got, row_ids, row_weights = layer.prepare(
                (values, scales), ids, weights, 0, max(TOKENS)
            )
            rows, row_scales = got
            assert row_scales.dtype == scales.dtype and row_scales.is_contiguous()
            if packed:
                exponents = row_scales.contiguous().view(torch.uint8)
                row_scales = torch.exp2(exponents.float() - 127)
            back = rows.float() * row_scales[:, :1] / 2
            out = torch.zeros_like(case.x[rank]).to(where)
            layer.finalize(experts(back, row_ids, row_weights), out, 0, False)()
            assert torch.equal(out.cpu().double(), case.dense(rank))
    first.group.allgather(None)


ALL = (prefill_and_decode, quantised_before_dispatch)
