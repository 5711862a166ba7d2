"""Arrays of JAX and TensorFlow in and out: of their own types, bf16 and fp8 too, without copies,
and never written."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rank_threads import DEADLINE, run_ranks, run_threads

import ferry

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
RANKS = 3
FP8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
FLOATS = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]


@pytest.fixture(params=["jax", "tensorflow"])
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def made(framework: str, values: np.ndarray[Any, Any]) -> Any:
    """An array of the framework."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.array(values)
    import tensorflow as tf

    return tf.constant(values)


def kind(framework: str) -> type:
    if framework == "jax":
        import jax

        return jax.Array
    import tensorflow as tf

    return tf.Tensor  # type: ignore[no-any-return, unused-ignore]


def same(framework: str, x: Any, expected: np.ndarray[Any, Any]) -> bool:
    values = np.asarray(x)
    whole = isinstance(x, kind(framework)) and values.shape == expected.shape
    if framework == "jax" and expected.dtype == np.int64:  # without jax_enable_x64
        return whole and values.dtype == np.int32 and bool((values == expected).all())
    return whole and values.dtype == expected.dtype and values.tobytes() == expected.tobytes()


def tokens(rank: int) -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(rank)
    x = rng.integers(-4, 5, (5, 64)).astype(np.float32)
    ids = np.argsort(rng.random((5, 6)), axis=1)[:, :2].astype(np.int32)
    return x, ids, np.full((5, 2), 0.5, np.float32)


@pytest.mark.parametrize("dtype", FLOATS + FP8, ids=str)
def test_dispatch_and_combine_bring_what_numpy_gets(framework: str, dtype: np.dtype[Any]) -> None:
    def body(group: ferry.Group) -> None:
        x, ids, weights = tokens(group.rank)
        x = x.astype(dtype)
        plan = group.plan(made(framework, ids))
        mine = group.dispatch(made(framework, x), plan, topk_weights=made(framework, weights))
        expected = group.dispatch(x, group.plan(ids), topk_weights=weights)
        for field in ("x", "topk_idx", "topk_weights", "source_token"):
            assert same(framework, getattr(mine, field), getattr(expected, field)), field
        own = np.asarray(mine.x)
        if dtype not in FP8:
            assert own.ctypes.data == mine.raw.x.address  # no copy
            again = group.combine(mine.x, plan, topk_weights=mine.topk_weights)
            theirs = group.combine(expected.x, plan, topk_weights=expected.topk_weights)
            assert same(framework, again.x, theirs.x)
            assert same(framework, again.topk_weights, theirs.topk_weights)
        stream = ferry.Stream()
        later = group.dispatch(made(framework, x), plan, stream=stream)
        later.event.wait()
        assert same(framework, later.x, np.asarray(own))

    run_ranks(RANKS, body, experts=6)


def test_latency_mode(framework: str) -> None:
    def body(group: ferry.Group) -> None:
        x, ids, weights = tokens(group.rank)
        x = x.astype(ml_dtypes.bfloat16)
        exchange = ferry.LatencyExchange(group, capacity=5, hidden=64, topk=2)
        received = exchange.dispatch(made(framework, x), made(framework, ids))
        rows, counts = np.asarray(received.x), np.asarray(received.counts)
        assert isinstance(received.x, kind(framework)) and rows.dtype == x.dtype
        everyone = [tokens(rank)[:2] for rank in range(RANKS)]
        for expert, (some, count) in enumerate(zip(rows, counts)):
            arrived = [
                tuple(x[at].tolist())
                for x, ids in everyone
                for at in np.flatnonzero((ids == group.local_experts * group.rank + expert).any(1))
            ]
            assert count == len(arrived)
            assert {tuple(row.tolist()) for row in some[:count].astype(np.float32)} == set(arrived)
        combined = exchange.combine(received.x, received, topk_weights=made(framework, weights))
        assert same(framework, combined.x, x)  # two slots, each half the token

    run_ranks(RANKS, body, experts=6)


def on_ranks(body: Any, memory_bytes: int = 1 << 20) -> None:
    bootstraps = ferry.threads(RANKS)

    def one(rank: int) -> None:
        config: Any = {"deadline": DEADLINE, "memory_bytes": memory_bytes}
        with ferry.Collectives(bootstraps[rank], **config) as ranks:
            body(ranks)
            ranks.barrier()

    run_threads(RANKS, one)


def calls_of(framework: str) -> ModuleType:
    return getattr(ferry, framework)  # type: ignore[no-any-return]


@pytest.mark.parametrize("memory_bytes", [1 << 20, 0])
def test_collectives_return_their_results(framework: str, memory_bytes: int) -> None:
    calls = calls_of(framework)

    def body(ranks: ferry.Collectives) -> None:
        for dtype in FLOATS:
            every = [np.arange(12).reshape(3, 2, 2, 1).astype(dtype) + r for r in range(RANKS)]
            x = made(framework, every[ranks.rank])
            total = calls.all_reduce(ranks, x)
            assert same(framework, total, sum(every).astype(dtype))
            assert same(framework, x, every[ranks.rank])  # as it was
            assert same(framework, calls.broadcast(ranks, x, 1), every[1])
            assert same(framework, calls.all_gather(ranks, x), np.stack(every))
            block = every[0][:1] * 0 + max(every[r][ranks.rank].max() for r in range(RANKS))
            largest = calls.reduce_scatter(ranks, x, op="max")
            assert np.asarray(largest).max() == block.max() and largest.shape == (1, 2, 2, 1)
            swapped = np.stack([one[ranks.rank] for one in every])
            assert same(framework, calls.all_to_all(ranks, x), swapped)
        many = [
            made(framework, np.full(shape, ranks.rank + at, dtype))
            for at, (shape, dtype) in enumerate([
                ((), FLOATS[0]),
                ((3, 5), FLOATS[1]),
                ((7,), FLOATS[0]),
                ((0, 4), FLOATS[0]),
            ])
        ]
        means = calls.all_reduce(ranks, many, op="mean")
        for at, (one, mean) in enumerate(zip(many, means)):
            expected = np.full(one.shape, at + 1, np.asarray(one).dtype)
            assert same(framework, mean, expected)

    on_ranks(body, memory_bytes)


def test_what_would_write_an_array_is_refused(framework: str) -> None:
    calls = calls_of(framework)

    def body(ranks: ferry.Collectives) -> None:
        x = made(framework, np.ones(3, np.float32))
        words = f"which nobody may write; expected .*ferry.{framework} return"
        with pytest.raises(ferry.InvalidArgumentError, match=words):
            ranks.all_reduce(x)
        with pytest.raises(ferry.InvalidArgumentError, match=r"all_gather: out: .*nobody may"):
            ranks.all_gather(x, x)
        with pytest.raises(ferry.InvalidArgumentError, match="all_reduce: x: got an object of ty"):
            calls.all_reduce(ranks, np.ones(3))
        with pytest.raises(ferry.InvalidArgumentError, match="first extent divisible by 3"):
            calls.all_to_all(ranks, made(framework, np.ones(4, np.float32)))
        traced = "traces" if framework == "jax" else "symbolic"
        with pytest.raises(
            ferry.InvalidArgumentError, match=f"all_reduce: x: got a .*{traced}|{traced}"
        ):
            compiled(framework, lambda value: calls.all_reduce(ranks, value))(x)
        out = np.empty((RANKS, 3), np.float32)
        ranks.all_gather(x, out)  # to be read it may be
        assert (out == 1).all()

    on_ranks(body)


def compiled(framework: str, function: Any) -> Any:
    if framework == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, autograph=False)
