"""The calls of DeepGEMM's test of its fused MoE kernel: the unfused baseline, an expanded dispatch
without a CPU sync, two grouped GEMMs over its rows, and a combine that rounds once."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import factor
from replays import Case, Framework
from torch import Tensor

import deep_ep

FRAMEWORK = Framework(
    "DeepGEMM",
    "2.6.1, main 54e2261",
    "tests/test_mega_moe.py",
    "`tests/test_mega_moe.py`, its baseline",
)

EXPERTS, TOKENS, MOST, HIDDEN, ALIGNMENT = 8, [16, 0, 12, 3], 16, 256, 16
GRAN = 32  # channels that share a scale


def packed_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and scales that are powers of two, four exponents in an i32: `per_token_cast_to_fp8`."""
    cut = x.float().view(len(x), x.shape[1] // GRAN, GRAN)
    amax = cut.abs().amax(2).clamp(min=1e-4)
    exponents = torch.ceil(torch.log2(amax / 448)).clamp(min=-126)
    codes = (cut / torch.exp2(exponents)[:, :, None]).to(torch.float8_e4m3fn)
    packed = (exponents + 127).to(torch.uint8).contiguous()
    return codes.view(x.shape), packed.view(torch.int32)


def unpacked(codes: Tensor, packed: Tensor) -> Tensor:
    exponents = packed.contiguous().view(torch.uint8).float()
    return codes.float() * torch.exp2(exponents - 127).repeat_interleave(GRAN, 1)


def grouped(rows: Tensor, weights: Tensor, ends: Tensor, first: int) -> Tensor:
    """What both GEMMs and the activation between them make: rows times their expert's factor times
    their weight, for the rows that `ends` says; the others are not read, and become NaN."""
    made = torch.full(rows.shape, torch.nan, dtype=torch.bfloat16, device=rows.device)
    begin = 0
    for local, end in enumerate(ends.tolist()):
        each = factor(torch.tensor(first + local)).to(rows.device) * weights[begin:end, None]
        made[begin:end] = (rows[begin:end].float() * each).bfloat16()
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    return made


def unfused_mega_moe(first: Any, device: str) -> None:
    """In bf16, and in e4m3 with a packed scale for each 32 channels in columns; slots that are not
    used; statistics that grow; the barrier of the benchmark."""
    rank, where = first.rank, device_of(first, device)
    buffer = deep_ep.ElasticBuffer(
        first.group,
        num_max_tokens_per_rank=MOST,
        hidden=HIDDEN,
        num_topk=2,
        use_fp8_dispatch=True,
        explicitly_destroy=True,
        allow_multiple_reduction=False,
        num_gpu_timeout_secs=10,
        num_cpu_timeout_secs=30,
    )
    local = EXPERTS // first.group_size
    stats = torch.arange(local, dtype=torch.int32, device=where)
    for step in range(4):
        case, fp8 = Case(240 + step, TOKENS, EXPERTS, HIDDEN), step % 2 == 1
        x, ids = case.x[rank].to(where), case.topk_idx[rank].to(where)
        weights = torch.where(ids >= 0, case.weights[rank].to(where), 0.0)
        how = {"do_cpu_sync": False, "do_handle_copy": False, "do_expand": True}
        if fp8:
            how["use_tma_aligned_col_major_sf"] = True
        before = stats.clone()
        rows, none, row_weights, handle, _ = buffer.dispatch(
            packed_fp8(x) if fp8 else x,
            topk_idx=ids,
            topk_weights=weights,
            cumulative_local_expert_recv_stats=stats,
            num_experts=EXPERTS,
            expert_alignment=ALIGNMENT,
            **how,
        )
        assert none is None
        assert (stats - before).tolist() == case.counts(rank)
        if fp8:
            codes, scales = rows
            assert scales.dtype == torch.int32 and scales.stride(0) == 1
            assert scales.stride(1) % 4 == 0 and scales.shape == (len(codes), HIDDEN // GRAN // 4)
            rows = unpacked(codes, scales)
        assert len(rows) % ALIGNMENT == 0 and row_weights.shape == (len(rows),)
        ends = handle.psum_num_recv_tokens_per_expert
        made = grouped(rows, row_weights, ends, case.local(rank).start)
        y = buffer.combine(made, handle=handle)[0]
        assert torch.equal(y.cpu().double(), case.dense(rank))
        buffer.barrier(use_comm_stream=False)
    first.group.allgather(None)
    buffer.destroy()


ALL = (unfused_mega_moe,)
