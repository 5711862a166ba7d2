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

EXPERTS = 6
TOKENS = [4, 6, 3]


def run(body: Any, **options: Any) -> None:
    options = {
        "low_latency_mode": True,
        "enable_shrink": True,
        "explicitly_destroy": True,
    } | options
    run_buffers(len(TOKENS), body, **options)


def step(buffer: Any, case: Case, there: list[int], end: str = "plain") -> None:
    mask_bodies.step(buffer, "cpu", case, there, end)


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


def test_new_buffers_take_ranks_that_were_masked_before_there_were_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused at once, by those that masked it alone: nobody waits."""
    monkeypatch.setenv("FERRY_DEADLINE", "2")
    case = Case(34, TOKENS, EXPERTS)

    def body(buffer: Any) -> None:
        if buffer.rank == 2:
            return
        buffer.low_latency_update_mask_buffer(2, True)
        with pytest.raises(RuntimeError, match=r"while ranks \[2\] are masked"):
            dispatch(buffer, case, use_fp8=False)
        assert status(buffer) == [0, 0, 1]

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
