"""`ElasticBuffer` of V2 against the definition, on ranks that are threads of one process."""

from __future__ import annotations

from typing import Any

import elastic_bodies as bodies
import pytest
import torch
from elastic_calls import MOST, dispatched
from rank_buffers import ThreadComm, run_buffers, run_ranks
from reference import make_job

import deep_ep
from deep_ep.errors import EPException

SIZES = (1, 2, 4, 8)
ON_CPU = [*bodies.EVERYWHERE, *bodies.IN_CPU_MEMORY]
ELASTIC: dict[str, Any] = {"kind": deep_ep.ElasticBuffer}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", ON_CPU, ids=lambda body: body.__name__)
def test_on_cpu(body: Any, size: int) -> None:
    run_buffers(size, lambda buffer: body(buffer, "cpu"), **ELASTIC)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_argument_of_the_constructor(size: int) -> None:
    """By name and by place; the modes that change results."""
    some = {
        "num_bytes": 4 << 20,
        "num_cpu_bytes": 4096,
        "num_max_tokens_per_rank": MOST,
        "hidden": 64,
        "num_topk": 3,
        "use_fp8_dispatch": True,
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
            deep_ep.ElasticBuffer(comm, **some),
            deep_ep.ElasticBuffer(comm, *some.values()),
        ):
            for name, value in some.items():
                if hasattr(buffer, name):
                    assert getattr(buffer, name) == value, name
            assert buffer.group is comm
            long = (bodies.every_combine, bodies.several_in_flight) if size < 4 else ()
            for one in (bodies.sizes, bodies.every_argument_at_once, *long):
                one(buffer, "cpu")
            comm.allgather(None)
            buffer.destroy()
            buffer.destroy()  # once more is nothing
            with pytest.raises(EPException, match="destroyed"):
                buffer.barrier()

    run_ranks(size, body)


def test_size_hints() -> None:
    def body(comm: ThreadComm) -> None:
        plain = deep_ep.ElasticBuffer.get_buffer_size_hint(comm, 4096, 7168, 8)
        assert deep_ep.ElasticBuffer.get_buffer_size_hint(comm, 0, 0) == 0
        made = deep_ep.ElasticBuffer(comm, None, 0, 4096, 7168, 8)
        assert made.num_bytes == plain
        comm.allgather(None)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_experts": None}, "num_experts: got None"),
        ({"num_max_tokens_per_rank": 2}, "num_max_tokens_per_rank: got 2; expected at least 13"),
        ({"expert_alignment": 0}, "expert_alignment: got 0"),
        ({"do_zero_padding": True}, "do_zero_padding: got True; expected do_expand"),
        ({"num_qps": 1000}, "num_qps: got 1000; expected 0 to 129"),
        ({"num_sms": -2}, "num_sms: got -2"),
        ({"topk_idx": torch.zeros(13, 3)}, "topk_idx: got torch.float32"),
        ({"topk_idx": torch.zeros(12, 3, dtype=torch.int64)}, "topk_idx: got .12, 3."),
        ({"topk_weights": torch.zeros(13, 4)}, "topk_weights"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(16)}, "recv_stats: got torch.float32"),
        ({"previous_event": deep_ep.EventHandle()}, "allocate_on_comm_stream: got False"),
    ],
    ids=lambda one: "" if isinstance(one, dict) else one.split(":")[0],
)
def test_wrong_dispatches(given: dict[str, Any], words: str) -> None:
    def body(buffer: Any) -> None:
        job = make_job(1)
        with pytest.raises(EPException, match=words):
            dispatched(buffer, "cpu", job, job.x[0], **given)

    run_buffers(1, body, **ELASTIC)


def test_wrong_uses_of_handles() -> None:
    def body(buffer: Any) -> None:
        job = make_job(1)
        got = dispatched(buffer, "cpu", job, job.x[0])
        for given, words in (
            ({"topk_idx": job.topk_idx[0]}, "topk_idx: got a tensor; expected None"),
            ({"do_cpu_sync": True}, "do_cpu_sync: got True"),
            ({"num_experts": 8}, "num_experts: got 8; expected 16, as of the handle"),
            ({"do_expand": True}, "do_expand: got True; expected False"),
            ({"handle": (1, 2)}, "handle: got tuple"),
            ({"num_sms": None}, "num_sms: got None; expected 0 or more"),
            ({"num_sms": True}, "num_sms: got True; expected 0 or more"),
        ):
            with pytest.raises(EPException, match=words):
                buffer.dispatch(job.x[0], **({"handle": got[3]} | given))
        with pytest.raises(EPException, match="x: got a tuple of 3; expected rows, or a tuple"):
            buffer.dispatch((job.x[0], None, None), handle=got[3])
        with pytest.raises(EPException, match="x: got 12 rows; expected 13"):
            buffer.dispatch(job.x[0][:12], handle=got[3])
        with pytest.raises(EPException, match="x: got 1 rows"):
            buffer.combine(got[0][:1], got[3])
        with pytest.raises(EPException, match="topk_weights"):
            buffer.combine(got[0], got[3], topk_weights=got[2][:, 0])
        with pytest.raises(EPException, match="handle: got NoneType"):
            buffer.combine(got[0], None)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = got[3].nothing

    run_buffers(1, body, **ELASTIC)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_bytes": 100}, "num_bytes: got 100; expected a multiple of 2097152"),
        ({"num_cpu_bytes": -1}, "num_cpu_bytes: got -1"),
        ({"num_gpu_timeout_secs": 0}, "num_gpu_timeout_secs: got 0"),
        ({"hidden": -1}, "hidden: got -1"),
        ({"sl_idx": None}, "sl_idx: got None"),
    ],
    ids=lambda one: "" if isinstance(one, dict) else one.split(":")[0],
)
def test_wrong_constructors(given: dict[str, Any], words: str) -> None:
    with pytest.raises(EPException, match=words):
        run_ranks(1, lambda comm: deep_ep.ElasticBuffer(comm, **given))
    with pytest.raises(ValueError, match="neither group nor comm"):
        deep_ep.ElasticBuffer(None)


def test_one_process_holds_both_faces() -> None:
    """A Buffer of 1.2.1 and one of V2, their calls in turn."""

    def body(comm: ThreadComm) -> None:
        old, new = deep_ep.Buffer(None, comm=comm), deep_ep.ElasticBuffer(comm)
        job = make_job(2, seed=3)
        rank, ids = comm.Get_rank(), job.topk_idx[comm.Get_rank()]
        layout = old.get_dispatch_layout(ids, 16)
        ours = dispatched(new, "cpu", job, job.x[rank])
        theirs = old.dispatch(
            job.x[rank],
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            topk_idx=ids,
        )
        assert torch.equal(ours[0], theirs[0])
        y = new.combine(ours[0], ours[3])[0], old.combine(theirs[0], theirs[4])[0]
        assert torch.equal(*y)
        comm.allgather(None)

    run_ranks(2, body)
