"""The operators `torch.ops.ferry`: what `ferry.torch` calls when a plan crosses as a tensor.

    plan(Tensor topk_idx, SymInt group) -> Tensor
    dispatch(Tensor x, Tensor plan, Tensor? topk_weights, SymInt group, SymInt topk,
             SymInt local_experts, str order, SymInt alignment, SymInt max_recv_rows,
             SymInt num_sms, str format="as_is", str scale_format="f32")
        -> (Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor source_token, Tensor slot_rows,
            Tensor expert_offsets, Tensor scales)
    combine(Tensor rows, Tensor plan, SymInt group, SymInt tokens, str order, SymInt alignment,
            SymInt max_recv_rows, SymInt num_sms) -> Tensor

`group` is `Group.handle`; an ExpertParallel that begins to run gives `plan` a handle of its own, so
that it learns of that inside compiled code, too. A plan is an i64 [1] tensor on the CPU that holds
the plan's handle and, as long as its memory lives, the plan: what torch saves for the backward pass
keeps it, and nothing else has to. Tensors that were not asked for come back empty.
`dispatch_backward` and `combine_backward` are the gradients, collective like all of them.

Calls must keep their order on all ranks, and torch keeps that of calls that need one another's
results. Two exchanges that do not may not stand in one compiled function.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ferry._ferry import Plan
from ferry.arguments import refuse
from ferry.experts import ExpertPlacement
from ferry.group import Group
from ferry.handles import find, register
from ferry.tensors import dense
from ferry.torch_wrapped_experts import ready


class _Keeper(bytearray):
    """The memory of a plan's tensor: the handle, and a reference to the plan."""

    plan: Plan


def plan_tensor(plan: Plan) -> Tensor:
    """An i64 [1] tensor with the plan's handle. Its memory keeps the plan."""
    keeper = _Keeper(register(plan).to_bytes(8, sys.byteorder))
    keeper.plan = plan
    return torch.frombuffer(keeper, dtype=torch.int64)


def plan_of(name: str, tensor: Tensor) -> Plan:
    """The plan of such a tensor."""
    if tensor.dtype != torch.int64 or tensor.numel() != 1 or tensor.device.type != "cpu":
        refuse(
            name,
            f"a tensor of {tensor.dtype}, shape {list(tensor.shape)}, on {tensor.device}",
            "the i64 [1] tensor in CPU memory that ferry::plan returned",
        )
    found: Plan = find(
        name, int(tensor.item()), "plan", "the tensor that ferry::plan returned, and no copy of it"
    )
    if not isinstance(found, Plan):
        refuse(name, "the handle of a group", "the tensor that ferry::plan returned")
    return found


def group_of(name: str, handle: int) -> Group:
    """The group with that handle, or of the ExpertParallel with it, which begins to run."""
    return _group_and_placement(name, handle)[0]


def _group_and_placement(name: str, handle: int) -> tuple[Group, ExpertPlacement | None]:
    found: Any = find(name, handle, "group", "Group.handle of a group that is kept elsewhere")
    placement = None
    if isinstance(found, nn.Module):
        found, placement = ready(found), found.placement  # type: ignore[arg-type]
    if not isinstance(found, Group):
        refuse(name, "the handle of a plan", "Group.handle")
    return found, placement


def _plan(topk_idx: Tensor, group: int) -> Tensor:
    found, placement = _group_and_placement("ferry::plan: group", group)
    digest = 0 if placement is None else placement.digest
    return plan_tensor(found.plan(topk_idx, placement_digest=digest))


