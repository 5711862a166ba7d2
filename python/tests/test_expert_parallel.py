"""ferry.torch.ExpertParallel against a layer whose experts are all here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_threads import run_ranks
from torch import Tensor, nn

import ferry
import ferry.torch as ft

EXPERTS, TOPK, HIDDEN = 7, 3, 256
TOKENS = [5, 0, 9, 2]


def tables(dtype: torch.dtype) -> Tensor:
    """What each expert multiplies the channels by: whole numbers, so that sums are exact."""
    make = torch.Generator().manual_seed(5)
    return torch.randint(-2, 3, (EXPERTS, HIDDEN), generator=make).to(dtype)


class Experts(nn.Module):
    """Of one rank."""

    def __init__(self, tables: Tensor) -> None:
        super().__init__()
        self.tables = nn.Parameter(tables.clone())

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        place = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.searchsorted(offsets[1:], place, right=True)
        padded = torch.cat([self.tables, self.tables.new_zeros(1, HIDDEN)])
        return rows * padded[expert]


def inputs(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(rank)
    shape = (TOKENS[rank], TOPK)
    x = torch.randint(-3, 4, (TOKENS[rank], HIDDEN), generator=make).to(dtype)
    return (
        x,
        torch.randint(-1, EXPERTS, shape, generator=make),
        torch.randint(1, 3, shape, generator=make).float(),
    )


def dense(x: Tensor, ids: Tensor, weights: Tensor, all_tables: Tensor) -> Tensor:
    each = torch.where(ids >= 0, weights, 0.0)[:, :, None] * all_tables[ids.clamp(min=0)].float()
    return (x.float() * each.sum(1)).to(x.dtype)


def local(group: ferry.Group) -> slice:
    each, more = divmod(EXPERTS, group.size)
    first = group.rank * each + min(group.rank, more)
    return slice(first, first + group.local_experts)


def wanted(ranks: int, dtype: torch.dtype) -> tuple[list[list[Any]], Tensor]:
    """Of each rank: y and the gradients of x and weights; and that of all tables."""
    all_tables = tables(dtype).requires_grad_()
    made = []
    for rank in range(ranks):
        x, ids, weights = inputs(rank, dtype)
        leaves = x.requires_grad_(), weights.requires_grad_()
        y = dense(*leaves[:1], ids, leaves[1], all_tables)
        y.float().sum().backward()
        made.append([y.detach(), x.grad, weights.grad])
    assert all_tables.grad is not None
    return made, all_tables.grad


@pytest.mark.parametrize("options", [{}, {"alignment": 4}, {"worst_case_rows": 64}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 4])
def test_training_step(ranks: int, dtype: torch.dtype, options: dict[str, int]) -> None:
    """Outputs and all gradients are exact."""
    expected, of_tables = wanted(ranks, dtype)

    def body(group: ferry.Group) -> None:
        layer = ft.ExpertParallel(group, Experts(tables(dtype)[local(group)]), **options)
        assert [name for name, _ in layer.named_parameters()] == ["experts.tables"]
        x, ids, weights = inputs(group.rank, dtype)
        y = layer(x.requires_grad_(), ids, weights.requires_grad_())
        y.float().sum().backward()
        for got, value in zip((y.detach(), x.grad, weights.grad), expected[group.rank]):
            assert torch.equal(got, value)
        assert torch.equal(layer.experts.tables.grad, of_tables[local(group)])

    run_ranks(ranks, body, experts=EXPERTS)


def test_training_step_in_fp8() -> None:
    """These tokens are exact in e4m3 up to their scale, so sums are right but for its rounding; the
    gradients do not see it."""
    expected, of_tables = wanted(3, torch.float32)

    def body(group: ferry.Group) -> None:
        layer = ft.ExpertParallel(
            group, Experts(tables(torch.float32)[local(group)]), format="e4m3"
        )
        x, ids, weights = inputs(group.rank, torch.float32)
        y = layer(x.requires_grad_(), ids, weights.requires_grad_())
        y.sum().backward()
        value, grad_x, grad_weights = expected[group.rank]
        # Of whole numbers up to 3 and their scale, e4m3 keeps 4 bits: a token is off by 1/16 of
        # itself at most. Then 3 slots with weights and tables up to 2, or all channels, or rows.
        torch.testing.assert_close(y.detach(), value, rtol=0, atol=3 * 2 * 2 * 3 / 16)
        assert torch.equal(x.grad, grad_x)
        torch.testing.assert_close(weights.grad, grad_weights, rtol=0, atol=HIDDEN * 2 * 3 / 16)
        torch.testing.assert_close(
            layer.experts.tables.grad, of_tables[local(group)], rtol=0, atol=16 * 3 * 2 * 3 / 16
        )

    run_ranks(3, body, experts=EXPERTS, memory_bytes=1 << 22)


@pytest.mark.parametrize("form", ["as_is", "e4m3"])
@pytest.mark.parametrize("batched", [False, True])
def test_decode_step(form: str, batched: bool) -> None:
    """With experts of their own and with those of training, also while something else is done; as
    often as one likes."""
    ranks, dtype = 4, torch.bfloat16

    def body(group: ferry.Group) -> None:
        own = tables(dtype)[local(group)]
        seen = []

        def on_blocks(rows: Tensor, counts: Tensor, scales: Tensor | None = None) -> Tensor:
            seen.append(counts.sum())
            if scales is not None:
                wide = scales.repeat_interleave(128, -1)
                rows = (rows.float() * wide).to(dtype)
            return rows * own[:, None]

        layer = ft.ExpertParallel(
            group,
            Experts(own),
            format=form,
            decode_tokens=max(TOKENS),
            decode_experts=on_blocks if batched else None,
        )
        x, ids, weights = inputs(group.rank, dtype)
        for _ in range(5):
            for meanwhile in (None, lambda: seen.append(torch.zeros(()))):
                y = layer.decode(x, ids, weights, meanwhile)
                assert not y.requires_grad
                value = dense(x, ids, weights, tables(dtype))
                if form == "as_is":
                    assert torch.equal(y, value)
                else:
                    torch.testing.assert_close(y, value, rtol=1 / 128, atol=3 * 2 * 2 * 3 / 16)
        assert len(seen) == 5 + 10 * batched

    run_ranks(ranks, body, experts=EXPERTS, memory_bytes=1 << 22)


def test_refusals() -> None:
    with ferry.Group(ferry.threads(1)[0], experts=EXPERTS) as group:
        experts = Experts(tables(torch.float32))
        x, ids, weights = inputs(0, torch.float32)
        with pytest.raises(ferry.InvalidArgument, match="decode_tokens"):
            ft.ExpertParallel(group, experts).decode(x, ids, weights)
        with pytest.raises(ferry.InvalidArgument, match=r"experts: got .*; expected a torch"):
            ft.ExpertParallel(group, lambda rows, offsets: rows)  # type: ignore[arg-type]
        with pytest.raises(ferry.InvalidArgument, match="format"):
            ft.ExpertParallel(group, experts, format="fp8")
        small = ft.ExpertParallel(group, experts, decode_tokens=2)
        with pytest.raises(
            ferry.InvalidArgument, match="5 tokens; expected at most the capacity, 2"
        ):
            small.decode(x, ids, weights)
        with pytest.raises(ferry.InvalidArgument, match="meanwhile"):
            small.decode(x, ids, weights, meanwhile=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["as_is", "e4m3"])
def test_compiled(form: str) -> None:
    """The layer compiles in whole, with new sizes and without them."""
    with ferry.Group(ferry.threads(1)[0], experts=EXPERTS) as group:
        layer = ft.ExpertParallel(group, Experts(tables(torch.float32)), format=form)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        for rank in (0, 2, 3):
            x, ids, weights = inputs(rank, torch.float32)
            results = []
            for run in (layer, compiled):
                leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
                y = run(leaves[0], ids, leaves[1])
                y.sum().backward()
                results.append((y.detach(), leaves[0].grad, leaves[1].grad))
            for eager, own in zip(*results):
                assert torch.equal(eager, own)
