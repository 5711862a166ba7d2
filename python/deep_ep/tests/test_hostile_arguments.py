"""Arguments that no program means: refused in words, before anything is sent, and never read where
memory is gone."""

from __future__ import annotations

import inspect
from typing import Any

import idle_arguments
import numpy as np
import pytest
import torch
from elastic_calls import dispatched
from rank_buffers import ThreadComm, run_buffers, run_ranks
from reference import make_job

import deep_ep
import ferry
from deep_ep.errors import EPException
from deep_ep.utils.semantic import weak_lru

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
def test_numbers_of_v2(kind: Any) -> None:
    numbers = ["num_experts", "num_max_tokens_per_rank", "expert_alignment"]
    of_all = ["num_sms", "num_qps", "previous_event"]

    def body(buffer: Any) -> None:
        job = make_job(1)
        x, ids = job.x[0], job.topk_idx[0]
        given = {"x": x, "topk_idx": ids, "num_experts": 16, "num_max_tokens_per_rank": 32}
        for name in numbers + of_all:
            refused(buffer.dispatch, name, given)
        rows, _, _, handle, _ = dispatched(buffer, "cpu", job, x)
        for name in numbers + of_all:
            refused(buffer.dispatch, name, {"x": x, "handle": handle})
        for name in of_all:
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


class Unhashable:
    """Whose hash raises what no container expects."""

    def __hash__(self) -> int:
        raise ValueError("no hash")


@pytest.mark.parametrize("kind", NEW)
def test_what_was_known_lets_nothing_else_through(kind: Any) -> None:
    """What is equal to a good argument, or cannot be compared, after a good dispatch."""

    def body(buffer: Any) -> None:
        job = make_job(1)
        numbers = {"expert_alignment": 1, "num_sms": 1, "num_qps": 1}
        given = {"x": job.x[0], "topk_idx": job.topk_idx[0], "num_max_tokens_per_rank": 32}
        given |= {"num_experts": 16, "do_expand": True}
        for name in (*numbers, "do_expand"):
            for wrong in (True, 1.0, torch.tensor([1, 1]), [1], Unhashable()):
                if name == "do_expand" and wrong is True:
                    continue
                buffer.dispatch(**(given | numbers))
                with pytest.raises(EPException, match=f"dispatch: {name}: got"):
                    buffer.dispatch(**(given | numbers | {name: wrong}))

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

    names = ["num_bytes", "num_max_tokens_per_rank", "hidden", "num_topk"]
    names += ["num_cpu_timeout_secs", "num_gpu_timeout_secs"]
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


def test_numbers_of_low_latency_mode() -> None:
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
        for name in names:
            refused(buffer.low_latency_dispatch, name, given)
        for name in names:  # equal to what was checked before
            with pytest.raises(EPException, match="expected a positive integer"):
                buffer.low_latency_dispatch(**given | {name: 16.0})

    run_buffers(1, body, low_latency_mode=True)


def test_numbers_of_hybrid_calls() -> None:
    def body(buffer: Any) -> None:
        job = make_job(1)
        routes = {"hidden": job.x[0], "topk_idx": job.topk_idx[0], "num_of_experts": 16}
        for name in ("num_of_experts", "num_dispatched_tokens"):
            refused(buffer.dispatch, name, routes)
        for name in ("num_of_experts", "num_of_experts_per_rank", "pad_multiple"):
            refused(buffer.dispatch_with_permute, name, routes)
        found = buffer.dispatch_with_permute(**routes)
        answer = {"hidden": found[0], "handle": found[-1]}
        refused(buffer.combine_with_unpermute, "pad_multiple", answer)

    sizes = {"hidden_dim": 64, "max_num_of_tokens_per_rank": 32, "num_local_experts": 16}
    run_buffers(1, body, deep_ep.HybridEPBuffer, **sizes)


def test_gathers() -> None:
    def body(buffer: Any) -> None:
        given = {"shapes": (2, 4), "dtype": torch.float32}
        buffer.agrs_set_config(4096, 8)
        with buffer.agrs_new_session():
            for call, more in (
                (buffer.agrs_get_inplace_tensor, {}),
                (buffer.get_agrs_num_max_session_bytes, {"group": buffer.group}),
            ):
                refused(call, "dtype", given | more)
                for wrong in (5, None, "x", (-1,), [1.5], [(1,), 2], torch.ones(3), HUGE):
                    with pytest.raises(EPException, match="shapes: got"):
                        call(**given | more | {"shapes": wrong})
            for wrong in (5, None, "x", [5], freed(1.0, 2.0)):
                with pytest.raises((EPException, ferry.Error), match="all_gather: t: got"):
                    buffer.all_gather(wrong)
            gathered, _ = buffer.all_gather(torch.ones(3))
            assert gathered.tolist() == [[1, 1, 1]]

    run_buffers(1, body, deep_ep.ElasticBuffer)


