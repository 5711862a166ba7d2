"""Experts that move to the ranks that are left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpus import needs_gpu
from rank_threads import run_threads

import ferry
from ferry import torch_places


def test_routes_become_places_of_their_framework() -> None:
    placement = ferry.ExpertPlacement(experts=5, ranks=3, slots=2)
    routes = np.array([[0, 4], [-1, 2]], np.int32)
    places = placement.places(routes, 1)
    assert isinstance(places, np.ndarray) and places.dtype == np.int64
    held = [placement.held_by(place // 2)[place % 2] for place in places.reshape(-1) if place >= 0]
    assert held == [0, 4, 2] and places[1, 0] == -1
    same = placement.places(torch.from_numpy(routes), 1)
    assert isinstance(same, torch.Tensor) and same.tolist() == places.tolist()
    assert repr(placement) == "ferry.ExpertPlacement(5 experts, 3 ranks, 2 slots)"


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_places_by_operators_of_torch_are_the_same(device: str) -> None:
    random = np.random.default_rng(20261128)
    placement = ferry.ExpertPlacement(experts=7, ranks=5, slots=3)
    placement.balance([0, 2, 3, 4], random.random(7), copies=1)
    routes = torch.from_numpy(random.integers(-1, 7, (4000, 4)))
    masked = [False, False, True, False, False]
    for without in ([], masked):
        held_by = [placement.held_by(rank) for rank in range(5)]
        table = torch_places.copy_table(held_by, 7, without)
        lacking = torch.tensor([expert for expert in range(7) if table[1][expert] == 0])
        reached = torch.where(torch.isin(routes, lacking), -1, routes)
        assert (table[1] > 1).any() and (len(lacking) > 0) == bool(without)
        for rank in (0, 3):
            wanted = placement.places(reached, rank, masked=without or None)
            if device == "cuda":
                got = placement.places(reached.cuda(), rank, masked=without or None)
            else:
                got = torch_places.place_copies(reached.int(), rank, *table)
            assert got.dtype == torch.int64 and torch.equal(got.cpu(), wanted), (without, rank)
    assert torch_places.place_copies(torch.tensor([[7], [-2]]), 0, *table).tolist() == [
        [torch_places.NO_EXPERT],
        [torch_places.NO_EXPERT],
    ]


def test_masked_ranks_get_no_tokens() -> None:
    placement = ferry.ExpertPlacement(experts=4, ranks=2, slots=4)
    placement.balance([0, 1], copies=2)
    routes = np.arange(64).reshape(16, 4) % 4
    assert set((placement.places(routes, 0) // 4).reshape(-1)) == {0, 1}
    assert (placement.places(routes, 0, masked=[False, True]) < 4).all()
    with pytest.raises(ferry.InvalidArgumentError, match="on masked ranks"):
        placement.places(routes, 0, masked=[True, True])
    gone = torch.zeros(2, dtype=torch.bool)
    gone.untyped_storage().resize_(0)
    for wrong in (3, "01", [0, 1], {0, 1}, [[False], [True]], np.array([0.5, 0.0]), gone):
        with pytest.raises(ferry.InvalidArgumentError, match="places: masked: got"):
            placement.places(routes, 0, masked=wrong)
    for right in (np.array([False, True]), torch.tensor([False, True]), (False, True)):
        assert (placement.places(routes, 0, masked=right) < 4).all()


def test_bad_placements_are_refused() -> None:
    with pytest.raises(ferry.InvalidArgumentError, match="at least 7"):
        ferry.ExpertPlacement(experts=7, ranks=3, slots=2)
    placement = ferry.ExpertPlacement(experts=4, ranks=3, slots=2)
    for wrong in ("abcd", 5, [10**400] * 4, [1j] * 4):
        with pytest.raises(ferry.InvalidArgumentError, match="balance: load: got"):
            placement.balance(range(3), wrong)
    with pytest.raises(ferry.InvalidArgumentError, match="balance: ranks"):
        placement.balance([0, 3])
    with pytest.raises(ferry.InvalidArgumentError, match="3 numbers"):
        placement.balance([0, 1], [1, 2, 3])
    with pytest.raises(ferry.InvalidArgumentError, match="expert 4"):
        placement.places(np.array([[4]]), 0)


def test_a_group_goes_on_with_all_experts() -> None:
    experts, ranks, slots, tokens = 6, 3, 3, 12
    bootstraps = ferry.threads(ranks)

    def step(group: ferry.Group, placement: ferry.ExpertPlacement) -> None:
        """Expert e multiplies by e + 1."""
        routes = np.arange(tokens * 2).reshape(tokens, 2) % experts
        x = np.full((tokens, 16), group.rank + 1, np.float32)
        plan = group.plan(placement.places(routes, group.rank))
        got = group.dispatch(x, plan, order="expert_major", topk_weights=np.ones((tokens, 2), "f4"))
        held = placement.held_by(group.rank)
        for slot, expert in enumerate(held):
            rows = got.x[got.expert_offsets[slot] : got.expert_offsets[slot + 1]]
            assert expert >= 0 or len(rows) == 0
            rows *= expert + 1
        y = group.combine(got.x, plan, order="expert_major").x
        assert (y == ((group.rank + 1) * (routes + 1).sum(1))[:, None]).all()

    def rank(number: int) -> None:
        group = ferry.Group(
            bootstraps[number], experts=ranks * slots, deadline=20, memory_bytes=1 << 20
        )
        placement = ferry.ExpertPlacement(experts=experts, ranks=ranks, slots=slots)
        step(group, placement)
        group.barrier()
        if number == 1:
            group.destroy()
            return
        with pytest.raises(ferry.PeerLeftError):
            step(group, placement)
        placement.balance(group.regroup().ranks)
        step(group, placement)
        group.barrier()
        group.destroy()

    run_threads(ranks, rank)
