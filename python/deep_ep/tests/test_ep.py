"""`EPBuffer` and `BufferAllocator` of V2.5, on ranks that are threads of one process."""

from __future__ import annotations

import re
from typing import Any

import elastic_bodies as bodies
import pytest
import torch
from elastic_calls import MOST, dispatched
from rank_buffers import ThreadComm, run_buffers, run_ranks
from reference import make_job

import deep_ep
import ferry
from deep_ep.errors import EPException

SIZES = (1, 2, 4, 8)
ON_CPU = [*bodies.EVERYWHERE, *bodies.IN_CPU_MEMORY]
EP: dict[str, Any] = {"kind": deep_ep.EPBuffer}
MIB = 1 << 20


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", ON_CPU, ids=lambda body: body.__name__)
def test_as_an_elastic_buffer(body: Any, size: int) -> None:
    run_buffers(size, lambda buffer: body(buffer, "cpu"), **EP)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", bodies.DEFERRED, ids=lambda body: body.__name__)
def test_what_v25_adds(body: Any, size: int) -> None:
    run_buffers(size, lambda buffer: body(buffer, "cpu"), **EP)


@pytest.mark.parametrize("size", SIZES)
def test_every_argument_of_the_constructor(size: int) -> None:
    some = {
        "num_bytes": 4 * MIB,
        "num_max_tokens_per_rank": MOST,
        "hidden": 64,
        "num_topk": 3,
        "use_fp8_dispatch": True,
        "lb_allocation_plan_or_num_bytes": 2 * MIB,
        "deterministic": True,
        "allow_hybrid_mode": False,
        "allow_multiple_reduction": False,
        "prefer_overlap_with_compute": False,
        "sl_idx": 0,
        "num_allocated_qps": 5,
        "num_cpu_timeout_secs": 50,
        "num_gpu_timeout_secs": 60,
        "explicitly_destroy": True,
    }

    def body(comm: ThreadComm) -> None:
        for buffer in (
            deep_ep.EPBuffer(comm, **some),  # type: ignore[arg-type]
            deep_ep.EPBuffer(comm, *some.values()),  # type: ignore[arg-type]
        ):
            for name, value in some.items():
                if hasattr(buffer, name):
                    assert getattr(buffer, name) == value, name
            assert buffer.num_lb_bytes == 2 * MIB and isinstance(buffer, deep_ep.BufferBase)
            bodies.sizes(buffer, "cpu")
            bodies.every_argument_at_once(buffer, "cpu")
            bodies.deferred_combines(buffer, "cpu")
            comm.allgather(None)
            buffer.destroy()
            assert buffer.runtime is None and buffer.main_context is None

    run_ranks(size, body)


def test_plans() -> None:
    plan = deep_ep.BufferAllocator()
    a, b = plan.allocate((2, 3), torch.float32), plan.allocate((5,), torch.bfloat16)
    assert a.is_meta and b.is_meta and plan.alignment == deep_ep.get_num_allocation_alignment()
    assert plan.num_bytes == 2 * plan.alignment
    with pytest.raises(EPException, match=r"storage: got torch\.uint8 of shape"):
        plan.materialize(torch.zeros(8, dtype=torch.uint8))
    storage = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    plan.materialize(storage)
    assert a.shape == (2, 3) and b.dtype == torch.bfloat16
    a.fill_(1)
    b.fill_(2)
    assert storage[:24].view(torch.float32).tolist() == [1] * 6
    assert storage[plan.alignment :][:10].view(torch.bfloat16).tolist() == [2] * 5
    assert storage.count_nonzero() == 6 * 2 + 5
    for call in (lambda: plan.allocate((1,), torch.int8), lambda: plan.materialize(storage)):
        with pytest.raises(EPException, match="one that has its memory; expected a new plan"):
            call()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"do_handle_copy": True}, "do_handle_copy: got True"),
        ({"defer_epilogue": True}, "defer_epilogue: got True; expected async_with_compute_stream"),
    ],
)
def test_wrong_dispatches(given: dict[str, Any], words: str) -> None:
    def body(buffer: Any) -> None:
        job = make_job(1)
        with pytest.raises(EPException, match=words):
            dispatched(buffer, "cpu", job, job.x[0], **given)
        with pytest.raises(EPException, match="defer_epilogue"):
            buffer.combine(
                job.x[0], dispatched(buffer, "cpu", job, job.x[0])[3], defer_epilogue=True
            )
        buffer.barrier(context_idx=0)
        with pytest.raises(EPException, match="context_idx: got 1"):
            buffer.barrier(context_idx=1)

    run_buffers(1, body, **EP)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("defer", [False, True])
