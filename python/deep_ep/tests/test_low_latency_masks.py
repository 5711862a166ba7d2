"""enable_shrink: ranks that leave or do not answer are left out, and the others go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from low_latency_bodies import CAPACITY, combine, dispatch, experts, own
from low_latency_reference import factor
from rank_buffers import run_buffers
from replays import Case
from torch import Tensor

EXPERTS = 6
TOKENS = [4, 6, 3]


def run(body: Any, **options: Any) -> None:
    options = {
        "low_latency_mode": True,
        "enable_shrink": True,
        "explicitly_destroy": True,
    } | options
    run_buffers(len(TOKENS), body, **options)


def of_ranks(case: Case, rank: int, there: list[int]) -> Tensor:
    """What comes back when only the experts of these ranks answer."""
    ids = case.topk_idx[rank]
    known = torch.tensor([e for one in there for e in case.local(one)])
    each = torch.where(torch.isin(ids, known), case.weights[rank] * factor(ids), 0.0)
    return case.x[rank].double() * each.sum(1, keepdim=True).double()


def step(buffer: Any, case: Case, there: list[int], end: str = "plain") -> None:
    """A round trip among these ranks."""
    rows, counts, handle = dispatch(buffer, case, end=end, use_fp8=False)
    arrivals = [[pair for pair in one if pair[0] in there] for one in case.arrivals(buffer.rank)]
    assert counts.tolist() == [len(one) for one in arrivals]
    for e, one in enumerate(arrivals):
        wanted = [case.x[source][token] for source, token in one]
        assert not one or torch.equal(rows[e, : len(one)], torch.stack(wanted))
    combined = combine(buffer, case, experts(buffer, case, rows), handle, end=end)
    assert torch.equal(combined.double(), of_ranks(case, buffer.rank, there))


def status(buffer: Any) -> list[int]:
    result = torch.full((len(TOKENS),), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(result)
    return result.tolist()


@pytest.mark.parametrize("end", ["plain", "hook"])
def test_a_rank_leaves(end: str) -> None:
    case = Case(30, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        step(buffer, case, [0, 1, 2], end)
        assert status(buffer) == [0, 0, 0]
        if buffer.rank == 2:
            buffer.destroy()
            return
        for _ in range(3):
            step(buffer, case, [0, 1], end)
            assert status(buffer) == [0, 0, 1]

    run(body)


def test_a_rank_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told that it was left behind, by an error that names no cause of its own."""
    monkeypatch.setenv("FERRY_DEADLINE", "2")
    case = Case(31, TOKENS, EXPERTS)
    others_are_done = threading.Event()
    done: list[int] = []

    def body(buffer: Any) -> None:
        step(buffer, case, [0, 1, 2])
        if buffer.rank == 2:
            assert others_are_done.wait(20)
            with pytest.raises(RuntimeError, match="left behind"):
                dispatch(buffer, case, use_fp8=False)
            return
        step(buffer, case, [0, 1])
        assert status(buffer) == [0, 0, 1]
        step(buffer, case, [0, 1])
        done.append(buffer.rank)
        if len(done) == 2:
            others_are_done.set()

    run(body)


def test_ranks_are_masked_and_taken_back() -> None:
    """Two and one go on apart, in step, then together again."""
    case = Case(32, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        with_me = [2] if buffer.rank == 2 else [0, 1]
        others = [rank for rank in range(3) if rank not in with_me]
        step(buffer, case, [0, 1, 2])
        for again in range(2):
            buffer._groups.all_gather(b"")  # nobody is in a call that a mask would end
            for rank in others:
                buffer.low_latency_update_mask_buffer(rank, True)
            assert status(buffer) == [int(rank in others) for rank in range(3)]
            step(buffer, case, with_me)
            buffer._groups.all_gather(b"")
            if again:
                buffer.low_latency_clean_mask_buffer()
            else:
                for rank in others:
                    buffer.low_latency_update_mask_buffer(rank)
            assert status(buffer) == [0, 0, 0]
            buffer._groups.all_gather(b"")
            step(buffer, case, [0, 1, 2])

    run(body)


def test_new_buffers_take_all_ranks() -> None:
    """Refused at once while a rank is masked, and the others go on."""
    case, other = Case(33, TOKENS, EXPERTS), Case(33, TOKENS, EXPERTS, hidden=256)

    def body(buffer: Any) -> None:
        step(buffer, case, [0, 1, 2])
        if buffer.rank == 2:
            buffer.destroy()
            return
        rows, _, handle = dispatch(buffer, case, use_fp8=False)
        answer = experts(buffer, case, rows)
        combine(buffer, case, answer, handle)
        for call in (
            lambda: dispatch(buffer, other, use_fp8=False),
            lambda: combine(buffer, case, answer, handle),
        ):
            with pytest.raises(RuntimeError, match=r"while ranks \[2\] are masked"):
                call()
        step(buffer, case, [0, 1])

    run(body)


def test_refusals() -> None:
    def without(buffer: Any) -> None:
        for call in (
            lambda: buffer.low_latency_update_mask_buffer(1, True),
            lambda: buffer.low_latency_query_mask_buffer(torch.zeros(3, dtype=torch.int32)),
            lambda: buffer.low_latency_clean_mask_buffer(),
        ):
            with pytest.raises(AssertionError, match="enable_shrink=True"):
                call()

    def wrong(buffer: Any) -> None:
        for rank in (-1, 3, buffer.rank):
            with pytest.raises(AssertionError, match="another rank than this one"):
                buffer.low_latency_update_mask_buffer(rank, True)
        with pytest.raises(AssertionError, match="mask_status: got int64"):
            buffer.low_latency_query_mask_buffer(torch.zeros(3, dtype=torch.int64))

    run(without, enable_shrink=False)
    run(wrong)


@pytest.mark.parametrize("end", ["plain", "event", "hook"])
def test_waits_are_added(end: str) -> None:
    """Nanoseconds for each source, of dispatch and of combine: a late rank is seen."""
    case = Case(34, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        x, topk_idx, weights = own(buffer, case, "cpu")
        first = torch.full((3,), 5, dtype=torch.int64)
        second = torch.full((3,), 5, dtype=torch.int64)
        hooks = end == "hook"
        how = {"return_recv_hook": hooks, "async_finish": end == "event"}
        step(buffer, case, [0, 1, 2])  # buffers are there
        buffer.group.allgather(None)
        if buffer.rank == 1:
            time.sleep(0.1)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, topk_idx, CAPACITY, EXPERTS, None, first, use_fp8=False, **how
        )
        if hooks:
            hook()
        if buffer.rank == 1:
            time.sleep(0.1)
        _, _, hook = buffer.low_latency_combine(
            rows, topk_idx, weights, handle, combine_wait_recv_cost_stats=second, **how
        )
        if hooks:
            hook()
        for stats in (first, second):
            assert (stats >= 5).all()
            assert buffer.rank == 1 or int(stats[1]) > 1_000_000

    run(body, enable_shrink=False)
