"""Weights of slots as rows have them and back, and routing maps, beside loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_threads import run_ranks
from torch import Tensor

import ferry
import ferry.torch


def routes(rank: int, tokens: int, experts: int, topk: int) -> Tensor:
    random = torch.Generator().manual_seed(40 + rank)
    ids = torch.rand(tokens, experts, generator=random).argsort(1)[:, :topk].contiguous()
    ids[torch.rand(ids.shape, generator=random) < 0.3] = -1
    return ids


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("worst", [False, True])
def test_rows_and_slots(ranks: int, alignment: int, worst: bool) -> None:
    """Every row has the weight of the slot that it is for, and every slot gets that of its row."""

    def body(group: ferry.Group) -> None:
        tokens = 3 * group.rank  # rank 0 has none
        ids = routes(group.rank, tokens, 8, 3)
        weights = torch.rand(tokens, 3)
        got = group.dispatch(
            torch.ones(tokens, 16),
            topk_idx=ids,
            topk_weights=weights,
            order="expert_major",
            alignment=alignment,
            row_weights=True,
            max_recv_rows=300 if worst else 0,
        )
        rows = ferry.torch.row_weights(got.topk_weights, got.topk_idx, got.slot_rows, len(got.x))
        expected = torch.zeros(len(got.x))
        for row, slots in enumerate(got.topk_idx.tolist()):
            for k, expert in enumerate(slots):
                if expert >= 0:
                    expected[got.slot_rows[row, k]] = got.topk_weights[row, k]
        assert torch.equal(rows, expected) and torch.equal(got.row_weights, expected)
        back = ferry.torch.slot_weights(rows, got.topk_idx, got.slot_rows)
        assert torch.equal(back, torch.where(got.topk_idx >= 0, got.topk_weights, 0.0))
        counts = ferry.torch.expert_rows(got.topk_idx, group.local_experts)
        assert counts.tolist() == got.plan.slots_per_expert()
        for weights_back in (back, rows):
            how = {"order": "expert_major", "alignment": alignment, "topk_weights": weights_back}
            combined = group.combine(got.x, got.plan, **how)
            assert torch.equal(combined.topk_weights, torch.where(ids >= 0, weights, 0.0))

    run_ranks(ranks, body)


def test_gradients_go_both_ways() -> None:
    ids, slots = torch.tensor([[0, -1], [1, 0]]), torch.tensor([[0, -1], [2, 1]])
    weights = torch.tensor([[0.5, 9.0], [2.0, 3.0]], requires_grad=True)
    rows = ferry.torch.row_weights(weights, ids, slots, 4)
    assert rows.tolist() == [0.5, 3.0, 2.0, 0.0]
    back: Any = ferry.torch.slot_weights(rows * 2, ids, slots)
    assert back.tolist() == [[1.0, 0.0], [4.0, 6.0]]
    back.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[2.0, 0.0], [2.0, 2.0]]


def test_no_row_at_all() -> None:
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert ferry.torch.row_weights(torch.zeros(0, 2), none, none, 0).shape == (0,)
    ids = torch.full((2, 2), -1)
    assert ferry.torch.slot_weights(torch.zeros(0), ids, ids).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("experts", "topk"), [(9, 4), (9, 9), (3, 5)])
def test_routing_maps(experts: int, topk: int) -> None:
    random = torch.Generator().manual_seed(experts)
    bits = torch.zeros(20, experts, dtype=torch.bool)
    for row in range(1, 20):
        named = torch.randperm(experts, generator=random)[: row % (min(topk, experts) + 1)]
        bits[row, named] = True
    probs = torch.rand(20, experts, generator=random)
    ids, weights = ferry.torch.routes_of_map(bits, topk, probs)
    assert weights is not None
    assert ids.shape == weights.shape == (20, topk)
    for row in range(20):
        named = bits[row].nonzero().flatten().tolist()
        assert ids[row].tolist() == named + [-1] * (topk - len(named))
        assert weights[row].tolist() == probs[row, named].tolist() + [0.0] * (topk - len(named))
    assert torch.equal(ferry.torch.routes_of_map(bits, topk)[0], ids)
    back = ferry.torch.probs_of_routes(ids, weights, experts)
    assert torch.equal(back, torch.where(bits, probs, 0.0))


def test_what_is_refused() -> None:
    bits = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ferry.InvalidArgumentError, match="routing_map"):
        ferry.torch.routes_of_map(bits.int(), 2)
    with pytest.raises(ferry.InvalidArgumentError, match="topk"):
        ferry.torch.routes_of_map(bits, 0)
    with pytest.raises(ferry.InvalidArgumentError, match="probs"):
        ferry.torch.routes_of_map(bits, 2, torch.zeros(2, 4))
