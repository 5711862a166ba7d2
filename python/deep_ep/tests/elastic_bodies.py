"""Bodies of tests of V2's and V2.5's exchanges: `body(buffer, device)` on every rank, which checks
its own results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from elastic_calls import (
    ENDS,
    LAYOUTS,
    MOST,
    alike,
    check_handle,
    check_received,
    combined,
    dispatched,
    ended,
    expected,
    made_of,
    wait,
)
from reference import lopsided_job, make_job, shared_job
from throughput_calls import inputs, on, same

import deep_ep
from deep_ep.errors import EPException

KINDS = ("bf16", "f32", "fp8", "fp8 column-major", "fp8 packed", "fp8 one scale", "nvfp4")


def ends_of(buffer: Any) -> tuple[str, ...]:
    """V2.5 has no epilogue that waits for an event of its own."""
    elastic = isinstance(buffer, deep_ep.ElasticBuffer)
    return ENDS if elastic else tuple(one for one in ENDS if "epilogue" not in one)


def every_dispatch(buffer: Any, device: str) -> None:
    """What is sent, in which layout, exact or not, and how it ends; then the same way again."""
    rank = buffer.rank_idx
    ways = itertools.cycle(ends_of(buffer))
    for kind, (expand, step), exact in itertools.product(KINDS, LAYOUTS, (True, False)):
        words = (kind, expand, step, exact, way := next(ways))
        job = shared_job(buffer.num_ranks, seed=len(kind) + step)
        sent = inputs(job, kind)
        x = on(device, sent[rank])
        layout = {"do_expand": expand, "use_tma_aligned_col_major_sf": kind == "fp8"}
        how = layout | {"expert_alignment": step, "do_cpu_sync": exact}
        got = dispatched(buffer, device, job, x, way, do_zero_padding=expand, **how)
        wait(got[4], way)
        want = expected(job, rank, expand, step)
        check_received(got, sent, job, rank, want, device, words)
        check_handle(got[3], job, rank, want, step, exact)
        rows = len(want.rows) if exact else got[3].num_recv_tokens
        if expand and not exact:
            rows = got[3].num_expanded_tokens
        parts = got[0] if isinstance(got[0], tuple) else (got[0],)
        assert {len(part) for part in parts} == {rows}, words
        if kind == "fp8":
            assert parts[1].stride() == (1, -(-rows // 4) * 4)
        again = dispatched(buffer, device, job, x, way, handle=got[3], **layout)
        wait(again[4], way)
        assert again[3] is got[3] and again[2] is None
        check_received(again, sent, job, rank, want, device, words)


def every_combine(buffer: Any, device: str) -> None:
    """Which rows and weights come back, with which biases, and how it ends."""
    rank, once = buffer.rank_idx, not buffer.allow_multiple_reduction
    ways = itertools.cycle(ends_of(buffer))
    random = torch.Generator().manual_seed(6)
    job = shared_job(buffer.num_ranks, seed=8)
    for dtype, (expand, step), exact, weighted, biased in itertools.product(
        (torch.bfloat16, torch.float32), LAYOUTS, (True, False), (False, True), (0, 1, 2)
    ):
        words = (dtype, expand, step, exact, weighted, biased, way := next(ways))
        x = [one.to(dtype) for one in job.x]
        how = {"do_expand": expand, "expert_alignment": step, "do_cpu_sync": exact}
        got = dispatched(buffer, device, job, x[rank].to(device), **how)
        want = expected(job, rank, expand, step)
        rows = got[0].clone()
        kept = len(want.rows)
        rows[:kept] = made_of(want, rank, rows[:kept])
        own = [torch.randn(x[rank].shape, generator=random).to(dtype) for _ in range(biased)]
        here = [bias.to(device) for bias in own]
        bias = (None, here[0] if here else None, tuple(here))[biased]
        y, back, event = buffer.combine(
            rows,
            got[3],
            topk_weights=got[2] if weighted else None,
            bias=bias,
            **ended(buffer, way),
        )
        wait(event, way)
        same(y, combined(job, rank, x, step, expand, own, once and expand), device, words)
        assert (back is None) == (not weighted), words
        if back is not None:
            ids, sent = job.topk_idx[rank], job.topk_weights[rank]
            same(back, torch.where(ids >= 0, sent, 0.0), device, words)


def every_argument_at_once(buffer: Any, device: str) -> None:
    """Each with another value than its default; sums are those of ranks that are added once."""
    rank = buffer.rank_idx
    job = shared_job(buffer.num_ranks, seed=27)
    sent, way = inputs(job, "fp8"), "async after event on comm stream"
    if isinstance(buffer, deep_ep.ElasticBuffer):
        way += " before epilogue"
    for expand, step in ((False, 4), (True, 8)):
        want = expected(job, rank, expand, step)
        stats = torch.zeros(len(want.counts), dtype=torch.int32, device=device)
        layout = {"do_expand": expand, "use_tma_aligned_col_major_sf": True}
        given = {"expert_alignment": step, "do_zero_padding": expand, "do_cpu_sync": expand}
        if isinstance(buffer, deep_ep.ElasticBuffer):
            given["do_handle_copy"] = expand
        given |= {"num_sms": 6, "num_qps": 1, "cumulative_local_expert_recv_stats": stats}
        x = on(device, sent[rank])
        got = dispatched(buffer, device, job, x, way, **given, **layout)
        wait(got[4], way)
        check_received(got, sent, job, rank, want, device, (expand, step))
        assert stats.tolist() == want.counts and got[3].num_sms == 6
        again = dispatched(buffer, device, job, x, way, handle=got[3], **layout)
        wait(again[4], way)
        check_received(again, sent, job, rank, want, device, (expand, step))
        rows = torch.zeros(len(got[0][0]), 64, dtype=torch.bfloat16, device=device)
        rows[: len(want.rows)] = made_of(want, rank, want.of(job.x).to(device))
        y, back, event = buffer.combine(
            rows,
            got[3],
            topk_weights=got[2],
            bias=(job.x[rank].to(device), None),
            num_sms=4,
            num_qps=1,
            **ended(buffer, way),
        )
        wait(event, way)
        once = expand and not buffer.allow_multiple_reduction
        same(y, combined(job, rank, job.x, step, expand, (job.x[rank],), once), device, step)
        ids = job.topk_idx[rank]
        same(back, torch.where(ids >= 0, job.topk_weights[rank], 0.0), device, step)


def several_in_flight(buffer: Any, device: str) -> None:
    """Layers one after the other, answered in the order of a backward; weights of a cached
    dispatch are new ones."""
    rank = buffer.rank_idx
    jobs = [shared_job(buffer.num_ranks, seed=seed) for seed in (31, 32, 33)]
    layers = [
        dispatched(buffer, device, job, job.x[rank].to(device), do_expand=True, expert_alignment=2)
        for job in jobs
    ]
    for job, got in reversed(list(zip(jobs, layers))):
        want = expected(job, rank, True, 2)
        weights = job.topk_weights[rank].to(device) * 2
        grads = (job.x[rank] * 2).to(device)
        again = buffer.dispatch(grads, topk_weights=weights, handle=got[3], do_expand=True)
        same(again[0], want.of([one * 2 for one in job.x]), device)
        same(again[2], want.weights() * 2, device)
        y = buffer.combine(made_of(want, rank, got[0]), got[3])[0]
        once = not buffer.allow_multiple_reduction
        same(y, combined(job, rank, job.x, 2, True, (), once), device)


def counted(buffer: Any, device: str) -> None:
    """Statistics are added to; a handle keeps its routes, whatever becomes of the caller's."""
    rank = buffer.rank_idx
    job = shared_job(buffer.num_ranks, seed=14)
    want = expected(job, rank, False, 1)
    stats = torch.full((len(want.counts),), 5, dtype=torch.int32, device=device)
    for times, (expand, step) in enumerate(LAYOUTS, 1):
        ids = job.topk_idx[rank].clone().to(device)
        kept = isinstance(buffer, deep_ep.ElasticBuffer)  # V2.5 copies nothing
        how = {"topk_idx": ids, "do_expand": expand, "expert_alignment": step}
        how["cumulative_local_expert_recv_stats"] = stats
        x = job.x[rank].to(device)
        got = dispatched(buffer, device, job, x, **how)
        assert stats.tolist() == [5 + times * count for count in want.counts]
        del how["cumulative_local_expert_recv_stats"]
        if kept:
            ids.fill_(-1)
        if kept:
            how |= {"topk_idx": ids, "do_handle_copy": False}
            shown = dispatched(buffer, device, job, x, **how)[3].topk_idx
            assert shown.data_ptr() == ids.data_ptr()
        if not expand:
            got[1].fill_(-7)  # as vLLM, which makes global ids of them
            again = buffer.dispatch(x, handle=got[3])
            same(again[1], want.there.topk_idx, device)
            again[1].fill_(-7)
        check_handle(got[3], job, rank, expected(job, rank, expand, step), step, True)
    buffer.barrier()


