"""What the ranks of test_gpu.py do with rows of fewer bits, on either engine."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from exchange_case import HIDDEN, Case, same
from exchange_reference import quantised

import ferry
import ferry.torch as ft


def fp8(group: ferry.Group) -> None:
    """fp8 rows with scales in any stride."""
    case = Case(group)
    x, ids, _ = case.own(torch.float8_e4m3fn)
    columns = torch.arange(2 * len(x), device=x.device, dtype=torch.float32).view(2, -1)
    got = group.dispatch(x, group.plan(ids), scales=columns.t())
    case.check_received(got, weights=False)
    assert got.x.dtype == torch.float8_e4m3fn and got.x.device == x.device
    ref = case.reference
    rows = ref.arrivals(group.rank)
    counts = [len(route) for route in ref.routes]
    assert got.scales is not None
    same(got.scales[:, 0], np.array([row.token for row in rows], np.float32))
    same(got.scales[:, 1], np.array([row.token + counts[row.source] for row in rows], np.float32))


def quantised_on_the_way(group: ferry.Group) -> None:
    """Rows become e4m3 with scales in flight, or were that before: the same bytes arrive."""
    case = Case(group)
    rng = np.random.default_rng(5)
    shift = [rng.normal(size=x.shape).astype(np.float32) for x in case.xs]
    xs = [(a + b).astype(ml_dtypes.bfloat16).astype(np.float32) for a, b in zip(case.xs, shift)]
    for x in xs:
        x[1:2] = 0
    own = torch.from_numpy(xs[case.rank]).to(case.device)
    ids = torch.from_numpy(case.reference.routes[case.rank]).to(case.device)
    plan = group.plan(ids)
    ref, rank, n = case.reference, case.rank, len(case.reference.arrivals(case.rank))
    for pow2 in (False, True):
        codes = [quantised(x, pow2)[0] for x in xs]
        scales = [quantised(x, pow2)[1] for x in xs]
        given: dict[str, Any] = {"format": "e4m3", "scale_format": "f32_pow2" if pow2 else "f32"}
        results = [group.dispatch(x, plan, **given) for x in (own, own.bfloat16())]
        results.append(group.dispatch(own, plan, max_recv_rows=160, **given))
        out = torch.empty(n, HIDDEN, dtype=torch.float8_e4m3fn, device=own.device)
        results.append(group.dispatch(own, plan, out=out, **given))
        assert results[-1].x.data_ptr() == out.data_ptr()
        ready = torch.from_numpy(codes[rank]).to(case.device).view(torch.float8_e4m3fn)
        made = torch.from_numpy(scales[rank]).to(case.device)
        some = rank % 2 == 1  # bring what the others' rows become
        results.append(
            group.dispatch(ready, plan, scales=made) if some else group.dispatch(own, plan, **given)
        )
        for got in results:
            assert got.x.dtype == torch.float8_e4m3fn and got.x.device == own.device
            assert got.scales is not None and got.scales.shape == (len(got.x), 1)
            same(got.x[:n].view(torch.uint8), ref.gathered(codes, rank).astype(np.float32))
            same(got.scales[:n], ref.gathered(scales, rank))
        by_expert = group.dispatch(own, plan, order="expert_major", alignment=4, **given)
        assert by_expert.scales is not None
        plain = by_expert.x.view(torch.uint8)
        same(plain, ref.expert_major(codes, rank, 4).astype(np.float32))
        same(by_expert.scales, ref.expert_major(scales, rank, 4))


def quantised_by_torch(group: ferry.Group) -> None:
    """The same through ferry.torch, by either kind of plan."""
    case = Case(group)
    x, ids, w = case.own(torch.bfloat16)
    codes = [quantised(each)[0] for each in case.xs]
    scales = [quantised(each)[1] for each in case.xs]
    ref, rank, n = case.reference, case.rank, len(case.reference.arrivals(case.rank))
    for plan in (group.plan(ids), ft.plan(group, ids)):
        assert ft.dispatch(group, plan, x).scales is None
        for worst_case in (0, 160):
            got = ft.dispatch(group, plan, x, w, max_recv_rows=worst_case, format="e4m3")
            assert got.x.dtype == torch.float8_e4m3fn and got.scales is not None
            same(got.x[:n].view(torch.uint8), ref.gathered(codes, rank).astype(np.float32))
            same(got.scales[:n], ref.gathered(scales, rank))
            same(got.topk_weights[:n], ref.topk_weights(case.ws, rank))
            assert not got.x[n:].view(torch.uint8).any() and not got.scales[n:].any()
        for name in ("x", "topk_weights"):
            wants = {"x": x, "topk_weights": w}
            wants[name] = wants[name].clone().requires_grad_()
            with pytest.raises(ferry.InvalidArgumentError, match=rf"{name}: .*gradient.*detach"):
                ft.dispatch(group, plan, **wants, format="e4m3")
            with torch.no_grad():
                ft.dispatch(group, plan, **wants, format="e4m3", scale_format="f32_pow2")


ALL = (fp8, quantised_on_the_way, quantised_by_torch)
