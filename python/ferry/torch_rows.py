"""What belongs to slots of routes, as rows of expert-major order have it, and back; routes of
routing maps."""

from __future__ import annotations

import torch
from torch import Tensor

from ferry.arguments import describe, integer, refuse


def row_weights(topk_weights: Tensor, topk_idx: Tensor, slot_rows: Tensor, rows: int) -> Tensor:
    """The weight of each expert-major row, 0 for padding: f32 [rows]. Differentiable in
    topk_weights.

    topk_weights, topk_idx, slot_rows: [n, K], as a dispatch with `order="expert_major"` brings
    them. rows: of its `x`.
    """
    # Of a worst case, slots that did not arrive are known by their id alone.
    places = torch.where(topk_idx < 0, rows, slot_rows).flatten()
    whole = topk_weights.new_zeros(rows + 1).scatter(0, places, topk_weights.flatten())
    return whole[:-1]


def slot_weights(row_weights: Tensor, topk_idx: Tensor, slot_rows: Tensor) -> Tensor:
    """The other way round: [n, K] of the weights of expert-major rows [rows], for `combine`; 0 for
    slots that are not local. Differentiable in row_weights."""
    # One more row of zeros, which slots of no row read: there may be no row at all.
    padded = torch.nn.functional.pad(row_weights, (0, 1))
    return padded[torch.where(topk_idx < 0, row_weights.shape[0], slot_rows)]


def expert_rows(topk_idx: Tensor, experts: int) -> Tensor:
    """i32 [experts]: how many slots name each local expert. topk_idx: local ids, -1: none. Nothing
    waits for the GPU."""
    slots = (topk_idx + 1).flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=topk_idx.device)
    counts.scatter_add_(0, slots.long(), torch.ones_like(slots, dtype=torch.int32))
    return counts[1:]


def routes_of_map(
    routing_map: Tensor, topk: int, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Routes of a routing map, in ascending expert, and their weights: i64 [T, topk], -1 where a
    token names fewer experts, and f32 [T, topk], 0 there (None without probs).

    routing_map: bool [T, E]. probs: f32 [T, E]. topk: the most experts of a token, the same on all
    ranks; what a row has beyond it is lost, so the caller makes sure there is none. Nothing waits
    for the GPU.
    """
    if routing_map.dtype != torch.bool or routing_map.dim() != 2:
        refuse(
            "routes_of_map: routing_map", describe(routing_map), "bool of two dimensions, [T, E]"
        )
    integer("routes_of_map: topk", topk, 1)
    tokens, experts = routing_map.shape
    # Bits of a row keep their order, before everything that is none.
    order = torch.argsort(routing_map, dim=1, descending=True, stable=True)[:, :topk]
    named = routing_map.gather(1, order)
    ids = torch.where(named, order, -1)
    if experts < topk:
        ids = torch.nn.functional.pad(ids, (0, topk - experts), value=-1)
    if probs is None:
        return ids, None
    if probs.shape != routing_map.shape:
        refuse("routes_of_map: probs", describe(probs), f"f32 of shape {(tokens, experts)}")
    weights = torch.where(ids >= 0, probs.gather(1, ids.clamp(min=0)), 0.0)
    return ids, weights.float()


def probs_of_routes(topk_idx: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The other way round: f32 [T, E] of weights [T, K], 0 where no slot names an expert."""
    places = torch.where(topk_idx < 0, experts, topk_idx)
    whole = weights.new_zeros(topk_idx.shape[0], experts + 1).scatter(1, places, weights)
    return whole[:, :experts]
