"""Latency mode from Python: shapes, dtypes, hooks, buffers. C++ tests the arithmetic."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from exchange_reference import Reference
from rank_threads import run_ranks

import ferry

RANKS, EXPERTS, CAPACITY, HIDDEN, TOPK = 3, 7, 8, 256, 3


class Case:
    def __init__(self, rng: np.random.Generator) -> None:
        tokens = [5, 0, CAPACITY]
        self.routes = [rng.integers(-1, EXPERTS, (t, TOPK)) for t in tokens]
        self.x = [rng.integers(-8, 9, (t, HIDDEN)).astype(np.float32) for t in tokens]
        self.weights = [(rng.integers(-8, 9, (t, TOPK)) / 8).astype(np.float32) for t in tokens]
        self.reference = Reference(self.routes, EXPERTS)

    def arrivals(self, rank: int) -> list[list[tuple[int, int]]]:
        """For each local expert: (source rank, token), a row for each slot that names it."""
        return [
            [
                (source, token)
                for source in range(RANKS)
                for token, route in enumerate(self.routes[source].tolist())
                for expert in route
                if expert == global_expert
            ]
            for global_expert in self.reference.blocks[rank]
        ]

    def combined(self, rank: int) -> np.ndarray:
        factor = np.where(self.routes[rank] >= 0, self.weights[rank], 0).sum(1, keepdims=True)
        return (self.x[rank] * factor).astype(np.float32)


def exchange(group: ferry.Group, dtype: str = "f32") -> ferry.LatencyExchange:
    return ferry.LatencyExchange(group, capacity=CAPACITY, hidden=HIDDEN, topk=TOPK, dtype=dtype)


def maker(framework: str) -> Callable[[np.ndarray], Any]:
    """What makes that framework's array of NumPy's; both lie on the same memory."""
    return torch.from_numpy if framework == "torch" else np.asarray


def check_arrived(case: Case, rank: int, r: Any, rows: np.ndarray) -> None:
    arrivals = case.arrivals(rank)
    assert np.array_equal(r.counts, [len(a) for a in arrivals])
    ranges = np.asarray(r.ranges)
    for e, expected in enumerate(arrivals):
        tokens = np.asarray(r.source_token)[e, : len(expected)]
        assert np.array_equal(tokens, [t for _, t in expected])
        for at, (source, token) in enumerate(expected):
            assert np.array_equal(rows[e, at], case.x[source][token])
        for source in range(RANKS):
            first, count = int(ranges[e, source]) >> 32, int(ranges[e, source]) & 0xFFFFFFFF
            mine = [s == source for s, _ in expected]
            assert count == sum(mine)
            assert all(mine[first : first + count])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("hook", [False, True])
def test_round_trip(rng: np.random.Generator, hook: bool, framework: str) -> None:
    case, array = Case(rng), maker(framework)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group)
        outs = []
        for _ in range(4):  # both buffers, twice
            r = lat.dispatch(array(case.x[rank]), array(case.routes[rank]), hook=hook)
            if hook:
                r.receive()
            assert r.scales is None
            assert tuple(r.x.shape) == (group.local_experts, RANKS * CAPACITY, HIDDEN)
            check_arrived(case, rank, r, np.asarray(r.x))
            c = lat.combine(r.x, r, array(case.weights[rank]), hook=hook)
            if hook:
                c.receive()
            outs.append(c.x)
            assert type(c.x) is type(r.x) is type(array(case.x[rank]))
        return outs

    for rank, outs in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        for out in outs:
            assert np.array_equal(out, case.combined(rank))


@pytest.mark.parametrize("scale_format", ["f32", "f32_pow2", "ue8m0_packed"])
def test_e4m3(rng: np.random.Generator, scale_format: str) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group, "bf16")
        ml = lat.dispatch(
            case.x[rank].astype(ml_dtypes.bfloat16),
            case.routes[rank],
            format="e4m3",
            scale_format=scale_format,
        )
        own = lat.dispatch(
            torch.from_numpy(case.x[rank]).to(torch.bfloat16),
            torch.from_numpy(case.routes[rank]),
            format="e4m3",
            scale_format=scale_format,
        )
        assert ml.x.dtype == ml_dtypes.float8_e4m3fn
        assert own.x.dtype == torch.float8_e4m3fn
        assert own.scales is not None
        assert ml.scales is not None
        assert own.scales.stride(1) == 1
        for e, count in enumerate(ml.counts.tolist()):
            assert torch.equal(
                own.x[e, :count].view(torch.uint8),
                torch.from_numpy(ml.x[e, :count].view(np.uint8)),
            )
            assert np.array_equal(own.scales[e, :count], ml.scales[e, :count])
        if scale_format == "ue8m0_packed":
            assert ml.scales.dtype == np.int32
            assert ml.scales.shape[2] == 1
            low = ml.scales.view(np.uint32)
            scales = np.stack([(low >> (8 * i)) & 0xFF for i in range(2)], -1)[:, :, 0]
            with np.errstate(over="ignore"):  # rows that nothing arrived in hold anything
                scales = np.exp2(scales.astype(np.float32) - 127)
        else:
            scales = ml.scales
        for e, arrived in enumerate(case.arrivals(rank)):
            valid = np.repeat(scales[e, : len(arrived)], 128, axis=1)
            back = ml.x[e, : len(arrived)].astype(np.float32) * valid
            for at, (source, token) in enumerate(arrived):
                assert np.allclose(back[at], case.x[source][token], rtol=1 / 16, atol=1e-2)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS, memory_bytes=1 << 22))


def own_sums(x: Any, weights: Any) -> np.ndarray:
    """Rank-major rows: each token times the sum of its weights on this rank."""
    sums: np.ndarray = np.asarray(x) * np.asarray(weights).sum(2, keepdims=True)
    return sums.astype(np.float32)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("hook", [False, True])
def test_rank_major(rng: np.random.Generator, hook: bool, framework: str) -> None:
    case, array = Case(rng), maker(framework)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group)
        r = lat.dispatch(
            array(case.x[rank]),
            array(case.routes[rank]),
            topk_weights=array(case.weights[rank]),
            order="rank_major",
            hook=hook,
        )
        if hook:
            r.receive()
        assert tuple(r.x.shape) == (RANKS, CAPACITY, HIDDEN)
        assert r.topk_idx is not None
        assert r.topk_weights is not None
        assert r.ranges is None
        assert type(r.topk_idx) is type(r.topk_weights) is type(array(case.x[rank]))
        assert group.is_registered(r.x)
        block = case.reference.blocks[rank]
        for source in range(RANKS):
            tokens = [
                t for t, route in enumerate(case.routes[source].tolist()) if set(route) & set(block)
            ]
            n = len(tokens)
            assert int(r.counts[source]) == n
            assert np.array_equal(np.asarray(r.source_token)[source, :n], tokens)
            assert np.array_equal(np.asarray(r.x)[source, :n], case.x[source][tokens])
            routes = case.routes[source][tokens]
            here = np.isin(routes, list(block))
            ids, weights = np.asarray(r.topk_idx)[source], np.asarray(r.topk_weights)[source]
            assert np.array_equal(ids[:n], np.where(here, routes - block.start, -1))
            assert np.array_equal(weights[:n], np.where(here, case.weights[source][tokens], 0))
            assert (ids[n:] == -1).all()
            assert (weights[n:] == 0).all()
        rows = array(own_sums(r.x, r.topk_weights))
        c = lat.combine(rows, r, hook=hook)
        if hook:
            c.receive()
        return c.x

    for rank, out in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        assert np.array_equal(out, case.combined(rank))


@pytest.mark.parametrize("scale_format", ["f32", "f32_pow2", "ue8m0_packed"])
def test_rank_major_scales(rng: np.random.Generator, scale_format: str) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        x = case.x[group.rank].astype(ml_dtypes.bfloat16)
        options: Any = {"format": "e4m3", "scale_format": scale_format}
        lat = exchange(group, "bf16")
        r = lat.dispatch(x, case.routes[group.rank], order="rank_major", **options)
        assert r.scales is not None
        packed = scale_format == "ue8m0_packed"
        assert r.scales.shape == (RANKS, CAPACITY, 1 if packed else HIDDEN // 128)
        assert r.scales.strides[1] == 4
        for source in range(RANKS):
            n = int(r.counts[source])
            scales = r.scales[source, :n]
            if packed:
                bytes_ = np.ascontiguousarray(scales).view(np.uint8)[:, : HIDDEN // 128]
                scales = np.exp2(bytes_.astype(np.float32) - 127)
            back = r.x[source, :n].astype(np.float32) * np.repeat(scales, 128, axis=1)
            tokens = r.source_token[source, :n]
            assert np.allclose(back, case.x[source][tokens], rtol=1 / 16, atol=1e-2)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS, memory_bytes=1 << 22))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("path", ["per_slot", "per_rank"])
@pytest.mark.parametrize("format", ["as_is", "e4m3", "logfmt10"])
def test_paths_and_formats(
    rng: np.random.Generator, format: str, path: str, ahead: bool, framework: str
) -> None:
    case, array = Case(rng), maker(framework)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group)
        weights = array(case.weights[rank])
        call = (array(case.x[rank]), array(case.routes[rank]))
        r = lat.dispatch(*call, topk_weights=weights if ahead else None)
        assert r.topk_idx is None
        assert r.topk_weights is None
        return lat.combine(r.x, r, None if ahead else weights, path=path, format=format).x

    for rank, out in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        if format == "as_is":  # small integers: exact in any order
            assert np.array_equal(out, case.combined(rank))
        else:
            # Each slot's error is at most 1/16 of it, that of logfmt10 half a step of 3 octaves.
            share = 1 / 15 if format == "e4m3" else 0.0025
            size = np.where(case.routes[rank] >= 0, np.abs(case.weights[rank]), 0).sum(1)[:, None]
            error = np.abs(np.asarray(out) - case.combined(rank))
            assert (error <= share * np.abs(case.x[rank]) * size + 1e-4).all()


def test_rank_major_alone(rng: np.random.Generator) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        size: Any = {"capacity": CAPACITY, "hidden": HIDDEN, "topk": TOPK, "order": "rank_major"}
        lat = ferry.LatencyExchange(group, dtype="f32", **size)
        hint = ferry.LatencyExchange.memory_hint(dtype="f32", experts=EXPERTS, ranks=RANKS, **size)
        assert group.memory().latency_bytes == hint
        call = (case.x[rank], case.routes[rank])
        with pytest.raises(ferry.InvalidArgumentError, match="no room to fan out"):
            lat.dispatch(*call)
        r = lat.dispatch(*call, topk_weights=case.weights[rank], order="rank_major")
        return lat.combine(own_sums(r.x, r.topk_weights), r).x

    for rank, out in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        assert np.array_equal(out, case.combined(rank))


def test_refusals(rng: np.random.Generator) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group)
        call = (case.x[rank], case.routes[rank])
        with pytest.raises(ferry.InvalidArgumentError, match="order"):
            lat.dispatch(*call, order="sideways")
        r = lat.dispatch(*call, topk_weights=case.weights[rank])
        with pytest.raises(ferry.InvalidArgumentError, match="path"):
            lat.combine(r.x, r, path="per_expert")
        with pytest.raises(ferry.InvalidArgumentError, match="format"):
            lat.combine(r.x, r, format="fp4")
        with pytest.raises(ferry.InvalidArgumentError, match="came with the dispatch"):
            lat.combine(r.x, r, case.weights[rank])
        other = lat.dispatch(*call)
        with pytest.raises(ferry.InvalidArgumentError, match="brought none"):
            lat.combine(other.x, other)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS))


def make_rows(
    made: np.ndarray, rows: np.ndarray, signals: np.ndarray, block: int, ready: int
) -> None:
    for e in reversed(range(len(made))):
        for b in range(signals.shape[1]):
            at = slice(b * block, (b + 1) * block)
            rows[e, at] = made[e, at]
            signals[e, b] = ready


def test_rows_are_sent_as_their_blocks_are_made(rng: np.random.Generator) -> None:
    """A thread makes rows of 0 and then says so; who never does ends with the deadline."""
    case = Case(rng)

    def body(group: ferry.Group) -> None:
        lat = exchange(group)
        for path, block in itertools.product(("per_slot", "per_rank"), (1, 7, RANKS * CAPACITY)):
            sent = lat.dispatch(case.x[group.rank], case.routes[group.rank])
            made = np.array(sent.x)
            rows = np.full_like(made, np.nan)
            # Signals of u32 are compared as such: below and above 2^31.
            start, ready, dtype = (
                (2**31 - 1, 2**31 + 1, np.uint32) if block == 7 else (0, 2, np.int32)
            )
            signals = np.full((len(made), -(-RANKS * CAPACITY // block)), start, dtype)

            maker = threading.Timer(0.01, make_rows, (made, rows, signals, block, ready))
            maker.start()
            got = lat.combine(
                rows,
                sent,
                case.weights[group.rank],
                path=path,
                signals=signals,
                block_rows=block,
                threshold=ready,
            )
            maker.join()
            assert np.array_equal(got.x, case.combined(group.rank))
        sent = lat.dispatch(case.x[group.rank], case.routes[group.rank])
        weights, wrong = case.weights[group.rank], np.zeros((len(made), 2), np.int32)
        with pytest.raises(ferry.InvalidArgumentError, match="signals: got shape"):
            lat.combine(made, sent, weights, signals=wrong)
        unsigned = wrong[:, :1].astype(np.uint32)
        with pytest.raises(
            ferry.InvalidArgumentError, match=r"threshold: got -1; expected at least 0"
        ):
            lat.combine(made, sent, weights, signals=unsigned, threshold=-1)
        none, most = np.zeros((len(made), 0), np.int32), 2**63 - 1
        with pytest.raises(ferry.InvalidArgumentError, match=r"signals: .*expected \[\d+, 1\]"):
            lat.combine(made, sent, weights, signals=none, block_rows=most)
        assert np.array_equal(lat.combine(made, sent, weights).x, case.combined(group.rank))

    run_ranks(RANKS, body, experts=EXPERTS)


def test_a_block_that_is_not_made() -> None:
    with ferry.Group(ferry.threads(1)[0], experts=2, deadline=0.2) as group:
        lat = ferry.LatencyExchange(group, capacity=2, hidden=16, topk=1, dtype="f32")
        sent = lat.dispatch(np.ones((1, 16), np.float32), np.ones((1, 1), np.int64))
        signals = np.array([[9], [0]], np.int32)
        expected = "block 0 of local expert 1 of rank 0 was not made"
        with pytest.raises(ferry.DeadlineExceededError, match=expected):
            lat.combine(sent.x, sent, np.ones((1, 1), np.float32), signals=signals)


def test_all_blocks_share_the_deadline_of_the_call() -> None:
    with ferry.Group(ferry.threads(1)[0], experts=8, deadline=0.5) as group:
        lat = ferry.LatencyExchange(group, capacity=1, hidden=16, topk=8, dtype="f32")
        sent = lat.dispatch(np.ones((1, 16), np.float32), np.arange(8)[None])
        signals = np.zeros((8, 1), np.int32)
        ended = threading.Event()

        def make() -> None:
            for expert in range(8):  # each in time, if it had a deadline of its own
                ended.wait(0.2)
                signals[expert] = 1

        maker = threading.Thread(target=make)
        maker.start()
        with pytest.raises(ferry.DeadlineExceededError, match=r"deadline of 0\.5 s: got signal 0"):
            lat.combine(sent.x, sent, np.ones((1, 8), np.float32), signals=signals)
        ended.set()
        maker.join()


def test_nothing_arrives_before_the_hook(rng: np.random.Generator) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group)
        r = lat.dispatch(case.x[rank], case.routes[rank], hook=True)
        r.counts[:] = 77
        r.source_token[:] = -5
        group.barrier()
        assert (r.counts == 77).all()
        assert (r.source_token == -5).all()
        r.receive()
        check_arrived(case, rank, r, r.x)
        with pytest.raises(ferry.InvalidArgumentError, match="receive"):
            r.receive()
        out = np.full_like(case.x[rank], 5)
        c = lat.combine(r.x, r, case.weights[rank], hook=True, out=out)
        group.barrier()
        assert (out == 5).all()
        c.receive()
        assert c.x is out
        return out

    for rank, out in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        assert np.array_equal(out, case.combined(rank))


def test_streams_and_hooks(rng: np.random.Generator) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat, stream = exchange(group), ferry.Stream()
        outs = []
        for hook in (False, True, False, True):
            x, routes = case.x[rank].copy(), case.routes[rank].copy()
            r = lat.dispatch(x, routes, hook=hook, stream=stream)
            del x, routes
            if hook:
                r.receive()
            r.event.wait()
            c = lat.combine(r.x, r, case.weights[rank].copy(), hook=hook, stream=stream)
            if hook:
                c.receive()
            stream.synchronize()
            outs.append(c.x)
        return outs

    for rank, outs in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        for out in outs:
            assert np.array_equal(out, case.combined(rank))


def test_arrays_lie_in_registered_memory(rng: np.random.Generator) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        r = exchange(group).dispatch(case.x[group.rank], case.routes[group.rank])
        return [group.is_registered(array) for array in (r.x, case.x[group.rank])]

    assert run_ranks(RANKS, body, experts=EXPERTS) == [[True, False]] * RANKS


def test_two_results_at_a_time(rng: np.random.Generator) -> None:
    """A third is refused before anything moves; dropping one makes room."""
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group)
        call = (case.x[rank], case.routes[rank])
        first, second = lat.dispatch(*call), lat.dispatch(*call)
        with pytest.raises(ferry.ExhaustedError):
            lat.dispatch(*call)
        array = first.x
        del first
        with pytest.raises(ferry.ExhaustedError):  # an array of the result is part of it
            lat.dispatch(*call)
        del array
        third = lat.dispatch(*call)
        check_arrived(case, rank, second, second.x)
        check_arrived(case, rank, third, third.x)
        return True

    assert all(run_ranks(RANKS, body, experts=EXPERTS))


def test_bf16_as_uint16_and_memory_hint(rng: np.random.Generator) -> None:
    case = Case(rng)

    def body(group: ferry.Group) -> Any:
        rank = group.rank
        lat = exchange(group, "bf16")
        hint = ferry.LatencyExchange.memory_hint(
            capacity=CAPACITY, hidden=HIDDEN, topk=TOPK, experts=EXPERTS, ranks=RANKS
        )
        assert group.memory().latency_bytes == hint
        with pytest.raises(ferry.InvalidArgumentError, match=r'device.*"cpu", "cuda"'):
            ferry.LatencyExchange.memory_hint(
                capacity=1, hidden=HIDDEN, topk=1, experts=1, ranks=1, device="tpu"
            )
        x = case.x[rank].astype(ml_dtypes.bfloat16).view(np.uint16)
        r = lat.dispatch(x, case.routes[rank])
        assert r.x.dtype == np.uint16
        c = lat.combine(r.x, r, case.weights[rank])
        assert c.x.dtype == np.uint16
        return c.x.view(ml_dtypes.bfloat16)

    for rank, out in enumerate(run_ranks(RANKS, body, experts=EXPERTS)):
        assert np.array_equal(out, case.combined(rank).astype(ml_dtypes.bfloat16))


def nvfp4_row(x: np.ndarray, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The bytes and the scales of a row by ml_dtypes' own conversions; neither overflows."""
    blocks = x.astype(np.float32).reshape(-1, 16)
    scales = (g * (np.abs(blocks).max(1) / np.float32(6))).astype(ml_dtypes.float8_e4m3fn)
    wide = scales.astype(np.float32)
    inverse = np.where(wide == 0, np.float32(0), g / np.where(wide == 0, 1, wide))
    scaled = np.clip(blocks * inverse[:, None], -6, 6)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(-1) & 0xF
    return codes[0::2] | codes[1::2] << 4, scales.view(np.uint8)


