"""Handles of HybridEP, and routing maps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_ep.arguments import is_strided, words
from deep_ep.errors import refuse, require, require_integer
from deep_ep.handles import Exchange
from deep_ep.hybrid_config import HybridEpConfigInstance


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """The routing map of routes, bool [T, E], and their probabilities, f32 [T, E] or None.

    topk_idx: [T, K], -1: unused. topk_weights: [T, K] or None.
    """
    call = "indices_to_map"
    shape = (num_of_tokens, num_of_experts + 1)
    good = is_strided(topk_idx) and topk_idx.dim() == 2 and len(topk_idx) == num_of_tokens
    if not good or topk_idx.dtype not in (torch.int64, torch.int32):
        expected = f"torch.int64 or torch.int32 of shape ({num_of_tokens}, K)"
        refuse(call, "topk_idx", words(topk_idx), expected)
    places = torch.where(topk_idx < 0, num_of_experts, topk_idx).long()
    bits = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device).scatter_(1, places, True)
    if topk_weights is None:
        return bits[:, :-1], None
    probs = torch.zeros(shape, dtype=torch.float32, device=topk_idx.device)
    return bits[:, :-1], probs.scatter(1, places, topk_weights.float())[:, :-1]


class Kept(NamedTuple):
    """A dispatch that others answer. routes: i64 [T, K] of this rank's tokens. topk_idx, slot_rows:
    of what arrived, as Ferry has them."""

    exchange: Exchange
    routes: Tensor
    topk_idx: Tensor
    slot_rows: Tensor | None
    tokens_per_expert: Tensor | None
    alignment: int


class HybridCall(NamedTuple):
    """length: of its handles. alignment: 0: rank-major. most: rows that come back, 0: exact."""

    name: str
    length: int
    alignment: int
    most: int
    non_blocking: bool = False
    experts_per_rank: int | None = None


def rows_of(name: str, given: int | None, non_blocking: bool, step: int) -> int:
    """num_permuted_tokens, checked; 0: exact."""
    if given is None:
        require(not non_blocking, name, "num_permuted_tokens", None, "a number, with non_blocking")
        return 0
    rows = require_integer(name, "num_permuted_tokens", given, 1, "at least 1")
    good = step == 0 or rows % step == 0
    require(good, name, "num_permuted_tokens", rows, f"a multiple of {step}, pad_multiple")
    return rows


def handle_of(
    call: HybridCall, kept: Kept, tokens: int, config: HybridEpConfigInstance
) -> tuple[Any, ...]:
    """(sparse_to_dense_map: the routes i64 [T, K]; None twice, as no rank forwards rows;
    num_dispatched_tokens i32 [1]; local_expert_routing_map bool [n, L]; [None; the row of each slot
    i64 [n, K]; rows of each expert;] T; the settings[; an overflow flag, which stays 0])."""
    ids = kept.topk_idx
    local = kept.exchange.group.local_experts
    known = (ids >= 0).any(1)
    count = known.sum(dtype=torch.int32).view(1)
    count.untyped_storage()._ferry_hybrid = kept  # type: ignore[attr-defined]
    bits, _ = indices_to_map(ids, None, len(ids), local)
    first = (kept.routes, None, None, count, bits)
    if call.length == 7:
        return (*first, tokens, config)
    flag = torch.zeros(1, dtype=torch.int32, device=ids.device)
    return (*first, None, kept.slot_rows, kept.tokens_per_expert, tokens, config, flag)


def kept_of(name: str, handle: Any, length: int) -> Kept:
    """The dispatch that a handle of this length belongs to, and whose settings are in it."""
    good = isinstance(handle, (tuple, list)) and len(handle) == length
    found = None
    if good and isinstance(handle[3], Tensor):
        found = getattr(handle[3].untyped_storage(), "_ferry_hybrid", None)
    settings = None if found is None else config_of(handle)
    if found is None or not isinstance(settings, HybridEpConfigInstance):
        got = f"a {type(handle).__name__}" + (f" of {len(handle)}" if good else "")
        way = "dispatch" if length == 7 else "dispatch_with_permute"
        refuse(name, "handle", got, f"the handle of a {way} of a HybridEPBuffer")
    kept: Kept = found
    return kept


def config_of(handle: tuple[Any, ...]) -> HybridEpConfigInstance:
    """The settings in a handle."""
    found: HybridEpConfigInstance = handle[6 if len(handle) == 7 else 9]
    return found
