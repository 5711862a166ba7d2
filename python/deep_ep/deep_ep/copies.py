"""Handles whose tensors are copies, as after a trip of saved tensors to other memory: known by
their contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.arguments import check_memory
from deep_ep.call import Call
from deep_ep.errors import refuse, require
from deep_ep.handles import Exchange, InternodeHandle, IntranodeHandle, attach, prefix_of


def routes_of(handle: Sequence[Any]) -> Tensor:
    """is_token_in_rank."""
    found: Tensor = handle[4] if len(handle) == 6 else handle[0]
    return found


def check_copies(call: str, handle: Sequence[Any], num_ranks: int) -> None:
    """What `routes_of` and `remade` read of a handle has the form that it has in one."""
    check_memory(call, **{f"handle[{place}]": one for place, one in enumerate(handle)})
    marks = routes_of(handle)
    expected = f"the handle of a dispatch, whose is_token_in_rank is torch.bool [T, {num_ranks}]"
    good = marks.dtype == torch.bool and marks.shape[1:] == (num_ranks,)
    got = f"one with {marks.dtype} of shape {tuple(marks.shape)} there"
    require(good, call, "handle", got, expected)
    told, source = _told(handle)
    dims = 1 if len(handle) == 6 else 2
    good = told.dtype == torch.int32 and source.dim() == dims and handle[1].dim() == 2
    require(good, call, "handle", "one whose other tensors are of other forms", expected)


def remade(call: Call, handle: Sequence[Any], group: ferry.Group, plan: ferry.Plan) -> Exchange:
    """The exchange of such a handle, whose plan was made anew out of `routes_of`. That must be what
    the dispatch did, or rows would be taken for those of other tokens."""
    source, exact = _told(handle)[1], plan.recv_rows()
    rows, channels = source.shape[0], handle[1].shape[-1]
    exchange = Exchange(group, plan, channels, rows, worst_case=rows != exact, sums=exact)
    kind = IntranodeHandle if len(handle) == 6 else InternodeHandle
    with call.turn.context(*(one for one in handle if one.is_cuda)):
        prefix = prefix_of(plan)
        source = source if len(handle) == 6 else source[:, 0]
        there = [one.to(prefix.device) for one in (source, routes_of(handle))]
        made = kind.of(exchange, prefix, *there)
        agrees = all(
            one.dtype == own.dtype and torch.equal(one.to(prefix.device), own)
            for one, own in zip(handle, made)
        )
    if not agrees:
        refuse(
            call.name,
            "handle",
            "copies of tensors that are not those of a dispatch that sent what is_token_in_rank "
            "says",
            "one whose dispatch had topk_idx and what get_dispatch_layout makes of it",
        )
    attach(handle, exchange)
    return exchange


def _told(handle: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """What says how many rows the dispatch sent, and where those that came were from."""
    return (handle[0], handle[3]) if len(handle) == 6 else (handle[6], handle[7])
