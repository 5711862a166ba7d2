"""enable_shrink: ranks that leave or do not answer are left out, and the others go on."""

from __future__ import annotations

import threading
from typing import Any

import mask_bodies
import numpy as np
import pytest
import torch
from low_latency_bodies import combine, dispatch, experts
from rank_buffers import run_buffers
from replays import Case

from deep_ep.rounds import Rounds
from deep_ep.survivors import Members

EXPERTS = 6
TOKENS = [4, 6, 3]


def run(body: Any, ranks: int = len(TOKENS), **options: Any) -> None:
    options = {
        "low_latency_mode": True,
        "enable_shrink": True,
        "explicitly_destroy": True,
    } | options
    run_buffers(ranks, body, **options)


def step(buffer: Any, case: Case, there: list[int], end: str = "plain", combines: int = 1) -> None:
    mask_bodies.step(buffer, "cpu", case, there, end, combines)


def status(buffer: Any) -> list[int]:
    return mask_bodies.status(buffer, "cpu")


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
    """It is told that it was evicted, by an error that names no cause of its own."""
    monkeypatch.setenv("FERRY_DEADLINE", "2")
    case = Case(31, TOKENS, EXPERTS)
    others_are_done = threading.Event()
    done: list[int] = []

    def body(buffer: Any) -> None:
        step(buffer, case, [0, 1, 2])
        if buffer.rank == 2:
            assert others_are_done.wait(20)
            with pytest.raises(RuntimeError, match="evicted"):
                dispatch(buffer, case, use_fp8=False)
            return
        step(buffer, case, [0, 1])
        assert status(buffer) == [0, 0, 1]
        step(buffer, case, [0, 1])
        done.append(buffer.rank)
        if len(done) == 2:
            others_are_done.set()

    run(body)


def test_new_buffers_among_those_that_are_left() -> None:
    """Of other sizes, and for a further combine of a handle."""
    case, other = Case(33, TOKENS, EXPERTS), Case(33, TOKENS, EXPERTS, hidden=256)

    def body(buffer: Any) -> None:
        step(buffer, case, [0, 1, 2])
        if buffer.rank == 1:
            buffer.destroy()
            return
        for end in ("plain", "hook"):
            step(buffer, case, [0, 2], end, combines=3)
            step(buffer, other, [0, 2], end)
        assert status(buffer) == [0, 1, 0]

    run(body)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("end", ["plain", "hook"])