def test_wrong_biases(expand: bool, defer: bool) -> None:
    """Also where they are added here, by torch, which would take any shape."""

    def body(buffer: Any) -> None:
        job = make_job(1)
        x = job.x[0]
        rows, _, _, handle, _ = dispatched(buffer, "cpu", job, x, do_expand=expand)
        how = {"async_with_compute_stream": True, "defer_epilogue": defer}
        gone = x.clone()
        gone.untyped_storage().resize_(0)
        wanted = re.escape(f"expected a contiguous tensor of torch.bfloat16, shape {(13, 64)}")
        for bias, words in (
            (x[:1], wanted),
            ((None, x[:, :1].contiguous()), wanted),
            ((x, x.float()), wanted),
            (x.to("meta"), "bias: got meta; expected cpu"),
            (gone, "bias: got a tensor whose storage was resized to 0 bytes"),
        ):
            with pytest.raises((EPException, ferry.InvalidArgumentError), match=words):
                buffer.combine(rows, handle, bias=bias, **how)
        assert buffer.combine(rows, handle, bias=x, **how) is not None

    run_buffers(1, body, **EP, allow_multiple_reduction=False)


def test_wrong_regions() -> None:
    for wrong in (1, -5, True, 2.0):
        how = {**EP, "lb_allocation_plan_or_num_bytes": wrong}
        with pytest.raises(EPException, match="lb_allocation_plan_or_num_bytes: got"):
            run_buffers(1, lambda buffer: None, **how)

    def body(buffer: Any) -> None:
        region, own = buffer._lb_storage[:64].view(torch.float32).view(2, 8), torch.zeros(3, 8)
        mapping = torch.full((1, 2), -1, dtype=torch.int32)
        for given, words in (
            ((torch.zeros(2, 8), own, mapping), "lies elsewhere"),
            ((region, own[:, :4].contiguous(), mapping), "got 16 bytes; expected a multiple of 32"),
            ((region, own, mapping.long()), "redundancy_mapping: got torch.int64"),
            (([region], [own, own], mapping), "1 and 2 tensors"),
            ((region, own, mapping, 4), "num_sms: got 4"),
        ):
            with pytest.raises(EPException, match=words):
                buffer.lb_prefetch_weights(*given)
        with pytest.raises(EPException, match="lies elsewhere"):
            buffer.lb_reduce_grads(own, own, mapping)

    run_buffers(1, body, **EP, lb_allocation_plan_or_num_bytes=2 * MIB)


def test_plans_of_what_is_no_tensor() -> None:
    plan = deep_ep.BufferAllocator()
    for wrong in (5, None, (-1,), "x", (1.5,), (1 << 62,), [(2,), (3,)]):
        with pytest.raises(EPException, match="allocate: shapes: got"):
            plan.allocate(wrong, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(EPException, match="allocate: dtype: got 'x'"):
        plan.allocate((2,), "x")  # type: ignore[arg-type]
    assert plan.num_bytes == 0
    viewed = plan.allocate((4,), torch.float32)
    view = viewed.view(2, 2)
    with pytest.raises(EPException, match="with views or weak references"):
        plan.materialize(torch.zeros(plan.num_bytes, dtype=torch.uint8))
    assert view.is_meta


def test_what_a_deferred_combine_reads_later() -> None:
    """As one that is not deferred: no gradient, and nothing that was freed."""

    def body(buffer: Any) -> None:
        x, ids = torch.ones(4, 64), torch.zeros(4, 1, dtype=torch.int64)
        rows, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=ids, num_experts=2, num_max_tokens_per_rank=8
        )
        how = {"async_with_compute_stream": True, "defer_epilogue": True}
        bias = torch.ones(4, 64, requires_grad=True)
        y, _ = buffer.combine(rows, handle, bias=bias, **how).wait()
        assert not y.requires_grad and (y == 2).all()
        event = buffer.combine(rows, handle, bias=x, **how)
        x.untyped_storage().resize_(0)
        with pytest.raises(ferry.Error, match="bias: got a tensor whose storage was resized"):
            event.wait()

    run_buffers(1, body, deep_ep.EPBuffer)
