"""Groups in several domains: the results of one domain, gradients too, and what crosses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import run_ranks
from test_autograd import EXPERTS, make, moe

import ferry

RANKS, HIDDEN, TOPK = 4, 32, 4
NETWORKS = ["automatic", "sim"]


def exchange(group: ferry.Group) -> tuple[list[np.ndarray], np.ndarray]:
    """What a rank receives, with weights, and its sums: of few bits, so any order is exact."""
    rng = np.random.default_rng(100 + group.rank)
    routes = rng.integers(-1, group.experts, (20, TOPK))
    x = rng.integers(-8, 9, (20, HIDDEN)).astype(np.float32)
    weights = (rng.integers(-8, 9, (20, TOPK)) / 8).astype(np.float32)
    got = group.dispatch(x, topk_idx=routes, topk_weights=weights)
    again = group.dispatch(x, got.plan, topk_weights=weights, order="expert_major", alignment=4)
    parts = [got.x, got.topk_idx, got.topk_weights, got.source_token, again.x, again.slot_rows]
    y = group.combine(
        again.x,
        got.plan,
        order="expert_major",
        alignment=4,
        topk_weights=again.topk_weights,
        apply_weights=True,
    )
    return [np.array(part) for part in parts], y.x


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("crossing", ["direct", "hierarchical"])
def test_results_are_those_of_one_domain(crossing: str, network: str) -> None:
    expected = run_ranks(RANKS, exchange)
    got = run_ranks(RANKS, exchange, domain_size=2, network=network, crossing=crossing)
    for (parts, y), (expected_parts, expected_y) in zip(got, expected):
        for part, expected_part in zip(parts, expected_parts):
            assert np.array_equal(part, expected_part)
        assert np.array_equal(y, expected_y)


def test_gradients_cross_too() -> None:
    ref, xs, ws = make(5, RANKS)

    def body(group: ferry.Group) -> Any:
        x = xs[group.rank].clone().requires_grad_()
        w = ws[group.rank].clone().requires_grad_()
        y = moe(group, ref, x, w)
        y.float().pow(2).sum().mul(0.5).backward()
        return y.detach(), x.grad, w.grad

    expected = run_ranks(RANKS, body, experts=EXPERTS)
    got = run_ranks(RANKS, body, experts=EXPERTS, domain_size=2, crossing="hierarchical")
    for mine, theirs in zip(got, expected):
        for a, b in zip(mine, theirs):
            assert torch.equal(a, b)


def test_what_crosses_is_counted_and_can_be_chosen() -> None:
    def body(group: ferry.Group) -> Any:
        assert (group.domains, [group.domain_of(r) for r in range(RANKS)]) == (2, [0, 0, 1, 1])
        assert group.fabric_name == "local+copies"
        # Every token to both ranks of the other domain.
        other = [4, 6] if group.domain_of(group.rank) == 0 else [0, 2]
        plan = group.plan(np.array([other] * 10))
        assert plan.crossing() == "hierarchical"
        x = np.ones((10, HIDDEN), np.float32)
        sent = {}
        for crossing in ("direct", "hierarchical", "automatic"):
            group.dispatch(x, plan, crossing=crossing)  # brings routes, once
            before = group.network().put_bytes
            group.dispatch(x, plan, crossing=crossing)
            sent[crossing] = group.network().put_bytes - before
        row_bytes = HIDDEN * 4
        assert sent["direct"] - sent["hierarchical"] == 10 * row_bytes
        assert sent["automatic"] == sent["hierarchical"]
        assert "put_bytes=" in repr(group.network())
        with pytest.raises(ferry.InvalidArgumentError, match="domain_of: rank"):
            group.domain_of(RANKS)
        with pytest.raises(ferry.InvalidArgumentError, match=r'dispatch: crossing.*"hierarchical"'):
            group.dispatch(x, plan, crossing="both")

    run_ranks(RANKS, body, domain_size=2)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"domain_size": -1}, "domain_size"),
        ({"network": "shm"}, "network"),
        ({"crossing": "both"}, "crossing"),
        ({"fabric": "sim", "domain_size": 1}, "fabric sim"),
    ],
)
def test_configurations_that_cannot_be(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ferry.InvalidArgumentError, match=word):
        ferry.Group(ferry.threads(1)[0], experts=4, **config)
