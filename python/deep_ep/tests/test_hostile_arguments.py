"""Arguments that no program means: refused in words, before anything is sent, and never read where
memory is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elastic_calls import dispatched
from rank_buffers import ThreadComm, run_buffers
from reference import make_job

import deep_ep
import ferry
from deep_ep.errors import EPException

HUGE = 10**30
NEW = [deep_ep.ElasticBuffer, deep_ep.EPBuffer]


def freed(*elements: Any) -> torch.Tensor:
    tensor = torch.tensor(elements if len(elements) > 1 else elements[0])
    tensor.untyped_storage().resize_(0)
    return tensor


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def hostile() -> dict[str, Any]:
    """None of them is a number or a flag."""
    return {
        "a list": [1],
        "a dict": {},
        "a word": "x",
        "a complex number": 1j,
        "a tensor": torch.ones(3),
        "a freed tensor": freed(1.0, 2.0, 3.0),
        "a freed number": freed(1),
        "a freed flag": freed(True),
        "a list of freed tensors": [freed(1.0, 2.0)],
        "what cannot be printed": Unprintable(),
        "a huge number": HUGE,
        "a tensor of no memory": torch.ones(1, device="meta"),
    }


def refused(call: Any, argument: str, given: dict[str, Any]) -> None:
    for what, value in hostile().items():
        with pytest.raises((EPException, ferry.Error)) as error:
            call(**given | {argument: value})
            pytest.fail(f"{argument}, {what}: nothing was raised")
        text = str(error.value)
        assert "expected" in text and len(text) < 400, f"{argument}, {what}: {text}"


@pytest.mark.parametrize("kind", NEW)
def test_numbers_and_flags_of_v2(kind: Any) -> None:
    numbers = ["num_experts", "num_max_tokens_per_rank", "expert_alignment"]
    of_all = ["num_sms", "num_qps", "async_with_compute_stream", "allocate_on_comm_stream"]
    flags = ["do_handle_copy", "do_cpu_sync", "do_expand", "do_zero_padding", "previous_event"]
    flags.append("use_tma_aligned_col_major_sf")

    def body(buffer: Any) -> None:
        job = make_job(1)
        x, ids = job.x[0], job.topk_idx[0]
        given = {"x": x, "topk_idx": ids, "num_experts": 16, "num_max_tokens_per_rank": 32}
        for name in numbers + of_all + flags:
            refused(buffer.dispatch, name, given)
        rows, _, _, handle, _ = dispatched(buffer, "cpu", job, x)
        for name in numbers + of_all + flags:
            refused(buffer.dispatch, name, {"x": x, "handle": handle})
        for name in [*of_all, "previous_event"]:
            refused(buffer.combine, name, {"x": rows, "handle": handle})
        for name in ("num_topk", "num_scaleout_topk"):
            refused(buffer.get_theoretical_num_sms, name, {"num_experts": 16, "num_topk": 2})

    run_buffers(1, body, kind)


@pytest.mark.parametrize("kind", NEW)
def test_a_number_that_changes_is_read_anew(kind: Any) -> None:
    """Also where a dispatch with this very object was checked before."""

    def body(buffer: Any) -> None:
        job = make_job(1)
        experts = torch.tensor(job.experts)
        for wanted in (job.experts, 2 * job.experts):
            experts.fill_(wanted)
            handle = dispatched(buffer, "cpu", job, job.x[0], num_experts=experts)[3]
            assert handle.num_experts == wanted
            assert type(handle.num_experts) is int

    run_buffers(1, body, kind)


@pytest.mark.parametrize("kind", NEW)
def test_fields_that_callers_set(kind: Any) -> None:
    def body(buffer: Any) -> None:
        job = make_job(1)
        for name in ("expert_alignment", "num_sms"):
            for wrong in (*hostile().values(), -1, True):
                handle = dispatched(buffer, "cpu", job, job.x[0], do_expand=True)[3]
                setattr(handle, name, wrong)
                with pytest.raises(EPException, match=f"dispatch: handle.{name}: got"):
                    buffer.dispatch(job.x[0], handle=handle, do_expand=True)

    run_buffers(1, body, kind)


@pytest.mark.parametrize("kind", NEW)
def test_constructors(kind: Any) -> None:
    def made(**given: Any) -> Any:
        return kind(ThreadComm(ferry.threads(1)[0]), **given)

    names = ["num_bytes", "num_max_tokens_per_rank", "hidden", "num_topk", "use_fp8_dispatch"]
    names += ["deterministic", "allow_hybrid_mode", "explicitly_destroy"]
    if kind is deep_ep.EPBuffer:
        names.append("lb_allocation_plan_or_num_bytes")
    for name in names:
        refused(made, name, {})


def test_copies_of_experts() -> None:
    def body(buffer: Any) -> None:
        copies = buffer._lb_storage.view(torch.float32)[:128].view(2, 64)
        table = torch.full((1, 2), -1, dtype=torch.int32)
        given = {"redundancy_mapping": table}
        weights = given | {"redundant_expert_weights": copies, "expert_weights": torch.ones(2, 64)}
        for name in [*weights, "num_sms", "previous_event"]:
            refused(buffer.lb_prefetch_weights, name, weights)
        grads = given | {"redundant_expert_grads": copies, "expert_grads": torch.ones(2, 64)}
        for name in [*grads, "num_sms", "previous_event"]:
            refused(buffer.lb_reduce_grads, name, grads)

    run_buffers(1, body, deep_ep.EPBuffer, lb_allocation_plan_or_num_bytes=2 << 20)


def test_buckets() -> None:
    def body(buffer: Any) -> None:
        given = {"srcs": buffer.storage[:64].view(torch.float32)}
        for name in ("srcs", "dsts", "num_sms"):
            refused(buffer.all_gather, name, given)
        for call in (buffer.reduce_scatter, buffer.all_reduce):
            for name in ("srcs", "num_sms"):
                refused(call, name, given)
            for wrong in hostile().values():
                if wrong is not HUGE:
                    with pytest.raises(EPException, match="scale: got"):
                        call(**given, scale=wrong)
        refused(buffer.reduce_scatter, "comm_precision", given)

    run_buffers(1, body, deep_ep.BucketBuffer, allocation_plan_or_num_bytes=1 << 20)


def test_low_latency_numbers_and_flags() -> None:
    def body(buffer: Any) -> None:
        job = make_job(1)
        given = {
            "x": job.x[0],
            "topk_idx": job.topk_idx[0],
            "num_max_dispatch_tokens_per_rank": 16,
            "num_experts": 16,
        }
        buffer.low_latency_dispatch(**given)
        names = ("num_max_dispatch_tokens_per_rank", "num_experts")
        for name in (*names, "use_fp8", "round_scale", "use_nvfp4", "use_ue8m0_for_sf"):
            refused(buffer.low_latency_dispatch, name, given)
        for name in names:  # equal to what was checked before
            with pytest.raises(EPException, match="expected a positive integer"):
                buffer.low_latency_dispatch(**given | {name: 16.0})

    run_buffers(1, body, low_latency_mode=True)


def test_hybrid_numbers_and_flags() -> None:
    def body(buffer: Any) -> None:
        job = make_job(1)
        routes = {"hidden": job.x[0], "topk_idx": job.topk_idx[0], "num_of_experts": 16}
        for name in ("num_of_experts", "num_dispatched_tokens"):
            refused(buffer.dispatch, name, routes)
        for name in ("num_of_experts", "num_of_experts_per_rank", "pad_multiple", "use_fp8"):
            refused(buffer.dispatch_with_permute, name, routes)
        found = buffer.dispatch_with_permute(**routes)
        answer = {"hidden": found[0], "handle": found[-1]}
        refused(buffer.combine_with_unpermute, "pad_multiple", answer)

    sizes = {"hidden_dim": 64, "max_num_of_tokens_per_rank": 32, "num_local_experts": 16}
    run_buffers(1, body, deep_ep.HybridEPBuffer, **sizes)
