"""What a rank's own routes say: how many of its tokens go where."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.config import RANKS_OF_A_HOST, domains_of


class Layout(NamedTuple):
    """T tokens, R ranks, E experts."""

    num_tokens_per_rank: Tensor  # i32 [R]
    num_tokens_per_rdma_rank: Tensor | None  # i32 [R / 8], of more than 8 ranks
    num_tokens_per_expert: Tensor  # i32 [E]: slots that name it
    is_token_in_rank: Tensor  # bool [T, R]


def layout_of(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Ids that are no expert are left out here; a dispatch refuses all of them but -1."""
    ids = _ids(topk_idx, num_experts)
    is_token_in_rank = _marks(ids, num_experts, num_ranks)
    slots = (ids + 1).flatten()
    # One place more on both sides takes what names nobody.
    per_expert = torch.zeros(num_experts + 2, dtype=torch.int32, device=ids.device)
    per_expert.scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
    per_domain = None
    if (domains := domains_of(num_ranks)) > 1:
        in_domain = is_token_in_rank.view(ids.shape[0], domains, RANKS_OF_A_HOST).any(2)
        per_domain = in_domain.sum(0, dtype=torch.int32)
    return Layout(
        is_token_in_rank.sum(0, dtype=torch.int32),
        per_domain,
        per_expert[1:-1],
        is_token_in_rank,
    )


def ranks_of_tokens(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """is_token_in_rank alone: bool [T, R]."""
    return _marks(_ids(topk_idx, num_experts), num_experts, num_ranks)


def slots_here(said: list[bytes], rank: int) -> list[int]:
    """Slots of all ranks for each expert of this one. said: num_tokens_per_expert of each rank."""
    everyone = torch.stack([torch.frombuffer(bytearray(one), dtype=torch.int32) for one in said])
    small, more = divmod(everyone.shape[1], len(said))
    first = rank * small + min(rank, more)
    counts: list[int] = everyone.sum(0)[first:][: small + (rank < more)].tolist()
    return counts


def _ids(topk_idx: Tensor, num_experts: int) -> Tensor:
    """i64 [T, K]: -1 and num_experts for what names nobody."""
    return topk_idx.to(torch.int64).clamp(-1, num_experts)


def _marks(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    ranks = _rank_of(ids, num_experts, num_ranks)
    # One column more on both sides takes what names nobody.
    hit = torch.zeros(ids.shape[0], num_ranks + 2, dtype=torch.bool, device=ids.device)
    return hit.scatter_(1, ranks + 1, True)[:, 1:-1].contiguous()


def _rank_of(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """The rank of each expert, in contiguous blocks of which the first E mod R hold one more; -1
    stays -1, E becomes R."""
    small, more = divmod(num_experts, num_ranks)
    if more == 0:
        return ids.div(small, rounding_mode="floor")
    large = ids.div(small + 1, rounding_mode="floor")
    rest = (ids - more * (small + 1)).div(max(small, 1), rounding_mode="floor") + more
    rest = torch.where(ids == num_experts, num_ranks, rest)
    return torch.where(ids < more * (small + 1), large, rest)


def rank_routes(is_token_in_rank: Tensor) -> Tensor:
    """Routes to ranks instead of experts, for a group with one expert on each rank: i64 [T, R]."""
    ranks = torch.arange(is_token_in_rank.shape[1], device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, ranks, -1)
