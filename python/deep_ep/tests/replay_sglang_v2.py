"""The calls of SGLang's DeepEP V2 dispatcher: prefill in the contiguous layout with exact counts,
decode in expanded rows of a fixed size for a masked GEMM; SMs and QPs are asked for every time."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from replays import Case, Framework
from torch import Tensor

from deep_ep import ElasticBuffer

FRAMEWORK = Framework(
    "SGLang, V2",
    "0.5.23",
    "srt/layers/moe/token_dispatcher/deepep_v2.py",
    "the V2 option of `--moe-a2a-backend`",
)

EXPERTS, TOKENS, MOST, ALIGNMENT = 8, [7, 0, 12, 3], 32, 128


class Dispatcher:
    """Its stages: a call begins a dispatch or combine, the next one ends it."""

    def __init__(self, first: Any) -> None:
        self.buffer = ElasticBuffer(
            first.group,
            num_max_tokens_per_rank=MOST,
            hidden=128,
            num_topk=2,
            use_fp8_dispatch=True,
            allow_hybrid_mode=False,
            sl_idx=0,
            prefer_overlap_with_compute=False,
        )
        self.handle: Any = None
        self.padded = False

    def how(self) -> dict[str, int]:
        sms = self.buffer.get_theoretical_num_sms(EXPERTS, 2)
        return {"num_sms": sms, "num_qps": self.buffer.get_theoretical_num_qps(sms)}

    def dispatch_a(self, x: Tensor, ids: Tensor, weights: Tensor, decode: bool) -> Any:
        self.padded = not decode and len(x) == 0
        if self.padded:  # one row that weighs nothing, as their V2 wants
            x = x.new_zeros(1, x.shape[1])
            ids = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            weights = weights.new_zeros(1, weights.shape[1])
        scales = torch.full((len(x), 1), 1.0, device=x.device)
        if not decode:
            scales = scales.t().contiguous().t()
        got = self.buffer.dispatch(
            (x.to(torch.float8_e4m3fn), scales),
            topk_idx=ids.to(torch.int64),
            topk_weights=weights,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=MOST,
            expert_alignment=ALIGNMENT,
            use_tma_aligned_col_major_sf=not decode,
            do_cpu_sync=not decode,
            do_expand=decode,
            **self.how(),
        )
        self.handle = got[3]
        return got, decode

    def dispatch_b(self, got: Any, decode: bool) -> Any:
        (rows, scales), ids, weights, handle, event = got
        if event.event is not None:
            event.current_stream_wait()
        if decode:
            return rows, scales, None, weights, handle.psum_num_recv_tokens_per_expert
        live = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
        counts = list(handle.num_recv_tokens_per_expert_list)
        return rows[:live], scales[:live], ids[:live], weights[:live], counts

    def combine(self, made: Tensor) -> Tensor:
        combined, _, event = self.buffer.combine(
            made, handle=self.handle, topk_weights=None, **self.how()
        )
        if event.event is not None:
            event.current_stream_wait()
        self.handle = None
        return combined[:0] if self.padded else combined


def contiguous_prefill(first: Any, device: str) -> None:
    """Counts are multiples of the alignment, rows are not padded; a rank without tokens sends one
    that weighs nothing."""
    rank, where = first.rank, device_of(first, device)
    dispatcher = Dispatcher(first)
    for step in range(3):
        case = Case(170 + step, TOKENS, EXPERTS)
        given = [one[rank].to(where) for one in (case.x, case.topk_idx, case.weights)]
        rows, scales, ids, weights, counts = dispatcher.dispatch_b(
            *dispatcher.dispatch_a(*given, decode=False)
        )
        assert all(count % ALIGNMENT == 0 for count in counts)
        own = factor(ids.cpu() + case.local(rank).start).to(where)
        each = torch.where(ids >= 0, weights * own, 0.0).sum(1)
        made = (rows.float() * scales * each[:, None]).bfloat16()
        assert torch.equal(dispatcher.combine(made).cpu().double(), case.dense(rank))
    first.group.allgather(None)


def masked_decode(first: Any, device: str) -> None:
    """Blocks of experts begin at multiples of the alignment; each one's rows go to a slab of its
    own and back, and what lies between is never read."""
    rank, where = first.rank, device_of(first, device)
    dispatcher = Dispatcher(first)
    for step in range(3):
        case = Case(180 + step, TOKENS, EXPERTS)
        given = [one[rank].to(where) for one in (case.x, case.topk_idx, case.weights)]
        rows, scales, ids, weights, ends = dispatcher.dispatch_b(
            *dispatcher.dispatch_a(*given, decode=True)
        )
        assert ids is None and len(rows) % ALIGNMENT == 0
        made = torch.full_like(rows, float("nan"), dtype=torch.bfloat16)
        begin = 0
        for local, end in enumerate(ends.tolist()):
            own = float(factor(torch.tensor(case.local(rank).start + local)))
            part = rows[begin:end].float() * scales[begin:end] * weights[begin:end, None]
            made[begin:end] = (part * own).bfloat16()
            begin = -(-end // ALIGNMENT) * ALIGNMENT
        assert torch.equal(dispatcher.combine(made).cpu().double(), case.dense(rank))
    first.group.allgather(None)


ALL = (contiguous_prefill, masked_decode)