@pytest.mark.parametrize("seconds", [1e9, 10**12, 0, -1.0, True, float("nan"), float("inf")])
def test_times_that_no_wait_takes(seconds: Any) -> None:
    """The argument is named, not the variable that may say the same."""
    for kind, given in (
        (deep_ep.ElasticBuffer, ()),
        (deep_ep.EPBuffer, ()),
        (deep_ep.BucketBuffer, (64,)),
        (deep_ep.PPBuffer, (64, 1)),
        (deep_ep.EngramBuffer, (0, 0, True, 1, 1)),
    ):
        with pytest.raises(EPException, match=f"{kind.__name__}: num_gpu_timeout_secs: got"):
            kind(ThreadComm(ferry.threads(1)[0]), *given, num_gpu_timeout_secs=seconds)


def flags_of(call: Any) -> list[str]:
    """Its arguments that are True or False, by name."""
    return [
        name
        for name, one in inspect.signature(call).parameters.items()
        if one.annotation in ("bool", "bool | None") and one.kind != one.POSITIONAL_ONLY
    ]


class Flags:
    """Refuses what is neither True nor False, call by call."""

    def __init__(self) -> None:
        self.tried: set[Any] = set()

    def __call__(self, call: Any, **given: Any) -> None:
        own = call.__init__ if inspect.isclass(call) else call
        self.tried.add(inspect.unwrap(getattr(own, "__func__", own)))

        def whole(**given: Any) -> None:
            made = call(**given)
            if hasattr(made, "__enter__"):
                made.__enter__()

        for name in flags_of(call):
            refused(whole, name, given)


def test_flags_of_every_call() -> None:
    refuse = Flags()
    job = make_job(1)
    x, ids = job.x[0], job.topk_idx[0]

    def first(comm: ThreadComm) -> None:
        refuse(deep_ep.BufferBase)
        refuse(deep_ep.Buffer, group=None, comm=comm)
        buffer = deep_ep.Buffer(None, comm=comm, low_latency_mode=True, enable_shrink=True)
        refuse(buffer.get_dispatch_layout, topk_idx=ids, num_experts=16)
        for name in ("dispatch", "internode_dispatch"):
            refuse(getattr(buffer, name), x=x)
        for name in ("combine", "internode_combine"):
            refuse(getattr(buffer, name), x=x, handle=None)
        refuse(buffer.get_local_buffer_tensor, dtype=torch.int8)
        sizes = {"num_max_dispatch_tokens_per_rank": 16, "num_experts": 16}
        refuse(buffer.low_latency_dispatch, x=x, topk_idx=ids, **sizes)
        rows = {"x": x, "topk_idx": ids, "topk_weights": None, "handle": None}
        refuse(buffer.low_latency_combine, **rows)
        refuse(buffer.low_latency_update_mask_buffer, rank_to_mask=1)
        event = deep_ep.Buffer.capture()
        refuse(event.current_stream_wait)
        refuse(event.__call__)

    def later(comm: ThreadComm) -> None:
        sizes = {"num_max_tokens_per_rank": 32, "hidden": 64}
        for kind in NEW:
            refuse(kind, group=comm)
            refuse(kind.get_buffer_size_hint, group=comm, **sizes)
            buffer: Any = kind(comm)
            how = {"num_experts": 16, "num_max_tokens_per_rank": 32}
            refuse(buffer.dispatch, x=x, topk_idx=ids, **how)
            rows, _, _, handle, _ = dispatched(buffer, "cpu", job, x)
            refuse(buffer.dispatch, x=x, handle=handle)
            refuse(buffer.combine, x=rows, handle=handle)
            refuse(buffer.barrier)
        refuse(deep_ep.comm.barrier, buffer=buffer)
        refuse(deep_ep.comm.get_logical_domain_size, group_or_buffer=buffer)
        refuse(deep_ep.get_logical_domain_size, group=buffer)
        refuse(deep_ep.utils.envs.domain_sizes, group=buffer)
        refuse(buffer.runtime.get_logical_domain_size)
        refuse(weak_lru)
        elastic = deep_ep.ElasticBuffer(comm)
        refuse(elastic.agrs_new_session)
        refuse(elastic.engram_fetch, indices=None)

    def others(comm: ThreadComm) -> None:
        bucket = {"allocation_plan_or_num_bytes": 64}
        refuse(deep_ep.BucketBuffer, group=comm, **bucket)
        refuse(deep_ep.BucketBuffer(comm, 64).barrier)
        pipeline = {"num_max_tensor_bytes": 64, "num_max_inflight_tensors": 1}
        refuse(deep_ep.PPBuffer, group=comm, **pipeline)
        names = ("num_gpu_bytes", "num_rdma_storage_bytes", "use_cpu_rdma_storage")
        tables = dict(zip((*names, "num_allocated_qps", "qp_depth"), (0, 1 << 20, True, 1, 1)))
        refuse(deep_ep.EngramBuffer, group=comm, **tables)
        engram = deep_ep.EngramBuffer(comm, *tables.values())
        refuse(engram.barrier)
        engram.set_config([4], 16, 2, 1)
        refuse(engram.fetch, indices=None)
        sizes = {"hidden_dim": 64, "max_num_of_tokens_per_rank": 32, "num_local_experts": 16}
        refuse(deep_ep.HybridEPBuffer, group=comm, **sizes)
        hybrid = deep_ep.HybridEPBuffer(comm, **sizes)
        refuse(hybrid.dispatch_with_permute, hidden=x, topk_idx=ids, num_of_experts=16)
        refuse(hybrid.combine_with_unpermute, hidden=x)
        refuse(hybrid.update_template_config)
        refuse(hybrid.configurer.get_default_config)
        refuse(hybrid.configurer.adjust_template, config=hybrid.update_template_config())

    for body in (first, later, others):
        run_ranks(1, body)
    every = {inspect.unwrap(one): name for name, one in idle_arguments.calls() if flags_of(one)}
    assert sorted(every[one] for one in set(every) - refuse.tried) == []


