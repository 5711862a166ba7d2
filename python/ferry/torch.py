"""Ferry for torch: dispatch and combine that autograd goes through, and torch's process groups.

The gradient of a dispatch is a combine and the other way round, so backward is collective, too.
Every rank must reach the backward of every exchange that it went through forward, in the same
order: requires_grad must be the same on all ranks, and a rank that received no rows must still use
the empty result in its loss. Gradients that autograd leaves out are sent as zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ferry._ferry import Bootstrap, Plan
from ferry.arguments import instance, refuse
from ferry.bootstrap import from_all_gather
from ferry.group import Group


class TorchReceived(NamedTuple):
    """What a dispatch brings, as tensors; shapes as in `ferry.Received`."""

    x: Tensor  # [N, H]; differentiable
    topk_idx: Tensor  # i64 [n, K]
    topk_weights: Tensor | None  # f32 [n, K]; differentiable
    source_token: Tensor  # i32 [n]
    slot_rows: Tensor | None  # i64 [n, K], expert-major only
    expert_offsets: Tensor | None  # i64 [local experts + 1], expert-major only


def dispatch(
    group: Group,
    plan: Plan,
    x: Tensor,
    topk_weights: Tensor | None = None,
    order: str = "rank_major",
    alignment: int = 1,
) -> TorchReceived:
    """Collective, forward and backward. `Group.dispatch` with gradients for x and topk_weights.

    x: f32, bf16 or f16 [T, H], copied only if it is not contiguous. topk_weights: f32 [T, K].
    """
    _check("torch.dispatch", group, plan, x=x, topk_weights=topk_weights)
    others: list[Any] = []
    if topk_weights is not None:
        topk_weights = topk_weights.contiguous()
    out, weights = _Dispatch.apply(  # type: ignore[no-untyped-call]
        group, plan, order, alignment, others, x.contiguous(), topk_weights
    )
    return TorchReceived(out, others[0], weights, others[1], others[2], others[3])


def combine(
    group: Group,
    plan: Plan,
    rows: Tensor,
    order: str = "rank_major",
    alignment: int = 1,
) -> Tensor:
    """Collective, forward and backward. `Group.combine` with a gradient for rows: [T, H].

    rows: f32, bf16 or f16, [n, H] rank-major or [M, H] expert-major, as dispatch gave them.
    """
    _check("torch.combine", group, plan, rows=rows)
    arguments = (group, plan, order, alignment, rows.contiguous())
    result: Tensor = _Combine.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        plan: Plan,
        order: str,
        alignment: int,
        others: list[Any],
        x: Tensor,
        topk_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        received = group.dispatch(
            x, plan, topk_weights=topk_weights, order=order, alignment=alignment
        )
        others += [
            received.topk_idx,
            received.source_token,
            received.slot_rows,
            received.expert_offsets,
        ]
        ctx.exchange = (group, plan, order, alignment)
        # Weights arrive as 0 where a slot is not local, whatever they are: no gradient from there.
        ctx.local = received.topk_idx >= 0 if topk_weights is not None else None
        return received.x, received.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor | None) -> tuple[Any, ...]:
        group, plan, order, alignment = ctx.exchange
        if ctx.local is not None:
            assert grad_weights is not None  # materialised by autograd
            grad_weights = torch.where(ctx.local, grad_weights, 0.0)
        combined = group.combine(
            grad_x.contiguous(),
            plan,
            order=order,
            alignment=alignment,
            topk_weights=grad_weights if ctx.local is not None else None,
        )
        return None, None, None, None, None, combined.x, combined.topk_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Group, plan: Plan, order: str, alignment: int, rows: Tensor
    ) -> Tensor:
        ctx.exchange = (group, plan, order, alignment)
        return group.combine(rows, plan, order=order, alignment=alignment).x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        group, plan, order, alignment = ctx.exchange
        received = group.dispatch(grad.contiguous(), plan, order=order, alignment=alignment)
        return None, None, None, None, received.x


def _check(call: str, group: Any, plan: Any, **tensors: Any) -> None:
    instance(f"{call}: group", group, Group, "a ferry.Group")
    instance(f"{call}: plan", plan, Plan, "a ferry.Plan, as Group.plan returns it")
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


def from_process_group(pg: Any = None) -> Bootstrap:
    """The ranks of a torch.distributed process group (None: the default one), any backend."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        refuse(
            "from_process_group: pg",
            "no initialised process group",
            "torch.distributed.init_process_group to be called first",
        )

    def all_gather(mine: bytes) -> list[bytes]:
        everyone: list[Any] = [None] * dist.get_world_size(pg)
        dist.all_gather_object(everyone, mine, group=pg)
        return everyone

    return from_all_gather(dist.get_rank(pg), dist.get_world_size(pg), all_gather)


__all__ = ["TorchReceived", "combine", "dispatch", "from_process_group"]
