"""Low-latency mode: every argument, on every number of ranks, against the definition; and what is
refused. On GPUs: test_process_ranks.py."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import low_latency_calls as calls
import mask_bodies
import pytest
import torch
from low_latency_bodies import CAPACITY, check_received, combine, dispatch, experts, own
from low_latency_reference import Batch
from rank_buffers import run_buffers

from deep_ep.errors import EPException


def run(size: int, body: Any, **options: Any) -> list[Any]:
    return run_buffers(size, body, low_latency_mode=True, **options)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", calls.ALL, ids=lambda body: body.__name__)
def test_on_cpu(body: Any, size: int) -> None:
    run(size, lambda buffer: body(buffer, "cpu"))


@pytest.mark.parametrize(
    "body",
    [body for body in calls.ALL if body not in calls.ROUNDED],
    ids=lambda body: body.__name__,
)
def test_nobody_is_left_out_on_cpu(body: Any) -> None:
    """With enable_shrink, while all ranks are there, sums that are exact are the same."""
    run(2, lambda buffer: body(buffer, "cpu"), enable_shrink=True)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", mask_bodies.ALL, ids=lambda body: body.__name__)
def test_masks_on_cpu(body: Any, size: int) -> None:
    run(size, lambda buffer: body(buffer, "cpu"), enable_shrink=True)


def make_rows(
    made: torch.Tensor, to: torch.Tensor, signals: torch.Tensor, block: int, ready: int
) -> None:
    experts_, blocks = signals.shape
    for e, b in itertools.product(range(experts_), reversed(range(blocks))):
        time.sleep(0.001)
        at = slice(b * block, (b + 1) * block)
        to[e, at] = made[e, at]
        signals[e, b] = ready


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "experts"])
@pytest.mark.parametrize("shrink", [False, True])
def test_rows_that_are_made_meanwhile(size: int, whole: bool, shrink: bool) -> None:
    """The combine of a thread begins before any row is there. The last block is made first."""
    batch = Batch(3, calls.TOKENS[:size], 2 * size, 2, 128)
    block = size * CAPACITY if whole else 5
    blocks = -(-size * CAPACITY // block)

    def body(buffer: Any) -> None:
        for zero_copy in (False, True):
            rows, counts, handle = dispatch(buffer, batch, use_fp8=False)
            made = experts(buffer, batch, rows)
            to = torch.empty_like(made)
            if zero_copy:
                to = buffer.get_next_low_latency_combine_buffer(handle)
            to.fill_(float("nan"))
            local = len(counts)
            dtype, ready = (torch.uint32, 2**31 + 5) if whole else (torch.int32, 3)
            signals = torch.zeros(local, blocks, dtype=dtype)

            if whole:
                how = {"src_signals": signals.view(-1), "src_signal_expect_value": ready}
            else:
                how = {"comp_signal": signals.view(-1), "block_m": block, "threshold": ready}
                how["packed_recv_count"] = counts
            maker = threading.Thread(target=make_rows, args=(made, to, signals, block, ready))
            maker.start()
            got = combine(
                buffer, batch, to, handle, end="hook", overlap=True, zero_copy=zero_copy, **how
            )
            assert torch.equal(got, batch.combined(buffer.rank, batch.x))
            maker.join()

    run(size, body, enable_shrink=shrink)


def test_signals_that_are_refused() -> None:
    batch = Batch(14, [4, 4], 4, 2, 128)

    def body(buffer: Any) -> None:
        rows, counts, handle = dispatch(buffer, batch, use_fp8=False)
        _, topk_idx, weights = own(buffer, batch, "cpu")
        signals = torch.ones(2 * 3, dtype=torch.int32)
        good = {
            "overlap": True,
            "return_recv_hook": True,
            "comp_signal": signals,
            "block_m": 8,
            "threshold": 1,
        }
        for change, match in (
            ({"overlap": False}, "overlap: got False; expected True beside signals"),
            ({"return_recv_hook": False}, "overlap: got True without a hook"),
            ({"comp_signal": None}, "comp_signal, src_signals: got None"),
            ({"src_signals": signals[:2]}, "comp_signal, src_signals: got both"),
            ({"comp_signal": signals[:5]}, r"comp_signal: got int32 \[5\]"),
            ({"comp_signal": signals.long()}, "comp_signal: got int64"),
            ({"block_m": 0}, "block_m: got 0"),
            ({"num_sms": 3}, "num_sms: got 3"),
            ({"packed_recv_count": counts + 1}, "packed_recv_count: got .*of the dispatch"),
            ({"comp_signal": None, "src_signals": signals}, "src_signals: got int32"),
            ({"threshold": 2**31}, "threshold: got 2147483648; expected -2147483648 to 2147483647"),
            (
                {
                    "comp_signal": None,
                    "src_signals": signals[:2].view(torch.uint32),
                    "src_signal_expect_value": 2**32,
                },
                "src_signal_expect_value: got 4294967296; expected 0 to 4294967295, for signals",
            ),
        ):
            how = good | change
            refused(
                lambda how=how: buffer.low_latency_combine(rows, topk_idx, weights, handle, **how),
                match,
            )
        del good["return_recv_hook"]
        got = combine(buffer, batch, rows, handle, end="hook", **good)
        again = lambda: combine(buffer, batch, rows, handle, end="hook", **good)  # noqa: E731
        refused(again, "handle: got one that has to be sent anew")
        assert torch.equal(combine(buffer, batch, rows, handle), got)

    run(2, body)


def refused(call: Any, match: str) -> None:
    """Refused as an assertion, which callers of the extension know as a RuntimeError."""
    for kind in (AssertionError, RuntimeError):
        with pytest.raises(kind, match=match) as caught:
            call()
        assert isinstance(caught.value, EPException)


def test_refusals() -> None:
    """Before anything moves: the calls after them are served."""
    batch = Batch(14, [4, 4], 4, 2, 128)

    def body(buffer: Any) -> None:
        x, topk_idx, weights = own(buffer, batch, "cpu")
        send = buffer.low_latency_dispatch
        rows, counts, handle = dispatch(buffer, batch, use_fp8=False)
        answer = buffer.low_latency_combine
        both = {"async_finish": True, "return_recv_hook": True}

        def nvfp4(**changes: Any) -> Any:
            return send(x, topk_idx, 12, 4, **({"use_fp8": False, "use_nvfp4": True} | changes))

        for call, match in (
            (lambda: send(x, topk_idx, 3, 4), "4 tokens; expected at most .* = 3"),
            (lambda: send(x, topk_idx, 0, 4), "num_max_dispatch_tokens_per_rank: got 0"),
            (lambda: send(x, topk_idx, 12, -1), "num_experts: got -1"),
            (lambda: send(x, topk_idx, 12, 4, **both), "one of the two"),
            (lambda: send(x, topk_idx, 12, 4, use_ue8m0=True), "round_scale=True"),
            (lambda: send(x, topk_idx, 12, 4, use_nvfp4=True), "use_fp8: got True; expected False"),
            (lambda: nvfp4(), "x_global_scale: got an object of type NoneType; expected float32"),
            (
                lambda: nvfp4(x_global_scale=torch.ones(1)),
                r"got float32 \[1\]; expected float32 \[\]",
            ),
            (lambda: nvfp4(round_scale=True), "round_scale, use_ue8m0: got True; expected False"),
            (lambda: nvfp4(use_ue8m0_for_sf=True), "use_ue8m0_for_sf: got True; expected False"),
            (
                lambda: nvfp4(x_global_scale=torch.tensor(0.0)),
                "x_global_scale: got 0.0; expected 2",
            ),
            (
                lambda: send(x, topk_idx, 12, 4, x_global_scale=torch.tensor(1.0)),
                "x_global_scale, use_ue8m0_for_sf: got one of them; expected use_nvfp4=True",
            ),
            (lambda: send(x.to(torch.int32), topk_idx, 12, 4), "x: got int32"),
            (lambda: send(x.T, topk_idx, 12, 4), r"x\.contiguous\(\)"),
            (lambda: send(x, topk_idx[:3], 12, 4), r"topk_idx: got int64 \[3, 2\]"),
            (lambda: send(x, topk_idx.float(), 12, 4), "topk_idx: got float32"),
            (lambda: send(x, topk_idx, 12, 4, torch.zeros(2)), "recv_stats: got float32"),
            (
                lambda: send(x, topk_idx, 12, 4, torch.zeros(4, dtype=torch.int32)),
                r"recv_stats: got int32 \[4\]; expected int32 \[2\]",
            ),
            (
                lambda: send(x, topk_idx, 12, 4, None, torch.zeros(2, 2, dtype=torch.int64)),
                r"wait_recv_cost_stats: got int64 \[2, 2\]; expected int64 \[2\]",
            ),
            (lambda: answer(rows, topk_idx, weights, handle, **both), "one of the two"),
            (
                lambda: answer(rows, topk_idx, weights, handle, use_logfmt=True, zero_copy=True),
                "use_logfmt: got True together with zero_copy",
            ),
            (lambda: answer(rows[:, :5], topk_idx, weights, handle), "x: got bfloat16"),
            (lambda: answer(rows.float(), topk_idx, weights, handle), "x: got float32"),
            (lambda: answer(rows, topk_idx, weights[:2], handle), "topk_weights: got"),
            (lambda: answer(rows, topk_idx[:, :1], weights, handle), "topk_idx: got"),
            (lambda: answer(rows, topk_idx, weights, handle[:4]), "handle: got"),
            (lambda: answer(rows, topk_idx, weights, None), "handle: got"),
            (lambda: answer(rows, topk_idx, weights, handle, out=x[:1]), "out: got"),
            (lambda: buffer.clean_low_latency_buffer(12, 0, 4), "hidden: got 0"),
        ):
            refused(call, match)
        with pytest.raises(ValueError, match="99"):
            send(x, torch.full_like(topk_idx, 99), CAPACITY, 4)
        check_received(buffer, batch, rows, counts, handle, use_fp8=False)
        combined = combine(buffer, batch, experts(buffer, batch, rows), handle)
        assert torch.equal(combined, batch.combined(buffer.rank))

    run(2, body)


def test_refusals_with_an_old_handle() -> None:
    """What is at fault is named, also when Ferry has forgotten the handle's routes."""
    batch, other = Batch(17, [4], 4, 2, 128), Batch(17, [4], 4, 2, 256)

    def body(buffer: Any) -> None:
        _, topk_idx, weights = own(buffer, batch, "cpu")
        dispatch(buffer, other, use_fp8=False)
        rows, _, handle = dispatch(buffer, batch, use_fp8=False)
        made = experts(buffer, batch, rows)
        for _ in range(2):
            dispatch(buffer, batch, use_fp8=False)
        answer, foreign = buffer.low_latency_combine, (*handle[:4], 5)
        for call, match in (
            (lambda: answer(made, None, weights, handle), "topk_idx: got an object of type None"),
            (
                lambda: answer(made, topk_idx[:, :1], weights[:, :1], handle),
                r"topk_idx: got int64 \[4, 1\]; expected .* \[any, 2\]",
            ),
            (lambda: answer(made.float(), topk_idx, weights, handle), "x: got float32"),
            (lambda: answer(made, topk_idx, weights, foreign), "handle: got one of another Buffer"),
            (
                lambda: buffer.get_next_low_latency_combine_buffer(handle),
                "handle: got one of a dispatch before the last two",
            ),
        ):
            refused(call, match)
        assert torch.equal(combine(buffer, batch, made, handle), batch.combined(buffer.rank))

    run(1, body)


def test_a_buffer_without_the_mode_refuses() -> None:
    batch = Batch(15, [4], 4, 2, 128)

    def body(buffer: Any) -> None:
        x, topk_idx, weights = own(buffer, batch, "cpu")
        for call in (
            lambda: buffer.low_latency_dispatch(x, topk_idx, CAPACITY, 4),
            lambda: buffer.low_latency_combine(x, topk_idx, weights, None),
            lambda: buffer.clean_low_latency_buffer(CAPACITY, 128, 4),
            lambda: buffer.get_next_low_latency_combine_buffer(None),
        ):
            refused(call, "low_latency_mode=True")

    run_buffers(1, body)
