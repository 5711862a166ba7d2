"""What the ranks of test_gpu.py do on either engine."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from exchange_case import EXPERTS, HIDDEN, Case, same

import ferry
import ferry.torch as ft


def exchange(
    group: ferry.Group, dtype_name: str, order: str, worst_case: int, out: bool = False
) -> None:
    """Plan, dispatch and combine, twice with the same plan; both orders."""
    case = Case(group)
    x, ids, w = case.own(getattr(torch, dtype_name))
    alignment = 4 if order == "expert_major" else None
    layout: dict[str, Any] = {"order": order, "alignment": alignment or 1}
    plan = group.plan(ids)
    for _ in range(2):
        given: dict[str, Any] = {}
        if out:
            rows = worst_case or plan.recv_rows()
            given = {"out": torch.empty(rows, HIDDEN, dtype=x.dtype, device=x.device)}
        got = group.dispatch(x, plan, topk_weights=w, max_recv_rows=worst_case, **layout, **given)
        case.check_received(got, alignment)
        assert got.x.device == x.device and got.x.dtype == x.dtype
        assert group.is_registered(got.x) != out
        assert got.event.ready() or x.is_cuda
        if order == "rank_major":
            got.x.mul_(2)
            back = group.combine(got.x, plan, topk_weights=got.topk_weights, **layout)
            same(back.x, case.doubled())
            back.event.wait(deadline=20.0)
            assert back.event.ready()
        else:
            back = group.combine(got.x, plan, **layout)
            ones = case.reference.routes[case.rank] >= 0
            same(back.x, case.xs[case.rank] * ones.sum(1, keepdims=True))


def biases_and_own_output(group: ferry.Group) -> None:
    case = Case(group)
    x, ids, _ = case.own(torch.bfloat16)
    plan = group.plan(ids)
    rows = group.empty((plan.recv_rows(), HIDDEN), torch.bfloat16)
    assert rows.device == x.device and group.is_registered(rows)
    rows.copy_(group.dispatch(x, plan).x).mul_(2)
    y = torch.empty_like(x)
    ordinary = rows.clone()
    for given in (rows, ordinary):
        y.zero_()
        combined = group.combine(given, plan, bias0=x, bias1=torch.ones_like(x), out=y, num_sms=0)
        assert combined.x is y
        same(y, case.doubled() + case.xs[case.rank] + 1)


def memory_goes_back(group: ferry.Group) -> None:
    case = Case(group)
    x, ids, _ = case.own()
    group.barrier()
    before = group.memory().arena_used_bytes
    for _ in range(3):
        plan = group.plan(ids)
        got = group.dispatch(x, plan)
        assert len(got.x) == plan.recv_rows()
        view = got.x[1:3]
        del got
        if len(view):
            assert group.memory().arena_used_bytes > before
        del view, plan
        gc.collect()
        limit = time.monotonic() + 5
        while group.memory().arena_used_bytes > before and time.monotonic() < limit:
            time.sleep(0.01)
        assert group.memory().arena_used_bytes == before
    assert group.memory().arena_used_bytes <= group.memory().arena_bytes


def results_outlive_the_group(group: ferry.Group) -> Any:
    case = Case(group)
    x, ids, _ = case.own()
    got = group.dispatch(x, group.plan(ids))
    group.barrier()
    group.destroy()
    gc.collect()
    same(got.x, case.reference.gathered(case.xs, group.rank))


def the_others_go_on_when_a_rank_leaves(group: ferry.Group) -> None:
    if group.size == 1:
        return
    x = torch.full((5, HIDDEN), float(group.rank), device=group.device)
    every = torch.arange(group.size, device=group.device).repeat(5, 1) * (EXPERTS // group.size)
    plan = group.plan(every)
    group.barrier()
    if group.rank == 0:
        group.destroy()
        return
    with pytest.raises((ferry.PeerLeftError, ferry.PeerFailedError)):
        group.barrier()
    view = group.regroup()
    left = list(range(1, group.size))
    assert (view.epoch, view.ranks, view.lost) == (2, left, [0])
    with pytest.raises(ferry.InvalidArgumentError, match="a plan of epoch 1"):
        group.dispatch(x, plan)
    # GPUs read the routes later, so one waits; the lowest rank that gave such is told so, the
    # others of it.
    with pytest.raises((ferry.InvalidArgumentError, ferry.PeerFailedError), match="of rank 0"):
        group.plan(every).recv_rows()
    plan = group.plan(every[:, 1:])
    got = group.dispatch(x, plan)
    assert (group.combine(got.x, plan).x == len(left) * group.rank).all()
    assert not group.commit(3)
    assert group.view().step == 3
    group.barrier()


def gradients(group: ferry.Group, worst_case: int) -> None:
    """The plain autograd functions, with plans of Group.plan."""
    import compiled_bodies as bodies

    x, ids, w = bodies.inputs(group, 4)
    x.requires_grad_()
    w.requires_grad_()
    plan = group.plan(ids)
    got = ft.dispatch(group, plan, x, topk_weights=w, max_recv_rows=worst_case, num_sms=3)
    assert got.topk_weights is not None
    rows = got.x * got.topk_weights.sum(1, keepdim=True)
    y = ft.combine(group, plan, rows, max_recv_rows=worst_case, num_sms=3)
    y.pow(2).sum().mul(0.5).backward()
    y_ref, x_ref, w_ref = bodies.expected(ids, x, w)
    assert torch.equal(y.detach(), y_ref)
    assert x.grad is not None and torch.equal(x.grad, x_ref)
    assert w.grad is not None and w_ref is not None and torch.equal(w.grad, w_ref)
