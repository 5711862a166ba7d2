"""Throughput mode against the naive reference: every framework and dtype, both orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from exchange_reference import Reference
from rank_threads import run_ranks

import ferry

HIDDEN = 32
TOPK = 3
EXPERTS = 7


@dataclass(frozen=True)
class Kind:
    """A framework and dtype: how to make its arrays from NumPy's, and back."""

    name: str
    numpy: Any  # the dtype of the reference
    tag: str | None = None

    def make(self, data: np.ndarray) -> Any:
        if self.name.startswith("torch"):
            if data.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(data)
        return data.view(np.uint16) if self.tag else data

    def back(self, result: Any) -> np.ndarray:
        if self.name.startswith("torch"):
            assert isinstance(result, torch.Tensor)
            if result.dtype == torch.bfloat16:
                return result.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return result.numpy()
        assert isinstance(result, np.ndarray)
        if self.tag:
            assert result.dtype == np.uint16
            return result.view(self.numpy)
        assert result.dtype == self.numpy
        return result


KINDS = [
    Kind("numpy-f32", np.float32),
    Kind("numpy-f16", np.float16),
    Kind("numpy-bf16", ml_dtypes.bfloat16),
    Kind("numpy-bf16-tag", ml_dtypes.bfloat16, "bf16"),
    Kind("torch-f32", np.float32),
    Kind("torch-f16", np.float16),
    Kind("torch-bf16", ml_dtypes.bfloat16),
]


@dataclass
class Case:
    reference: Reference
    x: list[np.ndarray]
    weights: list[np.ndarray]


def make_case(rng: np.random.Generator, ranks: int, dtype: Any, experts: int = EXPERTS) -> Case:
    """Uneven batches, one of them empty, -1 holes, duplicate ids; weights of few bits."""
    tokens = [0 if ranks > 1 and r == 1 else int(rng.integers(1, 20)) for r in range(ranks)]
    routes = [rng.integers(-1, experts, (t, TOPK)) for t in tokens]
    x = [rng.standard_normal((t, HIDDEN)).astype(dtype) for t in tokens]
    weights = [(rng.integers(-8, 9, (t, TOPK)) / 8).astype(np.float32) for t in tokens]
    return Case(Reference(routes, experts), x, weights)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("ranks", [1, 3])
def test_rank_major(rng: np.random.Generator, ranks: int, kind: Kind) -> None:
    case = make_case(rng, ranks, kind.numpy)
    ref = case.reference

    def body(group: ferry.Group) -> Any:
        r = group.rank
        plan = group.plan(ref.routes[r])
        got = group.dispatch(
            kind.make(case.x[r]), plan, topk_weights=case.weights[r], dtype=kind.tag
        )
        assert got.event.ready()
        back = group.combine(got.x, plan, topk_weights=got.topk_weights, dtype=kind.tag)
        assert plan.tokens == len(case.x[r])
        assert plan.topk == TOPK
        assert plan.recv_rows() == len(got.x)
        between = np.from_dlpack(plan.rank_rows()).copy()
        return plan.recv_rows_per_rank(), plan.send_rows_per_rank(), between, got, back

    results = run_ranks(ranks, body, experts=EXPERTS)
    arrived = [ref.gathered(case.x, r) for r in range(ranks)]
    for r, (received, sent, between, got, back) in enumerate(results):
        same(kind.back(got.x), arrived[r])
        assert between.dtype == np.int32 and between.shape == (ranks, ranks)
        assert np.array_equal(between, np.array([sent for _, sent, *_ in results]))
        assert received == [sum(row.source == p for row in ref.arrivals(r)) for p in range(ranks)]
        assert sent == [sum(row.source == r for row in ref.arrivals(p)) for p in range(ranks)]
        assert np.array_equal(got.topk_idx, ref.arrived_ids(r))
        assert np.array_equal(got.topk_weights, ref.topk_weights(case.weights, r))
        assert np.array_equal(got.source_token, ref.source_token(r))
        assert got.slot_rows is None
        assert got.expert_offsets is None
        assert got.scales is None
        same(kind.back(back.x), ref.combine(arrived, r))
        weights = [ref.topk_weights(case.weights, p) for p in range(ranks)]
        assert np.array_equal(back.topk_weights, ref.combine_weights(weights, r))
        assert type(got.topk_idx) is type(got.x) is type(back.topk_weights)


