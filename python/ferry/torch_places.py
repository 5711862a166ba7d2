"""Counts and places of routes by torch's own operators: on GPUs, where C++ reads none.

Nothing here waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferry.arguments import refuse

NO_EXPERT = 2**31 - 1
"""The place of an id that is no expert: `Group.plan` refuses it where it finds such ids."""


def count(topk_idx: Tensor, experts: int) -> Tensor:
    """i32 [experts]; ids that are no expert are not counted."""
    ids = _checked("counts", topk_idx).flatten()
    found = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    found.scatter_add_(0, _key(ids, experts) + 1, found.new_ones(1).expand(len(ids)))
    return found[1:]


def place(topk_idx: Tensor, experts: int, shares: Tensor) -> Tensor:
    """i64 [T, K]. shares: of `BatchBalancer`, i64 [2, P] on the CPU: the slots, sorted by expert,
    go to these places, so many to each."""
    ids = _checked("places", topk_idx).flatten()
    unused = len(ids) - int(shares[1].sum())
    if unused < 0:
        refuse("places: topk_idx", f"{len(ids)} slots", "as many as were counted")
    first = shares.new_tensor([[-1], [unused]])
    places, shared = torch.cat([first, shares], dim=1).to(ids.device, non_blocking=True)
    key = _key(ids, experts)
    order = key.to(torch.int32).sort(stable=True).indices
    made = places.new_empty(len(ids))
    made[order] = places.repeat_interleave(shared, output_size=len(ids))
    return torch.where((ids < -1) | (ids >= experts), NO_EXPERT, made).view(topk_idx.shape)


def copy_table(held_by: list[list[int]], experts: int, masked: list[bool]) -> tuple[Tensor, Tensor]:
    """Of an `ExpertPlacement`: i64 [experts, most] places of the copies, ascending, then
    NO_EXPERT; and i64 [experts] how many there are. Copies on masked ranks are left out."""
    slots = len(held_by[0])
    places: list[list[int]] = [[] for _ in range(experts)]
    for rank, held in enumerate(held_by):
        for slot, expert in enumerate(held):
            if expert >= 0 and not (masked and masked[rank]):
                places[expert].append(rank * slots + slot)
    most = max(1, *map(len, places))
    rows = [each + [NO_EXPERT] * (most - len(each)) for each in places]
    return torch.tensor(rows), torch.tensor([len(each) for each in places])


def place_copies(topk_idx: Tensor, rank: int, copies: Tensor, counts: Tensor) -> Tensor:
    """i64 [T, K]: of `ExpertPlacement.places`, by its `copy_table` on the same device."""
    ids = _checked("places", topk_idx)
    key = _key(ids, len(copies)).clamp(min=0)
    token = torch.arange(len(ids), device=ids.device)[:, None]
    chosen = _spread(token, rank).expand(ids.shape) % counts[key].clamp(min=1)
    made = torch.where(ids == -1, -1, copies[key, chosen])
    return torch.where((ids < -1) | (ids >= len(copies)), NO_EXPERT, made)


def _spread(token: Tensor, rank: int) -> Tensor:
    """What core/experts/expert_table.hpp, copy_for, takes the remainder of; products wrap."""
    x = token * _wrapped(0x9E3779B97F4A7C15) + _wrapped(rank * 0xD1B54A32D192ED03)
    x = (x ^ _shifted(x, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _wrapped(0x94D049BB133111EB)
    return _shifted(x, 32)


def _wrapped(value: int) -> int:
    """The i64 of these low 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, of unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _key(ids: Tensor, experts: int) -> Tensor:
    """-1 for each that is no expert."""
    return torch.where((ids < 0) | (ids >= experts), -1, ids.long())


def _checked(call: str, topk_idx: Tensor) -> Tensor:
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
        got = f"{topk_idx.dtype} of {topk_idx.dim()} dimensions"
        refuse(f"{call}: topk_idx", got, "i64 or i32 [T, K]")
    return topk_idx.detach()