def _plan_fake(topk_idx: Tensor, group: int) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _own(tensor: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, as compiled code may write into a result, and some are shared with the plan."""
    return x.new_empty(0, dtype=dtype) if tensor is None else tensor.clone()


def without_tail(rows: Tensor, topk_idx: Tensor) -> Tensor:
    """Rank-major rows of a worst case, those that did not arrive made zero in place: their bytes
    are undefined, and a gradient may not meet a NaN there."""
    # Of fp8, which torch cannot fill, the bytes.
    plain = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    plain.masked_fill_((topk_idx < 0).all(dim=1, keepdim=True), 0)
    return rows


def no_gradient(call: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that require a gradient where there is none. For callers that know that
    gradients are enabled: setup_context runs without, and only if the call was made with."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            refuse(
                f"{call}: {name}",
                'a tensor that requires a gradient with format "e4m3"',
                f"{name}.detach(), as quantised rows have no gradient",
            )


def _dispatch(
    x: Tensor,
    plan: Tensor,
    topk_weights: Tensor | None,
    group: int,
    topk: int,
    local_experts: int,
    order: str,
    alignment: int,
    max_recv_rows: int,
    num_sms: int,
    format: str = "as_is",
    scale_format: str = "f32",
) -> tuple[Tensor, ...]:
    weights = topk_weights
    if weights is not None:
        weights = dense("ferry::dispatch: topk_weights", weights)
    received = group_of("ferry::dispatch: group", group).dispatch(
        dense("ferry::dispatch: x", x),
        plan_of("ferry::dispatch: plan", plan),
        topk_weights=weights,
        format=format,
        scale_format=scale_format,
        order=order,
        alignment=alignment,
        max_recv_rows=max_recv_rows,
        num_sms=num_sms,
    )
    weights = received.topk_weights
    scales = received.scales
    if max_recv_rows > 0 and order == "rank_major":
        without_tail(received.x, received.topk_idx)
        if scales is not None:
            without_tail(scales, received.topk_idx)
    return (
        received.x,
        _own(received.topk_idx, x, torch.int64),
        x.new_empty(0, dtype=torch.float32) if weights is None else weights,
        _own(received.source_token, x, torch.int32),
        _own(received.slot_rows, x, torch.int64),
        _own(received.expert_offsets, x, torch.int64),
        x.new_empty(0, dtype=torch.float32) if scales is None else scales,
    )


def _dispatch_fake(
    x: Tensor,
    plan: Tensor,
    topk_weights: Tensor | None,
    group: int,
    topk: int,
    local_experts: int,
    order: str,
    alignment: int,
    max_recv_rows: int,
    num_sms: int,
    format: str = "as_is",
    scale_format: str = "f32",
) -> tuple[Tensor, ...]:
    expert_major = order == "expert_major"
    brought: Any = max_recv_rows
    rows: Any = max_recv_rows
    if not max_recv_rows:
        context = torch.library.get_ctx()
        brought = rows = context.new_dynamic_size()
        if expert_major:
            rows = context.new_dynamic_size()
    slots = (brought, topk) if expert_major else (0,)
    quantised = format != "as_is"
    return (
        x.new_empty(rows, x.shape[1], dtype=torch.float8_e4m3fn if quantised else x.dtype),
        x.new_empty(brought, topk, dtype=torch.int64),
        x.new_empty((0,) if topk_weights is None else (brought, topk), dtype=torch.float32),
        x.new_empty(brought, dtype=torch.int32),
        x.new_empty(slots, dtype=torch.int64),
        x.new_empty(local_experts + 1 if expert_major else 0, dtype=torch.int64),
        x.new_empty((rows, (x.shape[1] + 127) // 128) if quantised else (0,), dtype=torch.float32),
    )


def _dispatch_backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    topk_idx: Tensor,
    plan: Tensor,
    group: int,
    tokens: int,
    order: str,
    alignment: int,
    num_sms: int,
) -> tuple[Tensor, Tensor]:
    if grad_weights is not None:
        # Weights arrive as 0 where a slot is not local, whatever they are: no gradient from there.
        grad_weights = torch.where(topk_idx >= 0, grad_weights, 0.0)
    combined = group_of("ferry::dispatch_backward: group", group).combine(
        grad.contiguous(),
        plan_of("ferry::dispatch_backward: plan", plan),
        order=order,
        alignment=alignment,
        topk_weights=grad_weights,
        num_sms=num_sms,
    )
    weights = combined.topk_weights
    return combined.x, grad.new_empty(0, dtype=torch.float32) if weights is None else weights


def _dispatch_backward_fake(
    grad: Tensor,
    grad_weights: Tensor | None,
    topk_idx: Tensor,
    plan: Tensor,
    group: int,
    tokens: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    shape = (0,) if grad_weights is None else (tokens, topk_idx.shape[1])
    return grad.new_empty(tokens, grad.shape[1]), grad.new_empty(shape, dtype=torch.float32)


def _combine(
    rows: Tensor,
    plan: Tensor,
    group: int,
    tokens: int,
    order: str,
    alignment: int,
    max_recv_rows: int,
    num_sms: int,
) -> Tensor:
    found = group_of("ferry::combine: group", group)
    given = plan_of("ferry::combine: plan", plan)
    if given.tokens != tokens:
        refuse("ferry::combine: tokens", str(tokens), f"{given.tokens}, those of the plan")
    return found.combine(
        dense("ferry::combine: rows", rows),
        given,
        order=order,
        alignment=alignment,
        num_sms=num_sms,
    ).x


def _combine_fake(rows: Tensor, plan: Tensor, group: int, tokens: int, *_: Any) -> Tensor:
    return rows.new_empty(tokens, rows.shape[1])


def _combine_backward(
    grad: Tensor,
    plan: Tensor,
    group: int,
    rows: int,
    order: str,
    alignment: int,
    max_recv_rows: int,
    num_sms: int,
) -> Tensor:
    received = group_of("ferry::combine_backward: group", group).dispatch(
        grad.contiguous(),
        plan_of("ferry::combine_backward: plan", plan),
        order=order,
        alignment=alignment,
        max_recv_rows=max_recv_rows,
        num_sms=num_sms,
    )
    tail = max_recv_rows > 0 and order == "rank_major"
    return without_tail(received.x, received.topk_idx) if tail else received.x


def _combine_backward_fake(grad: Tensor, plan: Tensor, group: int, rows: int, *_: Any) -> Tensor:
    return grad.new_empty(rows, grad.shape[1])


# torch 2.4 asks for the context of calls without a gradient, too, and does not tell which.
_context_means_gradient = torch.__version__ >= "2.5"


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, plan, topk_weights, group, _, _, order, alignment, _, num_sms, form, _ = inputs
    ctx.quantised = form != "as_is"
    if ctx.quantised and _context_means_gradient:
        no_gradient("ferry::dispatch", x=x, topk_weights=topk_weights)
    ctx.save_for_backward(plan, output[1])
    ctx.exchange = (group, x.shape[0], order, alignment, num_sms)
    ctx.weighted = topk_weights is not None


def _dispatch_gradient(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    if ctx.quantised:
        refuse("ferry::dispatch", 'the gradient of a call with format "e4m3"', "none: detach()")
    plan, topk_idx = ctx.saved_tensors
    grad_weights = others[1] if ctx.weighted else None
    x, weights = torch.ops.ferry.dispatch_backward(
        grad, grad_weights, topk_idx, plan, *ctx.exchange
    )
    return x, None, weights if ctx.weighted else None, *[None] * 9


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, plan, group, _, order, alignment, max_recv_rows, num_sms = inputs
    ctx.save_for_backward(plan)
    ctx.exchange = (group, rows.shape[0], order, alignment, max_recv_rows, num_sms)


def _combine_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (plan,) = ctx.saved_tensors
    return torch.ops.ferry.combine_backward(grad, plan, *ctx.exchange), *[None] * 7


def _define() -> None:
    layout = "str order, SymInt alignment"
    operators = (
        ("plan", _plan, _plan_fake, "(Tensor topk_idx, SymInt group) -> Tensor"),
        (
            "dispatch",
            _dispatch,
            _dispatch_fake,
            "(Tensor x, Tensor plan, Tensor? topk_weights, SymInt group, SymInt topk, SymInt "
            f"local_experts, {layout}, SymInt max_recv_rows, SymInt num_sms, "
            'str format="as_is", str scale_format="f32") -> '
            "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        ),
        (
            "dispatch_backward",
            _dispatch_backward,
            _dispatch_backward_fake,
            "(Tensor grad, Tensor? grad_weights, Tensor topk_idx, Tensor plan, SymInt group, "
            f"SymInt tokens, {layout}, SymInt num_sms) -> (Tensor, Tensor)",
        ),
        (
            "combine",
            _combine,
            _combine_fake,
            f"(Tensor rows, Tensor plan, SymInt group, SymInt tokens, {layout}, SymInt "
            "max_recv_rows, SymInt num_sms) -> Tensor",
        ),
        (
            "combine_backward",
            _combine_backward,
            _combine_backward_fake,
            f"(Tensor grad, Tensor plan, SymInt group, SymInt rows, {layout}, SymInt "
            "max_recv_rows, SymInt num_sms) -> Tensor",
        ),
    )
    made = {}
    for name, run, fake, schema in operators:
        made[name] = torch.library.custom_op(f"ferry::{name}", run, mutates_args=(), schema=schema)
        made[name].register_fake(fake)
    made["dispatch"].register_autograd(_dispatch_gradient, setup_context=_dispatch_context)
    made["combine"].register_autograd(_combine_gradient, setup_context=_combine_context)


_define()
