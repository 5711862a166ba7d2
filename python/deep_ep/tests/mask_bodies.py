"""Bodies of tests of low-latency mode with `enable_shrink`: `body(buffer, device)`, as in
low_latency_calls."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_bodies import ENDS, check_received, combine, dispatch, experts
from low_latency_calls import BF16, TOKENS
from low_latency_reference import factor
from replays import Case


def among(case: Case, rank: int, there: list[int]) -> torch.Tensor:
    """What comes back when only the experts of these ranks answer."""
    ids = case.topk_idx[rank]
    known = torch.tensor([e for one in there for e in case.local(one)])
    each = torch.where(torch.isin(ids, known), case.weights[rank] * factor(ids), 0.0)
    return case.x[rank].double() * each.sum(1, keepdim=True).double()


def step(
    buffer: Any, device: str, case: Case, there: list[int], end: str = "plain", combines: int = 1
) -> None:
    """A round trip among these ranks."""
    rows, counts, handle = dispatch(buffer, case, device, end, **BF16)
    if there == list(range(case.ranks)):
        check_received(buffer, case, rows, counts, handle, **BF16)
    arrivals = [[pair for pair in one if pair[0] in there] for one in case.arrivals(buffer.rank)]
    assert counts.tolist() == [len(one) for one in arrivals]
    for e, one in enumerate(arrivals):
        wanted = [case.x[source][token] for source, token in one]
        assert not one or torch.equal(rows[e, : len(one)].cpu(), torch.stack(wanted))
    answer = experts(buffer, case, rows)
    for _ in range(combines):
        combined = combine(buffer, case, answer, handle, device, end)
        assert torch.equal(combined.cpu().double(), among(case, buffer.rank, there))


def status(buffer: Any, device: str) -> list[int]:
    where = device_of(buffer, device)
    result = torch.full((buffer.group_size,), 7, dtype=torch.int32, device=where)
    buffer.low_latency_query_mask_buffer(result)
    return result.tolist()


def halves_apart_and_together(buffer: Any, device: str) -> None:
    """All ranks, then each half without the other, then all again: masks taken back one by one, and
    all at once. Alone there is nobody to mask."""
    ranks, rank = buffer.group_size, buffer.rank
    case = Case(50, TOKENS[:ranks], 2 * ranks)
    everyone = list(range(ranks))
    half = [one for one in everyone if (one < (ranks + 1) // 2) == (rank < (ranks + 1) // 2)]
    others = [one for one in everyone if one not in half]
    for end in ENDS:
        step(buffer, device, case, everyone, end)
    for again in range(2):
        buffer.group.allgather(None)  # nobody is in a call that a mask would end
        for other in others:
            buffer.low_latency_update_mask_buffer(other, True)
        assert status(buffer, device) == [int(one in others) for one in everyone]
        for end in ENDS:
            step(buffer, device, case, half, end)
        buffer.group.allgather(None)
        if again:
            buffer.low_latency_clean_mask_buffer()
        else:
            for other in others:
                buffer.low_latency_update_mask_buffer(rank_to_mask=other, mask=False)
        assert status(buffer, device) == [0] * ranks
        buffer.group.allgather(None)
        step(buffer, device, case, everyone)


ALL = (halves_apart_and_together,)