def scales_of_row(tiles: np.ndarray, t: int, hidden: int) -> np.ndarray:
    """Row t of a block's scales, out of the tiles: [.., columns * 512]."""
    whole = tiles.reshape(tiles.shape[0], -1, 32, 4, 4)
    return whole[t // 128, :, t % 32, t % 128 // 32].reshape(-1)[: hidden // 16]


@pytest.mark.parametrize("hidden", [64, 208])  # the latter leaves a part of a tile
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("order", ["expert_major", "rank_major"])
@pytest.mark.parametrize("domain_size", [0, 2])
def test_nvfp4(
    rng: np.random.Generator, domain_size: int, order: str, masks: bool, hidden: int
) -> None:
    """Two values a byte and a scale for each 16, as an independent reference makes them, and the
    sums of a combine, which know nothing of it. Rows reach a second tile of 128."""
    ranks, capacity = 4, 40
    routes = [rng.integers(-1, EXPERTS, (t, TOPK)) for t in (5, 0, capacity, 31)]
    case = Reference(routes, EXPERTS)
    xs = [rng.standard_normal((len(r), hidden)).astype(ml_dtypes.bfloat16) for r in routes]
    xs[0][1, :16] = 0
    g = np.float32(448 * 6 / max(np.abs(x.astype(np.float32)).max() for x in xs if len(x)))

    def body(group: ferry.Group) -> None:
        rank = group.rank
        how: dict[str, Any] = {"order": "rank_major"} if order == "rank_major" else {}
        lat = ferry.LatencyExchange(
            group, capacity=capacity, hidden=hidden, topk=TOPK, masks=masks, **how
        )
        weights = np.ones((len(routes[rank]), TOPK), np.float32)
        for hook in (False, True, False):
            r = lat.dispatch(
                xs[rank],
                routes[rank],
                topk_weights=weights,
                format="nvfp4",
                global_scale=g,
                order=order,
                hook=hook,
            )
            if hook:
                r.receive()
            x, scales = np.asarray(r.x), np.asarray(r.scales).view(np.uint8)
            blocks = group.local_experts if order == "expert_major" else ranks
            rows = ranks * capacity if order == "expert_major" else capacity
            assert x.dtype == np.uint8 and x.shape == (blocks, rows, hidden // 2)
            assert scales.shape == (blocks, -(-rows // 128), -(-hidden // 64) * 512)
            tokens, counts = np.asarray(r.source_token), np.asarray(r.counts)
            for block in range(blocks):
                sources = [block] * int(counts[block])
                if order == "expert_major":
                    expert = case.blocks[rank][block]
                    sources = [
                        s for s, ids in enumerate(routes) for _ in range((ids == expert).sum())
                    ]
                assert len(sources) == counts[block]
                for at, source in enumerate(sources):
                    wanted = nvfp4_row(xs[source][tokens[block, at]], g)
                    assert np.array_equal(x[block, at], wanted[0])
                    assert np.array_equal(scales_of_row(scales[block], at, hidden), wanted[1])
            shape = (blocks, rows, hidden)
            ones = np.ones(shape, ml_dtypes.bfloat16)
            sums = lat.combine(ones, r, path="per_rank").x.astype(np.float32)
            each = (routes[rank] >= 0).sum(1)
            if order == "rank_major":
                firsts = [block.start for block in case.blocks]
                owners = np.searchsorted(firsts, routes[rank], "right")  # 0: of no slot
                each = np.array([len(set(row) - {0}) for row in owners.tolist()])
            assert np.array_equal(sums, np.repeat(each[:, None], hidden, 1))

    run_ranks(ranks, body, experts=EXPERTS, domain_size=domain_size)


def test_nvfp4_of_other_global_scales_is_named() -> None:
    """A receiver would take the values of one rank for others."""

    def body(group: ferry.Group) -> None:
        lat = exchange(group, "bf16")
        x = np.ones((2, HIDDEN), ml_dtypes.bfloat16)
        with pytest.raises(ferry.MismatchError, match="global_scale"):
            lat.dispatch(
                x, np.zeros((2, TOPK)).astype(int), format="nvfp4", global_scale=1 + group.rank
            )

    with pytest.raises(ferry.Error):  # the group is failed
        run_ranks(2, body, experts=EXPERTS)


def test_nan_spoils_its_block_of_nvfp4_alone() -> None:
    def body(group: ferry.Group) -> None:
        x = np.ones((1, HIDDEN), np.float32)
        x[0, 20], x[0, 40] = np.nan, np.inf
        r = exchange(group).dispatch(x, np.zeros((1, 1)).astype(int), format="nvfp4")
        scales = scales_of_row(np.asarray(r.scales)[0], 0, HIDDEN).view(ml_dtypes.float8_e4m3fn)
        found = scales.astype(np.float32)
        assert np.isnan(found[1]) and not np.isnan(np.delete(found, 1)).any()
        codes = np.asarray(r.x)[0, 0, 20] & 0xF  # of the infinity: the largest
        assert found[2] == 448 and codes == 7

    run_ranks(1, body, experts=EXPERTS)
