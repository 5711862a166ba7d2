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


def _key(ids: Tensor, experts: int) -> Tensor:
    """-1 for each that is no expert."""
    return torch.where((ids < 0) | (ids >= experts), -1, ids.long())


def _checked(call: str, topk_idx: Tensor) -> Tensor:
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
        got = f"{topk_idx.dtype} of {topk_idx.dim()} dimensions"
        refuse(f"{call}: topk_idx", got, "i64 or i32 [T, K]")
    return topk_idx.detach()
