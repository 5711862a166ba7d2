"""The operator `torch.ops.ferry.dispatch_through_e4m3`: expert-major rows that crossed in fp8, in
the dtype of x again.

    dispatch_through_e4m3(Tensor x, Tensor plan, Tensor topk_weights, SymInt group, SymInt topk,
                          SymInt local_experts, SymInt alignment, SymInt max_recv_rows,
                          SymInt num_sms)
        -> (Tensor x, Tensor topk_weights, Tensor topk_idx, Tensor slot_rows, Tensor expert_offsets)

Its gradient takes the quantisation for the identity: that of x is the sum of the rows' gradients,
as of `dispatch`, which refuses to have one for fp8 by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ferry.torch_ops  # noqa: F401  importing it defines the operators that this one calls

BLOCK = 128
"""Channels that share a scale."""
_ORDER = "expert_major"


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of e4m3 codes [.., H] and scales f32 [.., ceil(H/128)]."""
    wide = scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    return (codes.float() * wide).to(dtype)


def _dispatch(
    x: Tensor,
    plan: Tensor,
    topk_weights: Tensor,
    group: int,
    topk: int,
    local_experts: int,
    alignment: int,
    max_recv_rows: int,
    num_sms: int,
) -> tuple[Tensor, ...]:
    """Serves as the operator and as its fake: all that it calls has one."""
    layout = (_ORDER, alignment, max_recv_rows, num_sms)
    codes, ids, weights, _, slots, offsets, scales = torch.ops.ferry.dispatch(
        x, plan, topk_weights, group, topk, local_experts, *layout, "e4m3", "f32"
    )
    return restored(codes, scales, x.dtype), weights, ids, slots, offsets


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, plan, _, group, _, _, alignment, _, num_sms = inputs
    ctx.save_for_backward(plan, output[2])
    ctx.exchange = (group, x.shape[0], _ORDER, alignment, num_sms)


def _gradient(ctx: Any, grad: Tensor, grad_weights: Tensor, *_: Any) -> tuple[Any, ...]:
    plan, topk_idx = ctx.saved_tensors
    x, weights = torch.ops.ferry.dispatch_backward(
        grad, grad_weights, topk_idx, plan, *ctx.exchange
    )
    return x, None, weights, *[None] * 6


def _define() -> None:
    made = torch.library.custom_op(
        "ferry::dispatch_through_e4m3",
        _dispatch,
        mutates_args=(),
        schema="(Tensor x, Tensor plan, Tensor topk_weights, SymInt group, SymInt topk, SymInt "
        "local_experts, SymInt alignment, SymInt max_recv_rows, SymInt num_sms) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    )
    made.register_fake(_dispatch)
    made.register_autograd(_gradient, setup_context=_context)


_define()
