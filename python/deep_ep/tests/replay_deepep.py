"""The calls of DeepEP's own test programs, those of its extension for ranks that fail among
them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from devices import device_of
from low_latency_bodies import (
    CAPACITY,
    ENDS,
    FORMATS,
    arrived,
    check_received,
    combine,
    dispatch,
    experts,
    finish,
)
from low_latency_reference import factor, quantised, restored
from mask_bodies import status
from replays import Case, Framework
from torch import Tensor

import deep_ep

FRAMEWORK = Framework(
    "DeepEP's tests",
    "1.2.1",
    "test_intranode.py, test_internode.py, test_low_latency.py",
    "they are its own: with `--use-logfmt` and, after 1.2.1, `--shrink-test`, too",
)

EXPERTS = 16


def plain(rows: Any) -> Tensor:
    """As bf16."""
    return restored(*rows) if isinstance(rows, tuple) else rows


def throughput_program(first: deep_ep.Buffer, device: str) -> None:
    """Rows of bf16 and fp8, with and without routes, by events and without: dispatch, the same with
    `num_worst_tokens`, cached dispatch, combine with weights; two biases between hosts."""
    where, rank, ranks = device_of(first, device), first.rank, first.group_size
    several = ranks > 8
    case = Case(70, [5 + r % 4 for r in range(ranks)], EXPERTS)
    ids, weights = case.topk_idx[rank].to(where), case.weights[rank].to(where)
    local = case.local(rank)
    buffer = deep_ep.Buffer(None, 1 << 20, 1 << 20, comm=first.group, explicitly_destroy=True)
    per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank}
    layout |= {"num_tokens_per_expert": per_expert}
    if several:
        layout["num_tokens_per_rdma_rank"] = per_host
    config = deep_ep.Config(8, 8, 512, 16, 128) if several else deep_ep.Config(8, 8, 256)
    codes, scales = quantised(case.x[rank])
    x = case.x[rank].to(where)
    fp8 = codes.to(where), scales.t().contiguous().t().to(where)
    for previous, later, sent, routed in itertools.product(
        (False, True), (False, True), (x, fp8), (False, True)
    ):

        def call(what: Any, sent: Any, **how: Any) -> Any:
            if previous:  # noqa: B023
                how["previous_event"] = buffer.capture()
            made = what(sent, config=config, async_finish=later, **how)  # noqa: B023
            if later:  # noqa: B023
                made[-1].current_stream_wait()
            return made

        how = layout | ({"topk_idx": ids, "topk_weights": weights} if routed else {})
        rows, row_ids, row_weights, counts, handle, _ = call(buffer.dispatch, sent, **how)
        whole = [restored(*quantised(one)) for one in case.x] if sent is fp8 else case.x
        wanted = case.received_rows(rank, whole)
        assert torch.equal(plain(rows).cpu(), wanted)
        assert counts == case.counts(rank)
        ends = handle[-4] if several else handle[0][:, rank]
        sources = torch.tensor([source for source, _ in case.received(rank)])
        assert ends.tolist() == [int((sources <= r).sum()) for r in range(ranks)]
        if routed:
            assert torch.equal(row_ids.cpu(), case.received_ids(rank))
            most = ranks * max(map(len, case.x))
            worst = call(buffer.dispatch, sent, num_worst_tokens=most, **how)
            assert len(plain(worst[0])) == most and worst[3] == []
            assert torch.equal(plain(worst[0])[: len(wanted)].cpu(), wanted)
            assert torch.equal(worst[1][: len(wanted)], row_ids)
            assert torch.equal(worst[2][: len(wanted)], row_weights)
            assert (worst[1][len(wanted) :] == -1).all()
        else:
            rows = call(buffer.dispatch, sent, handle=handle)[0]
            assert torch.equal(plain(rows).cpu(), wanted)
        biases = (torch.ones_like(x), torch.full_like(x, 2.0)) if several else ()
        given = {"topk_weights": row_weights} if routed else {}
        given |= {"bias": biases} if several else {}
        y, sums, _ = call(buffer.combine, plain(rows), handle=handle, **given)
        times = in_rank.sum(1, keepdim=True).cpu().float()
        expected = whole[rank].float() * times + sum(bias.cpu().float() for bias in biases)
        assert torch.allclose(y.cpu().float(), expected, rtol=2**-7)
        if routed:
            assert torch.equal(sums.cpu(), torch.where(ids.cpu() >= 0, weights.cpu(), 0.0))
            assert local.start == 0 or (row_ids < len(local)).all()

    for chunk in (4, 32):  # as it is tuned
        config = deep_ep.Config(8, chunk, 256)
        rows = buffer.dispatch(x, handle=handle, config=config)[0]
        buffer.combine(rows, handle, config=config)
    buffer.destroy()


def low_latency_buffer(first: deep_ep.Buffer, case: Case, **options: Any) -> deep_ep.Buffer:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    return deep_ep.Buffer(
        None,
        num_rdma_bytes=hint(CAPACITY, case.hidden, case.ranks, case.experts),
        low_latency_mode=True,
        num_qps_per_rank=case.experts // case.ranks,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
        allow_mnnvl=False,
        comm=first.group,
        **options,
    )


def low_latency_program(first: deep_ep.Buffer, device: str) -> None:
    """By events and by hooks, in every form of rows: one dispatch or two, then two combines along
    the same handle, the second with `zero_copy`; and with `use_logfmt`."""
    rank = first.rank
    case = Case(71, [3 + r % 4 for r in range(first.group_size)], EXPERTS)
    buffer = low_latency_buffer(first, case)
    for logfmt, end, wire in itertools.product((False, True), ("event", "hook"), FORMATS.values()):
        for _ in range(2 - logfmt):
            rows, counts, handle = dispatch(buffer, case, device, end, **wire)
        check_received(buffer, case, rows, counts, handle, **wire)
        answer = experts(buffer, case, rows)
        expected = case.combined(rank, arrived(case, **wire)).double()
        for zero_copy in (False,) if logfmt else (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = answer
            how = {"use_logfmt": logfmt, "zero_copy": zero_copy}
            how["out"] = torch.empty_like(case.x[rank], device=device_of(first, device))
            got = combine(buffer, case, answer, handle, device, end, **how).cpu().double()
            assert torch.allclose(got, expected, rtol=0.06 if logfmt else 2**-7, atol=2**-7)
    buffer.destroy()


class Failures:
    """Ranks that stop when they first come to a call, which all know."""

    def __init__(self, ranks: int) -> None:
        self.at = {"dispatch": 1, "combine": 3, "clean": 5 if ranks > 5 else 2}
        self.gone: set[int] = set()

    def reached(self, call: str, rank: int) -> bool:
        """Whether this rank stops here, or did so before."""
        if rank not in self.gone:
            self.gone.add(self.at[call])
        return rank in self.gone

    def check(self, buffer: deep_ep.Buffer, device: str) -> None:
        masked = {rank for rank, one in enumerate(status(buffer, device)) if one}
        assert masked == self.gone


def shrink_program(first: deep_ep.Buffer, device: str) -> None:
    """A rank leaves before the first dispatch, one before its first combine, one before the buffer
    is cleaned; the others go on and combine twice along each handle."""
    rank = first.rank
    case = Case(72, [3 + r % 4 for r in range(first.group_size)], EXPERTS)
    local, where = case.local(rank), device_of(first, device)
    owner = torch.tensor([r for r in range(case.ranks) for _ in case.local(r)] + [-1])
    ids, weights = case.topk_idx[rank].to(where), case.weights[rank].to(where)
    failures = Failures(case.ranks)
    buffer = low_latency_buffer(first, case, enable_shrink=True)
    numbers = range(1, 1 + 2 * len(FORMATS))
    ways = itertools.product(("event", "hook"), FORMATS.values())
    for number, (end, wire) in zip(numbers, ways):
        if failures.reached("dispatch", rank):
            continue
        for _ in range(number % 2 + 1):
            stats = torch.zeros(len(local), dtype=torch.int32, device=where)
            rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                case.x[rank].to(where),
                ids,
                CAPACITY,
                EXPERTS,
                **wire,
                cumulative_local_expert_recv_stats=stats,
                **ENDS[end],
            )
            finish(event, hook, ENDS[end])
        failures.check(buffer, device)
        sent = arrived(case, **wire)
        for e, arrivals in enumerate(case.arrivals(rank)):
            there = [(s, token) for s, token in arrivals if s not in failures.gone]
            assert int(counts[e]) == int(stats[e]) == len(there)
            assert handle[0][e, : len(there)].tolist() == [token for _, token in there]
            wanted = [sent[s][token] for s, token in there]
            found = plain(rows)[e, : len(there)].cpu()
            assert not there or torch.equal(found, torch.stack(wanted))
            for source in set(range(case.ranks)) - failures.gone:
                begin, count = divmod(int(handle[1][e, source]), 1 << 32)
                mine = [i for i, (s, _) in enumerate(there) if s == source]
                assert mine == list(range(begin, begin + count)) or (not mine and count == 0)
        if failures.reached("combine", rank):
            continue
        answer = experts(buffer, case, rows)
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = answer
            out = torch.empty_like(case.x[rank], device=where)
            y, event, hook = buffer.low_latency_combine(
                answer, ids, weights, handle, zero_copy=zero_copy, out=out, **ENDS[end]
            )
            finish(event, hook, ENDS[end])
            failures.check(buffer, device)
            lost = torch.isin(owner[ids.cpu()], torch.tensor(sorted(failures.gone)))
            ids[lost.to(where)] = -1
            each = torch.where(ids >= 0, weights * factor(ids), 0.0).cpu().double()
            expected = sent[rank].double() * each.sum(1, keepdim=True)
            assert torch.allclose(y.cpu().double(), expected, rtol=2**-6, atol=2**-7)
        if failures.reached("clean", rank):
            continue
        buffer.clean_low_latency_buffer(CAPACITY, case.hidden, EXPERTS)
        failures.check(buffer, device)
    buffer.destroy()
    first.group.allgather(None)


ALL = (throughput_program, low_latency_program, shrink_program)
