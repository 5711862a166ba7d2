"""The ways to call `dispatch` and `combine` of V2 and V2.5, and what the definition says comes
back, from the inputs of all ranks, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from reference import Arrived, Job, arrived, first_expert, in_rank
from throughput_calls import bytes_of, same
from torch import Tensor

ENDS = ("plain", "async", "after event", "async after event", "on comm stream", "before epilogue")
LAYOUTS = ((False, 1), (False, 4), (True, 1), (True, 8))  # do_expand, expert_alignment
MOST = 32  # tokens of a rank


def ended(buffer: Any, way: str) -> dict[str, Any]:
    """The arguments of streams and events, one of the ways to call."""
    kwargs: dict[str, Any] = {"async_with_compute_stream": "async" in way or "comm" in way}
    if "after" in way:
        kwargs |= {"previous_event": buffer.capture(), "allocate_on_comm_stream": True}
    if "comm" in way:
        kwargs["allocate_on_comm_stream"] = True
    if "epilogue" in way:
        kwargs["previous_event_before_epilogue"] = buffer.capture()
    return kwargs


def wait(event: Any, way: str) -> None:
    """The event is there when the call was asynchronous, and only then."""
    if "async" in way or "comm" in way:
        assert event.event is not None
        event.current_stream_wait()
    else:
        assert event.event is None


def dispatched(buffer: Any, device: str, job: Job, x: Any, way: str = "plain", **how: Any) -> Any:
    """A dispatch of this rank's part of the job, with weights unless `how` says otherwise."""
    rank = buffer.rank_idx
    given: dict[str, Any] = {
        "topk_idx": job.topk_idx[rank].to(device),
        "topk_weights": job.topk_weights[rank].to(device),
        "num_experts": job.experts,
        "num_max_tokens_per_rank": MOST,
    }
    if how.get("handle") is not None:
        given = {}
    return buffer.dispatch(x, **(given | how | ended(buffer, way)))


@dataclass
class Expected:
    """What a dispatch brings a rank. rows: of what arrived, for each row, -1 for padding; slots:
    the row of each slot, -1: none."""

    there: Arrived
    counts: list[int]
    expanded: bool
    rows: Tensor
    slots: Tensor
    starts: list[int]

    def of(self, of_ranks: list[Tensor]) -> Tensor:
        """The rows of what each rank sends, zero for padding."""
        came = self.there.rows(of_ranks)
        plain = came.view(torch.uint8) if came.dtype.itemsize == 1 else came
        padded = torch.cat([plain, torch.zeros_like(plain[:1])])
        if len(plain) == 0:
            padded = plain.new_zeros(1, *plain.shape[1:])
        found = padded[torch.where(self.rows < 0, len(padded) - 1, self.rows)]
        return found.view(came.dtype)

    def weights(self) -> Tensor:
        """Of the rows: [rows], or [n, K]."""
        if not self.expanded:
            return self.there.topk_weights
        found = torch.zeros(len(self.rows))
        for n, k in (self.slots >= 0).nonzero().tolist():
            found[self.slots[n, k]] = self.there.topk_weights[n, k]
        return found


def expected(job: Job, rank: int, expanded: bool, alignment: int) -> Expected:
    key = ("expected", rank, expanded, alignment)
    return job.once(key, lambda: _expected(job, rank, expanded, alignment))


def _expected(job: Job, rank: int, expanded: bool, alignment: int) -> Expected:
    there = arrived(job, rank)
    local = first_expert(job, rank + 1) - first_expert(job, rank)
    slots = torch.full_like(there.topk_idx, -1)
    if not expanded:
        rows = torch.arange(len(there.token))
        return Expected(there, there.per_expert, False, rows, slots, [])
    rows_of, starts = [], []
    for e in range(local):
        starts.append(len(rows_of))
        for n, k in (there.topk_idx == e).nonzero().tolist():
            slots[n, k] = len(rows_of)
            rows_of.append(n)
        rows_of += [-1] * (-len(rows_of) % alignment)
    return Expected(
        there, there.per_expert, True, torch.tensor(rows_of, dtype=torch.int64), slots, starts
    )


