"""Every kind of bad call is refused before anything moves: the message names the argument, what was
got and what was expected, and the group works afterwards as if nothing had been said. Here those of
throughput mode; test_bad_groups.py and test_bad_latency_calls.py have the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import (
    EXPERTS,
    HIDDEN,
    I64,
    TOKENS,
    TOPK,
    BadCall,
    Call,
    Env,
    check,
    check_refused_by_one_rank,
    each,
    f32,
    read_only,
    strided,
)
from rank_threads import run_ranks

import ferry


def plan(routes: Any) -> Call:
    return lambda e: e.group.plan(routes)


def dispatch(**options: Any) -> Call:
    x = options.pop("x", "own")
    plan = options.pop("plan", "own")

    def call(e: Env) -> Any:
        own = isinstance(plan, str)
        routes = {"topk_idx": e.routes} if own and e.makes_plan else {}
        return e.group.dispatch(
            e.x if isinstance(x, str) and x == "own" else x,
            None if routes else e.plan if own else plan,
            **routes,
            **options,
        )

    return call


def combine(**options: Any) -> Call:
    rows = options.pop("rows", "own")
    return lambda e: e.group.combine(
        e.received.x if isinstance(rows, str) and rows == "own" else rows,
        options.pop("plan", e.plan),
        **options,
    )


META = torch.zeros(TOKENS, TOPK, dtype=torch.int64, device="meta")
SPARSE = torch.ones(TOKENS, TOPK).to_sparse()

FP8 = torch.ones(4, 16).to(torch.float8_e4m3fn)
STRUCT = np.zeros((4, 16), [("x", np.float32), ("other", np.int8)])

CALLS: list[BadCall] = [
    # plan
    ("routes: a list", plan([[0, 1]]), "topk_idx", "list", "NumPy array or a torch CPU tensor"),
    ("routes: None", plan(None), "topk_idx", "NoneType", "array"),
    ("routes: dtype", plan(f32(4, 2)), "topk_idx", "f32", "i64 or i32"),
    ("routes: bool", plan(np.ones((4, 2), bool)), "topk_idx", "dtype bool", " dtype i64 or i32$"),
    ("routes: torch bool", plan(torch.ones(4, 2) > 0), "topk_idx", "bool", " dtype i64 or i32$"),
    ("routes: u64", plan(np.ones((4, 2), np.uint64)), "topk_idx", "uint64", " dtype i64 or i32$"),
    ("routes: u16", plan(np.ones((4, 2), np.uint16)), "topk_idx", "uint16", " dtype i64 or i32$"),
    ("routes: text", plan(np.full((4, 2), "a")), "topk_idx", "<U1", "native .* i64 or i32$"),
    ("routes: 1-d", plan(np.zeros(4, I64)), "topk_idx", r"\[4\]", "2 dimensions"),
    ("routes: 0-d", plan(np.array(3)), "topk_idx", "0 dimensions", "1 to 3"),
    ("routes: 4-d", plan(np.zeros((1, 1, 1, 1), I64)), "topk_idx", "4 dimensions", "1 to 3"),
    ("routes: too high", plan(np.full((4, 2), 8)), "topk_idx", "expert 8", "0 … 7"),
    ("routes: too low", plan(np.full((4, 2), -2)), "topk_idx", "expert -2", "-1"),
    ("routes: no slots", plan(np.zeros((4, 0), I64)), "topk_idx", "topk 0", "1 … 64"),
    ("routes: many slots", plan(np.zeros((4, 65), I64)), "topk_idx", "topk 65", "1 … 64"),
    ("routes: device", plan(META), "topk_idx", "device meta", "CPU memory"),
    ("routes: sparse", plan(SPARSE), "topk_idx", "sparse", "strided"),
    ("routes: byte order", plan(np.zeros((4, 2), ">i8")), "topk_idx", ">i8", "native"),
    ("plan: stream", lambda e: e.group.plan(e.routes, stream=1), "stream", "1", "ferry.Stream"),
    # dispatch
    ("x: None", dispatch(x=None), "x", "NoneType", "array"),
    ("x: dtype", dispatch(x=np.ones((4, 16))), "x", "float64", "f32"),
    ("x: complex", dispatch(x=np.ones((4, 16), np.complex64)), "x", "complex64", "f32"),
    ("x: 1-d", dispatch(x=f32(64)), "x", r"\[64\]", "2 dimensions"),
    ("x: 3-d", dispatch(x=f32(4, 16, 1)), "x", r"\[4, 16, 1\]", "2 dimensions"),
    ("x: tokens", dispatch(x=f32(5, 16)), "x", "5 rows", "4"),
    ("x: row bytes", dispatch(x=f32(4, 5)), "x", "20 bytes", "multiple of 16"),
    ("x: no columns", dispatch(x=f32(4, 0)), "x", "0 bytes", "multiple of 16"),
    ("x: strides", dispatch(x=strided((4, 16))), "x", r"strides \[32, 2\]", "dense"),
    ("x: broadcast", dispatch(x=np.broadcast_to(f32(1, 16), (4, 16))), "x", "strides", "dense"),
    ("x: uint16", dispatch(x=np.ones((4, 16), np.uint16)), "x", "uint16", 'dtype="bf16"'),
    ("x: device", dispatch(x=torch.ones(4, 16, device="meta")), "x", "meta", "CPU memory"),
    ("x: object", dispatch(x=np.zeros((4, 16), object)), "x", "object", "numeric"),
    ("dtype: disagrees", dispatch(dtype="bf16"), "x", "float32", "bf16"),
    ("dtype: word", dispatch(dtype="bfloat"), "dtype", "bfloat", "bf16"),
    ("dtype: of torch", dispatch(dtype=torch.float64), "dtype", "float64", "f32"),
    ("plan: None", dispatch(plan=None), "plan", "none", "a plan, or else topk_idx"),
    ("plan: an array", dispatch(plan=np.zeros(3)), "plan", "ndarray", "ferry.Plan"),
    ("weights: dtype", dispatch(topk_weights=np.ones((4, 2))), "topk_weights", "float64", " f32$"),
    (
        "weights: half",
        dispatch(topk_weights=np.ones((4, 2), np.float16)),
        "topk_weights",
        "f16",
        "f32",
    ),
    ("weights: shape", dispatch(topk_weights=f32(4, 3)), "topk_weights", "4, 3", "4, 2"),
    (
        "weights: strides",
        dispatch(topk_weights=strided((4, 2))),
        "topk_weights",
        "strides",
        "dense",
    ),
    ("scales: rows", dispatch(scales=f32(3, 1)), "scales", "3, 1", "4"),
    ("scales: double", dispatch(scales=np.ones((4, 1))), "scales", "float64", " dtype f32$"),
    ("scales: dtype", dispatch(scales=np.ones((4, 1), np.int32)), "scales", "i32", "f32"),
    ("format: word", dispatch(format="fp8"), "format", "fp8", "e4m3"),
    ("format: type", dispatch(format=1), "format", "1", "as_is"),
    ("scale format: alone", dispatch(scale_format="f32_pow2"), "scale_format", "without", "e4m3"),
    (
        "scale format: packed",
        dispatch(format="e4m3", scale_format="ue8m0_packed"),
        "scale_format",
        "packed",
        "f32_pow2",
    ),
    ("format: scales", dispatch(format="e4m3", scales=f32(4, 1)), "scales", "e4m3", "none"),
    (
        "format: integers",
        dispatch(format="e4m3", x=np.ones((4, 16), np.int32)),
        "x",
        "i32",
        "bf16",
    ),
    ("format: hidden", dispatch(format="e4m3", x=f32(4, 20)), "x", "hidden 20", "multiple of 16"),
    ("format: out", dispatch(format="e4m3", out=f32(8, 16)), "out", "float32|f32", "e4m3|u8"),
    ("order: word", dispatch(order="rank-major"), "order", "rank-major", "rank_major"),
    ("order: type", dispatch(order=0), "order", "0", "rank_major"),
    ("alignment: 0", dispatch(order="expert_major", alignment=0), "alignment", "0", "at least 1"),
    (
        "alignment: huge",
        dispatch(order="expert_major", alignment=2**21),
        "alignment",
        "2097",
        "1 …",
    ),
    ("alignment: rank-major", dispatch(alignment=8), "alignment", "8", "1"),
    ("row weights: type", dispatch(row_weights=1), "row_weights", "1", "True or False"),
    (
        "row weights: rank-major",
        dispatch(row_weights=True, topk_weights=f32(4, 2)),
        "row_weights",
        "rank_major",
        "expert_major",
    ),
    (
        "row weights: none",
        dispatch(row_weights=True, order="expert_major"),
        "row_weights",
        "without topk_weights",
        "topk_weights beside it",
    ),
    ("alignment: float", dispatch(alignment=1.5), "alignment", "1.5", "integer"),
    ("alignment: bool", dispatch(alignment=True), "alignment", "True", "integer"),
    ("worst case: negative", dispatch(max_recv_rows=-1), "max_recv_rows", "-1", "at least 0"),
    (
        "worst case: huge",
        dispatch(max_recv_rows=2**63),
        "max_recv_rows",
        "9223",
        "at most 2.63 - 1$",
    ),
    ("out: read-only", dispatch(out=read_only((4, 16))), "out", "read-only", "written"),
    ("out: dtype", dispatch(out=np.ones((8, 16), np.float16)), "out", "float16", " dtype f32$"),
    ("out: lazy", dispatch(out=torch._neg_view(torch.ones(8, 16))), "out", "lazy", "resolve_neg"),
    ("x: lazy fp8", dispatch(x=torch._neg_view(FP8)), "x", "lazy.*float8_e4m3fn", "without"),
    ("x: field", dispatch(x=STRUCT["x"]), "x", r"strides of \(80, 5\)", "ascontiguousarray"),
    ("out: columns", dispatch(out=f32(8, 20)), "out", "8, 20", "16 columns"),
    ("stream: type", dispatch(stream="s"), "stream", "s", "ferry.Stream"),
    # combine
    ("rows: dtype", combine(rows=np.ones((8, 16), np.int32)), "rows", "i32", "f32, bf16 or f16"),
    ("rows: double", combine(rows=np.ones((8, 16))), "rows", "float64", "dtype f32, bf16 or f16 "),
    ("rows: count", combine(rows=f32(7, 16)), "rows", "7", "8"),
    ("rows: expert-major count", combine(rows=f32(7, 16), order="expert_major"), "rows", "7", "8"),
    ("rows: strides", combine(rows=strided((8, 16))), "rows", "strides", "dense"),
    (
        "rows: torch layout",
        combine(rows=torch.ones(8, 16).to_sparse()),
        "rows",
        "sparse",
        "strided",
    ),
    ("plan: word", combine(plan="plan"), "plan", "plan", "ferry.Plan"),
    ("bias0: shape", combine(bias0=f32(3, 16)), "bias0", "3, 16", "4, 16"),
    ("bias1: dtype", combine(bias1=np.ones((4, 16), np.float16)), "bias1", "float16", "f32"),
    ("out: shape", combine(out=f32(5, 16)), "out", "5, 16", "4, 16"),
    (
        "apply: rank-major",
        combine(apply_weights=True),
        "apply_weights",
        "rank_major",
        "expert_major",
    ),
    (
        "apply: no weights",
        combine(apply_weights=True, order="expert_major"),
        "apply_weights",
        "without topk_weights",
        "topk_weights",
    ),
    ("apply: type", combine(apply_weights=1), "apply_weights", "1", "True or False"),
    (
        "weights back: of rows",
        combine(topk_weights=f32(7), order="expert_major"),
        "topk_weights",
        r"\[7\]",
        r"\[8\]",
    ),
    ("weights back: rank-major", combine(topk_weights=f32(8)), "topk_weights", r"\[8\]", "2 dim"),
    ("weights back: shape", combine(topk_weights=f32(4, 2)), "topk_weights", "4, 2", "8, 2"),
    # memory
    ("empty: shape", lambda e: e.group.empty(16), "shape", "16", "tuple"),
    ("empty: negative", lambda e: e.group.empty((-1, 16)), "shape", "-1", "at least 0"),
    ("empty: 4-d", lambda e: e.group.empty((1, 1, 1, 16)), "shape", "4 dimensions", "1 to 3"),
    ("empty: dtype", lambda e: e.group.empty((1, 16), "f64"), "dtype", "f64", "f32"),
    ("empty: like", lambda e: e.group.empty((1, 16), like="jax"), "like", "jax", "numpy"),
    ("empty: like a list", lambda e: e.group.empty((1, 16), like=[]), "like", "list", "array"),
    ("registered: a word", lambda e: e.group.is_registered("x"), "pointer", "str", "array"),
    # events
    ("events: deadline", lambda e: ferry.Event().wait(-1.0), "deadline", "-1", "more than 0"),
]
DISPATCHES = [
    case
    for case in CALLS
    if case[1].__qualname__.startswith("dispatch.") and not case[0].startswith("plan:")
]


@each(CALLS)
def test_refused_by_one_rank(call: Call, argument: str, got: str, expected: str) -> None:
    check_refused_by_one_rank(call, argument, got, expected)


@each(DISPATCHES)
def test_refused_by_one_rank_before_it_makes_its_plan(
    call: Call, argument: str, got: str, expected: str
) -> None:
    """dispatch(topk_idx=...), which is two calls of the group, or none."""

    def body(group: ferry.Group) -> None:
        env = Env(group)
        env.makes_plan = True
        if group.rank == 0:
            check(call, env, argument, got, expected)
        made = group.dispatch(env.x, topk_idx=env.routes)
        assert (group.combine(made.x, made.plan).x == group.size).all()
        env.check_it_works()

    run_ranks(2, body, experts=EXPERTS)


def test_plan_of_another_group() -> None:
    """A mismatched handle."""

    def body(group: ferry.Group) -> None:
        env = Env(group)
        with ferry.Group(ferry.threads(1)[0], experts=EXPERTS) as other:
            stranger = other.plan(env.routes)
            with pytest.raises(ferry.InvalidArgumentError, match="plan"):
                group.dispatch(env.x, stranger)
            with pytest.raises(ferry.InvalidArgumentError, match="plan"):
                group.combine(env.x, stranger)
        env.check_it_works()

    run_ranks(1, body, experts=EXPERTS)


def test_expert_major_combine_before_any_dispatch() -> None:
    def body(group: ferry.Group) -> None:
        env = Env(group)
        fresh = group.plan(env.routes)
        rows = f32(fresh.expert_major_rows(), HIDDEN)
        with pytest.raises(ferry.InvalidArgumentError, match="plan"):
            group.combine(rows, fresh, order="expert_major")
        env.check_it_works()

    run_ranks(2, body, experts=EXPERTS)


def test_more_rows_than_the_worst_case() -> None:
    def body(group: ferry.Group) -> None:
        env = Env(group)
        with pytest.raises(ferry.ExhaustedError, match="max_recv_rows"):
            group.dispatch(env.x, env.plan, max_recv_rows=3)
        env.check_it_works()

    run_ranks(2, body, experts=EXPERTS)


def test_out_with_too_few_rows() -> None:
    def body(group: ferry.Group) -> None:
        env = Env(group)
        with pytest.raises((ferry.InvalidArgumentError, ferry.ExhaustedError), match="out"):
            group.dispatch(env.x, env.plan, out=f32(3, HIDDEN))
        env.check_it_works()

    run_ranks(2, body, experts=EXPERTS)


def test_out_with_too_few_rows_on_one_rank_that_makes_its_plan() -> None:
    def body(group: ferry.Group) -> None:
        env = Env(group)
        kind = ferry.InvalidArgumentError if group.rank == 0 else ferry.ExhaustedError
        with pytest.raises(kind, match="out"):
            group.dispatch(
                env.x, topk_idx=env.routes, out=f32(3, HIDDEN) if group.rank == 0 else None
            )
        env.check_it_works()

    run_ranks(2, body, experts=EXPERTS)


@pytest.mark.parametrize("what", ["hidden", "dtype", "topk", "call"])
def test_ranks_that_disagree_about_a_call(what: str) -> None:
    def body(group: ferry.Group) -> None:
        other = group.rank == 1
        routes = np.zeros((4, 2 + (other and what == "topk")), I64)
        if what == "topk":
            with pytest.raises(ferry.MismatchError, match="topk"):
                group.plan(routes)
            return
        plan = group.plan(routes)
        columns = 32 if other and what == "hidden" else 16
        x = np.ones((4, columns), np.float16 if other and what == "dtype" else np.float32)
        with pytest.raises(ferry.MismatchError, match="rank"):
            if what == "call" and other:
                group.barrier()
            else:
                group.dispatch(x, plan)

    bootstraps = ferry.threads(2)

    def one(rank: int) -> None:
        group = ferry.Group(bootstraps[rank], experts=8, deadline=5.0, memory_bytes=1 << 16)
        body(group)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_use_after_destroy() -> None:
    def body(group: ferry.Group) -> tuple[Env, ferry.Group]:
        return Env(group), group

    for env, group in run_ranks(2, body, experts=EXPERTS):
        for call in (
            lambda: group.plan(env.routes),  # noqa: B023
            lambda: group.dispatch(env.x, env.plan),  # noqa: B023
            lambda: group.combine(env.received.x, env.plan),  # noqa: B023
            lambda: group.barrier(),  # noqa: B023
            lambda: group.empty((1, 16)),  # noqa: B023
            lambda: env.plan.recv_rows(),  # noqa: B023
            lambda: env.lat.dispatch(env.x, env.routes),  # noqa: B023
            lambda: ferry.LatencyExchange(group, capacity=1, hidden=16, topk=1),  # noqa: B023
        ):
            with pytest.raises(ferry.DestroyedError):
                call()
        group.destroy()  # a second time is nothing
        assert (env.received.x == 1).all()
