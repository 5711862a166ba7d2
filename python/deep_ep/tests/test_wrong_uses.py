"""Wrong uses raise what callers expect, and the Buffer goes on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from buffer_bodies import round_trip
from rank_buffers import ThreadComm, run_buffers, run_ranks
from reference import arrived, make_job, shared_job
from throughput_bodies import every_dispatch
from throughput_calls import dispatched

import deep_ep
import ferry
from deep_ep import errors
from deep_ep.errors import EPException

E4M3 = torch.float8_e4m3fn


def wrong_calls(buffer: Any) -> dict[str, Any]:
    """Calls by what is wrong with them."""
    job = make_job(buffer.group_size, tokens_of=(5, 4))  # wrong on all ranks alike
    x, idx, weights = job.x[buffer.rank], job.topk_idx[buffer.rank], job.topk_weights[buffer.rank]
    per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, job.experts)
    got = dispatched(buffer, "cpu", job, x)
    handle, rows = got[4], got[0]
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_ranks,
        "num_tokens_per_expert": per_expert,
    }

    def dispatch(x: Any = x, **changes: Any) -> Any:
        given = layout | {"topk_idx": idx, "topk_weights": weights} | changes
        return lambda: buffer.dispatch(x, **given)

    def combine(rows: Any = rows, handle: Any = handle, **changes: Any) -> Any:
        return lambda: buffer.combine(rows, handle, **changes)

    def get_layout(*args: Any, **kwargs: Any) -> Any:
        return lambda: buffer.get_dispatch_layout(*args, **kwargs)

    return {
        "routes of one dimension": get_layout(idx[:, 0], 16),
        "routes of floats": get_layout(idx.float(), 16),
        "no experts": get_layout(idx, 0),
        "None for experts": get_layout(idx, None),
        "half an expert": get_layout(idx, 16.5),
        "True for experts": get_layout(idx, True),
        "the communication stream without an event": get_layout(
            idx, 16, async_finish=True, allocate_on_comm_stream=True
        ),
        "the communication stream without async_finish": get_layout(
            idx, 16, previous_event=buffer.capture(), allocate_on_comm_stream=True
        ),
        "no layout": dispatch(num_tokens_per_rank=None),
        "no is_token_in_rank": dispatch(is_token_in_rank=None),
        "no num_tokens_per_expert": dispatch(num_tokens_per_expert=None),
        "routes beside a handle": dispatch(handle=handle),
        "not a handle": dispatch(handle=(1, 2), topk_idx=None, topk_weights=None),
        "a handle of no tensors": dispatch(handle=(1,) * 6, topk_idx=None, topk_weights=None),
        "a part of a handle": combine(handle=tuple(handle)[:5]),
        "a handle of other tensors": combine(handle=(torch.zeros(1),) * 6),
        "ten other tensors": combine(handle=(torch.zeros(1),) * 10),
        "a handle in another order": combine(handle=tuple(handle)[::-1]),
        "a handle of zeros": combine(handle=tuple(torch.zeros_like(one) for one in handle)),
        "a handle of freed copies": combine(handle=tuple(freed(one) for one in handle)),
        "freed routes": get_layout(freed(idx), 16),
        "freed marks": dispatch(is_token_in_rank=freed(in_ranks)),
        "freed experts": dispatch(
            topk_idx=None, topk_weights=None, num_tokens_per_expert=freed(per_expert)
        ),
        "freed rows": dispatch(freed(x)),
        "rows behind others that were freed": dispatch(freed(torch.cat((x, x)), len(x))),
        "a freed bias": combine(bias=freed(x)),
        "freed weights of other slots": combine(topk_weights=freed(got[2][:, :2].contiguous())),
        "rows alone in a tuple": dispatch((x,)),
        "rows and two scales": dispatch((x.to(E4M3), torch.ones(len(x), 1), torch.ones(1))),
        "a handle of numbers": combine(handle=(*[torch.tensor(1)] * 4, in_ranks, torch.tensor(1))),
        "x of one dimension": dispatch(x[:, 0]),
        "x that is no tensor": dispatch(x.tolist()),
        "x with gaps": dispatch(x[:, ::2]),
        "rows of 8 bytes": dispatch(x[:, :4].contiguous()),
        "layout of fewer ranks": dispatch(num_tokens_per_rank=per_rank[:1]),
        "layout that is a list": dispatch(num_tokens_per_rank=per_rank.tolist()),
        "marks that are a list": dispatch(is_token_in_rank=in_ranks.tolist()),
        "experts that are a list": dispatch(num_tokens_per_expert=per_expert.tolist()),
        "a worst case of half a row": dispatch(num_worst_tokens=99.5),
        "layout of fewer tokens": dispatch(is_token_in_rank=in_ranks[1:]),
        "a layout of other routes": dispatch(is_token_in_rank=torch.zeros_like(in_ranks)),
        "as many marks, of other tokens": dispatch(is_token_in_rank=of_other_tokens(in_ranks)),
        "layout that is not bool": dispatch(is_token_in_rank=in_ranks.int()),
        "no expert at all": dispatch(num_tokens_per_expert=per_expert[:0]),
        "routes of fewer tokens": dispatch(topk_idx=idx[1:], topk_weights=weights[1:]),
        "weights of doubles": dispatch(topk_weights=weights.double()),
        "weights of fewer slots": dispatch(topk_weights=weights[:, :2]),
        "weights without routes": dispatch(topk_idx=None),
        "a worst case without routes": dispatch(
            topk_idx=None, topk_weights=None, num_worst_tokens=100
        ),
        "a negative worst case": dispatch(num_worst_tokens=-1),
        "an alignment of 0": dispatch(expert_alignment=0),
        "an odd number of SMs": dispatch(config=deep_ep.Config(21)),
        "a number as config": dispatch(config=20),
        "local memory of no dtype": lambda: buffer.get_local_buffer_tensor(None),
        "local memory from half a byte on": lambda: buffer.get_local_buffer_tensor(E4M3, None, 0.5),
        "local memory of no shape": lambda: buffer.get_local_buffer_tensor(E4M3, "all"),
        "scales beside two-byte rows": dispatch((x, torch.ones(len(x), 1))),
        "scales of fewer tokens": dispatch((x.to(E4M3), torch.ones(1, 1))),
        "scales of one dimension": dispatch((x.to(E4M3), torch.ones(len(x)))),
        "scales of bf16": dispatch((x.to(E4M3), torch.ones(len(x), 1).bfloat16())),
        "fewer rows than received": combine(rows[1:]),
        "rows that cannot be added": combine(rows.to(E4M3)),
        "other SMs than the dispatch": combine(config=deep_ep.Config(24)),
        "again with other SMs": dispatch(
            handle=handle, topk_idx=None, topk_weights=None, config=deep_ep.Config(24)
        ),
        "returned weights of doubles": combine(topk_weights=got[2].double()),
        "returned weights of fewer rows": combine(topk_weights=got[2][1:]),
        "bias of another dtype": combine(bias=x.float()),
        "bias of fewer tokens": combine(bias=x[1:].contiguous()),
        "three biases": combine(bias=(x, x, x)),
        "bias that is no tensor": combine(bias=3.0),
    }


def freed(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """A copy, or its rows from the first on, whose memory is gone, as programs free tensors."""
    copy = tensor.clone()[first:]
    copy.untyped_storage().resize_(0)
    return copy


def of_other_tokens(in_ranks: torch.Tensor) -> torch.Tensor:
    """The same number of marks for each rank."""
    other = in_ranks.flip(0)
    assert not other.equal(in_ranks)
    return other


def test_marks_of_other_tokens_are_named() -> None:
    """On the rank alone that gave them; the others have their rows."""

    def body(buffer: Any) -> None:
        job = make_job(2, tokens_of=(5, 4))
        x, idx = job.x[buffer.rank], job.topk_idx[buffer.rank]
        per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, job.experts)
        wrong = in_ranks.clone()
        wrong[2] = ~wrong[2]
        given = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": wrong if buffer.rank == 1 else in_ranks,
            "num_tokens_per_expert": per_expert,
            "topk_idx": idx,
        }
        if buffer.rank == 0:
            assert buffer.dispatch(x, **given)[0].shape[0] == arrived(job, 0).token.numel()
            return
        marked, routed = (one[2].nonzero().flatten().tolist() for one in (wrong, in_ranks))
        words = re.escape(f"ranks {marked} for token 2; expected {routed}, as topk_idx says")
        with pytest.raises(AssertionError, match=words):
            buffer.dispatch(x, **given)

    run_buffers(2, body)


def test_wrong_calls() -> None:
    def body(buffer: Any) -> None:
        for what, call in wrong_calls(buffer).items():
            with pytest.raises((AssertionError, ValueError, RuntimeError)) as error:
                call()
                pytest.fail(f"{what}: nothing was raised")
            text = str(error.value)
            assert "expected" in text, f"{what}: {text}"
        every_dispatch(buffer, "cpu")  # the Buffer goes on

    run_buffers(2, body)


def test_more_than_the_worst_case_is_an_error_on_all_ranks() -> None:
    def body(buffer: Any) -> None:
        job = make_job(buffer.group_size)
        with pytest.raises(RuntimeError, match="max_recv_rows"):
            dispatched(buffer, "cpu", job, job.x[buffer.rank], num_worst_tokens=3)
        dispatched(buffer, "cpu", job, job.x[buffer.rank])

    run_buffers(2, body)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRY_DEADLINE", "0.5")

    def body(comm: ThreadComm) -> None:
        buffer = deep_ep.Buffer(None, comm=comm)
        job = make_job(2)
        dispatched(buffer, "cpu", job, job.x[buffer.rank])
        if buffer.rank == 0:
            with pytest.raises(RuntimeError, match="rank 1") as error:
                dispatched(buffer, "cpu", job, job.x[buffer.rank])
            assert isinstance(error.value, TimeoutError)
        comm.allgather(None)

    run_ranks(2, body)


def test_after_destroy() -> None:
    def body(comm: ThreadComm) -> None:
        how = {"explicitly_destroy": True, "low_latency_mode": True, "enable_shrink": True}
        buffer = deep_ep.Buffer(None, comm=comm, **how)
        job, runtime = make_job(1), buffer.runtime
        rows, *_, handle, _ = dispatched(buffer, "cpu", job, job.x[0])
        x, idx, weights = job.x[0], job.topk_idx[0], job.topk_weights[0]
        per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, job.experts)
        layout = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_ranks,
            "num_tokens_per_expert": per_expert,
        }
        sent, _, ours, *_ = buffer.low_latency_dispatch(x, idx, 16, job.experts, use_fp8=False)
        buffer.destroy()
        buffer.destroy()  # once more does nothing
        assert rows.float().sum().isfinite()  # results stay
        for call in (
            lambda: dispatched(buffer, "cpu", job, job.x[0]),
            lambda: buffer.get_dispatch_layout(idx, job.experts),
            lambda: buffer.dispatch(job.x[0], **layout, topk_idx=idx),
            lambda: buffer.dispatch(job.x[0], handle=handle),
            lambda: buffer.dispatch(job.x[0], handle=handle, async_finish=True),
            lambda: buffer.combine(rows, handle),
            lambda: buffer.low_latency_dispatch(x, idx, 16, job.experts),
            lambda: buffer.low_latency_combine(sent, idx, weights, ours),
            lambda: buffer.get_next_low_latency_combine_buffer(ours),
            lambda: buffer.get_local_buffer_tensor(torch.uint8),
            lambda: buffer.get_comm_stream(),
            lambda: runtime.get_local_buffer_tensor(torch.uint8),
            lambda: buffer.clean_low_latency_buffer(16, 64, job.experts),
            lambda: buffer.low_latency_update_mask_buffer(1, True),
            lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
            lambda: buffer.low_latency_clean_mask_buffer(),
        ):
            with pytest.raises(EPException, match="this Buffer is destroyed; make a new one"):
                call()

    run_ranks(1, body)


def test_ranks_of_one_host_meet_over_no_network() -> None:
    comm = ThreadComm(ferry.threads(1)[0])
    round_trip(deep_ep.Buffer(None, comm=comm, allow_nvlink_for_normal_mode=True), "cpu", 1)
    errors._warned.clear()
    with pytest.warns(UserWarning, match="allow_nvlink_for_low_latency_mode: got False") as said:
        for _ in range(2):
            deep_ep.Buffer(None, comm=comm, allow_nvlink_for_low_latency_mode=False)
    assert len(said) == 1


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_values_that_are_always_refused(size: int) -> None:
    """Of arguments that take no other than the default, and what needs a GPU; by each rank alone,
    before anything is sent."""

    def body(comm: ThreadComm) -> None:
        first = deep_ep.Buffer(None, comm=comm, low_latency_mode=True)
        later = deep_ep.EPBuffer(comm, lb_allocation_plan_or_num_bytes=2 << 20)
        elastic = deep_ep.ElasticBuffer(comm)
        elastic.pp_set_config(64, 1)
        job, rank = shared_job(size), comm.Get_rank()
        x, ids = job.x[rank], job.topk_idx[rank]
        copies = later._lb_storage.view(torch.float32)[:16].view(2, 8)
        table = torch.full((size, 2), -1, dtype=torch.int32)
        nvfp4 = {"use_fp8": False, "use_nvfp4": True, "x_global_scale": torch.tensor(1.0)}
        sent = first.low_latency_dispatch(x, ids, 32, 16, use_fp8=False)
        weights = job.topk_weights[rank]
        signals = torch.ones(len(sent[1]), dtype=torch.int32)
        overlap = {"overlap": True, "return_recv_hook": True, "src_signals": signals}
        near = (rank + 1) % size
        for argument, call in (
            (
                "allow_nvlink_for_normal_mode",
                lambda: deep_ep.Buffer(None, comm=comm, allow_nvlink_for_normal_mode=False),
            ),
            (
                "use_ue8m0_for_sf",
                lambda: first.low_latency_dispatch(x, ids, 32, 16, use_ue8m0_for_sf=True, **nvfp4),
            ),
            (
                "num_sms",
                lambda: first.low_latency_combine(
                    sent[0], ids, weights, sent[2], num_sms=3, **overlap
                ),
            ),
            (
                "do_handle_copy",
                lambda: later.dispatch(x, ids, num_experts=16, do_handle_copy=True),
            ),
            ("num_sms", lambda: later.lb_prefetch_weights(copies, torch.ones(2, 8), table, 4)),
            ("num_sms", lambda: later.lb_reduce_grads(copies, torch.ones(2, 8), table, 4)),
            ("context_idx", lambda: later.barrier(context_idx=1)),
            ("num_sms", lambda: elastic.pp_send(torch.ones(4), near, 3)),
            ("num_sms", lambda: elastic.pp_recv(torch.ones(4), near, 3)),
        ):
            with pytest.raises(EPException, match=f"{argument}: got"):
                call()
        tables = deep_ep.EngramBuffer(comm, 0, 0, True, 1, 1)
        for buffer in (first, later, elastic, tables):
            if torch.cuda.is_available():
                assert isinstance(buffer.get_comm_stream(), torch.cuda.Stream)
                continue
            with pytest.raises(EPException, match="get_comm_stream: this machine: got no GPU"):
                buffer.get_comm_stream()
        first.low_latency_combine(sent[0], ids, weights, sent[2])
        comm.allgather(None)

    run_ranks(size, body)


def test_destroy_wants_to_be_announced(capfd: pytest.CaptureFixture[str]) -> None:
    buffer = deep_ep.Buffer(None, comm=ThreadComm(ferry.threads(1)[0]))
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()
    del buffer
    assert capfd.readouterr().err == ""
    buffer = deep_ep.Buffer(None, comm=ThreadComm(ferry.threads(1)[0]), explicitly_destroy=True)
    del buffer
    assert "without destroy()" in capfd.readouterr().err


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("pending", [False, True])
def test_ranks_leave_in_any_order(order: tuple[int, ...], pending: bool) -> None:
    """One after another, each when those before it have left for good."""

    def body(comm: ThreadComm) -> None:
        buffer = deep_ep.Buffer(None, comm=comm, explicitly_destroy=True)
        job = make_job(3)
        alive = []
        if pending:
            idx = job.topk_idx[buffer.rank]
            layout = buffer.get_dispatch_layout(idx, job.experts, async_finish=True)
            alive += [layout, dispatched(buffer, "cpu", job, job.x[buffer.rank], way="async")]
        for rank in order:
            if rank == buffer.rank:
                buffer.destroy()
            comm.allgather(None)
        del alive

    run_ranks(3, body)


def test_a_rank_that_left_is_missed_and_named() -> None:
    def body(comm: ThreadComm) -> None:
        buffer = deep_ep.Buffer(None, comm=comm, explicitly_destroy=True)
        job = make_job(2)
        dispatched(buffer, "cpu", job, job.x[buffer.rank])
        if buffer.rank == 1:
            buffer.destroy()
        comm.allgather(None)
        if buffer.rank == 0:
            with pytest.raises(RuntimeError, match="rank 1"):
                dispatched(buffer, "cpu", job, job.x[buffer.rank])
        comm.allgather(None)

    run_ranks(2, body)


def test_two_buffers_beside_each_other() -> None:
    def body(comm: ThreadComm) -> None:
        first, second = (deep_ep.Buffer(None, comm=comm) for _ in range(2))
        job = make_job(2)
        x = job.x[first.rank]
        one, two = dispatched(first, "cpu", job, x), dispatched(second, "cpu", job, x)
        y = second.combine(one[0], one[4])[0]  # a handle is good in any
        assert torch.equal(y, first.combine(two[0], two[4])[0])
        comm.allgather(None)

    run_ranks(2, body)
