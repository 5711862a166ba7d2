"""torch tensors whose memory is not what they show: the lazy negative and conjugate bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_threads import run_ranks

import ferry
import ferry.tensors
import ferry.torch
from ferry import _ferry

X = torch.arange(1.0, 65.0).reshape(4, 16)
ROUTES = np.zeros((4, 1), np.int64)


LAZY = {
    "negative view": lambda: torch._neg_view(X),
    "imaginary part of a conjugate": lambda: torch.complex(X, X).conj().imag,
    "bf16": lambda: torch._neg_view(X.to(torch.bfloat16)),
    "requires a gradient": lambda: torch._neg_view(X.clone().requires_grad_()),
}


@pytest.mark.parametrize("name", LAZY)
def test_rows_arrive_with_their_sign(name: str) -> None:
    def body(group: ferry.Group) -> None:
        x = LAZY[name]()
        assert x.is_neg()
        plan = group.plan(ROUTES)
        with torch.no_grad():  # as one of them requires a gradient
            assert (group.dispatch(x, plan).x == -X).all()
            assert (group.combine(x, plan).x == -X).all()
            assert (group.combine(torch.zeros(4, 16, dtype=x.dtype), plan, bias0=x).x == -X).all()

    run_ranks(1, body)


NOT_PLAIN = {
    **LAZY,
    "gradient": lambda: X.clone().requires_grad_(),
    "transposed": lambda: X.t(),
    "subclass": lambda: torch.nn.Parameter(X, requires_grad=False),
    "sparse": lambda: X.to_sparse(),
    "dtype that Ferry does not know": lambda: X.double(),
    "four dimensions": lambda: X.view(2, 2, 4, 4),
    "no dimension": lambda: X[0, 0],
    "NumPy": lambda: X.numpy(),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_a_closer_look(name: str) -> None:
    assert _ferry.View.of_torch(NOT_PLAIN[name](), "x", False) is None


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch has no exchange table of DLPack")
def test_plain_tensors_are_read_at_once() -> None:
    for x in (X, X[1:3], X[0], X.bfloat16(), X.to(torch.float8_e4m3fn), torch.empty(0, 16)):
        found = _ferry.View.of_torch(x, "x", False)
        assert found is not None and found.gpu is None and found.address == x.data_ptr()
        assert found.dtype == ferry.tensors.dtype_named("x", x.dtype)
    before = X._version
    assert _ferry.View.of_torch(X, "x", True) is not None and X._version == before + 1


def test_weights_and_scales_arrive_with_their_sign() -> None:
    def body(group: ferry.Group) -> None:
        column = X[:, :1].contiguous()
        lazy = torch._neg_view(column)
        got = group.dispatch(X, group.plan(ROUTES), topk_weights=lazy, scales=lazy)
        assert (got.topk_weights == -column).all()
        assert (got.scales == -column).all()

    run_ranks(1, body)


def test_registered_rows_are_not_read_in_place_without_their_sign() -> None:
    def body(group: ferry.Group) -> None:
        plan = group.plan(ROUTES)
        received = group.dispatch(X, plan)
        assert (group.combine(torch._neg_view(received.x), plan).x == -X).all()

    run_ranks(1, body)


def test_autograd_carries_the_sign() -> None:
    def body(group: ferry.Group) -> None:
        plan = group.plan(ROUTES)
        x = X.clone().requires_grad_()
        received = ferry.torch.dispatch(group, plan, torch._neg_view(x))
        assert (received.x == -X).all()
        ferry.torch.combine(group, plan, received.x).backward(torch._neg_view(torch.ones(4, 16)))
        assert x.grad is not None
        assert (x.grad == 1).all()

    run_ranks(1, body)


def test_latency_mode_carries_the_sign() -> None:
    def body(group: ferry.Group) -> None:
        latency = ferry.LatencyExchange(group, capacity=4, hidden=16, topk=1, dtype="f32")
        sent = latency.dispatch(torch._neg_view(X), ROUTES)
        assert (sent.x[0, :4] == -X).all()
        weights = torch._neg_view(torch.ones(4, 1))
        assert (latency.combine(sent.x, sent, weights).x == X).all()

    run_ranks(1, body)


def test_complex_numbers_are_refused() -> None:
    def body(group: ferry.Group) -> None:
        with pytest.raises(
            ferry.InvalidArgumentError, match=r"x: got dtype complex64; expected dtype"
        ):
            group.dispatch(torch.complex(X, X).conj(), group.plan(ROUTES))

    run_ranks(1, body)
