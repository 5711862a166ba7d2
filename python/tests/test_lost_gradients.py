"""Calls of a group and of latency mode have no gradient: a tensor that requires one is refused
while gradients are recorded, whatever argument it is, and taken where none is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import run_ranks

import ferry
import ferry.torch as ft

TOKENS, TOPK, HIDDEN = 4, 2, 16
ROUTES = np.tile(np.array([0, 7]), (TOKENS, 1))


class Env:
    """What a call can be made with, on a rank of its own."""

    def __init__(self, group: ferry.Group) -> None:
        self.group = group
        self.plan = group.plan(ROUTES)
        self.x = torch.ones(TOKENS, HIDDEN)
        self.weights = torch.ones(TOKENS, TOPK)
        self.scales = torch.ones(TOKENS, 1)
        self.bias = torch.ones(TOKENS, HIDDEN)
        self.out = torch.zeros(TOKENS, HIDDEN)
        self.latency = ferry.LatencyExchange(
            group, capacity=TOKENS, hidden=HIDDEN, topk=TOPK, dtype="f32"
        )

    def combine(self, rows: torch.Tensor, **options: Any) -> Any:
        return self.group.combine(rows, self.plan, **options)

    def low(self, **given: Any) -> Any:
        received = self.latency.dispatch(self.x, ROUTES)
        given = {"rows": received.x, "topk_weights": self.weights} | given
        return self.latency.combine(received=received, **given)


Call = Callable[[Env, torch.Tensor], Any]
# The argument, the tensor that it is given, the call.
CALLS: dict[str, tuple[str, Call]] = {
    "dispatch: x": ("x", lambda e, t: e.group.dispatch(t, e.plan)),
    "dispatch: topk_weights": (
        "weights",
        lambda e, t: e.group.dispatch(e.x, topk_idx=ROUTES, topk_weights=t),
    ),
    "dispatch: scales": ("scales", lambda e, t: e.group.dispatch(e.x, e.plan, scales=t)),
    "dispatch: out": ("out", lambda e, t: e.group.dispatch(e.x, e.plan, out=t)),
    "combine: rows": ("x", lambda e, t: e.combine(t)),
    "combine: topk_weights": ("weights", lambda e, t: e.combine(e.x, topk_weights=t)),
    "combine: bias0": ("bias", lambda e, t: e.combine(e.x, bias0=t)),
    "combine: bias1": ("bias", lambda e, t: e.combine(e.x, bias0=e.bias, bias1=t)),
    "combine: out": ("out", lambda e, t: e.combine(e.x, out=t)),
    "latency dispatch: x": ("x", lambda e, t: e.latency.dispatch(t, ROUTES)),
    "latency dispatch: topk_weights": (
        "weights",
        lambda e, t: e.latency.dispatch(e.x, ROUTES, topk_weights=t),
    ),
    "latency combine: rows": ("low", lambda e, t: e.low(rows=t)),
    "latency combine: topk_weights": ("weights", lambda e, t: e.low(topk_weights=t)),
    "latency combine: out": ("out", lambda e, t: e.low(out=t)),
}


def refusal(call: Callable[[], Any]) -> str:
    """Its words alone: the error would keep results of latency mode, of which two may live."""
    try:
        call()
    except ferry.InvalidArgumentError as error:
        return str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_is_not_dropped_without_a_word(name: str) -> None:
    given, call = CALLS[name]

    def body(group: ferry.Group) -> None:
        env = Env(group)
        plain = torch.zeros(8, TOKENS, HIDDEN) if given == "low" else getattr(env, given)
        leaf = plain.clone().requires_grad_()
        argument = name.partition(": ")[2]
        for tensor in (leaf, leaf * 1):
            message = refusal(lambda: call(env, tensor))  # noqa: B023
            assert message.startswith(f"{name}: got a tensor that requires a gradient"), message
            for remedy in ("ferry.torch", f"{argument}.detach()", "torch.no_grad()"):
                assert remedy in message
        # Nothing moved; and who wants no gradient says so.
        call(env, leaf.detach())
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                call(env, leaf)

    run_ranks(1, body)


WRITES: dict[str, Call] = {
    "dispatch: out": lambda e, t: e.group.dispatch(e.x, e.plan, out=t),
    "combine: out": lambda e, t: e.combine(e.x, out=t),
    "latency combine: out": lambda e, t: e.low(out=t),
}


@pytest.mark.parametrize("name", WRITES)
def test_autograd_notices_that_what_it_saved_is_written_over(name: str) -> None:
    def body(group: ferry.Group) -> None:
        env = Env(group)
        factor = torch.ones(TOKENS, HIDDEN, requires_grad=True)
        loss = (factor * env.out).sum()
        WRITES[name](env, env.out.view(TOKENS, HIDDEN))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            uncounted = torch.empty(TOKENS, HIDDEN)
            WRITES[name](env, uncounted)
        WRITES[name](env, uncounted)

    run_ranks(1, body)


def test_looking_where_a_tensor_lies_needs_no_gradient() -> None:
    def body(group: ferry.Group) -> None:
        made = group.empty((4, 16), torch.float32).zero_().requires_grad_()
        assert group.is_registered(made)
        group.record_stream(made)
        assert not group.is_registered(torch.ones(4, requires_grad=True))

    run_ranks(1, body)


class Layer(torch.autograd.Function):
    """A caller's own gradient around plain calls, as layers written for `Group` have it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ferry.Group, plan: ferry.Plan) -> torch.Tensor:
        ctx.exchange = group, plan
        assert x.requires_grad
        return group.dispatch(x, plan).x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        group, plan = ctx.exchange
        return group.combine(grads[0].contiguous(), plan).x, None, None


def test_gradients_of_ones_own_and_of_ferry_torch_pass() -> None:
    def body(group: ferry.Group) -> None:
        plan = group.plan(ROUTES)
        x = torch.ones(TOKENS, HIDDEN, requires_grad=True)
        Layer.apply(x, group, plan).sum().backward()  # type: ignore[no-untyped-call]
        for form in (plan, ft.plan(group, torch.from_numpy(ROUTES))):
            weights = torch.ones(TOKENS, TOPK, requires_grad=True)
            got = ft.dispatch(group, form, x, topk_weights=weights)
            assert got.topk_weights is not None
            rows = got.x * got.topk_weights.sum(1, keepdim=True)
            loss = ft.combine(group, form, rows).sum()
            (made,) = torch.autograd.grad(loss, weights, create_graph=True)
            assert torch.equal(made, torch.full((TOKENS, TOPK), float(HIDDEN)))

    run_ranks(1, body)
