"""ferry.torch: gradients through dispatch and combine against one rank that does it all itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exchange_reference import Reference
from rank_threads import run_ranks

import ferry
import ferry.torch as ft

HIDDEN, TOPK, EXPERTS = 16, 3, 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(seed: int, ranks: int) -> tuple[Reference, list[torch.Tensor], list[torch.Tensor]]:
    rng = np.random.default_rng(seed)
    tokens = [0 if r == 1 else int(rng.integers(2, 12)) for r in range(ranks)]
    routes = [rng.integers(-1, EXPERTS, (t, TOPK)) for t in tokens]
    # Small integers: sums are exact in every dtype, so that any order gives the same bits.
    x = [torch.from_numpy(rng.integers(-4, 5, (t, HIDDEN)).astype(np.float32)) for t in tokens]
    w = [torch.from_numpy(rng.integers(-2, 3, (t, TOPK)).astype(np.float32)) for t in tokens]
    return Reference(routes, EXPERTS), x, w


def expert_scale(experts: torch.Tensor) -> torch.Tensor:
    """What expert e does to a row: times (e mod 3) + 1, which is exact."""
    return (experts % 3 + 1).to(torch.float32)


def naive(
    routes: np.ndarray, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """y[t] = sum over slots of w * scale(expert) * x, on one rank, with its gradients."""
    x = x.to(dtype).requires_grad_()
    w = w.clone().requires_grad_()
    ids = torch.from_numpy(routes)
    factor = torch.where(ids >= 0, w * expert_scale(ids), 0.0).sum(1, keepdim=True)
    y = (x.float() * factor).to(dtype)
    y.float().pow(2).sum().mul(0.5).backward()
    return y.detach(), x.grad, w.grad


def moe(group: ferry.Group, ref: Reference, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same with Ferry: experts' weighted sum on their ranks, rank-major."""
    plan = group.plan(ref.routes[group.rank])
    got = ft.dispatch(group, plan, x, topk_weights=w)
    ids = got.topk_idx + ref.blocks[group.rank].start
    factor = (got.topk_weights * expert_scale(ids)).sum(1, keepdim=True)
    return ft.combine(group, plan, (got.x.float() * factor).to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 4])
def test_rank_major_gradients(ranks: int, dtype: torch.dtype) -> None:
    ref, xs, ws = make(1, ranks)
    if dtype != torch.float32:  # the gradient of y*y/2 stays exact: few bits in everything
        xs = [x.sign() for x in xs]

    def body(group: ferry.Group) -> Any:
        x = xs[group.rank].to(dtype).requires_grad_()
        w = ws[group.rank].clone().requires_grad_()
        y = moe(group, ref, x, w)
        y.float().pow(2).sum().mul(0.5).backward()
        return y.detach(), x.grad, w.grad

    for r, got in enumerate(run_ranks(ranks, body, experts=EXPERTS)):
        for mine, expected in zip(got, naive(ref.routes[r], xs[r], ws[r], dtype)):
            assert mine is not None
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected)


@pytest.mark.parametrize("alignment", [1, 4])
def test_expert_major_gradients(alignment: int) -> None:
    ranks = 3
    ref, xs, _ = make(2, ranks)

    def body(group: ferry.Group) -> Any:
        x = xs[group.rank].clone().requires_grad_()
        plan = group.plan(ref.routes[group.rank])
        got = ft.dispatch(group, plan, x, order="expert_major", alignment=alignment)
        assert got.expert_offsets is not None
        blocks = got.expert_offsets.diff()
        ids = torch.arange(len(blocks)) + ref.blocks[group.rank].start
        scale = expert_scale(ids).repeat_interleave(blocks)[:, None]
        y = ft.combine(group, plan, got.x * scale, order="expert_major", alignment=alignment)
        y.pow(2).sum().mul(0.5).backward()
        return y.detach(), x.grad

    for r, (y, grad) in enumerate(run_ranks(ranks, body, experts=EXPERTS)):
        ones = torch.ones(ref.routes[r].shape)
        expected_y, expected_grad, _ = naive(ref.routes[r], xs[r], ones, torch.float32)
        assert torch.equal(y, expected_y)
        assert torch.equal(grad, expected_grad)


