"""Low-latency mode: every argument, on every number of ranks, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from low_latency_bodies import (
    CAPACITY,
    ENDS,
    FORMATS,
    arrived,
    check_received,
    combine,
    dispatch,
    experts,
    own,
)
from low_latency_reference import Batch, factor
from rank_buffers import run_buffers

from deep_ep.errors import EPException

TOKENS = [5, 0, CAPACITY, 1, 7, 3, 2, 9]


def run(size: int, body: Any, **options: Any) -> list[Any]:
    return run_buffers(size, body, low_latency_mode=True, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_end(ranks: int, name: str, device: str) -> None:
    """Rows, counts, handle and sums are exact, however the call ends."""
    form = FORMATS[name]
    batch = Batch(ranks, TOKENS[:ranks], 2 * ranks, min(3, 2 * ranks), 512, whole=False)

    def body(buffer: Any) -> None:
        wanted = batch.combined(buffer.rank, arrived(batch, **form))
        for end in ENDS:
            rows, counts, handle = dispatch(buffer, batch, device, end, **form)
            check_received(buffer, batch, rows, counts, handle, **form)
            combined = combine(buffer, batch, experts(buffer, batch, rows), handle, device, end)
            assert torch.equal(combined.cpu(), wanted)

    run(ranks, body)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("ranks", "count", "topk", "hidden"),
    [(3, 7, 2, 256), (4, 2, 2, 136), (2, 48, 12, 64), (1, 1, 1, 2880)],
)
def test_sizes_that_the_original_refuses(
    ranks: int, count: int, topk: int, hidden: int, device: str
) -> None:
    """Experts that do not divide, fewer of them than ranks, any hidden size, more than 11 slots."""
    batch = Batch(7, TOKENS[:ranks], count, topk, hidden)

    def body(buffer: Any) -> None:
        for form in ("bf16", "fp8 packed"):
            rows, counts, handle = dispatch(buffer, batch, device, **FORMATS[form])
            check_received(buffer, batch, rows, counts, handle, **FORMATS[form])
            combined = combine(buffer, batch, experts(buffer, batch, rows), handle, device)
            wanted = batch.combined(buffer.rank, arrived(batch, **FORMATS[form]))
            assert torch.equal(combined.cpu(), wanted)

    run(ranks, body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    batch = Batch(8, [4, 6], 4, 2, 128)

    def body(buffer: Any) -> None:
        x, topk_idx, weights = own(buffer, batch, "cpu")
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x.to(dtype), topk_idx, CAPACITY, 4, use_fp8=False
        )
        assert rows.dtype == dtype
        made = experts(buffer, batch, rows).to(dtype)
        combined, _, _ = buffer.low_latency_combine(made, topk_idx, weights, handle)
        assert combined.dtype == dtype
        assert torch.equal(combined.bfloat16(), batch.combined(buffer.rank))

    run(2, body)


@pytest.mark.parametrize("device", DEVICES)
def test_routes_of_32_bits_and_nobody_routed(device: str) -> None:
    batch = Batch(9, [4, 6], 4, 2, 128)
    nobody = Batch(9, [4, 6], 4, 2, 128)
    for routes in nobody.topk_idx:
        routes.fill_(-1)
    batch.topk_idx = [routes.to(torch.int32) for routes in batch.topk_idx]

    def body(buffer: Any) -> None:
        for one in (batch, nobody):
            rows, counts, handle = dispatch(buffer, one, device, use_fp8=False)
            check_received(buffer, one, rows, counts, handle, use_fp8=False)
            combined = combine(buffer, one, experts(buffer, one, rows), handle, device)
            assert torch.equal(combined.cpu(), one.combined(buffer.rank))

    run(2, body)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("end", ENDS)
def test_counts_are_added_to_statistics(end: str, device: str) -> None:
    """With a hook: when it is called, not before."""
    batch = Batch(10, [4, 6], 4, 2, 128)

    def body(buffer: Any) -> None:
        x, topk_idx, _ = own(buffer, batch, device)
        stats = torch.full((2,), 100, dtype=torch.int32, device=x.device)
        for times in (1, 2):
            before = stats.tolist()
            _, counts, _, event, hook = buffer.low_latency_dispatch(
                x, topk_idx, CAPACITY, 4, stats, **ENDS[end]
            )
            if hook:
                assert stats.tolist() == before
                hook()
            elif event.event:
                event.current_stream_wait()
            assert stats.tolist() == [100 + times * count for count in counts.tolist()]

    run(2, body)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_the_combine_buffer(device: str) -> None:
    """zero_copy reads what was written there, whatever x holds; each of two dispatches has its
    own."""
    batches = [Batch(seed, [4, 6], 4, 2, 256) for seed in (11, 12)]

    def body(buffer: Any) -> None:
        handles, held = [], []
        for batch in batches:
            rows, _, handle = dispatch(buffer, batch, device, use_fp8=False)
            place = buffer.get_next_low_latency_combine_buffer(handle)
            assert (place.dtype, place.shape) == (torch.bfloat16, rows.shape)
            assert place.data_ptr() != rows.data_ptr()
            place[:, :, :] = experts(buffer, batch, rows)
            handles.append(handle)
            held.append(torch.full_like(rows, 77))
        for batch, handle, other in zip(batches, handles, held):
            for _ in range(2):  # the buffer keeps its rows
                out = torch.empty_like(own(buffer, batch, device)[0])
                combined = combine(
                    buffer, batch, other, handle, device, "hook", zero_copy=True, out=out
                )
                assert combined is out
                assert torch.equal(out.cpu(), batch.combined(buffer.rank))

    run(2, body)


def test_a_hook_writes_nothing_before_it_is_called() -> None:
    batch = Batch(13, [4, 6], 4, 2, 128)

    def body(buffer: Any) -> None:
        x, topk_idx, weights = own(buffer, batch, "cpu")
        call = (x, topk_idx, CAPACITY, 4)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            *call, use_fp8=False, return_recv_hook=True
        )
        counts.fill_(-5)
        buffer._groups.all_gather(b"")  # everybody has sent
        assert counts.tolist() == [-5, -5]
        hook()
        check_received(buffer, batch, rows, counts, handle, use_fp8=False)
        out = torch.full_like(x, 5)
        _, _, hook = buffer.low_latency_combine(
            experts(buffer, batch, rows), topk_idx, weights, handle, return_recv_hook=True, out=out
        )
        buffer._groups.all_gather(b"")
        assert (out == 5).all()
        hook()
        assert torch.equal(out, batch.combined(buffer.rank))

    run(2, body)


@pytest.mark.parametrize("device", DEVICES)
def test_one_buffer_serves_many_shapes(device: str) -> None:
    """Capacity, hidden size, experts and top-k may differ from call to call, results overlap."""
    shapes = [(12, 4, 2, 128), (8, 4, 2, 128), (12, 6, 2, 128), (12, 4, 3, 128), (12, 4, 2, 256)]
    batches = [(c, Batch(c + h, [4, 6], e, k, h)) for c, e, k, h in shapes]

    def body(buffer: Any) -> None:
        for _ in range(2):
            got = [
                dispatch(buffer, batch, device, use_fp8=False, capacity=capacity)
                for capacity, batch in batches
            ]
            for (capacity, batch), (rows, counts, handle) in zip(batches, got):
                check_received(buffer, batch, rows, counts, handle, capacity, use_fp8=False)
                combined = combine(buffer, batch, experts(buffer, batch, rows), handle, device)
                assert torch.equal(combined.cpu(), batch.combined(buffer.rank))

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
        for call, match in (
            (lambda: send(x, topk_idx, 3, 4), "4 tokens; expected at most .* = 3"),
            (lambda: send(x, topk_idx, 0, 4), "num_max_dispatch_tokens_per_rank: got 0"),
            (lambda: send(x, topk_idx, 12, -1), "num_experts: got -1"),
            (lambda: send(x, topk_idx, 12, 4, **both), "one of the two"),
            (lambda: send(x, topk_idx, 12, 4, use_ue8m0=True), "round_scale=True"),
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


@pytest.mark.parametrize("end", ENDS)
def test_rows_come_back_in_ten_bits(end: str) -> None:
    """Off by no more than LogFMT-10 may be (docs/latency.md), and off: it was used."""
    batch = Batch(16, [4, 6], 4, 2, 256, whole=False)
    most = (2 ** (32 / 505) - 1) / 2 + 5e-6  # of a row's value, of a block of any span

    def body(buffer: Any) -> None:
        rows, _, handle = dispatch(buffer, batch, use_fp8=False)
        made = experts(buffer, batch, rows)
        exact = combine(buffer, batch, made, handle, end=end)
        combined = combine(buffer, batch, made, handle, end=end, use_logfmt=True)
        weights, x = batch.weights[buffer.rank], batch.x[buffer.rank].float()
        ids = batch.topk_idx[buffer.rank]
        reach = torch.where(ids >= 0, weights * factor(ids), 0.0).sum(1, keepdim=True) * x.abs()
        bound = reach * (most + 2**-8) + 2**-8 * exact.float().abs() + 1e-6
        assert ((combined.float() - exact.float()).abs() <= bound).all()
        assert not torch.equal(combined, exact)

    run(2, body)
