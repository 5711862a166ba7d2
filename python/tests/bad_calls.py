"""Calls that are refused before anything moves, for the test_bad_*.py: what they are made with, and
what the message must say: the argument, what was got and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rank_threads import run_ranks

import ferry

TOKENS, TOPK, HIDDEN, EXPERTS = 4, 2, 16, 8
I64 = np.int64


class Env:
    """What a call can be made with, on rank 0 of two ranks."""

    def __init__(self, group: ferry.Group) -> None:
        self.group = group
        self.routes = np.tile(np.array([0, EXPERTS - 1]), (TOKENS, 1))
        self.plan = group.plan(self.routes)
        self.x = np.ones((TOKENS, HIDDEN), np.float32)
        self.weights = np.ones((TOKENS, TOPK), np.float32)
        self.makes_plan = False  # the dispatches
        self.received = group.dispatch(self.x, self.plan, topk_weights=self.weights)
        self.lat = ferry.LatencyExchange(
            group, capacity=TOKENS, hidden=HIDDEN, topk=TOPK, dtype="f32"
        )

    def check_it_works(self) -> None:
        got = self.group.dispatch(self.x, self.plan)
        assert (got.x == 1).all()
        assert (self.group.combine(got.x, self.plan).x == self.group.size).all()
        low = self.lat.dispatch(self.x, self.routes)
        assert (self.lat.combine(low.x, low, self.weights).x == 2).all()


Call = Callable[[Env], Any]
# What is bad, the call, argument, got, expected; the last two are regular expressions.
BadCall = tuple[str, Call, str, str, str]


def strided(shape: tuple[int, int]) -> np.ndarray:
    return np.ones((shape[0], shape[1] * 2), np.float32)[:, ::2]


def read_only(shape: tuple[int, int]) -> np.ndarray:
    array = np.zeros(shape, np.float32)
    array.setflags(write=False)
    return array


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def check(call: Call, env: Env, argument: str, got: str, expected: str) -> None:
    with pytest.raises(ferry.InvalidArgumentError) as caught:
        call(env)
    message = str(caught.value)
    name, _, rest = message.partition("got ")
    assert argument in re.findall(r"\w+", name), message
    first, _, last = rest.partition("expected")
    assert re.search(got, first), message
    assert re.search(expected, last), message


def each(cases: list[BadCall]) -> pytest.MarkDecorator:
    """Parametrises a test with (call, argument, got, expected)."""
    return pytest.mark.parametrize(
        ("call", "argument", "got", "expected"), [c[1:] for c in cases], ids=[c[0] for c in cases]
    )


def check_refused_by_one_rank(call: Call, argument: str, got: str, expected: str) -> None:
    """Rank 0 of two makes the call; nothing is taken, and both go on."""

    def body(group: ferry.Group) -> None:
        env = Env(group)
        before = group.memory()
        if group.rank == 0:
            check(call, env, argument, got, expected)
        assert group.memory() == before
        env.check_it_works()

    run_ranks(2, body, experts=EXPERTS)