def test_weights_that_never_count_get_no_gradient() -> None:
    """A slot that is not local arrives as 0: a gradient there must not come back."""
    ref, xs, ws = make(3, 2)

    def body(group: ferry.Group) -> Any:
        w = ws[group.rank].clone().requires_grad_()
        got = ft.dispatch(group, group.plan(ref.routes[group.rank]), xs[group.rank], topk_weights=w)
        assert got.topk_weights is not None
        got.topk_weights.sum().backward()
        return w.grad

    for r, grad in enumerate(run_ranks(2, body, experts=EXPERTS)):
        assert torch.equal(grad, torch.from_numpy((ref.routes[r] >= 0).astype(np.float32)))


def test_gradients_that_are_left_out_are_sent_as_zeros() -> None:
    """Only x is used on one rank, only the weights on the other; both take part."""
    ref, xs, ws = make(4, 2)

    def body(group: ferry.Group) -> Any:
        x = xs[group.rank].clone().requires_grad_()
        w = ws[group.rank].clone().requires_grad_()
        plan = group.plan(ref.routes[group.rank])
        got = ft.dispatch(group, plan, x, topk_weights=w)
        assert got.topk_weights is not None
        (got.x if group.rank == 0 else got.topk_weights).sum().backward()
        return x.grad, w.grad

    results = run_ranks(2, body, experts=EXPERTS)
    for r, (x_grad, w_grad) in enumerate(results):
        went = [np.isin(ref.routes[r], list(ref.blocks[p])) for p in range(2)]
        to_first = torch.from_numpy(went[0].any(1).astype(np.float32))[:, None]
        assert torch.equal(x_grad, to_first.expand(-1, HIDDEN))
        assert torch.equal(w_grad, torch.from_numpy(went[1].astype(np.float32)))


def test_without_gradients_and_with_strided_inputs() -> None:
    ref, xs, ws = make(5, 2)

    def body(group: ferry.Group) -> Any:
        x = xs[group.rank].t().contiguous().t()
        with torch.no_grad():
            y = moe(group, ref, x, ws[group.rank])
        assert not y.requires_grad
        return y

    for r, y in enumerate(run_ranks(2, body, experts=EXPERTS)):
        assert torch.equal(y, naive(ref.routes[r], xs[r], ws[r], torch.float32)[0])


def test_numeric_gradient() -> None:
    """Finite differences in fp32 of a function with curvature, ranks working together."""
    ref, xs, ws = make(6, 2)
    direction = [
        torch.from_numpy(np.random.default_rng(r).standard_normal(x.shape)).float()
        for r, x in enumerate(xs)
    ]

    def body(group: ferry.Group) -> Any:
        r = group.rank
        x = (xs[r] / 8).requires_grad_()
        loss = moe(group, ref, x, ws[r]).tanh().sum()
        loss.backward()
        step = 1e-2
        with torch.no_grad():
            ahead, behind = (
                moe(group, ref, x + s * direction[r], ws[r]).tanh().double().sum()
                for s in (step, -step)
            )
        return (x.grad * direction[r]).double().sum(), (ahead - behind) / (2 * step)

    results = run_ranks(2, body, experts=EXPERTS)
    analytic, numeric = (sum(float(pair[i]) for pair in results) for i in range(2))
    assert analytic == pytest.approx(numeric, rel=2e-2, abs=1e-2)


def test_bad_arguments_are_named() -> None:
    def body(group: ferry.Group) -> None:
        plan = group.plan(torch.zeros(2, 1, dtype=torch.int64))
        with pytest.raises(ferry.InvalidArgumentError, match=r"torch.dispatch: x: got .*ndarray"):
            ft.dispatch(group, plan, np.ones((2, 16), np.float32))  # type: ignore[arg-type]
        with pytest.raises(
            ferry.InvalidArgumentError, match=r"x: got dtype torch.float64; expected"
        ):
            ft.dispatch(group, plan, torch.ones(2, 16, dtype=torch.float64))
        with pytest.raises(ferry.InvalidArgumentError, match=r"torch.combine: plan: got None"):
            ft.combine(group, None, torch.ones(2, 16))  # type: ignore[arg-type]
        with pytest.raises(ferry.InvalidArgumentError, match="no initialised process group"):
            ft.from_process_group()

    run_ranks(1, body)
