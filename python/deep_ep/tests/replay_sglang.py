"""The calls of SGLang: one buffer for both modes, which is cleaned when decoding comes after
prefill; scales in columns and packed; two batches that overlap in stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from devices import device_of
from low_latency_bodies import arrived, experts
from low_latency_reference import BLOCK, Batch, restored
from rank_buffers import ThreadComm
from replays import Case, Framework, expert_rows
from torch import Tensor

import deep_ep

FRAMEWORK = Framework(
    "SGLang",
    "0.5.23",
    "token_dispatcher/deepep.py",
    "`--moe-a2a-backend deepep`, every mode; not `deepep_v2`",
)

RANKS, EXPERTS, CAPACITY, HIDDEN = 4, 8, 16, 256
DISPATCH = {
    "num_sms": 24,
    "num_max_nvl_chunked_send_tokens": 16,
    "num_max_nvl_chunked_recv_tokens": 512,
    "num_max_rdma_chunked_send_tokens": 16,
    "num_max_rdma_chunked_recv_tokens": 128,
}


class Modes:
    """The process's one buffer and the mode that it is in."""

    def __init__(self, comm: ThreadComm, device: str = "cpu") -> None:
        config = deep_ep.Config(**DISPATCH)
        ranks = comm.Get_size()
        self.buffer = deep_ep.Buffer(
            None,
            config.get_nvl_buffer_size_hint(HIDDEN * 2, ranks),
            max(
                config.get_rdma_buffer_size_hint(HIDDEN * 2, ranks),
                deep_ep.Buffer.get_low_latency_rdma_size_hint(CAPACITY, HIDDEN, ranks, EXPERTS),
            ),
            low_latency_mode=True,
            num_qps_per_rank=max(24, EXPERTS // ranks),
            allow_mnnvl=True,
            comm=comm,
        )
        self.where = device_of(self.buffer, device)
        self.config = config
        self.decoding = False

    def enter(self, decoding: bool) -> deep_ep.Buffer:
        if decoding and not self.decoding and self.buffer.low_latency_mode:
            self.buffer.clean_low_latency_buffer(CAPACITY, HIDDEN, EXPERTS)
        self.decoding = decoding
        return self.buffer


def prefill(modes: Modes, case: Case, form: str, use_async: bool) -> Tensor:
    """A layer of a prefill, rows quantised by the caller unless form is "bf16"."""
    buffer = modes.enter(False)
    rank = buffer.rank
    x, scales = quantised_by_caller(case, rank, form)
    topk_idx = case.topk_idx[rank].to(modes.where)
    previous = deep_ep.Buffer.capture() if use_async else None
    per_rank, per_rdma_rank, per_expert, in_rank, previous = buffer.get_dispatch_layout(
        topk_idx,
        EXPERTS,
        previous_event=previous,
        async_finish=use_async,
        allocate_on_comm_stream=previous is not None,
    )
    got, ids, weights, counts, handle, event = buffer.dispatch(
        x.to(modes.where) if scales is None else (x.to(modes.where), scales.to(modes.where)),
        topk_idx=topk_idx,
        topk_weights=case.weights[rank].to(modes.where),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=previous,
        async_finish=use_async,
        allocate_on_comm_stream=(previous is not None) and use_async,
        expert_alignment=128,
        config=modes.config,
    )
    if use_async:
        event.current_stream_wait()
    assert counts == case.counts(rank, 128)
    if scales is None:
        assert torch.equal(got.cpu(), case.received_rows(rank))
        rows = got
    else:
        every = [quantised_by_caller(case, source, form) for source in range(RANKS)]
        assert torch.equal(
            got[0].view(torch.uint8).cpu(),
            case.received_rows(rank, [codes.view(torch.uint8) for codes, _ in every]),
        )
        assert torch.equal(got[1].cpu(), case.received_rows(rank, [s for _, s in every]))
        assert got[1].is_contiguous()
        rows = restored(*got)
    made = expert_rows(rows, ids, weights, case.local(rank).start)
    previous = deep_ep.Buffer.capture() if use_async else None
    combined, _, event = buffer.combine(
        made,
        handle,
        async_finish=use_async,
        previous_event=previous,
        allocate_on_comm_stream=previous is not None,
        config=modes.config,
    )
    if use_async:
        event.current_stream_wait()
    assert isinstance(combined, Tensor)
    return combined


def quantised_by_caller(case: Case, rank: int, form: str) -> tuple[Tensor, Tensor | None]:
    """Rows of a prefill that are exact: codes, and scales of 1 and 2."""
    x = case.x[rank]
    if form == "bf16":
        return x, None
    blocks, tokens = x.shape[1] // BLOCK, x.shape[0]
    exponents = (torch.arange(tokens * blocks).view(tokens, blocks) + rank) % 2
    scales = torch.exp2(exponents.float())
    if form == "columns":
        aligned = -(-tokens // 4) * 4
        scales = torch.zeros(blocks, aligned).T[:tokens].copy_(scales)
    if form == "packed":
        shifts = 8 * torch.arange(blocks)
        words = ((exponents + 127) << shifts).sum(1, keepdim=True).to(torch.int32)
        scales = torch.zeros(1, tokens + 4, dtype=torch.int32).T[:tokens].copy_(words)
    return x.to(torch.float8_e4m3fn), scales


def prefill_wanted(case: Case, rank: int, form: str) -> Tensor:
    x, scales = quantised_by_caller(case, rank, form)
    return case.dense(rank, x.double() if scales is None else restored(x, scales).double())


def decode(modes: Modes, batch: Batch, form: dict[str, Any], hooks: bool) -> Iterator[Tensor]:
    """A layer of a decode step, which stops where the other batch goes on; the last thing that
    comes is the result."""
    buffer = modes.enter(True)
    rank, where = buffer.rank, modes.where
    topk_idx, weights = batch.topk_idx[rank].to(where), batch.weights[rank].to(where)
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        batch.x[rank].to(where),
        topk_idx,
        CAPACITY,
        EXPERTS,
        async_finish=not hooks,
        return_recv_hook=hooks,
        **form,
    )
    yield rows  # shared experts
    hook() if hooks else event.current_stream_wait()
    assert counts.tolist() == [len(arrivals) for arrivals in batch.arrivals(rank)]
    made = experts(buffer, batch, rows)
    combined, event, hook = modes.enter(True).low_latency_combine(
        x=made,
        topk_idx=topk_idx,
        topk_weights=weights,
        handle=handle,
        async_finish=not hooks,
        return_recv_hook=hooks,
    )
    yield combined
    hook() if hooks else event.current_stream_wait()
    yield combined


def last(steps: Iterator[Tensor]) -> Tensor:
    return list(steps)[-1]


FP8: dict[str, Any] = {"use_fp8": True}
PACKED: dict[str, Any] = {"use_fp8": True, "round_scale": True, "use_ue8m0": True}
PLAIN: dict[str, Any] = {"use_fp8": False}


def cases(count: int) -> list[Case]:
    tokens = [7, 0, 12, 3]
    return [Case(60 + i, tokens, EXPERTS, HIDDEN) for i in range(count)]


def one_buffer_changes_its_mode(first: deep_ep.Buffer, device: str) -> None:
    """Prefill, decode, prefill, decode; every form of rows in both; by events and by hooks."""
    modes, rank = Modes(first.group, device), first.rank
    for use_async in (False, True, False):
        for case, form in zip(cases(4), ("bf16", "rows", "columns", "packed")):
            combined = prefill(modes, case, form, use_async)
            assert torch.equal(combined.cpu().double(), prefill_wanted(case, rank, form))
        for batch, wire in zip(cases(3), (FP8, PACKED, PLAIN)):
            combined = last(decode(modes, batch, wire, hooks=not use_async))
            assert torch.equal(combined.cpu(), batch.combined(rank, arrived(batch, **wire)))
    first.group.allgather(None)


def two_batches_overlap(first: deep_ep.Buffer, device: str) -> None:
    """Stages of one batch between those of another that is some stages behind, layer after
    layer."""
    modes, rank = Modes(first.group, device), first.rank

    def through(own: list[Case]) -> Iterator[None]:
        for batch in own:
            for combined in decode(modes, batch, PACKED, hooks=True):
                result = combined
                yield
            wanted = batch.combined(rank, arrived(batch, **PACKED))
            assert torch.equal(result.cpu(), wanted)
            yield  # attention

    for behind in (0, 1, 2):
        layers = cases(6)
        one, other = through(layers[::2]), through(layers[1::2])
        for _ in range(behind):
            next(one)
        running = [one, other]
        while running:
            running = [batch for batch in running if next(batch, running) is None]
        first.group.allgather(None)


ALL = (one_buffer_changes_its_mode, two_batches_overlap)
