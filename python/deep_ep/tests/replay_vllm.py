"""The calls of vLLM: one buffer for prefill and one for decode, a module for each layer that keeps
its last handle, and pairs of micro-batches on two threads that hand over to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from devices import device_of
from low_latency_bodies import arrived, experts
from low_latency_reference import Batch
from rank_buffers import ThreadComm
from replays import Case, Framework, expert_rows
from torch import Tensor

import deep_ep

FRAMEWORK = Framework(
    "vLLM",
    "0.33.0",
    "prepare_finalize/deepep_ht.py, prepare_finalize/deepep_ll.py, all2all.py",
    "all-to-all backends `deepep_high_throughput` and `deepep_low_latency`, "
    "also with micro-batches and fault tolerance; not `deepep_v2`",
)

RANKS, EXPERTS, CAPACITY = 4, 8, 16
TOKENS = [7, 0, 12, 3]


def nothing() -> None:
    pass


class Prefill:
    """A layer over the throughput calls. `switch` is called where the micro-batch hands over; then
    the streams are in order by themselves, and no call is asynchronous."""

    def __init__(self, buffer: deep_ep.Buffer, switch: Callable[[], None] | None = None) -> None:
        self.buffer, self.switch = buffer, switch or nothing
        self.use_async = switch is None
        self.handles: list[Any] = [None, None]

    def wait(self, event: deep_ep.EventOverlap) -> None:
        assert (event.event is not None) == self.use_async
        if event.event is not None:
            event.current_stream_wait()

    def run(self, case: Case, x: Tensor | tuple[Tensor, Tensor], which: int = 0) -> Tensor:
        """One layer; the rows that come must be those of the case."""
        buffer, rank = self.buffer, self.buffer.rank
        plain = x[0] if isinstance(x, tuple) else x
        topk_idx = case.topk_idx[rank].to(plain.device)
        weights = case.weights[rank].to(plain.device)
        previous = buffer.capture()
        self.switch()
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=topk_idx,
            num_experts=EXPERTS,
            previous_event=previous,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        (rows, ids, row_weights, counts, self.handles[which], event) = buffer.dispatch(
            x=x,
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights,
            expert_alignment=1,
            config=deep_ep.Buffer.get_dispatch_config(RANKS),
            previous_event=previous,
            async_finish=self.use_async,
            allocate_on_comm_stream=False,
        )
        self.switch()
        self.wait(event)
        assert counts == case.counts(rank)
        assert torch.equal(ids.cpu(), case.received_ids(rank))
        first = case.local(rank).start
        if isinstance(rows, tuple):  # one scale for each row and block of channels
            codes, scales = rows
            rows = codes.float() * scales.repeat_interleave(128, 1)[:, : codes.shape[1]]
            rows = rows.bfloat16()
        else:
            assert torch.equal(rows.cpu(), case.received_rows(rank))
        made = expert_rows(rows, ids, row_weights, first)
        previous = buffer.capture()
        self.switch()
        combined, none, event = buffer.combine(
            x=made,
            handle=self.handles[which],
            topk_weights=None,
            config=deep_ep.Buffer.get_combine_config(RANKS),
            previous_event=previous,
            async_finish=self.use_async,
            allocate_on_comm_stream=False,
        )
        self.switch()
        assert none is None
        self.wait(event)
        output = torch.empty_like(plain, dtype=combined.dtype)
        output.copy_(combined, non_blocking=True)
        return output


class Decode:
    """A layer over the low-latency calls. form: "bf16", "fp8", "packed". Where micro-batches hand
    over to each other, combines end by a hook, too."""

    def __init__(
        self,
        buffer: deep_ep.Buffer,
        form: str,
        device: str = "cpu",
        switch: Callable[[], None] | None = None,
    ) -> None:
        self.buffer, self.device, self.switch = buffer, device, switch or nothing
        self.hooks = switch is not None
        packed = form == "packed"
        self.form = {"use_fp8": form != "bf16", "round_scale": packed, "use_ue8m0": packed}
        self.handles: list[Any] = [None, None]

    def run(self, case: Batch, which: int = 0) -> Tensor:
        buffer, rank = self.buffer, self.buffer.rank
        where = device_of(buffer, self.device)
        x, topk_idx, weights = (
            tensors[rank].to(where) for tensors in (case.x, case.topk_idx, case.weights)
        )
        rows, counts, self.handles[which], _, hook = buffer.low_latency_dispatch(
            x,
            topk_idx,
            CAPACITY,
            EXPERTS,
            **self.form,
            async_finish=False,
            return_recv_hook=True,
        )
        self.switch()
        assert hook is not None
        hook()
        assert counts.tolist() == [len(a) for a in case.arrivals(rank)]
        made = experts(buffer, case, rows)
        output = torch.empty_like(x)
        _, _, hook = buffer.low_latency_combine(
            made,
            topk_idx,
            weights,
            self.handles[which],
            async_finish=False,
            zero_copy=False,
            return_recv_hook=self.hooks,
            out=output,
        )
        self.switch()
        assert (hook is not None) == self.hooks
        if hook is not None:
            hook()
        return output


class Baton:
    """Two threads of which one runs at a time."""

    def __init__(self) -> None:
        self.turns = [threading.Semaphore(1), threading.Semaphore(0)]
        self.gone = [False, False]

    def hand_over(self, which: int) -> None:
        self.turns[1 - which].release()
        if not self.gone[1 - which]:
            self.turns[which].acquire()

    def run(self, bodies: list[Callable[[Callable[[], None]], None]]) -> None:
        """Both bodies, each given the function that hands over."""
        errors: list[BaseException] = []

        def one(which: int) -> None:
            self.turns[which].acquire()
            try:
                bodies[which](lambda: self.hand_over(which))
            except BaseException as error:
                errors.append(error)
            self.gone[which] = True
            self.turns[1 - which].release()

        threads = [threading.Thread(target=one, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def low_latency_buffer(comm: ThreadComm, fault_tolerance: bool = False) -> deep_ep.Buffer:
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(CAPACITY, 128, RANKS, EXPERTS)
    return deep_ep.Buffer(
        None,
        comm=comm,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // RANKS,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=fault_tolerance,
    )


def cases(count: int) -> list[Case]:
    return [Case(40 + i, TOKENS, EXPERTS) for i in range(count)]


def prefill_and_decode_buffers(first: deep_ep.Buffer, device: str) -> None:
    """Layers keep their handles for ever; all buffers are destroyed in the end, in any order."""
    comm, rank = first.group, first.rank
    prefill_buffer = deep_ep.Buffer(
        group=None,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
        comm=comm,
    )
    decode_buffer = low_latency_buffer(comm)
    where = device_of(prefill_buffer, device)
    prefill = [Prefill(prefill_buffer) for _ in range(2)]
    forms = ("bf16", "fp8", "packed", "bf16")
    decode = [Decode(decode_buffer, form, device) for form in forms]
    for _ in range(2):
        for prefilling, case in zip(prefill, cases(2)):
            out = prefilling.run(case, case.x[rank].to(where))
            assert torch.equal(out.cpu().double(), case.dense(rank))
        for decoding, case in zip(decode, cases(4)):
            wanted = case.combined(rank, arrived(case, **decoding.form))
            assert torch.equal(decoding.run(case).cpu(), wanted)
    comm.allgather(None)
    for buffer in (decode_buffer, prefill_buffer)[:: 1 if rank % 2 else -1]:
        buffer.destroy()


def fault_tolerant_decode(first: deep_ep.Buffer, device: str) -> None:
    """Between steps the masks are asked for, and the buffer is zeroed and its masks are cleaned, as
    after a rank has come back."""
    comm, rank = first.group, first.rank
    buffer = low_latency_buffer(comm, fault_tolerance=True)
    where = device_of(buffer, device)
    masked = torch.zeros(buffer.group_size, device=where, dtype=torch.int32)
    layer = Decode(buffer, "bf16", device)
    for case in cases(3):
        assert torch.equal(layer.run(case).cpu().double(), case.dense(rank))
        buffer.low_latency_query_mask_buffer(masked)
        assert not masked.any()
        comm.allgather(None)
        buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        buffer.low_latency_clean_mask_buffer()
        comm.allgather(None)
    buffer.destroy()


def quantised_prefill(buffer: deep_ep.Buffer, device: str) -> None:
    """With a scale for each block of a row, as vLLM makes them for block-quantised models."""
    rank, layer = buffer.rank, Prefill(buffer)
    where = device_of(buffer, device)
    case = Case(50, TOKENS, EXPERTS, hidden=256)
    codes = case.x[rank].to(torch.float8_e4m3fn)
    scales = 1.0 + torch.arange(codes.shape[0] * 2).view(-1, 2).float() % 2
    wide = scales.repeat_interleave(128, 1).double()
    out = layer.run(case, (codes.to(where), scales.to(where)))
    assert torch.equal(out.cpu().double(), case.dense(rank, case.x[rank].double() * wide))


def two_micro_batches(first: deep_ep.Buffer, device: str) -> None:
    """Each rank runs three layers of two micro-batches on two threads, in both modes."""
    comm, rank = first.group, first.rank
    for buffer in (first, low_latency_buffer(comm)):
        where = device_of(buffer, device)

        def micro_batch(which: int, buffer: deep_ep.Buffer = buffer, where: Any = where) -> Any:
            def layers(switch: Callable[[], None]) -> None:
                device_of(buffer, device)  # a thread begins on the first GPU
                for case in cases(6)[which::2]:
                    if buffer is first:
                        out = Prefill(buffer, switch).run(case, case.x[rank].to(where), which)
                    else:
                        out = Decode(buffer, "bf16", device, switch).run(case, which)
                    assert torch.equal(out.cpu().double(), case.dense(rank))

            return layers

        Baton().run([micro_batch(0), micro_batch(1)])
        comm.allgather(None)
        if buffer is not first:
            buffer.destroy()


ALL = (
    prefill_and_decode_buffers,
    fault_tolerant_decode,
    quantised_prefill,
    two_micro_batches,
)
