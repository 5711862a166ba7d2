"""What callers may choose: where torch makes tensors by itself, and of which dtype (calls say their
own), and whose integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rank_buffers import ThreadComm, run_buffers, run_ranks
from reference import make_job
from throughput_calls import dispatched

import deep_ep


@contextmanager
def other_defaults() -> Iterator[None]:
    """A device that no tensor can be read from, of this thread; a dtype, of all."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device_and_dtype() -> None:
    routes = torch.tensor([[0, 3], [1, -1], [2, 1]])
    x, weights = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(3, 2)

    def body(comm: ThreadComm) -> None:
        status = torch.full((2,), 7, dtype=torch.int32)
        comm.allgather(None)
        with other_defaults():
            how = {"low_latency_mode": True, "enable_shrink": True}
            buffer = deep_ep.Buffer(None, comm=comm, **how)
            layout = buffer.get_dispatch_layout(routes, 4)
            given = {
                "num_tokens_per_rank": layout[0],
                "is_token_in_rank": layout[3],
                "num_tokens_per_expert": layout[2],
            }
            buffer.dispatch(x, **given)
            got = buffer.dispatch(x, topk_idx=routes, topk_weights=weights, **given)
            handle = tuple(got[4])
            y = buffer.combine(got[0], handle)[0]
            copies = tuple(one.clone() for one in handle)
            again = buffer.combine(got[0], copies, topk_weights=got[2][:, :1].contiguous())[0]
            rows, _, ours, _, _ = buffer.low_latency_dispatch(x, routes, 4, 4, use_fp8=False)
            for _ in range(2):  # the second one sends the routes once more
                summed = buffer.low_latency_combine(rows, routes, weights, ours)[0]
            buffer.get_next_low_latency_combine_buffer(ours)
            buffer.low_latency_query_mask_buffer(status)
            comm.allgather(None)
        assert y[:, 0].tolist() == layout[3].sum(1).tolist() and torch.equal(y, again)
        assert summed[:, 0].tolist() == [2, 1, 2]
        assert {one.device.type for one in (*layout[2:4], *handle, summed)} == {"cpu"}
        assert status.tolist() == [0, 0]

    run_ranks(2, body)


def test_integers_of_numpy() -> None:
    def body(buffer: Any) -> None:
        job = make_job(2, seed=4)
        rank, (n, one) = buffer.rank, (np.int64(60), np.int32(8))
        x, idx, weights = job.x[rank], job.topk_idx[rank], job.topk_weights[rank]
        got = dispatched(buffer, "cpu", job, x, num_worst_tokens=n, expert_alignment=one)
        assert got[0].shape[0] == 60 and got[3] == []
        counts = dispatched(buffer, "cpu", job, x, expert_alignment=one)[3]
        assert all(type(count) is int and count % 8 == 0 for count in counts)
        sizes = np.int64(16), np.int32(job.experts)
        buffer.clean_low_latency_buffer(sizes[0], np.int64(64), sizes[1])
        for _ in range(2):
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, *sizes, use_fp8=False)
        for _ in range(2):
            y = buffer.low_latency_combine(rows, idx, weights, handle)[0]
        assert y.shape == x.shape

    run_buffers(2, body, low_latency_mode=True)
