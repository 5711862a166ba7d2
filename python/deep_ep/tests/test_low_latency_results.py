"""What callers of low-latency mode may keep, forget and do in another order: its buffers just take
turns."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from low_latency_bodies import CAPACITY, check_received, combine, dispatch, experts, own
from low_latency_reference import Batch
from rank_buffers import run_buffers

BF16: dict[str, Any] = {"use_fp8": False}


def run(size: int, body: Any, **options: Any) -> list[Any]:
    return run_buffers(size, body, low_latency_mode=True, **options)


def batches(count: int, ranks: int = 2) -> list[Batch]:
    return [Batch(seed, [4, 6, 0][:ranks], 2 * ranks, 2, 128) for seed in range(20, 20 + count)]


def check_combined(buffer: Any, batch: Batch, rows: Any, handle: Any, **options: Any) -> None:
    combined = combine(buffer, batch, rows, handle, **options)
    assert torch.equal(combined, batch.combined(buffer.rank))


def test_hooks_that_are_never_called_or_too_late() -> None:
    a, b, c = batches(3)

    def body(buffer: Any) -> None:
        x, topk_idx, weights = own(buffer, a, "cpu")

        def send() -> Any:
            return buffer.low_latency_dispatch(
                x, topk_idx, CAPACITY, a.experts, return_recv_hook=True
            )[-1]

        late = send()
        for batch in (b, c):
            rows, counts, handle = dispatch(buffer, batch, **BF16)
            check_received(buffer, batch, rows, counts, handle, **BF16)
        with pytest.raises(RuntimeError, match="two later dispatches"):
            late()
        send()
        rows, _, handle = dispatch(buffer, a, **BF16)
        made = experts(buffer, a, rows)
        buffer.low_latency_combine(made, topk_idx, weights, handle, return_recv_hook=True)
        for batch in (b, c):
            rows, _, handle = dispatch(buffer, batch, **BF16)
            check_combined(buffer, batch, experts(buffer, batch, rows), handle)

    run(2, body)


def test_handles_of_others_and_of_lost_rows_are_refused() -> None:
    a, b, c = batches(3)

    def body(buffer: Any) -> None:
        _, topk_idx, weights = own(buffer, a, "cpu")
        rows, _, handle = dispatch(buffer, a, **BF16)
        strange = (handle[0], handle[1], CAPACITY + 1, *handle[3:])
        copied = (handle[0].clone(), handle[1], CAPACITY + 1, *handle[3:])
        check_combined(buffer, a, experts(buffer, a, rows), strange)  # the tensors say whose it is
        with pytest.raises(RuntimeError, match="one of another Buffer"):
            buffer.low_latency_combine(rows, topk_idx, weights, copied)
        for batch in (b, c):
            dispatch(buffer, batch, **BF16)
        with pytest.raises(RuntimeError, match="one of another Buffer"):
            buffer.get_next_low_latency_combine_buffer(copied)
        with pytest.raises(RuntimeError, match="before the last two"):
            buffer.low_latency_combine(rows, topk_idx, weights, handle, zero_copy=True)

    run(2, body)


def test_memory_that_callers_zero_and_buffers_that_they_clean() -> None:
    """As vLLM does between steps and SGLang when it changes the mode; no call waits for a peer."""
    layers = batches(4)

    def body(buffer: Any) -> None:
        for batch in layers:
            rows, _, handle = dispatch(buffer, batch, **BF16)
            buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
            if buffer.rank == 0:
                buffer.clean_low_latency_buffer(CAPACITY, 128, batch.experts)
            check_combined(buffer, batch, experts(buffer, batch, rows), handle)

    run(2, body, num_rdma_bytes=1 << 16)


def test_results_outlive_the_buffer() -> None:
    batch = batches(1)[0]

    def body(buffer: Any) -> None:
        rows, counts, handle = dispatch(buffer, batch, **BF16)
        combined = combine(buffer, batch, experts(buffer, batch, rows), handle)
        buffer._groups.all_gather(b"")
        buffer.destroy()
        gc.collect()
        check_received(buffer, batch, rows, counts, handle, **BF16)
        assert torch.equal(combined, batch.combined(buffer.rank))
        with pytest.raises(RuntimeError, match="destroyed"):
            dispatch(buffer, batch, **BF16)

    run(2, body, explicitly_destroy=True)


def test_destroy_with_work_pending() -> None:
    """It waits for nobody; a hook that comes after it says so."""
    batch = batches(1)[0]

    def body(buffer: Any) -> None:
        x, topk_idx, weights = own(buffer, batch, "cpu")
        rows, _, handle = dispatch(buffer, batch, **BF16)
        hooks = [
            buffer.low_latency_combine(rows, topk_idx, weights, handle, return_recv_hook=True)[-1],
            buffer.low_latency_dispatch(x, topk_idx, CAPACITY, 4, return_recv_hook=True)[-1],
        ]
        buffer._groups.all_gather(b"")
        buffer.destroy()
        for hook in hooks:
            with pytest.raises(RuntimeError, match="destroyed"):
                hook()

    run(2, body, explicitly_destroy=True)


def test_the_combine_buffer_serves_in_and_out_of_inference_mode() -> None:
    batch = batches(1)[0]

    def body(buffer: Any) -> None:
        for inside in (True, False):
            for _ in range(2):
                with torch.inference_mode(inside):
                    rows, _, handle = dispatch(buffer, batch, **BF16)
                    place = buffer.get_next_low_latency_combine_buffer(handle)
                    place.copy_(experts(buffer, batch, rows))
                    check_combined(buffer, batch, rows, handle, zero_copy=True)

    run(2, body)


def test_old_handles_of_two_dtypes() -> None:
    """Alike in all but the dtype of the rows: the combine's rows say which they are of."""

    def body(buffer: Any) -> None:
        idx, weights = torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2)
        old = []
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.ones(2, 64, dtype=dtype)
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, 4, **BF16)
            old.append((rows.clone(), handle))
            for _ in range(2):
                buffer.low_latency_dispatch(x, idx, 4, 4, **BF16)
        for rows, handle in old:
            y = buffer.low_latency_combine(rows, idx, weights, handle)[0]
            assert y.dtype == rows.dtype and y[:, 0].tolist() == [2, 1]
        with pytest.raises(AssertionError, match="x: got float16"):
            buffer.low_latency_combine(old[0][0].half(), idx, weights, old[0][1])

    run(2, body)