@pytest.mark.parametrize(("yes", "no"), [(1, 0), (np.True_, np.False_), (True, None)])
def test_what_stands_for_a_flag(yes: Any, no: Any) -> None:
    """In every face, as True and False."""
    job = make_job(1)
    x, ids, weights = job.x[0], job.topk_idx[0], job.topk_weights[0]

    def body(comm: ThreadComm) -> None:
        old = deep_ep.Buffer(None, comm=comm, low_latency_mode=yes, enable_shrink=no)
        assert old.get_dispatch_layout(ids, 16, async_finish=yes)[4].event is not None
        rows, _, handle, event, hook = old.low_latency_dispatch(
            x, ids, 16, 16, use_fp8=no, async_finish=no, return_recv_hook=yes
        )
        assert event.event is None
        assert hook is not None
        hook()
        y, _, hook = old.low_latency_combine(rows, ids, weights, handle, return_recv_hook=no)
        assert hook is None and y.shape == x.shape
        for kind in NEW:
            buffer = kind(comm, allow_hybrid_mode=no, deterministic=yes)
            how = {"do_expand": yes, "do_cpu_sync": no, "async_with_compute_stream": yes}
            sizes = {"num_experts": 16, "num_max_tokens_per_rank": 32}
            rows, _, _, handle, event = buffer.dispatch(x, ids, **sizes, **how)
            assert event.event is not None and len(rows) == handle.num_expanded_tokens
            assert buffer.combine(rows, handle, async_with_compute_stream=no)[2].event is None
            buffer.barrier(no, yes, no)

    run_ranks(1, body)


@pytest.mark.parametrize("kind", NEW)
def test_tensors_without_memory_of_their_own(kind: Any) -> None:
    def others(one: torch.Tensor) -> list[torch.Tensor]:
        return [one.to("meta"), one.to_sparse(), torch.nested.nested_tensor([one])]

    def body(buffer: Any) -> None:
        job = make_job(1)
        stats = torch.zeros(16, dtype=torch.int32)
        given = {
            "x": job.x[0],
            "topk_idx": job.topk_idx[0],
            "topk_weights": job.topk_weights[0],
            "cumulative_local_expert_recv_stats": stats,
        }
        sizes = {"num_experts": 16, "num_max_tokens_per_rank": 32}
        rows, _, weights, handle, _ = buffer.dispatch(**given, **sizes)
        answer = {"x": rows, "topk_weights": weights, "bias": job.x[0]}
        for call, arguments, more in (
            (buffer.dispatch, given, sizes),
            (buffer.combine, answer, {"handle": handle}),
        ):
            for name, one in arguments.items():
                for wrong in others(one):
                    with pytest.raises((EPException, ferry.Error), match=r"got .*; expected"):
                        call(**arguments | more | {name: wrong})
        name = "cumulative_local_expert_recv_stats"
        with pytest.raises(EPException, match=f"{name}: got one element expanded"):
            buffer.dispatch(**given | sizes | {name: stats[:1].expand(16)})
        for name in ("sm_read_gbs", "sm_write_gbs"):
            with pytest.raises(EPException, match=f"{name}: got torch.float32 of shape"):
                buffer.get_theoretical_num_sms(16, 2, **{name: torch.ones(3)})

    run_buffers(1, body, kind)
