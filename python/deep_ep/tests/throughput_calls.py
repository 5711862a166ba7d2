"""The ways to call throughput mode, and what its tests look at in what comes back."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from reference import Job, arrived
from torch import Tensor

import deep_ep

KINDS = ("bf16", "f32", "u8", "fp8", "fp8 column-major", "fp8 packed", "fp8 one scale")
ROUTES = ("none", "ids", "ids and weights", "i32 ids and weights")
ENDS = ("plain", "async", "after event", "async after event", "on comm stream")


def same(got: Tensor, expected: Tensor, device: str, words: object = "") -> None:
    """Equal in device, dtype, shape and every byte."""
    assert got.device.type == device, words
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), words
    assert torch.equal(bytes_of(got), bytes_of(expected)), f"{words}: {got} instead of {expected}"


def bytes_of(tensor: Tensor) -> Tensor:
    # One element of a column counts as contiguous, whatever its stride.
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def several_hosts(ranks: int) -> bool:
    """As the interface counts them."""
    return ranks > 8 and ranks % 8 == 0


def ended(buffer: Any, way: str) -> dict[str, Any]:
    """The arguments of streams and events, one of the ways to call."""
    kwargs: dict[str, Any] = {"async_finish": "async" in way or "comm" in way}
    if "after" in way or "comm" in way:
        kwargs["previous_event"] = buffer.capture()
    if "comm" in way:
        kwargs["allocate_on_comm_stream"] = True
    return kwargs


def product(device: str, *choices: Any) -> Any:
    """All combinations, each with all ways to call; in CPU memory, where these differ in little,
    with one of them in turn."""
    combinations = itertools.product(*choices)
    if device == "cpu":
        return ((*one, way) for one, way in zip(combinations, itertools.cycle(ENDS)))
    return ((*one, way) for one in combinations for way in ENDS)


def wait(event: Any, way: str) -> None:
    """The event is there when the call was asynchronous, and only then."""
    assert isinstance(event, deep_ep.EventOverlap)
    if "async" in way or "comm" in way:
        assert event.event is not None
        event.current_stream_wait()
    else:
        assert event.event is None


def inputs(job: Job, kind: str) -> list[Any]:
    """What each rank dispatches: a tensor, or one with scales."""
    if kind == "bf16":
        return list(job.x)
    if kind == "f32":
        return [x.float() for x in job.x]
    if kind == "u8":
        return [(x.float() * 50).to(torch.uint8) for x in job.x]
    if kind == "nvfp4":  # two e2m1 values a byte, an e4m3 scale for each 16
        halves = [x.view(torch.uint8)[:, : x.shape[1] // 2].contiguous() for x in job.x]
        some = [(x.float()[:, :4].abs() + 1).to(torch.float8_e4m3fn) for x in job.x]
        return list(zip(halves, some))
    columns = 1 if kind == "fp8 one scale" else 4
    scales = [x.float()[:, :columns].abs() + 1 for x in job.x]
    if kind == "fp8 column-major":
        scales = [s.t().contiguous().t() for s in scales]
    if kind == "fp8 packed":
        scales = [s.contiguous().view(torch.int32) for s in scales]
    return [(x.to(torch.float8_e4m3fn), s) for x, s in zip(job.x, scales)]


def on(device: str, x: Any) -> Any:
    """A tensor, or some, there; strides are kept."""
    return tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)


def dispatched(
    buffer: Any,
    device: str,
    job: Job,
    x: Any,
    routes: str = "ids and weights",
    way: str = "plain",
    **how: Any,
) -> Any:
    """A dispatch of this rank's part of the job."""
    rank = buffer.rank
    idx = job.topk_idx[rank].to(device)
    per_rank, per_host, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, job.experts)
    if "i32" in routes:
        idx = idx.int()
    how |= ended(buffer, way)  # an event behind all that the call reads
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_host,
        is_token_in_rank=in_ranks,
        num_tokens_per_expert=per_expert,
        topk_idx=None if routes == "none" else idx,
        topk_weights=job.topk_weights[rank].to(device) if "weights" in routes else None,
        **how,
    )


def check_rows(got: Any, sent: list[Any], job: Job, rank: int, device: str, words: object) -> None:
    """The rows of a dispatch, and their scales."""
    there = arrived(job, rank)
    if isinstance(sent[0], tuple):
        assert isinstance(got, tuple)
        for part in range(2):
            expected = there.rows([one[part].contiguous() for one in sent])
            assert got[part].is_contiguous(), words
            same(got[part][: len(expected)], expected, device, words)
    else:
        expected = there.rows(sent)
        assert got.is_contiguous(), words
        same(got[: len(expected)], expected, device, words)