def lopsided(buffer: Any, device: str) -> None:
    """All tokens to one expert; nobody has a token; a rank receives nothing."""
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    for case, (expand, step), exact in itertools.product(
        ("one expert", "no token", "no route"), LAYOUTS, (True, False)
    ):
        job = lopsided_job(ranks, case)
        words = (case, expand, step, exact)
        how = {"do_expand": expand, "expert_alignment": step, "do_cpu_sync": exact}
        got = dispatched(buffer, device, job, job.x[rank].to(device), **how)
        want = expected(job, rank, expand, step)
        check_received(got, job.x, job, rank, want, device, words)
        check_handle(got[3], job, rank, want, step, exact)
        rows, kept = got[0].clone(), len(want.rows)
        rows[:kept] = made_of(want, rank, rows[:kept])
        y, back, _ = buffer.combine(rows, got[3], topk_weights=got[2])
        once = expand and not buffer.allow_multiple_reduction
        same(y, combined(job, rank, job.x, step, expand, (), once), device, words)
        ids = job.topk_idx[rank]
        same(back, torch.where(ids >= 0, job.topk_weights[rank], 0.0), device, words)


def an_expert_in_every_slot(buffer: Any, device: str) -> None:
    """Without a CPU sync there are more rows than for experts that differ."""
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    job = make_job(ranks, experts=ranks, seed=19, tokens_of=(20,))
    job.topk_idx = [torch.zeros(20, 3, dtype=torch.int64) for _ in job.x]
    job.topk_weights = [weights[:, :1].repeat(1, 3) for weights in job.topk_weights]
    x = job.x[rank].to(device)
    for step in (1, 8):
        how = {"do_expand": True, "expert_alignment": step, "do_cpu_sync": False}
        got = dispatched(buffer, device, job, x, **how)
        want = expected(job, rank, True, step)
        check_received(got, job.x, job, rank, want, device, step)
        slots, rows = ranks * MOST * 3, len(got[0])
        assert rows == got[3].num_expanded_tokens == -(-(slots + step - 1) // step) * step
        again = dispatched(buffer, device, job, x, handle=got[3], do_expand=True)
        check_received(again, job.x, job, rank, want, device, step)
        made, kept = got[0].clone(), len(want.rows)
        made[:kept] = made_of(want, rank, made[:kept])
        y = buffer.combine(made, got[3])[0]
        once = not buffer.allow_multiple_reduction
        same(y, combined(job, rank, job.x, step, True, (), once), device, step)


def handles_put_together(buffer: Any, device: str) -> None:
    """A handle made of the fields of one serves as that one; what is none is refused."""
    rank = buffer.rank_idx
    job = shared_job(buffer.num_ranks, seed=15)
    got = dispatched(buffer, device, job, job.x[rank].to(device), do_expand=True)
    names = list(deep_ep.EPHandle.__init__.__annotations__)[:-1]
    again = deep_ep.EPHandle(**{name: getattr(got[3], name) for name in names})
    y = [buffer.combine(got[0], handle)[0] for handle in (got[3], again)]
    assert alike(y[0], y[1])
    x = job.x[rank].to(device)
    assert alike(buffer.dispatch(x, handle=again, do_expand=True)[0], got[0])


def sizes(buffer: Any, device: str) -> None:
    """What callers ask before a call, and the defaults of a call that says nothing."""
    ranks, rank = buffer.num_ranks, buffer.rank_idx
    domains = buffer._groups.everyone.domains
    apart = (domains, ranks // domains)
    logical = apart if buffer.allow_hybrid_mode else (1, ranks)
    assert (buffer.get_physical_domain_size(), buffer.get_logical_domain_size()) == (apart, logical)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == logical
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == apart
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, logical[1])
    assert buffer.num_bytes % (2 << 20) == 0
    sms = buffer.get_theoretical_num_sms(16, 3)
    least = 4 if buffer.prefer_overlap_with_compute else 24
    assert sms >= least and sms % 2 == 0
    faster = buffer.get_theoretical_num_sms(16, 3, nvlink_gbs=900, sm_write_gbs=25)
    slower = buffer.get_theoretical_num_sms(16, 3, sm_read_gbs=10)
    assert faster > sms < slower if ranks > 1 else faster == sms == slower
    with_rdma = buffer.get_theoretical_num_sms(16, 3, rdma_gbs=1000)
    assert with_rdma == sms  # ranks of one host need no NIC
    with pytest.raises(EPException, match="num_scaleout_topk: got 2; expected 0"):
        buffer.get_theoretical_num_sms(16, 3, 2)
    hint = type(buffer).get_buffer_size_hint
    plain = hint(buffer.group, 4096, 7168, 8)
    assert plain % (2 << 20) == 0 and plain >= ranks * 4096 * 7168 * 2
    assert hint(buffer.group, 4096, 7168, num_topk=8, use_fp8_dispatch=True) < plain
    more = {"allow_hybrid_mode": False, "allow_multiple_reduction": False}
    assert hint(buffer.group, 4096, 7168, 8, **more) > plain
    buffer.print_memory_usage()
    buffer.barrier(False, True, False)
    if isinstance(buffer, deep_ep.EPBuffer):
        buffer.barrier(context_idx=0)
    most = buffer.num_allocated_qps
    wanted = 4 * 16 + 1 if buffer.allow_hybrid_mode else 4
    assert buffer.get_theoretical_num_qps(4) == min(wanted, most)
    if domains == 1:  # test_endings.py lets a rank leave, test_replaced.py kills one
        assert buffer.regroup() == buffer.view().ranks == list(range(ranks))
        assert not buffer.commit(3)
    job = shared_job(ranks, seed=16)
    x = job.x[rank].to(device)
    got = dispatched(buffer, device, job, x, num_sms=6, num_qps=most)
    assert got[3].num_sms == 6
    assert buffer.combine(got[0], got[3], num_sms=4, num_qps=1)[0].shape == x.shape
    if buffer.num_max_tokens_per_rank == MOST:
        assert dispatched(buffer, device, job, x, num_max_tokens_per_rank=None)[3] is not None


def deferred_dispatches(buffer: Any, device: str) -> None:
    """The event alone comes back; its first wait returns what the call returns otherwise."""
    rank = buffer.rank_idx
    job = shared_job(buffer.num_ranks, seed=21)
    x = job.x[rank].to(device)
    for (expand, step), exact, after in itertools.product(LAYOUTS, (True, False), (False, True)):
        how: dict[str, Any] = {"do_expand": expand, "expert_alignment": step}
        plain = dispatched(buffer, device, job, x, do_cpu_sync=exact, **how)
        if after:
            how |= {"previous_event": buffer.capture(), "allocate_on_comm_stream": True}
        how |= {"async_with_compute_stream": True, "defer_epilogue": True}
        given = {
            "topk_idx": job.topk_idx[rank].to(device),
            "topk_weights": job.topk_weights[rank].to(device),
            "num_experts": job.experts,
            "num_max_tokens_per_rank": MOST,
            "do_cpu_sync": exact,
        }
        event = buffer.dispatch(x, **given, **how)
        assert isinstance(event, deep_ep.EventOverlap)
        got = event.wait()
        assert len(got) == 4 and event.wait() is None
        want = expected(job, rank, expand, step)
        check_received((*got, None), job.x, job, rank, want, device, (expand, step, exact))
        check_handle(got[3], job, rank, want, step, exact)
        del how["expert_alignment"]
        again = buffer.dispatch(x, handle=got[3], **how).current_stream_wait()
        assert again[3] is got[3] and len(again[0]) == len(plain[0])


def deferred_combines(buffer: Any, device: str) -> None:
    """Biases are read by the wait: what is written into them until then counts."""
    rank, once = buffer.rank_idx, not buffer.allow_multiple_reduction
    job = shared_job(buffer.num_ranks, seed=22)
    for (expand, step), biased in itertools.product(LAYOUTS, (0, 1, 2)):
        how = {"do_expand": expand, "expert_alignment": step}
        got = dispatched(buffer, device, job, job.x[rank].to(device), **how)
        want = expected(job, rank, expand, step)
        late = [torch.zeros_like(job.x[rank]).to(device) for _ in range(biased)]
        event = buffer.combine(
            made_of(want, rank, got[0]),
            got[3],
            topk_weights=got[2],
            bias=(None, late[0] if late else None, tuple(late))[biased],
            async_with_compute_stream=True,
            defer_epilogue=True,
        )
        for number, one in enumerate(late, 1):
            one.fill_(number)
        y, back = event.wait()
        biases = [one.cpu() for one in late]
        one_rounding = expand and (once or biased > 0)
        same(
            y,
            combined(job, rank, job.x, step, expand, biases, one_rounding),
            device,
            (step, biased),
        )
        ids = job.topk_idx[rank]
        same(back, torch.where(ids >= 0, job.topk_weights[rank], 0.0), device)


EXPERTS, SLOTS = 3, 4


def region_of(plan: Any) -> dict[str, Any]:
    """Tensors of the region of copies, in a plan."""
    return {
        "weights": plan.allocate((SLOTS, 16), torch.bfloat16),
        "scales": plan.allocate((SLOTS, 8), torch.float32),
        "grads": plan.allocate((SLOTS, 8), torch.float32),
    }


def mapping_of(ranks: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-1, ranks * EXPERTS, (ranks, SLOTS), generator=random, dtype=torch.int32)


def of_rank(rank: int, columns: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(EXPERTS if seed < 3 else SLOTS, columns, generator=random)


def copies_of_experts(first: Any, device: str) -> None:
    """Weights out, one tensor or several at once; gradients back, added to what is there."""
    torch.zeros(1, device=device)  # the region lies where torch has worked
    plan = deep_ep.BufferAllocator()
    region = region_of(plan)
    buffer = deep_ep.EPBuffer(first.group, lb_allocation_plan_or_num_bytes=plan)
    assert buffer.num_lb_bytes == plan.num_bytes and plan.materialized
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    for seed in (1, 2, 3):
        mapping = mapping_of(ranks, seed)
        weights, scales = of_rank(rank, 16, 1).bfloat16(), of_rank(rank, 8, 2)
        for tensor in region.values():
            tensor.fill_(7)
        given = (mapping.to(device), 0, buffer.capture()) if seed == 2 else (mapping.to(device),)
        buffer.lb_prefetch_weights(region["scales"], scales.to(device), mapping.to(device)).wait()
        buffer.lb_prefetch_weights(
            [region["weights"], region["scales"]], [weights.to(device), scales.to(device)], *given
        ).wait()
        for slot, expert in enumerate(mapping[rank].tolist()):
            for name, columns, number in (("weights", 16, 1), ("scales", 8, 2)):
                owner, local = divmod(expert, EXPERTS)
                wanted = torch.full((columns,), 7.0)
                if expert >= 0:
                    wanted = of_rank(owner, columns, number)[local]
                same(region[name][slot], wanted.to(region[name].dtype), device)
        region["grads"].copy_(of_rank(rank, 8, 3))
        grads, expected_grads = of_rank(rank, 8, 2).to(device), of_rank(rank, 8, 2)
        buffer.lb_reduce_grads(region["grads"], grads, *given).wait()
        for other, row in enumerate(mapping.tolist()):
            for slot, expert in enumerate(row):
                if expert >= 0 and expert // EXPERTS == rank:
                    expected_grads[expert % EXPERTS] += of_rank(other, 8, 3)[slot]
        same(grads, expected_grads, device)
    assert buffer.lb_get_theoretical_num_sms() == 0
    first.group.allgather(None)


EVERYWHERE = [
    every_argument_at_once,
    every_dispatch,
    every_combine,
    several_in_flight,
    counted,
    lopsided,
    handles_put_together,
    sizes,
]
"""For every device, and for every buffer that exchanges tokens as V2 does."""
IN_CPU_MEMORY = [an_expert_in_every_slot]
"""The same there; on GPUs there is room for experts that differ."""
DEFERRED = [deferred_dispatches, deferred_combines, copies_of_experts]
"""Of V2.5."""