@pytest.mark.parametrize("order", ["rank_major", "expert_major"])
def test_dispatch_makes_its_plan(rng: np.random.Generator, order: str) -> None:
    case = make_case(rng, 3, np.float32)
    ref = case.reference

    def body(group: ferry.Group) -> Any:
        r = group.rank
        stream = ferry.Stream()
        got = group.dispatch(case.x[r], topk_idx=ref.routes[r], order=order, stream=stream)
        got.event.wait()
        assert got.plan is not None
        again = group.dispatch(case.x[r], got.plan, order=order)
        assert again.plan is None
        with pytest.raises(
            ferry.InvalidArgumentError, match="got both; expected a plan, or else topk"
        ):
            group.dispatch(case.x[r], got.plan, topk_idx=ref.routes[r])
        with pytest.raises(
            ferry.InvalidArgumentError, match="got none; expected a plan, or else topk"
        ):
            group.dispatch(case.x[r])
        return got, again

    for r, (got, again) in enumerate(run_ranks(3, body, experts=EXPERTS)):
        same(again.x, got.x)
        assert np.array_equal(got.topk_idx, ref.arrived_ids(r))
        if order == "rank_major":
            same(got.x, ref.gathered(case.x, r))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[6]], ids=lambda k: k.name)
@pytest.mark.parametrize("alignment", [1, 4])
def test_expert_major_weighted(rng: np.random.Generator, alignment: int, kind: Kind) -> None:
    ranks = 3
    case = make_case(rng, ranks, kind.numpy)
    ref = case.reference

    def body(group: ferry.Group) -> Any:
        r = group.rank
        plan = group.plan(ref.routes[r].astype(np.int32))
        options: dict[str, Any] = {"order": "expert_major", "alignment": alignment}
        got = group.dispatch(kind.make(case.x[r]), plan, topk_weights=case.weights[r], **options)
        back = group.combine(
            got.x, plan, topk_weights=got.topk_weights, apply_weights=True, **options
        )
        assert plan.expert_major_rows(alignment) == len(got.x)
        return plan.slots_per_expert(), got, back

    results = run_ranks(ranks, body, experts=EXPERTS)
    arrived = [ref.expert_major(case.x, r, alignment) for r in range(ranks)]
    weights = [ref.topk_weights(case.weights, r) for r in range(ranks)]
    partial = [ref.reduce(arrived[r], r, alignment, weights[r]) for r in range(ranks)]
    for r, (slots, got, back) in enumerate(results):
        same(kind.back(got.x), arrived[r])
        rows, offsets = ref.slot_rows(r, alignment)
        assert np.array_equal(got.slot_rows, rows)
        assert np.array_equal(got.expert_offsets, offsets)
        routes = ref.arrived_ids(r)
        assert slots == [int((routes == e).sum()) for e in range(len(ref.blocks[r]))]
        same(kind.back(back.x), ref.combine(partial, r))


def test_fp8_rows_and_scales(rng: np.random.Generator) -> None:
    """fp8 comes and goes as torch's dtype, as ml_dtypes', or as uint8 beside a tag."""
    case = make_case(rng, 2, ml_dtypes.float8_e4m3fn)
    ref = case.reference
    scales = [rng.random((5, len(x))).astype(np.float32).T[:, :2] for x in case.x]

    def body(group: ferry.Group) -> Any:
        r = group.rank
        plan = group.plan(ref.routes[r])
        ml = group.dispatch(case.x[r], plan, scales=scales[r])
        tagged = group.dispatch(case.x[r].view(np.uint8), plan, scales=scales[r], dtype="e4m3")
        own = torch.from_numpy(case.x[r].view(np.uint8)).view(torch.float8_e4m3fn)
        as_torch = group.dispatch(own, plan, scales=torch.from_numpy(scales[r]))
        return ml, tagged, as_torch

    for r, (ml, tagged, as_torch) in enumerate(run_ranks(2, body, experts=EXPERTS)):
        expected = ref.gathered(case.x, r).view(np.uint8)
        assert ml.x.dtype == ml_dtypes.float8_e4m3fn
        assert tagged.x.dtype == np.uint8
        assert as_torch.x.dtype == torch.float8_e4m3fn
        assert np.array_equal(ml.x.view(np.uint8), expected)
        assert np.array_equal(tagged.x, expected)
        assert np.array_equal(as_torch.x.view(torch.uint8).numpy(), expected)
        for got in (ml, tagged, as_torch):
            assert np.array_equal(got.scales, ref.gathered(scales, r))


def test_opaque_rows_of_any_object(rng: np.random.Generator) -> None:
    """Anything with a buffer is carried; bytes come back as NumPy."""

    def body(group: ferry.Group) -> Any:
        plan = group.plan(np.array([[1 - group.rank]]))
        data = memoryview(bytes(range(group.rank, group.rank + 16))).cast("B", (1, 16))
        return group.dispatch(data, plan).x

    for rank, got in enumerate(run_ranks(2, body, experts=2)):
        assert got.dtype == np.uint8
        assert bytes(got[0]) == bytes(range(1 - rank, 17 - rank))


