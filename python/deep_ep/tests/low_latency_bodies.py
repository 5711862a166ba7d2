"""What ranks do in the tests of low-latency mode: calls, and what must come of them."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_reference import Batch, factor, quantised, restored
from torch import Tensor

CAPACITY = 12

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "fp8 rounded": {"use_fp8": True, "round_scale": True},
    "fp8 packed": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}
ENDS: dict[str, dict[str, bool]] = {
    "plain": {},
    "event": {"async_finish": True},
    "hook": {"return_recv_hook": True},
}


def own(buffer: Any, batch: Batch, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens, routes and weights."""
    where, rank = device_of(buffer, device), buffer.rank
    return tuple(t[rank].to(where) for t in (batch.x, batch.topk_idx, batch.weights))


def finish(event: Any, hook: Any, end: dict[str, bool]) -> None:
    """As callers wait: the hook, the event, or nothing."""
    if end.get("return_recv_hook"):
        assert event.event is None
        hook()
        return
    assert hook is None
    assert (event.event is not None) == bool(end.get("async_finish"))
    if end.get("async_finish"):
        event.current_stream_wait()


def dispatch(
    buffer: Any, batch: Batch, device: str = "cpu", end: str = "plain", **options: Any
) -> tuple[Any, Tensor, Any]:
    """A finished dispatch: rows, counts, handle."""
    x, topk_idx, _ = own(buffer, batch, device)
    capacity = options.pop("capacity", CAPACITY)
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, topk_idx, capacity, batch.experts, **options, **ENDS[end]
    )
    finish(event, hook, ENDS[end])
    return rows, counts, handle


def combine(
    buffer: Any,
    batch: Batch,
    rows: Tensor,
    handle: Any,
    device: str = "cpu",
    end: str = "plain",
    **options: Any,
) -> Tensor:
    """A finished combine."""
    _, topk_idx, weights = own(buffer, batch, device)
    combined, event, hook = buffer.low_latency_combine(
        rows, topk_idx, weights, handle, **options, **ENDS[end]
    )
    finish(event, hook, ENDS[end])
    assert isinstance(combined, Tensor)
    return combined


def experts(buffer: Any, batch: Batch, rows: Any) -> Tensor:
    """What the experts make of received rows."""
    plain = restored(*rows) if isinstance(rows, tuple) else rows
    ids = torch.tensor(list(batch.local(buffer.rank)), dtype=torch.int64, device=plain.device)
    made: Tensor = (plain.float() * factor(ids)[:, None, None]).bfloat16()
    return made


def arrived(batch: Batch, use_fp8: bool = True, round_scale: bool = False, **_: Any) -> Any:
    """What arrives of each token, on every rank that it goes to."""
    if not use_fp8:
        return batch.x
    return [restored(*quantised(x, round_scale)) for x in batch.x]


def check_received(
    buffer: Any,
    batch: Batch,
    rows: Any,
    counts: Tensor,
    handle: Any,
    capacity: int = CAPACITY,
    **options: bool,
) -> None:
    """Shapes, strides, dtypes and every value that is defined."""
    source_token, layout, *numbers = handle
    local, ranks = len(batch.local(buffer.rank)), batch.ranks
    assert numbers == [capacity, batch.hidden, batch.experts]
    assert (source_token.dtype, tuple(source_token.shape)) == (
        torch.int32,
        (local, ranks * capacity),
    )
    assert (layout.dtype, tuple(layout.shape)) == (torch.int64, (local, ranks))
    assert (counts.dtype, tuple(counts.shape)) == (torch.int32, (local,))
    fp8 = options.get("use_fp8", True)
    codes = rows[0] if fp8 else rows
    assert tuple(codes.shape) == (local, ranks * capacity, batch.hidden)
    assert codes.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
    if fp8:
        scales, columns = rows[1], -(-batch.hidden // 128)
        packed = options.get("use_ue8m0", False)
        columns = -(-columns // 4) if packed else columns
        assert scales.dtype == (torch.int32 if packed else torch.float32)
        assert tuple(scales.shape) == (local, ranks * capacity, columns)
        assert local == 0 or scales.stride(1) == 1
        assert local == 0 or columns == 1 or scales.stride(2) == ranks * capacity
    whole = restored(*rows) if fp8 else rows
    expected = arrived(batch, **options)
    for e, arrivals in enumerate(batch.arrivals(buffer.rank)):
        assert int(counts[e]) == len(arrivals)
        assert source_token[e, : len(arrivals)].tolist() == [token for _, token in arrivals]
        for source in range(ranks):
            mine = [at for at, (rank, _) in enumerate(arrivals) if rank == source]
            first, count = int(layout[e, source]) >> 32, int(layout[e, source]) & 0xFFFFFFFF
            assert count == len(mine)
            assert not mine or mine == list(range(first, first + count))
        if arrivals:
            wanted = torch.stack([expected[source][token] for source, token in arrivals])
            assert torch.equal(whole[e, : len(arrivals)].cpu(), wanted)
