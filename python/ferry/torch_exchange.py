"""Plan, dispatch and combine of `ferry.torch`: exchanges that autograd goes through."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ferry._ferry import Plan
from ferry.arguments import instance, refuse, renamed_keywords
from ferry.group import Group
from ferry.tensors import dense
from ferry.torch_ops import no_gradient, without_tail  # importing it defines torch.ops.ferry


class TorchPlan(NamedTuple):
    """A plan that crosses into compiled code: made by `plan`, for one group."""

    tensor: Tensor  # i64 [1] on the CPU: names the plan, and keeps it while its memory lives
    tokens: int  # of this rank
    topk: int


class TorchReceived(NamedTuple):
    """What a dispatch brings, as tensors; shapes as in `ferry.Received`."""

    x: Tensor  # [N, H]; differentiable unless quantised
    topk_idx: Tensor  # i64 [n, K]
    topk_weights: Tensor | None  # f32 [n, K]; differentiable
    source_token: Tensor  # i32 [n]
    slot_rows: Tensor | None  # i64 [n, K], expert-major only
    expert_offsets: Tensor | None  # i64 [local experts + 1], expert-major only
    scales: Tensor | None = None  # f32 [N, ceil(H/128)], with format="e4m3" only


def plan(group: Group, topk_idx: Tensor) -> TorchPlan:
    """Collective. `Group.plan` as an operator that torch.compile takes in."""
    instance("torch.plan: group", group, Group, "a ferry.Group")
    return planned(group.handle, topk_idx)


def planned(handle: int, topk_idx: Tensor) -> TorchPlan:
    """The same by the handle of a group, or of an ExpertParallel, which is about to run."""
    instance("torch.plan: topk_idx", topk_idx, Tensor, "a torch.Tensor")
    if topk_idx.dim() != 2:
        refuse("torch.plan: topk_idx", f"{topk_idx.dim()} dimensions", "2: [T, K]")
    tensor = torch.ops.ferry.plan(topk_idx, handle)
    return TorchPlan(tensor, topk_idx.shape[0], topk_idx.shape[1])


@renamed_keywords(sms="num_sms", worst_case_rows="max_recv_rows")
def dispatch(
    group: Group,
    plan: Plan | TorchPlan,
    x: Tensor,
    topk_weights: Tensor | None = None,
    order: str = "rank_major",
    alignment: int = 1,
    max_recv_rows: int = 0,
    num_sms: int = 0,
    format: str = "as_is",
    scale_format: str = "f32",
) -> TorchReceived:
    """Collective, forward and backward. `Group.dispatch` with gradients for x and topk_weights.

    x: f32, bf16 or f16 [T, H], copied only if it is not contiguous. topk_weights: f32 [T, K].
    With max_recv_rows, rows that did not arrive are zero.

    format="e4m3" quantises x on the way and has no gradient: x and topk_weights must not require
    one. A layer that wants one gives `x.detach()` inside its own torch.autograd.Function, whose
    backward is `Group.combine` of the gradient of what arrived.
    """
    _check("torch.dispatch", group, plan, x=x, topk_weights=topk_weights)
    if format != "as_is" and torch.is_grad_enabled():
        no_gradient("torch.dispatch", x=x, topk_weights=topk_weights)
    if isinstance(plan, TorchPlan):
        layout = (order, alignment, max_recv_rows, num_sms, format, scale_format)
        x, ids, weights, tokens, slots, offsets, scales = torch.ops.ferry.dispatch(
            x, plan.tensor, topk_weights, group.handle, plan.topk, group.local_experts, *layout
        )
        expert_major = order == "expert_major"
        return TorchReceived(
            x,
            ids,
            None if topk_weights is None else weights,
            tokens,
            slots if expert_major else None,
            offsets if expert_major else None,
            scales if format != "as_is" else None,
        )
    others: list[Any] = []
    if topk_weights is not None:
        topk_weights = dense("torch.dispatch: topk_weights", topk_weights)
    x = dense("torch.dispatch: x", x)
    exchange = (group, plan, order, alignment, max_recv_rows, num_sms)
    if format != "as_is":
        got = _dispatched(exchange, x, topk_weights, format=format, scale_format=scale_format)
        return TorchReceived(
            got.x,
            got.topk_idx,
            got.topk_weights,
            got.source_token,
            got.slot_rows,
            got.expert_offsets,
            got.scales,
        )
    out, weights = _Dispatch.apply(  # type: ignore[no-untyped-call]
        exchange, others, x, topk_weights
    )
    return TorchReceived(out, others[0], weights, others[1], others[2], others[3])


@renamed_keywords(sms="num_sms", worst_case_rows="max_recv_rows")
def combine(
    group: Group,
    plan: Plan | TorchPlan,
    rows: Tensor,
    order: str = "rank_major",
    alignment: int = 1,
    max_recv_rows: int = 0,
    num_sms: int = 0,
) -> Tensor:
    """Collective, forward and backward. `Group.combine` with a gradient for rows: [T, H].

    rows: f32, bf16 or f16, [n, H] rank-major or [M, H] expert-major, as dispatch gave them; order,
    alignment and max_recv_rows as given to dispatch.
    """
    _check("torch.combine", group, plan, rows=rows)
    if isinstance(plan, TorchPlan):
        layout = (order, alignment, max_recv_rows, num_sms)
        summed: Tensor = torch.ops.ferry.combine(
            rows, plan.tensor, group.handle, plan.tokens, *layout
        )
        return summed
    exchange = (group, plan, order, alignment, max_recv_rows, num_sms)
    result: Tensor = _Combine.apply(exchange, dense("torch.combine: rows", rows))  # type: ignore[no-untyped-call]
    return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: tuple[Any, ...],
        others: list[Any],
        x: Tensor,
        topk_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.exchange = exchange
        received = _dispatched(exchange, x, topk_weights)
        others += [
            received.topk_idx,
            received.source_token,
            received.slot_rows,
            received.expert_offsets,
        ]
        # Weights arrive as 0 where a slot is not local, whatever they are: no gradient from there.
        ctx.local = received.topk_idx >= 0 if topk_weights is not None else None
        return received.x, received.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor | None) -> tuple[Any, ...]:
        group, plan, order, alignment, _, num_sms = ctx.exchange
        if ctx.local is not None:
            assert grad_weights is not None  # materialised by autograd
            grad_weights = torch.where(ctx.local, grad_weights, 0.0)
        combined = group.combine(
            grad_x.contiguous(),
            plan,
            order=order,
            alignment=alignment,
            topk_weights=grad_weights if ctx.local is not None else None,
            num_sms=num_sms,
        )
        return None, None, combined.x, combined.topk_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: tuple[Any, ...], rows: Tensor) -> Tensor:
        ctx.exchange = exchange
        group, plan, order, alignment, _, num_sms = exchange
        made = group.combine(rows, plan, order=order, alignment=alignment, num_sms=num_sms)
        summed: Tensor = made.x
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, _dispatched(ctx.exchange, grad.contiguous(), None).x


def _dispatched(
    exchange: tuple[Any, ...], x: Tensor, topk_weights: Tensor | None, **formats: str
) -> Any:
    group, plan, order, alignment, max_recv_rows, num_sms = exchange
    received = group.dispatch(
        x,
        plan,
        topk_weights=topk_weights,
        order=order,
        alignment=alignment,
        max_recv_rows=max_recv_rows,
        num_sms=num_sms,
        **formats,
    )
    if max_recv_rows > 0 and order == "rank_major":
        without_tail(received.x, received.topk_idx)
        if received.scales is not None:
            without_tail(received.scales, received.topk_idx)
    return received


def _check(call: str, group: Any, plan: Any, **tensors: Any) -> None:
    instance(f"{call}: group", group, Group, "a ferry.Group")
    if not isinstance(plan, TorchPlan):
        expected = "a ferry.Plan, as Group.plan returns it, or a TorchPlan of ferry.torch.plan"
        instance(f"{call}: plan", plan, Plan, expected)
    for name, value in tensors.items():
        if value is None and name == "topk_weights":
            continue
        instance(f"{call}: {name}", value, Tensor, "a torch.Tensor")
        if name != "topk_weights" and value.dtype not in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            refuse(f"{call}: {name}", f"dtype {value.dtype}", "float32, bfloat16 or float16")
