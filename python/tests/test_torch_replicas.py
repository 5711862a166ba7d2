"""Copies of experts on other ranks, beside loops over the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_threads import run_threads

import ferry
import ferry.torch

EXPERTS, SLOTS, WIDTH = 3, 4, 8


def table_of(ranks: int, seed: int) -> list[list[int]]:
    """Any experts, own ones and the same one twice among them; some slots without."""
    random = torch.Generator().manual_seed(seed)
    named = torch.randint(-1, ranks * EXPERTS, (ranks, SLOTS), generator=random)
    found: list[list[int]] = named.tolist()
    return found


def weights_of(rank: int) -> torch.Tensor:
    return torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(70 + rank))


def slots_of(rank: int) -> torch.Tensor:
    return torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(90 + rank))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_weights_out_and_gradients_back(size: int) -> None:
    bootstraps = ferry.threads(size)

    def one(rank: int) -> None:
        with ferry.Collectives(bootstraps[rank], deadline=20) as ranks:
            for seed in range(4):
                table = table_of(size, seed) if seed else [[-1] * SLOTS] * size
                replicas = torch.full((SLOTS, 2, WIDTH // 2), 7.0)
                ferry.torch.copy_experts(ranks, weights_of(rank), replicas, table)
                for slot, expert in enumerate(table[rank]):
                    owner, local = divmod(expert, EXPERTS)
                    wanted = torch.full((WIDTH,), 7.0) if expert < 0 else weights_of(owner)[local]
                    assert torch.equal(replicas[slot].flatten(), wanted)
                grads = weights_of(rank)
                ferry.torch.reduce_experts(ranks, slots_of(rank), grads, table)
                expected = weights_of(rank)
                for other, row in enumerate(table):
                    for slot, expert in enumerate(row):
                        if expert >= 0 and expert // EXPERTS == rank:
                            expected[expert % EXPERTS] += slots_of(other)[slot]
                assert torch.equal(grads, expected)
            half = torch.arange(EXPERTS * 4).view(EXPERTS, 4).bfloat16()
            packed = torch.zeros(SLOTS, 8, dtype=torch.uint8)
            ferry.torch.copy_experts(ranks, half, packed, [[EXPERTS - 1] * SLOTS] * size)
            assert packed.view(torch.bfloat16).tolist() == [[8, 9, 10, 11]] * SLOTS
            ranks.barrier()

    run_threads(size, one)


def test_bytes_between_domains_are_those_of_the_experts() -> None:
    """Each copy that crosses moves the bytes of one expert once, and its gradient as many back."""
    bootstraps = ferry.threads(4)
    table = [[1, 6], [9, -1], [0, 3], [-1, -1]]  # of ranks 0 and 2, 3, 0 and 1
    out, back = [1, 1, 1, 1], [1, 1, 2, 0]

    def one(rank: int) -> None:
        with ferry.Collectives(bootstraps[rank], deadline=20, domain_size=2) as ranks:
            experts, slots = torch.ones(EXPERTS, 1024), torch.zeros(2, 1024)

            def sent(table: list[list[int]], call: Any, *given: torch.Tensor) -> int:
                before = ranks.network().put_bytes
                call(ranks, *given, table)
                return ranks.network().put_bytes - before

            nothing = [[-1, -1]] * 4
            for crossing, call, given in (
                (out, ferry.torch.copy_experts, (experts, slots)),
                (back, ferry.torch.reduce_experts, (slots, experts)),
            ):
                moved = sent(table, call, *given) - sent(nothing, call, *given)
                assert moved == crossing[rank] * 4 * 1024
            ranks.barrier()

    run_threads(4, one)


@pytest.mark.parametrize("domain_size", [0, 1])
def test_slots_that_differ_are_refused_everywhere(domain_size: int) -> None:
    """At once, by the rank whose table does not fit its slots, too; and the calls go on."""
    bootstraps = ferry.threads(2)

    def one(rank: int) -> None:
        how = {"deadline": 20, "domain_size": domain_size}
        with ferry.Collectives(bootstraps[rank], **how) as ranks:
            experts, slots = torch.ones(2, 4), torch.zeros(1 + rank, 4)
            table = [[2, 3], [-1, -1]]  # of rank 1, which has two slots
            word = (
                r"rank 0: \w+: table: got .*\[2\], 1 slots" if rank == 0 else "all_gather on rank 0"
            )
            for call, given in (
                (ferry.torch.copy_experts, (experts, slots)),
                (ferry.torch.reduce_experts, (slots, experts)),
            ):
                with pytest.raises(ferry.MismatchError, match=word):
                    call(ranks, *given, table)
            two = torch.zeros(2, 4)
            ferry.torch.copy_experts(ranks, experts, two, table)
            assert two.sum() == 8 * (1 - rank)
            ranks.barrier()

    run_threads(2, one)


def test_what_is_refused() -> None:
    (bootstrap,) = ferry.threads(1)
    with ferry.Collectives(bootstrap) as ranks:
        x, y = torch.zeros(2, 4), torch.zeros(3, 4)
        copy, reduce, wrong = (
            ferry.torch.copy_experts,
            ferry.torch.reduce_experts,
            ferry.InvalidArgumentError,
        )
        with pytest.raises(wrong, match=r"table: got 1 rows of \[2\]; expected 1 rows of 3"):
            copy(ranks, x, y, [[0, 1]])
        with pytest.raises(wrong, match=r"table: got 2"):
            copy(ranks, x, y, [[0, 1, 2]])
        with pytest.raises(wrong, match="replicas: got 8 bytes an expert; expected 16"):
            copy(ranks, x, y[:, :2].contiguous(), [[0, 1, -1]])
        with pytest.raises(wrong, match=r"experts: got shape \(2, 0\)"):
            copy(ranks, x[:, :0].contiguous(), y, [[0, 1, -1]])
        with pytest.raises(wrong, match="experts: got strides"):
            copy(ranks, torch.zeros(4, 2).t(), y, [[0, 1, -1]])
        with pytest.raises(wrong, match=r"experts: got torch\.bfloat16"):
            reduce(ranks, y, x.bfloat16(), [[0, 1, -1]])
        with pytest.raises(wrong, match="replicas: got 2 columns; expected 4"):
            reduce(ranks, y[:, :2].contiguous(), x, [[0, 1, -1]])
