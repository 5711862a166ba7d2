"""The calls of LMDeploy: one buffer for prefill and decode, rows of fp8 in both, two batches that
overlap."""

from __future__ import annotations

from typing import Any

import torch
from devices import device_of
from low_latency_bodies import CAPACITY, arrived, check_received, experts
from low_latency_reference import quantised, restored
from replays import Case, Framework, expert_rows
from torch import Tensor

import deep_ep

FRAMEWORK = Framework(
    "LMDeploy",
    "0.16.0",
    "pytorch/backends/cuda/token_dispatcher.py",
    "PyTorch engine with `--ep`",
)

EXPERTS, HIDDEN, ALIGNMENT = 8, 128, 128


def make_buffer(comm: Any) -> deep_ep.Buffer:
    ranks, nvl, rdma = comm.Get_size(), 0, 0
    for config in (
        deep_ep.Buffer.get_dispatch_config(ranks),
        deep_ep.Buffer.get_combine_config(ranks),
    ):
        nvl = max(config.get_nvl_buffer_size_hint(HIDDEN * 2, ranks), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(HIDDEN * 2, ranks), rdma)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(CAPACITY, HIDDEN, ranks, EXPERTS)
    buffer = deep_ep.Buffer(
        None,
        num_nvl_bytes=nvl,
        num_rdma_bytes=max(hint, rdma),
        low_latency_mode=True,
        num_qps_per_rank=max(EXPERTS // ranks, 20),
        allow_mnnvl=True,
        explicitly_destroy=True,
        comm=comm,
    )
    buffer.set_num_sms(20)
    return buffer


class Prefill:
    """A batch in throughput mode."""

    def __init__(self, buffer: deep_ep.Buffer, case: Case, device: str, fp8: bool) -> None:
        self.buffer, self.case, self.rank = buffer, case, buffer.rank
        where = device_of(buffer, device)
        self.sent = [restored(*quantised(x)) for x in case.x] if fp8 else case.x
        x: Any = quantised(case.x[self.rank]) if fp8 else case.x[self.rank]
        self.x = tuple(one.to(where) for one in x) if fp8 else x.to(where)
        self.ids = case.topk_idx[self.rank].to(where)
        self.weights = case.weights[self.rank].to(where)

    def dispatch(self, previous: Any, later: bool) -> None:
        when = {"previous_event": previous, "async_finish": later}
        when["allocate_on_comm_stream"] = previous is not None and later
        *layout, event = self.buffer.get_dispatch_layout(self.ids, EXPERTS, **when)
        per_rank, per_rdma_rank, per_expert, in_rank = layout
        when["previous_event"] = event
        when["allocate_on_comm_stream"] = later
        got = self.buffer.dispatch(
            self.x,
            topk_idx=self.ids,
            topk_weights=self.weights.to(torch.float32),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            expert_alignment=ALIGNMENT,
            **when,
        )
        self.rows, self.row_ids, self.row_weights, self.counts, self.handle, self.event = got

    def combine(self, later: bool) -> None:
        if later:
            self.event.current_stream_wait()
        rows = restored(*self.rows) if isinstance(self.rows, tuple) else self.rows
        assert torch.equal(rows.cpu(), self.case.received_rows(self.rank, self.sent))
        assert self.counts == self.case.counts(self.rank, ALIGNMENT)
        first = self.case.local(self.rank).start
        answer = expert_rows(rows, self.row_ids, self.row_weights, first)
        previous = self.buffer.capture() if later else None  # behind the experts
        self.y, _, self.event = self.buffer.combine(
            answer,
            self.handle,
            async_finish=later,
            previous_event=previous,
            allocate_on_comm_stream=later,
        )

    def end(self, later: bool) -> None:
        if later:
            self.event.current_stream_wait()
        expected = self.case.dense(self.rank, self.sent[self.rank].double())
        assert torch.allclose(self.y.cpu().double(), expected, rtol=2**-6)


class Decode:
    """A batch in low-latency mode."""

    def __init__(self, buffer: deep_ep.Buffer, case: Case, device: str) -> None:
        self.buffer, self.case, self.rank = buffer, case, buffer.rank
        where = device_of(buffer, device)
        self.x, self.ids, self.weights = (
            one[self.rank].to(where) for one in (case.x, case.topk_idx, case.weights)
        )

    def dispatch(self, hook: bool) -> None:
        self.rows, self.counts, self.handle, self.event, self.hook = (
            self.buffer.low_latency_dispatch(
                self.x,
                self.ids,
                CAPACITY,
                num_experts=EXPERTS,
                use_fp8=True,
                async_finish=not hook,
                return_recv_hook=hook,
            )
        )

    def combine(self, hook: bool) -> None:
        self.hook() if hook else self.event.current_stream_wait()
        check_received(self.buffer, self.case, self.rows, self.counts, self.handle)
        self.y, self.event, self.hook = self.buffer.low_latency_combine(
            experts(self.buffer, self.case, self.rows),
            self.ids,
            self.weights.to(torch.float32),
            self.handle,
            async_finish=not hook,
            return_recv_hook=hook,
        )

    def end(self, hook: bool) -> None:
        self.hook() if hook else self.event.current_stream_wait()
        expected: Tensor = self.case.combined(self.rank, arrived(self.case))
        assert torch.equal(self.y.cpu(), expected)


def prefill_then_decode(first: deep_ep.Buffer, device: str) -> None:
    """Prefill of bf16 and fp8, plainly and as two batches by events; the buffer is cleaned; decode,
    by events and by hooks, alone and as two batches."""
    buffer = make_buffer(first.group)
    for round_ in range(2):
        tokens = [5, 3, 7, 2, 4, 1, 6, 8][: buffer.group_size]
        cases = [Case(40 + 2 * round_ + i, tokens, EXPERTS) for i in range(2)]
        for fp8 in (False, True):
            for later in (False, True):
                batches = [Prefill(buffer, case, device, fp8) for case in cases]
                for batch in batches:
                    batch.dispatch(buffer.capture() if later else None, later)
                for batch in batches:
                    batch.combine(later)
                for batch in batches:
                    batch.end(later)
        buffer.clean_low_latency_buffer(CAPACITY, HIDDEN, EXPERTS)
        for hook in (False, True):
            decodes = [Decode(buffer, case, device) for case in cases]
            for decode in decodes:
                decode.dispatch(hook)
            for decode in decodes:
                decode.combine(hook)
            for decode in decodes:
                decode.end(hook)
    buffer.destroy()
    assert buffer.runtime is None


ALL = (prefill_then_decode,)
