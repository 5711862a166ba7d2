"""Bad calls of latency mode are refused before anything moves, and both modes work afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
from bad_calls import EXPERTS, I64, BadCall, Call, Env, check, check_refused_by_one_rank, each, f32
from rank_threads import run_ranks

import ferry


def latency(**config: Any) -> Call:
    settings = {"capacity": 4, "hidden": 16, "topk": 2, "dtype": "f32"} | config
    return lambda e: ferry.LatencyExchange(e.group, **settings)


def lat_dispatch(**options: Any) -> Call:
    return lambda e: e.lat.dispatch(
        options.pop("x", e.x), options.pop("topk_idx", e.routes), **options
    )


def low(rows: Any = None, weights: Any = None, **options: Any) -> Call:
    def call(e: Env) -> Any:
        received = e.lat.dispatch(e.x, e.routes)
        return e.lat.combine(
            received.x if rows is None else rows,
            received,
            e.weights if weights is None else weights,
            **options,
        )

    return call


CALLS: list[BadCall] = [
    (
        "latency: group",
        lambda e: ferry.LatencyExchange(None, capacity=1, hidden=16, topk=1),
        "group",
        "None",
        "ferry.Group",
    ),
    ("latency: capacity", latency(capacity=0), "capacity", "0", "at least 1"),
    ("latency: x dtype", lat_dispatch(x=np.ones((4, 16), np.float16)), "x", "f16", "f32"),
    ("latency: x hidden", lat_dispatch(x=f32(4, 32)), "x", "hidden 32", "16"),
    ("latency: x tokens", lat_dispatch(x=f32(5, 16)), "x", "5 tokens", "capacity, 4"),
    ("latency: routes", lat_dispatch(topk_idx=np.zeros((3, 2), I64)), "topk_idx", "3 tokens", "4"),
    ("latency: topk_idx", lat_dispatch(topk_idx=np.zeros((4, 3), I64)), "topk_idx", "topk 3", "2"),
    ("latency: expert", lat_dispatch(topk_idx=np.full((4, 2), 9)), "topk_idx", "expert 9", "… 7"),
    ("latency: format", lat_dispatch(format="fp8"), "format", "fp8", "e4m3"),
    (
        "latency: scale format",
        lat_dispatch(scale_format="f32_pow2"),
        "scale_format",
        "scale",
        "e4m3",
    ),
    ("latency: scale word", lat_dispatch(scale_format="e8"), "scale_format", "e8", "ue8m0_packed"),
    ("latency: hook", lat_dispatch(hook=None), "hook", "None", "True or False"),
    ("latency: stream", lat_dispatch(stream=0), "stream", "0", "ferry.Stream"),
]
# Calls that are wrong in or after something collective, so both ranks make them.
TOGETHER: list[BadCall] = [
    ("latency: hidden", latency(hidden=3), "hidden", "12 bytes", "multiple of 16"),
    ("latency: topk", latency(topk=65), "topk", "65", "1 … 64"),
    ("latency: dtype", latency(dtype="e4m3"), "dtype", "e4m3", "f32, bf16 or f16"),
    ("latency: rows", low(rows=f32(4, 8, 32)), "rows", "4, 8, 32", "4, 8, 16"),
    ("latency: rows dtype", low(rows=np.ones((4, 8, 16), np.float16)), "rows", "f16", "f32"),
    ("latency: weights", low(weights=f32(4, 3)), "topk_weights", "4, 3", "4, 2"),
    ("latency: weights dtype", low(weights=np.ones((4, 2))), "topk_weights", "float64", " f32$"),
    ("latency: out", low(out=f32(3, 16)), "out", "3, 16", "4, 16"),
    (
        "latency: received",
        lambda e: e.lat.combine(f32(4, 8, 16), e.received, e.weights),
        "received",
        "Received",
        "LatencyReceived",
    ),
    (
        "latency: no hook",
        lambda e: e.lat.dispatch(e.x, e.routes).receive(),
        "hook",
        "without hook",
        "receive",
    ),
]


@each(CALLS)
def test_refused_by_one_rank(call: Call, argument: str, got: str, expected: str) -> None:
    check_refused_by_one_rank(call, argument, got, expected)


@each(TOGETHER)
def test_refused_by_all_ranks(call: Call, argument: str, got: str, expected: str) -> None:
    def body(group: ferry.Group) -> None:
        env = Env(group)
        check(call, env, argument, got, expected)
        env.check_it_works()

    run_ranks(2, body, experts=EXPERTS)
