"""Bodies of tests: `body(buffer, device)` on every rank of low-latency mode, on any number of
ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
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
    own,
)
from low_latency_reference import Batch, factor, nvfp4, nvfp4_values

import ferry

TOKENS = 2 * [5, 0, CAPACITY, 1, 7, 3, 2, 9]
BF16 = FORMATS["bf16"]
LATE = 0.05  # seconds


def batch_of(buffer: Any, seed: int, topk: int = 2, hidden: int = 128) -> Batch:
    """Two experts for each rank."""
    ranks = buffer.group_size
    return Batch(seed, TOKENS[:ranks], 2 * ranks, topk, hidden)


def round_trip(buffer: Any, device: str, batch: Batch, end: str = "plain", **form: Any) -> None:
    """Every value of a dispatch and of its combine is right."""
    rows, counts, handle = dispatch(buffer, batch, device, end, **form)
    form.pop("capacity", None)
    check_received(buffer, batch, rows, counts, handle, handle[2], **form)
    combined = combine(buffer, batch, experts(buffer, batch, rows), handle, device, end)
    wanted = batch.combined(buffer.rank, arrived(batch, **form))
    assert torch.equal(combined.cpu(), wanted), (end, form)


def every_format_and_end(buffer: Any, device: str) -> None:
    ranks = buffer.group_size
    batch = Batch(ranks, TOKENS[:ranks], 2 * ranks, min(3, 2 * ranks), 512, whole=False)
    for form in FORMATS.values():
        for end in ENDS:
            round_trip(buffer, device, batch, end, **form)


def rows_of_nvfp4(buffer: Any, device: str) -> None:
    """Codes and scales in the order of dimensions of the fork that has them, then a combine of what
    they stand for. 192 channels fill three tiles of four scales."""
    ranks, hidden = buffer.group_size, 192
    batch = Batch(ranks, TOKENS[:ranks], 2 * ranks, 2, hidden, whole=False)
    g = 448 * 6 / torch.cat(batch.x).float().abs().max()
    how = {"use_fp8": False, "use_nvfp4": True, "x_global_scale": g}
    if device == "cuda":  # no kernel writes them yet
        with pytest.raises(ferry.UnsupportedError, match="nvfp4 in GPU memory"):
            dispatch(buffer, batch, device, **how)
        return
    wanted = [nvfp4(x, g) for x in batch.x]
    restored = [nvfp4_values(*made, g) for made in wanted]
    local, room = len(batch.local(buffer.rank)), ranks * CAPACITY
    for end in ENDS:
        (x, scales), counts, handle = dispatch(buffer, batch, device, end, **how)
        assert (x.dtype, x.shape) == (torch.uint8, (room, hidden // 2, local))
        tiles = (32, 4, -(-room // 128), 4, 3, local)
        assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, tiles)
        codes = torch.stack((x & 15, x >> 4), 2).view(room, hidden, local).permute(2, 0, 1).long()
        made = buffer.get_next_low_latency_combine_buffer(handle)
        assert (made.dtype, made.shape) == (torch.bfloat16, (local, room, hidden))
        for e, arrivals in enumerate(batch.arrivals(buffer.rank)):
            assert counts[e] == len(arrivals)
            for t, (source, token) in enumerate(arrivals):
                own_scales = scales[t % 32, t % 128 // 32, t // 128, :, :, e].T.reshape(-1)
                rows, columns = (one[token] for one in wanted[source])
                assert torch.equal(codes[e, t], rows)
                assert torch.equal(own_scales.view(torch.uint8), columns.view(torch.uint8))
                expert = torch.tensor(batch.local(buffer.rank)[e])
                made[e, t] = restored[source][token].float() * factor(expert)
        combined = combine(buffer, batch, made, handle, device, end, zero_copy=True)
        assert torch.equal(combined, batch.combined(buffer.rank, restored)), end


def sizes_that_the_original_refuses(buffer: Any, device: str) -> None:
    """Experts that do not divide, fewer of them than ranks, any hidden size, more than 11 slots."""
    ranks = buffer.group_size
    for count, topk, hidden in ((2 * ranks + 1, 2, 256), (1, 1, 136), (48, 12, 64), (3, 2, 2880)):
        batch = Batch(7, TOKENS[:ranks], count, topk, hidden)
        for form in ("bf16", "fp8 packed"):
            round_trip(buffer, device, batch, **FORMATS[form])


def routes_of_32_bits_and_nobody_routed(buffer: Any, device: str) -> None:
    batch, nobody = batch_of(buffer, 9), batch_of(buffer, 9)
    for routes in nobody.topk_idx:
        routes.fill_(-1)
    batch.topk_idx = [routes.to(torch.int32) for routes in batch.topk_idx]
    for one in (batch, nobody):
        round_trip(buffer, device, one, **BF16)


def other_dtypes(buffer: Any, device: str) -> None:
    batch = batch_of(buffer, 8)
    x, topk_idx, weights = own(buffer, batch, device)
    for dtype in (torch.float16, torch.float32):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x.to(dtype), topk_idx, CAPACITY, batch.experts, use_fp8=False
        )
        assert rows.dtype == dtype
        made = experts(buffer, batch, rows).to(dtype)
        combined, _, _ = buffer.low_latency_combine(made, topk_idx, weights, handle)
        assert combined.dtype == dtype
        assert torch.equal(combined.bfloat16().cpu(), batch.combined(buffer.rank))


def counts_are_added_to_statistics(buffer: Any, device: str) -> None:
    """With a hook: when it is called, not before."""
    batch = batch_of(buffer, 10)
    x, topk_idx, _ = own(buffer, batch, device)
    for end in ENDS.values():
        stats = torch.full((2,), 100, dtype=torch.int32, device=x.device)
        for times in (1, 2):
            before = stats.tolist()
            _, counts, _, event, hook = buffer.low_latency_dispatch(
                x, topk_idx, CAPACITY, batch.experts, stats, **end
            )
            if hook:
                assert stats.tolist() == before
                hook()
            elif event.event:
                event.current_stream_wait()
            assert stats.tolist() == [100 + times * count for count in counts.tolist()]


def rows_in_the_combine_buffer(buffer: Any, device: str) -> None:
    """zero_copy reads what was written there, whatever x holds; each of two dispatches has its
    own."""
    batches = [batch_of(buffer, seed) for seed in (11, 12)]
    handles, others = [], []
    for batch in batches:
        rows, _, handle = dispatch(buffer, batch, device, **BF16)
        place = buffer.get_next_low_latency_combine_buffer(handle)
        assert (place.dtype, place.shape) == (torch.bfloat16, rows.shape)
        assert place.data_ptr() != rows.data_ptr()
        place[:, :, :] = experts(buffer, batch, rows)
        handles.append(handle)
        others.append(torch.full_like(rows, 77))
    for batch, handle, other in zip(batches, handles, others):
        for end in ENDS:  # the buffer keeps its rows
            out = torch.empty_like(own(buffer, batch, device)[0])
            combined = combine(buffer, batch, other, handle, device, end, zero_copy=True, out=out)
            assert combined is out
            assert torch.equal(out.cpu(), batch.combined(buffer.rank))


def a_hook_writes_nothing_before_it_is_called(buffer: Any, device: str) -> None:
    batch = batch_of(buffer, 13)
    x, topk_idx, weights = own(buffer, batch, device)
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, CAPACITY, batch.experts, use_fp8=False, return_recv_hook=True
    )
    counts.fill_(-5)
    buffer.group.allgather(None)  # everybody has sent
    assert counts.tolist() == [-5, -5]
    hook()
    check_received(buffer, batch, rows, counts, handle, **BF16)
    made, out = experts(buffer, batch, rows), torch.full_like(x, 5)
    _, _, hook = buffer.low_latency_combine(
        made, topk_idx, weights, handle, return_recv_hook=True, out=out
    )
    buffer.group.allgather(None)
    assert (out == 5).all()
    hook()
    assert torch.equal(out.cpu(), batch.combined(buffer.rank))


def one_buffer_serves_many_shapes(buffer: Any, device: str) -> None:
    """Capacity, hidden size, experts and top-k differ from call to call, results overlap."""
    ranks = buffer.group_size
    shapes = [(12, 2, 2, 128), (16, 2, 2, 128), (12, 3, 2, 128), (12, 2, 1, 128), (12, 2, 2, 256)]
    batches = [
        (capacity, Batch(capacity + hidden, TOKENS[:ranks], each * ranks, topk, hidden))
        for capacity, each, topk, hidden in shapes
    ]
    for _ in range(2):
        got = [
            dispatch(buffer, batch, device, use_fp8=False, capacity=capacity)
            for capacity, batch in batches
        ]
        for (capacity, batch), (rows, counts, handle) in zip(batches, got):
            check_received(buffer, batch, rows, counts, handle, capacity, use_fp8=False)
            combined = combine(buffer, batch, experts(buffer, batch, rows), handle, device)
            assert torch.equal(combined.cpu(), batch.combined(buffer.rank))


def rows_come_back_in_ten_bits(buffer: Any, device: str) -> None:
    """Off by no more than LogFMT-10 may be (docs/latency.md), and off: it was used."""
    ranks = buffer.group_size
    batch = Batch(16, [4, *TOKENS[1:ranks]], 2 * ranks, 2, 256, whole=False)
    most = (2 ** (32 / 505) - 1) / 2 + 5e-6  # of a row's value, of a block of any span
    weights, x = batch.weights[buffer.rank], batch.x[buffer.rank].float()
    ids = batch.topk_idx[buffer.rank]
    reach = torch.where(ids >= 0, weights * factor(ids), 0.0).sum(1, keepdim=True) * x.abs()
    rows, _, handle = dispatch(buffer, batch, device, **BF16)
    made = experts(buffer, batch, rows)
    for end in ENDS:
        exact = combine(buffer, batch, made, handle, device, end).cpu()
        combined = combine(buffer, batch, made, handle, device, end, use_logfmt=True).cpu()
        bound = reach * (most + 2**-8) + 2**-8 * exact.float().abs() + 1e-6
        assert ((combined.float() - exact.float()).abs() <= bound).all()
        assert len(x) == 0 or not torch.equal(combined, exact)


def callers_keep_everything(buffer: Any, device: str) -> None:
    """Every tensor, handle, event and hook of every call stays in a list, as in layers that keep
    their last handle; calls go on, and the last two results are right."""
    kept: list[Any] = []
    for turn in range(7):
        batch, end = batch_of(buffer, 20 + turn), ("plain", "event", "hook")[turn % 3]
        kept.append((batch, *dispatch(buffer, batch, device, end, **BF16)))
        for one, rows, counts, handle, *_ in kept[-2:]:
            check_received(buffer, one, rows, counts, handle, **BF16)
        batch, rows, _, handle = kept[-1]
        made = experts(buffer, batch, rows)
        kept[-1] += (combine(buffer, batch, made, handle, device, end),)
    for batch, *_, combined in kept:
        assert torch.equal(combined.cpu(), batch.combined(buffer.rank))


def a_handle_serves_again_and_late(buffer: Any, device: str) -> None:
    """A combine may repeat, and come after later dispatches, in any order."""
    answers = []
    for seed in range(5):
        batch = batch_of(buffer, 30 + seed)
        rows, _, handle = dispatch(buffer, batch, device, **BF16)
        answers.append((batch, experts(buffer, batch, rows), handle))
    for batch, rows, handle in (*reversed(answers), *answers):
        for end in ("plain", "hook"):
            combined = combine(buffer, batch, rows, handle, device, end)
            assert torch.equal(combined.cpu(), batch.combined(buffer.rank))


def two_micro_batches_in_flight(buffer: Any, device: str) -> None:
    """Their halves interleave in every way that two buffers allow."""
    a, b, c, d = (batch_of(buffer, 40 + seed) for seed in range(4))

    def send(batch: Batch) -> Any:
        x, topk_idx, _ = own(buffer, batch, device)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, topk_idx, CAPACITY, batch.experts, use_fp8=False, return_recv_hook=True
        )
        return batch, rows, counts, handle, hook

    def answer(batch: Batch, rows: Any, counts: Any, handle: Any, hook: Any) -> Any:
        hook()
        check_received(buffer, batch, rows, counts, handle, **BF16)
        _, topk_idx, weights = own(buffer, batch, device)
        made = experts(buffer, batch, rows)
        combined, _, hook = buffer.low_latency_combine(
            made, topk_idx, weights, handle, return_recv_hook=True
        )
        return batch, combined, hook

    def end(batch: Batch, combined: Any, hook: Any) -> None:
        hook()
        assert torch.equal(combined.cpu(), batch.combined(buffer.rank))

    for _ in range(3):
        # One batch behind the other.
        first, second = send(a), send(b)
        first, second = answer(*first), answer(*second)
        end(*first)
        end(*second)
        # Each step of one between two of the other.
        first = answer(*send(a))
        second = send(b)
        end(*first)
        third = send(c)
        second = answer(*second)
        third = answer(*third)
        end(*second)
        end(*third)
        # Sums of one are asked for after the other has gone round.
        first = answer(*send(a))
        end(*answer(*send(b)))
        third = send(c)
        end(*first)
        end(*answer(*third))
        # And after its buffer was needed again.
        first = answer(*send(a))
        end(*answer(*send(b)))
        end(*answer(*send(c)))
        end(*answer(*send(d)))
        end(*first)


def between_dispatch_and_combine(buffer: Any, device: str) -> None:
    """Callers clean buffers when the mode changes and zero memory between steps; no rank waits for
    another there, but with enable_shrink, to find who has left."""
    batch = batch_of(buffer, 50)
    for most in (CAPACITY, 3 * CAPACITY):  # of another size, too
        rows, counts, handle = dispatch(buffer, batch, device, **BF16)
        if buffer.rank == 0 or buffer.enable_shrink:
            buffer.clean_low_latency_buffer(most, batch.hidden, batch.experts)
        if buffer.rank == 0:
            buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        check_received(buffer, batch, rows, counts, handle, **BF16)
        combined = combine(buffer, batch, experts(buffer, batch, rows), handle, device)
        assert torch.equal(combined.cpu(), batch.combined(buffer.rank))


def waits_are_added(buffer: Any, device: str) -> None:
    """Nanoseconds for each source, of dispatch and of combine: the last rank is late, and who
    waited for it is told so. Results are those of calls without."""
    ranks, late = buffer.group_size, buffer.group_size - 1
    batch = batch_of(buffer, 51)
    # A combine need wait for no rank that has none of the tokens, but with enable_shrink, where
    # all wait for the weights of all.
    routes = batch.topk_idx[buffer.rank]
    answers = any((routes == expert).any() for expert in batch.local(late))
    answers |= buffer.enable_shrink
    x, topk_idx, weights = own(buffer, batch, device)
    round_trip(buffer, device, batch, **BF16)  # buffers are there
    for end in ENDS.values():
        first, second = (
            torch.full((ranks,), 5, dtype=torch.int64, device=x.device) for _ in range(2)
        )
        buffer.group.allgather(None)
        if buffer.rank == late:
            time.sleep(LATE)
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x,
            topk_idx,
            CAPACITY,
            batch.experts,
            use_fp8=False,
            dispatch_wait_recv_cost_stats=first,
            **end,
        )
        finish(event, hook, end)
        check_received(buffer, batch, rows, counts, handle, **BF16)
        made = experts(buffer, batch, rows)
        buffer.group.allgather(None)
        if buffer.rank == late:
            time.sleep(LATE)
        combined, event, hook = buffer.low_latency_combine(
            made, topk_idx, weights, handle, combine_wait_recv_cost_stats=second, **end
        )
        finish(event, hook, end)
        assert torch.equal(combined.cpu(), batch.combined(buffer.rank))
        for stats, waits in ((first.tolist(), True), (second.tolist(), answers)):
            assert min(stats) >= 5
            assert buffer.rank == late or not waits or stats[late] >= LATE * 1e9 / 2


ROUNDED = (every_format_and_end, rows_of_nvfp4)
"""Whose sums are rounded, once more with enable_shrink."""
ALL = (
    every_format_and_end,
    rows_of_nvfp4,
    sizes_that_the_original_refuses,
    routes_of_32_bits_and_nobody_routed,
    other_dtypes,
    counts_are_added_to_statistics,
    rows_in_the_combine_buffer,
    a_hook_writes_nothing_before_it_is_called,
    one_buffer_serves_many_shapes,
    rows_come_back_in_ten_bits,
    callers_keep_everything,
    a_handle_serves_again_and_late,
    two_micro_batches_in_flight,
    between_dispatch_and_combine,
    waits_are_added,
)