def check_handle(handle: Any, job: Job, rank: int, want: Expected, step: int, exact: bool) -> None:
    """Every field that callers read."""
    there, counts = want.there, want.counts
    ranks, topk, n = job.ranks, there.topk_idx.shape[1], len(there.token)
    padded = [-(-count // step) * step for count in counts]
    assert (handle.do_expand, handle.num_experts) == (want.expanded, job.experts)
    assert (handle.expert_alignment, handle.num_max_tokens_per_rank) == (step, MOST)
    assert torch.equal(handle.topk_idx.cpu(), job.topk_idx[rank])
    assert handle.num_sms >= 2 and handle.num_sms % 2 == 0
    if exact:
        assert handle.num_recv_tokens == n and handle.num_expanded_tokens == sum(padded)
        assert handle.num_recv_tokens_per_expert_list == padded
    else:
        assert handle.num_recv_tokens == ranks * MOST
        most = ranks * MOST * min(topk, len(counts)) + (step - 1) * len(counts)
        assert handle.num_expanded_tokens == -(-most // step) * step
        assert handle.num_recv_tokens_per_expert_list == []
    domains = handle._exchange.group.domains
    here = torch.bincount(there.source, minlength=ranks).view(domains, -1).sum(0).cumsum(0).int()
    assert torch.equal(handle.psum_num_recv_tokens_per_scaleup_rank.cpu(), here)
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    before = [sum(padded[:e]) for e in range(len(counts))]
    ends = [b + (c if want.expanded else p) for b, c, p in zip(before, counts, padded)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
    found = handle.recv_src_metadata.cpu()
    assert found.dtype == torch.int32 and found.shape == (handle.num_recv_tokens, 2 + topk)
    assert torch.equal(found[:n, 0].long(), there.source * MOST + there.token)
    first = (there.topk_idx >= 0).int().argmax(1)
    assert torch.equal(found[:n, 1].long(), there.source * topk + first)
    assert torch.equal(found[:n, 2:].long(), want.slots)
    assert (found[n:] == -1).all()
    check_sent(handle.dst_buffer_slot_idx.cpu(), job, rank)


def check_sent(found: Tensor, job: Job, rank: int) -> None:
    sent = [0] * job.ranks
    for token, route in enumerate(job.topk_idx[rank].tolist()):
        seen: set[int] = set()
        for k, expert in enumerate(route):
            to = job.rank_of(expert) if expert >= 0 else -1
            if to < 0 or to in seen:
                assert found[token, k] == -1
                continue
            seen.add(to)
            assert found[token, k] == sent[to]
            sent[to] += 1


def check_received(
    got: Any, sent: list[Any], job: Job, rank: int, want: Expected, device: str, words: Any
) -> None:
    """Rows, scales, ids and weights, as far as they are defined."""
    x, ids, weights, _, _ = got
    parts = x if isinstance(x, tuple) else (x,)
    for part, mine in enumerate(parts):
        of = [one[part] if isinstance(one, tuple) else one for one in sent]
        rows = want.of([one.contiguous() for one in of])
        if part == 1 and want.expanded:  # scales of rows between experts: whatever they are
            kept = want.rows >= 0
            same(mine[: len(rows)][kept.to(device)].contiguous(), rows[kept], device, words)
            continue
        same(mine[: len(rows)].contiguous(), rows, device, words)
    n = len(want.there.token)
    if want.expanded:
        assert ids is None
    else:
        same(ids[:n], want.there.topk_idx, device, words)
        assert (ids[n:] == -1).all()
    if weights is not None:
        same(weights[: len(want.weights())], want.weights(), device, words)


def made_of(want: Expected, rank: int, rows: Tensor) -> Tensor:
    """What a rank's experts make of rows: each row another factor, the same bits everywhere."""
    factor = torch.arange(len(rows), device=rows.device) % 5 + rank + 1
    return (rows.float() * factor[:, None]).to(rows.dtype)


def combined(
    job: Job, source: int, x: list[Tensor], step: int, expanded: bool, biases: Any, once: bool
) -> Tensor:
    """[T, H], x those of the job in some dtype: rows of a rank in ascending slot in fp32 from +0,
    rounded unless `once`; the ranks likewise; then the biases, and the last rounding."""
    key = ("sums", source, expanded, step, x[source].dtype, once)
    total = job.once(key, lambda: _sums(job, source, x, step, expanded, once)).clone()
    for bias in biases:
        total += bias.float()
    return total.to(x[0].dtype)


def _sums(job: Job, source: int, x: list[Tensor], step: int, expanded: bool, once: bool) -> Tensor:
    total = torch.zeros(len(x[source]), x[source].shape[1])
    for rank in range(job.ranks):
        want = expected(job, rank, expanded, step)
        key = ("made", rank, expanded, step, x[source].dtype)
        rows = job.once(key, lambda rank=rank, want=want: made_of(want, rank, want.of(x)))
        here = in_rank(job, source)[:, rank].nonzero().flatten()
        mine = (want.there.source == source).nonzero().flatten()
        if not expanded:
            total[here] += rows[mine].float()
            continue
        part = torch.zeros(len(mine), total.shape[1])
        for k in range(want.slots.shape[1]):
            slots = want.slots[mine, k]
            some = slots >= 0
            part[some] += rows[slots[some]].float()
        total[here] += part if once else part.to(rows.dtype).float()
    return total


def alike(a: Any, b: Any) -> bool:
    """The same bytes, of tensors, pairs or None."""
    if isinstance(a, tuple):
        return all(alike(one, other) for one, other in zip(a, b, strict=True))
    return (a is None and b is None) or torch.equal(
        bytes_of(a.contiguous()), bytes_of(b.contiguous())
    )