def test_a_rank_leaves_between_dispatch_and_combines(before: bool, end: str) -> None:
    """Rows of sources behind it lie elsewhere when a further combine sends its routes once more,
    whether there were buffers for that before or not."""
    case = Case(35, [5, 4, 6, 3], 8)

    def body(buffer: Any) -> None:
        step(buffer, case, [0, 1, 2, 3], combines=1 + before)
        rows, _, handle = dispatch(buffer, case, end=end, use_fp8=False)
        answer = experts(buffer, case, rows)
        buffer.group.allgather(None)
        if buffer.rank == 1:
            buffer.destroy()
            return
        for zero_copy in (False, False, True, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = answer
            got = combine(buffer, case, answer, handle, end=end, zero_copy=zero_copy)
            expected = mask_bodies.among(case, buffer.rank, [0, 2, 3])
            assert torch.equal(got.double(), expected)

    run(body, ranks=4)


@pytest.mark.parametrize("left", [[0, 1, 2], [0, 2]])
def test_a_hook_outside_inference_mode(left: list[int]) -> None:
    case = Case(44, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        if buffer.rank not in left:
            buffer.destroy()
            return
        with torch.inference_mode():
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                case.x[buffer.rank],
                case.topk_idx[buffer.rank],
                max(TOKENS),
                EXPERTS,
                use_fp8=False,
                return_recv_hook=True,
            )
        hook()
        got = combine(buffer, case, experts(buffer, case, rows), handle)
        assert torch.equal(got.double(), mask_bodies.among(case, buffer.rank, left))

    run(body)


@pytest.mark.parametrize("gone", [False, True])
def test_an_old_handle_keeps_its_ranges(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """On GPUs they lie in a buffer that a later dispatch takes; here it is as if they did."""
    parts_of, cases = Rounds._parts, [Case(seed, [5, 4, 6, 3], 8) for seed in (41, 42, 43)]
    buffers: dict[tuple[Rounds, int], torch.Tensor] = {}

    def in_a_buffer(self: Rounds, received: Any, wire: Any) -> Any:
        parts = parts_of(self, received, wire)
        ranges = buffers.setdefault((self, self._turn), torch.empty_like(parts.ranges))
        ranges.copy_(parts.ranges)
        return parts._replace(ranges=ranges)

    monkeypatch.setattr(Rounds, "_parts", in_a_buffer)

    def body(buffer: Any) -> None:
        rows, _, handle = dispatch(buffer, cases[0], use_fp8=False)
        answer = experts(buffer, cases[0], rows)
        for case in cases[1:]:
            step(buffer, case, [0, 1, 2, 3])
        buffer.group.allgather(None)
        if gone and buffer.rank == 1:
            buffer.destroy()
            return
        for _ in range(2):
            got = combine(buffer, cases[0], answer, handle)
            there = [0, 2, 3] if gone else [0, 1, 2, 3]
            assert torch.equal(got.double(), mask_bodies.among(cases[0], buffer.rank, there))

    run(body, ranks=4)


@pytest.mark.parametrize("further", [1, 2])
def test_a_handle_serves_after_ranks_are_taken_back(further: int) -> None:
    """Ranks that were masked when it was made have no rows in it, and count as zero."""
    case = Case(39, [5, 4, 6, 3], 8)

    def body(buffer: Any) -> None:
        half, others = ([0, 1], [2, 3]) if buffer.rank < 2 else ([2, 3], [0, 1])
        step(buffer, case, [0, 1, 2, 3], combines=2)
        buffer.group.allgather(None)
        for other in others:
            buffer.low_latency_update_mask_buffer(other, True)
        rows, _, handle = dispatch(buffer, case, use_fp8=False)
        answer = experts(buffer, case, rows)
        buffer.group.allgather(None)
        for other in others:
            buffer.low_latency_update_mask_buffer(other, False)
        buffer.group.allgather(None)
        for _ in range(1 + further):
            got = combine(buffer, case, answer, handle)
            assert torch.equal(got.double(), mask_bodies.among(case, buffer.rank, half))

    run(body, ranks=4)


@pytest.mark.parametrize("leave", ["destroy", "masked"])
def test_a_rank_never_comes(leave: str) -> None:
    """The others make their buffers without it: it has left, or they have masked it."""
    case = Case(34, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        if buffer.rank == 1:
            if leave == "destroy":
                buffer.destroy()
            return
        if leave == "masked":
            buffer.low_latency_update_mask_buffer(1, True)
        for end in ("plain", "hook"):
            step(buffer, case, [0, 2], end, combines=2)
        assert status(buffer) == [0, 1, 0]

    run(body)


@pytest.mark.parametrize("end", ["plain", "hook"])
def test_waits_of_ranks_that_are_left(end: str) -> None:
    """Nothing for the one that is gone; experts that the ranks do not divide, routes of 32 bits."""
    case = Case(38, TOKENS, 5)
    case.topk_idx = [ids.int() for ids in case.topk_idx]

    def body(buffer: Any) -> None:
        if buffer.rank == 0:
            buffer.destroy()
            return
        sent, back = torch.zeros(3, dtype=torch.int64), torch.full((3,), 5)
        for _ in range(2):
            rows, _, handle = dispatch(
                buffer, case, end=end, use_fp8=False, dispatch_wait_recv_cost_stats=sent
            )
            answer = experts(buffer, case, rows)
            how = {"combine_wait_recv_cost_stats": back}
            got = combine(buffer, case, answer, handle, end=end, **how)
            assert torch.equal(got.double(), mask_bodies.among(case, buffer.rank, [1, 2]))
        assert sent[0] == 0 and (sent >= 0).all()
        assert back[0] == 5 and (back >= 5).all()

    run(body)


def test_numbers_among_those_that_are_left() -> None:
    members = Members((1, 3), 4, 6)  # which hold experts 2, 3 and 5
    ids = torch.tensor([[0, 2], [3, 5], [-1, 4], [6, 1]], dtype=torch.int32)
    assert members.experts == 3
    assert members.routes(ids).tolist() == [[-1, 0], [1, 2], [-1, -1], [-1, -1]]
    assert members.routes(ids).dtype == torch.int32
    assert members.spread(torch.tensor([[7, 8]])).tolist() == [[0, 7, 0, 8]]


def test_a_rank_is_taken_back_into_new_buffers() -> None:
    case = Case(36, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        for again in range(2):
            if buffer.rank != 1:
                buffer.low_latency_update_mask_buffer(1, True)
                step(buffer, case, [0, 2])
            buffer.group.allgather(None)
            if again:
                buffer.low_latency_clean_mask_buffer()
            elif buffer.rank != 1:
                buffer.low_latency_update_mask_buffer(1, False)
            assert status(buffer) == [0, 0, 0]

    run(body)


def test_cleaning_the_buffer_finds_who_left() -> None:
    case = Case(37, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        step(buffer, case, [0, 1, 2])
        if buffer.rank == 1:
            buffer.destroy()
            return
        buffer.clean_low_latency_buffer(max(TOKENS), case.hidden, EXPERTS)
        assert status(buffer) == [0, 1, 0]
        step(buffer, case, [0, 2])

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
        for rank in (-1, 3, buffer.rank, True, None, 1.5):
            with pytest.raises(AssertionError, match="another rank than this one"):
                buffer.low_latency_update_mask_buffer(rank, True)
        other = np.int64((buffer.rank + 1) % 3)
        buffer.low_latency_update_mask_buffer(other, True)
        assert status(buffer)[other] == 1
        buffer.low_latency_update_mask_buffer(other)
        assert status(buffer) == [0, 0, 0]
        with pytest.raises(AssertionError, match="mask_status: got int64"):
            buffer.low_latency_query_mask_buffer(torch.zeros(3, dtype=torch.int64))

    run(without, enable_shrink=False)
    run(wrong)
