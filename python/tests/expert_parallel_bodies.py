"""What the ranks of test_expert_parallel.py do: a layer of experts over ranks against one whose
experts are all here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferry
import ferry.torch as ft

EXPERTS, TOPK, HIDDEN = 7, 3, 256
TOKENS = [5, 0, 9, 2]
CONFIG = {"experts": EXPERTS, "memory_bytes": 1 << 22}


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


def on(group: ferry.Group, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies where this rank's tensors lie."""
    return tuple(tensor.detach().clone().to(group.device) for tensor in tensors)


def layer_of(group: ferry.Group, dtype: torch.dtype, **options: Any) -> ft.ExpertParallel:
    (own,) = on(group, tables(dtype)[local(group)])
    return ft.ExpertParallel(group, Experts(own), **options)


def train(group: ferry.Group, dtype: torch.dtype, options: dict[str, int]) -> None:
    """Outputs and all gradients are exact."""
    expected, of_tables = wanted(group.size, dtype)
    layer = layer_of(group, dtype, **options)
    assert [name for name, _ in layer.named_parameters()] == ["experts.tables"]
    x, ids, weights = on(group, *inputs(group.rank, dtype))
    y = layer(x.requires_grad_(), ids, weights.requires_grad_())
    y.float().sum().backward()
    for got, value in zip((y.detach(), x.grad, weights.grad), expected[group.rank]):
        assert got is not None
        assert torch.equal(got.cpu(), value)
    assert torch.equal(layer.experts.tables.grad.cpu(), of_tables[local(group)])


def train_in_fp8(group: ferry.Group) -> None:
    """These tokens are exact in e4m3 up to their scale, so sums are right but for its rounding; the
    gradients do not see it."""
    expected, of_tables = wanted(group.size, torch.float32)
    layer = layer_of(group, torch.float32, format="e4m3")
    x, ids, weights = on(group, *inputs(group.rank, torch.float32))
    y = layer(x.requires_grad_(), ids, weights.requires_grad_())
    y.sum().backward()
    value, grad_x, grad_weights = expected[group.rank]
    # Of whole numbers up to 3 and their scale, e4m3 keeps 4 bits: a token is off by 1/16 of
    # itself at most. Then 3 slots with weights and tables up to 2, or all channels, or rows.
    torch.testing.assert_close(y.detach().cpu(), value, rtol=0, atol=3 * 2 * 2 * 3 / 16)
    assert x.grad is not None
    assert weights.grad is not None
    assert torch.equal(x.grad.cpu(), grad_x)
    torch.testing.assert_close(weights.grad.cpu(), grad_weights, rtol=0, atol=HIDDEN * 2 * 3 / 16)
    torch.testing.assert_close(
        layer.experts.tables.grad.cpu(),
        of_tables[local(group)],
        rtol=0,
        atol=sum(TOKENS[: group.size]) * 3 * 2 * 3 / 16,
    )


def decode(group: ferry.Group, form: str, batched: bool) -> None:
    """With experts of their own and with those of training, also while something else is done; as
    often as one likes."""
    dtype, seen = torch.bfloat16, []

    def on_blocks(rows: Tensor, counts: Tensor, scales: Tensor | None = None) -> Tensor:
        seen.append(counts.sum())
        if scales is not None:
            rows = (rows.float() * scales.repeat_interleave(128, -1)).to(dtype)
        return rows * layer.experts.tables[:, None]

    layer = layer_of(
        group,
        dtype,
        format=form,
        decode_tokens=max(TOKENS),
        decode_experts=on_blocks if batched else None,
    )
    given = inputs(group.rank, dtype)
    value = dense(*given, tables(dtype))
    for _ in range(5):
        for meanwhile in (None, lambda: seen.append(torch.zeros(()))):
            y = layer.decode(*on(group, *given), meanwhile)
            assert not y.requires_grad
            if form == "as_is":
                assert torch.equal(y.cpu(), value)
            else:
                torch.testing.assert_close(y.cpu(), value, rtol=1 / 128, atol=3 * 2 * 2 * 3 / 16)
    assert len(seen) == 5 + 10 * batched


SLOTS = 4  # two ranks have places for all experts, three have some for copies


