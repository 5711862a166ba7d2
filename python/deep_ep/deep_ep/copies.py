"""Handles whose tensors are copies, as after a trip of saved tensors to other memory: known by
their contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.call import Call
from deep_ep.errors import refuse
from deep_ep.handles import Exchange, attach, prefix_of


def routes_of(handle: Sequence[Any]) -> Tensor:
    """is_token_in_rank."""
    found: Tensor = handle[4] if len(handle) == 6 else handle[0]
    return found


def remade(call: Call, handle: Sequence[Any], group: ferry.Group, plan: ferry.Plan) -> Exchange:
    """The exchange of such a handle, whose plan was made anew out of `routes_of`. That must be what
    the dispatch did, or rows would be taken for those of other tokens."""
    intranode = len(handle) == 6
    told, source = (handle[0], handle[3]) if intranode else (handle[6], handle[7])
    with call.turn.context(told):
        prefix = prefix_of(plan)
        found = prefix if intranode else prefix[:, group.rank]
        agrees = torch.equal(told.to(found.device), found)
    if not agrees:
        refuse(
            call.name,
            "handle",
            "copies of tensors whose is_token_in_rank does not say what that dispatch sent",
            "one whose dispatch had topk_idx and what get_dispatch_layout makes of it",
        )
    exact, rows = plan.recv_rows(), source.shape[0]
    worst = {"worst_case": rows != exact, "sums": exact}
    exchange = Exchange(group, plan, handle[1].shape[-1], rows, **worst)
    attach(handle, exchange)
    return exchange