def test_worst_case_rows_and_out(rng: np.random.Generator) -> None:
    case = make_case(rng, 2, np.float32)
    ref = case.reference

    def body(group: ferry.Group) -> Any:
        r = group.rank
        plan = group.plan(ref.routes[r])
        worst = group.dispatch(case.x[r], plan, max_recv_rows=64)
        out = np.full((plan.recv_rows(), HIDDEN), np.nan, np.float32)
        mine = group.dispatch(case.x[r], plan, out=out)
        assert mine.x is out
        y = np.full(case.x[r].shape, np.nan, np.float32)
        bias = np.ones_like(y)
        combined = group.combine(out, plan, bias0=bias, bias1=bias, out=y)
        assert combined.x is y
        return worst, out, y

    arrived = [ref.gathered(case.x, r) for r in range(2)]
    for r, (worst, out, y) in enumerate(run_ranks(2, body, experts=EXPERTS)):
        n = len(arrived[r])
        assert worst.x.shape == (64, HIDDEN)
        assert np.array_equal(worst.x[:n], arrived[r])
        assert (worst.topk_idx[n:] == -1).all()
        assert np.array_equal(out, arrived[r])
        assert np.array_equal(y, ref.combine(arrived, r) + 1 + 1)


def test_cached_dispatch_and_two_plans(rng: np.random.Generator) -> None:
    """A plan serves any number of exchanges, with any hidden size and dtype."""
    first, second = make_case(rng, 2, np.float32), make_case(rng, 2, np.float16)

    def body(group: ferry.Group) -> Any:
        r = group.rank
        a, b = (group.plan(case.reference.routes[r]) for case in (first, second))
        got = []
        for _ in range(3):
            got.append(group.dispatch(second.x[r], b).x.copy())
            wide = np.concatenate([first.x[r]] * 2, axis=1)
            got.append(group.dispatch(wide, a).x[:, HIDDEN:].copy())
        return got

    for r, got in enumerate(run_ranks(2, body, experts=EXPERTS)):
        for at in range(0, 6, 2):
            same(got[at], second.reference.gathered(second.x, r))
            same(got[at + 1], first.reference.gathered(first.x, r))


def test_routes_of_a_plan(rng: np.random.Generator) -> None:
    """Its own, and those of what it brought once a dispatch has; also when the group is gone."""
    routes = [rng.integers(-1, 7, (tokens, 3)) for tokens in (5, 0, 9)]

    def body(group: ferry.Group) -> Any:
        mine = routes[group.rank]
        plan = group.plan(mine)
        with pytest.raises(ferry.InvalidArgumentError, match="no dispatch has used to its end"):
            plan.received_routes()
        received = group.dispatch(np.zeros((len(mine), 4), np.float32), plan)
        return plan, np.array(received.topk_idx)

    for mine, (plan, ids) in zip(routes, run_ranks(3, body, experts=7)):
        assert np.array_equal(plan.routes().numpy(), mine)
        assert np.array_equal(plan.received_routes().numpy(), ids)


def test_context_memory_and_time() -> None:
    def body(group: ferry.Group) -> Any:
        hint = ferry.Group.memory_hint(experts=8, ranks=2, memory_bytes=1 << 20)
        assert group.memory() == hint
        plan = group.plan(np.zeros((4, 1), np.int64))
        got = group.dispatch(np.ones((4, 16), np.float32), plan)
        used = group.memory().arena_used_bytes
        del got
        assert group.memory().arena_used_bytes < used or used == 0
        spent = group.time()
        assert spent.exchange_ns > 0
        assert spent.wait_ns <= spent.exchange_ns
        assert "rank" in repr(group)
        return group, (group.rank, group.size, group.experts, group.local_experts)

    results = run_ranks(2, body)
    assert [facts for _, facts in results] == [(0, 2, 8, 4), (1, 2, 8, 4)]
    for group, _ in results:
        assert group.destroyed
        assert "not usable" in repr(group)


@pytest.mark.parametrize("fabric", ["local", "sim"])
def test_fabrics(rng: np.random.Generator, fabric: str) -> None:
    case = make_case(rng, 3, np.float32)

    def body(group: ferry.Group) -> Any:
        assert group.fabric_name == fabric
        plan = group.plan(case.reference.routes[group.rank])
        return group.combine(group.dispatch(case.x[group.rank], plan).x, plan).x

    arrived = [case.reference.gathered(case.x, r) for r in range(3)]
    for r, y in enumerate(run_ranks(3, body, experts=EXPERTS, fabric=fabric, sim_seed=7)):
        same(y, case.reference.combine(arrived, r))