def placed_layer(group: ferry.Group, ranks: list[int]) -> ft.ExpertParallel:
    placement = ferry.ExpertPlacement(experts=EXPERTS, ranks=group.size, slots=SLOTS)
    placement.balance(ranks)
    (empty,) = on(group, torch.zeros(SLOTS, HIDDEN))
    layer = ft.ExpertParallel(group, Experts(empty), placement=placement)
    fill(layer)
    return layer


def fill(layer: ft.ExpertParallel) -> None:
    """As a vault does."""
    for expert, (table,) in layer.held().items():
        table.copy_(tables(torch.float32)[expert])


def placed_step(layer: ft.ExpertParallel, ranks: list[int], leaves: str = "") -> bool:
    """Outputs and all gradients are exact, those of copies too. leaves: the call before which this
    rank leaves; then False."""
    group = layer.group
    layer.zero_grad()
    all_tables, given = tables(torch.float32).requires_grad_(), inputs(group.rank, torch.float32)
    for rank in ranks:
        value = dense(*inputs(rank, torch.float32), all_tables)
        value.sum().backward()
        if rank == group.rank:
            expected = value.detach()
    for call in ("forward", "backward", "sum_copies"):
        if leaves == call:
            group.destroy()
            return False
        if call == "forward":
            y = layer(*on(group, *given))
        elif call == "backward":
            y.sum().backward()
        else:
            layer.sum_copies()
    assert torch.equal(y.cpu(), expected)
    assert all_tables.grad is not None
    for expert, (table,) in layer.held(layer.experts.tables.grad).items():
        assert torch.equal(table.cpu(), all_tables.grad[expert]), f"expert {expert}"
    return True


def go_on_without_rank_0(group: ferry.Group, leaves: str) -> None:
    """A step with all ranks, one in which rank 0 leaves, and that one again without it."""
    everyone, left = list(range(group.size)), list(range(1, group.size))
    layer = placed_layer(group, everyone)
    assert placed_step(layer, everyone)
    if group.rank == 0:
        assert not placed_step(layer, everyone, leaves)
        return
    lost = (ferry.PeerLeftError, ferry.PeerFailedError)
    with pytest.raises(lost, match=r"rank 0|called regroup"):
        placed_step(layer, everyone)
    view = group.regroup()
    assert view.ranks == left
    placement = ferry.ExpertPlacement(experts=EXPERTS, ranks=group.size, slots=SLOTS)
    placement.balance(view.ranks)
    layer.placement = placement
    fill(layer)
    assert placed_step(layer, left)
    group.barrier()


def ranks_that_differ(group: ferry.Group, differs: str) -> None:
    """Rank 1 and later ones, from rank 0: all learn of it, before a wrong value; then the group
    goes on."""
    everyone, other = list(range(group.size)), int(group.rank > 0)
    layer = placed_layer(group, everyone)
    assert layer.placement is not None
    assert placed_step(layer, everyone)
    if differs == "placement":
        load = [1.0 + e * other for e in range(layer.placement.experts)]
        layer.placement.balance(everyone, load, copies=1)
        for call in (layer, lambda *_: layer.sum_copies()):
            with pytest.raises(ferry.MismatchError, match="placement"):
                call(*on(group, *inputs(group.rank, torch.float32)))
        layer.placement.balance(everyone)
    else:
        more = torch.zeros(SLOTS, 4 if differs == "frozen" else 4 + other, device=group.device)
        layer.experts.more = nn.Parameter(more, requires_grad=differs != "frozen" or not other)
        with pytest.raises(ferry.MismatchError, match="parameters"):
            layer.sum_copies()
        del layer.experts.more
    fill(layer)
    assert placed_step(layer, everyone)
    layer.experts.more = nn.Parameter(torch.zeros(SLOTS, 4, dtype=torch.float64))
    with pytest.raises(ferry.InvalidArgumentError, match="fp32"):
        layer.sum_copies()
    group.barrier()


def a_rank_without_copies(group: ferry.Group) -> None:
    """It learns that others have some. In a group of two places for each of three ranks."""
    (empty,) = on(group, torch.zeros(2, HIDDEN))
    placement = ferry.ExpertPlacement(experts=6 - (group.rank > 0), ranks=3, slots=2)
    layer = ft.ExpertParallel(group, Experts(empty), placement=placement)
    with pytest.raises(ferry.MismatchError, match="placement"):
        layer.sum_copies()
    layer.placement = ferry.ExpertPlacement(experts=6, ranks=3, slots=2)
    layer.sum_copies()
    group.barrier()
