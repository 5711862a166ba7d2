"""The reference itself, against cases that were worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from sequences.arithmetic import fma, logfmt_error, packed_exponents, quantise, same_bits
from sequences.reference import (
    LatencyRows,
    LatencySums,
    Routing,
    crossing_cost,
    sum_ranks,
    sum_slots,
)

F32 = np.float32

# Two ranks, three experts: 0 and 1 on rank 0, 2 on rank 1. Rank 0 has two tokens, rank 1 has three.
ROUTES = [np.array([[0, 2], [1, 1]]), np.array([[2, -1], [-1, -1], [1, 0]])]


def routing() -> Routing:
    return Routing(ROUTES, 3)


def test_where_rows_go() -> None:
    r = routing()
    assert [r.local_experts(rank) for rank in (0, 1)] == [2, 1]
    assert r.arrivals(0) == [(0, 0), (0, 1), (1, 2)]
    assert r.arrivals(1) == [(0, 0), (1, 0)]
    assert r.sent().tolist() == [[2, 1], [1, 1]]
    assert r.arrived_ids(0).tolist() == [[0, -1], [1, 1], [1, 0]]
    assert r.arrived_ids(1).tolist() == [[-1, 0], [0, -1]]


def test_expert_major_rows_are_padded() -> None:
    slots, offsets = routing().slot_rows(0, 1)
    assert offsets.tolist() == [0, 2, 5]
    assert slots.tolist() == [[0, -1], [2, 3], [4, 1]]
    slots, offsets = routing().slot_rows(0, 4)
    assert offsets.tolist() == [0, 4, 8]
    assert slots.tolist() == [[0, -1], [4, 5], [6, 1]]


def test_sums() -> None:
    r = routing()
    rows = [np.array([[1.0], [2.0], [4.0]], F32), np.array([[8.0], [16.0]], F32)]
    assert sum_ranks(r, rows, 0).tolist() == [[9.0], [2.0]]
    assert sum_ranks(r, rows, 1).tolist() == [[16.0], [0.0], [4.0]]
    slots, _ = r.slot_rows(0, 1)
    of_slots = np.array([[1.0], [2.0], [4.0], [8.0], [16.0]], F32)
    assert sum_slots(of_slots, slots, None).tolist() == [[1.0], [12.0], [18.0]]
    weights = np.array([[2, 9], [3, 5], [1, 10]], F32)
    assert sum_slots(of_slots, slots, weights).tolist() == [[2.0], [52.0], [36.0]]


def test_a_hierarchical_sum_is_rounded_in_each_domain() -> None:
    """Of bf16, 1 + 2^-8 is rounded to 1 in a domain; summed by ranks the two halves count."""
    r = Routing([np.array([[0, 1, 2, 3]])] + [np.zeros((0, 4), int)] * 3, 4)
    half = 2.0**-8
    rows = [np.array([[v]], ml_dtypes.bfloat16) for v in (1.0, half, half, 0.0)]
    assert sum_ranks(r, rows, 0).item() == 1 + 2 * half
    assert sum_ranks(r, rows, 0, [0, 0, 1, 1]).item() == 1 + half


def test_the_cost_of_crossing() -> None:
    """One token for all ranks of another domain: a row for each crosses, or one that is spread."""
    r = Routing([np.array([[2, 3]])] + [np.zeros((0, 2), int)] * 3, 4)
    assert crossing_cost(r, [0, 0, 1, 1]) == (2.0, 1.0)
    many = Routing([np.array([range(1, 17)])] + [np.zeros((0, 16), int)] * 16, 17)
    assert crossing_cost(many, [0] + [1] * 16) == (16.0, 16 / 8)


def test_fma_rounds_once() -> None:
    """The product lies 2^-70 below half a unit: rounded to f64 first, the tie would go up to the
    even neighbour."""
    a, b, c = F32(1 + 2**-23), F32((1 - 2**-23) * 2**-24), F32(1 + 2**-23)
    assert fma(np.array([a]), np.array([b]), np.array([c]))[0] == c
    assert F32(float(a) * float(b) + float(c)) == F32(1 + 2**-22)


def test_quantisation() -> None:
    x = np.array([[448.0, 1.0, -1.06, np.nan] + [0.0] * 125 + [7.0]], F32)
    q = quantise(x)
    assert q.scales.tolist() == [[1.0, float(F32(7) / F32(448))]]
    assert q.codes[0, :3].astype(F32).tolist() == [448.0, 1.0, -1.0]
    assert np.isnan(q.codes[0, 3].astype(F32))
    assert q.codes[0, 129].astype(F32) == 448.0
    assert quantise(np.zeros((1, 4), F32)).scales[0, 0] == F32(1e-4) / F32(448)
    infinite = quantise(np.array([[np.inf, 1.0]], F32))
    assert infinite.codes.astype(F32).tolist() == [[448.0, 0.0]]


def test_scales_that_are_powers_of_two() -> None:
    for amax, scale in ((448.0, 1.0), (449.0, 2.0), (447.0, 1.0), (224.0, 0.5), (225.0, 1.0)):
        q = quantise(np.array([[amax, 0, 0, 0]], F32), power_of_two=True)
        assert q.scales[0, 0] == scale
    scales = np.array([[1.0, 2.0, 0.5]], F32)
    assert packed_exponents(scales).view(np.uint8).tolist() == [[127, 128, 126, 0]]


def test_the_error_of_logfmt() -> None:
    same = logfmt_error(np.full((1, 128), 3.0, F32))
    assert (same <= 3 * 5e-6).all()  # a block of one magnitude
    wide = logfmt_error(np.array([[1.0, 256.0, 0.0, 2.0**-30]], F32))
    assert wide[0, 2] == 2**-25  # of what is below the lowest level: half of that
    assert 0.022 < wide[0, 1] / 256 < 0.0225  # 32 octaves, the most


def test_latency_sums() -> None:
    r = routing()
    layout = LatencyRows(r, [{0, 1}, {0, 1}])
    assert layout.of_expert(0, 1) == [(0, 1, 0), (0, 1, 1), (1, 2, 0)]
    assert layout.of_source(1, 1) == [0]
    rows = [np.zeros((2, 6, 1), F32), np.zeros((1, 6, 1), F32)]
    rows[0][0, :2, 0] = [1, 2]  # expert 0: (0, 0, 0), (1, 2, 1)
    rows[0][1, :3, 0] = [4, 8, 16]
    rows[1][0, :2, 0] = [32, 64]  # expert 2: (0, 0, 1), (1, 0, 0)
    weights = [np.array([[1, 2], [3, 5]], F32), np.array([[1, 0], [0, 0], [1, 10]], F32)]
    for path in ("per_slot", "per_rank"):
        sums = LatencySums(layout, rows, [False, False], weights, path, "as_is")
        assert sums.of(0, {0, 1}).x.tolist() == [[65.0], [52.0]]
        assert sums.of(1, {0, 1}).x.tolist() == [[64.0], [0.0], [36.0]]
    assert sums.of(0, {0}).x.tolist() == [[1.0], [52.0]]  # without rank 1, which is masked


def test_bits_are_compared() -> None:
    a = np.array([0.0, np.nan], F32)
    assert same_bits(a, np.array([0.0, -np.nan], F32))
    assert not same_bits(a, np.array([-0.0, np.nan], F32))
    assert not same_bits(a, a.astype(np.float64))
