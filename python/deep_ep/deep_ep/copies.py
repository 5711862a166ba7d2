"""Handles whose tensors are copies, as after a trip of saved tensors to other memory: known by
their contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.call import Call
from deep_ep.errors import refuse, require
from deep_ep.handles import Exchange, attach, prefix_of


def routes_of(handle: Sequence[Any]) -> Tensor:
    """is_token_in_rank."""
    found: Tensor = handle[4] if len(handle) == 6 else handle[0]
    return found


def check_copies(call: str, handle: Sequence[Any], num_ranks: int) -> None:
    """What `routes_of` and `remade` read of a handle has the form that it has in one."""
    marks = routes_of(handle)
    expected = f"the handle of a dispatch, whose is_token_in_rank is torch.bool [T, {num_ranks}]"
    good = marks.dtype == torch.bool and marks.shape[1:] == (num_ranks,)
    got = f"one with {marks.dtype} of shape {tuple(marks.shape)} there"
    require(good, call, "handle", got, expected)
    told, source = _told(handle)
    good = told.dtype == torch.int32 and source.dim() > 0 and handle[1].dim() == 2
    require(good, call, "handle", "one whose other tensors are of other forms", expected)


def remade(call: Call, handle: Sequence[Any], group: ferry.Group, plan: ferry.Plan) -> Exchange:
    """The exchange of such a handle, whose plan was made anew out of `routes_of`. That must be what
    the dispatch did, or rows would be taken for those of other tokens."""
    told, source = _told(handle)
    with call.turn.context(told):
        prefix = prefix_of(plan)
        found = prefix if len(handle) == 6 else prefix[:, group.rank]
        agrees = torch.equal(told.to(found.device), found)
    if not agrees:
        refuse(
            call.name,
            "handle",
            "copies of tensors whose is_token_in_rank does not say what that dispatch sent",
            "one whose dispatch had topk_idx and what get_dispatch_layout makes of it",
        )
    exact, rows = plan.recv_rows(), source.shape[0]
    channels = handle[1].shape[-1]
    exchange = Exchange(group, plan, channels, rows, worst_case=rows != exact, sums=exact)
    attach(handle, exchange)
    return exchange


def _told(handle: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """What says how many rows the dispatch sent, and where those that came were from."""
    return (handle[0], handle[3]) if len(handle) == 6 else (handle[6], handle[7])
