"""Bodies of tests: `body(buffer, device, ...)` on every rank, which checks its own results."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from reference import (
    Job,
    answers,
    arrived,
    combined,
    expert,
    first_expert,
    in_rank,
    lopsided_job,
    make_job,
    rows_between,
    shared_job,
)
from throughput_calls import (
    ENDS,
    KINDS,
    ROUTES,
    check_rows,
    dispatched,
    ended,
    inputs,
    on,
    product,
    same,
    several_hosts,
    wait,
)
from torch import Tensor

import deep_ep


def layouts(buffer: Any, device: str) -> None:
    for experts, dtype, way in itertools.product((16, 19, 3), (torch.int64, torch.int32), ENDS):
        job = make_job(buffer.group_size, experts, topk=min(3, experts))
        idx = job.topk_idx[buffer.rank]
        asked = idx.to(device, dtype)
        asked[::3] = torch.where(asked[::3] < 0, experts, asked[::3])  # no expert either: left out
        found = buffer.get_dispatch_layout(asked, experts, **ended(buffer, way))
        per_rank, per_host, per_expert, in_ranks, event = found
        wait(event, way)
        there = in_rank(job, buffer.rank)
        slots = [(idx == e).sum() for e in range(experts)]
        same(in_ranks, there, device)
        same(per_rank, there.sum(0).int(), device)
        same(per_expert, torch.tensor(slots, dtype=torch.int32), device)
        if not several_hosts(buffer.group_size):
            assert per_host is None
        else:
            hosts = there.view(len(there), buffer.group_size // 8, 8).any(2).sum(0).int()
            same(per_host, hosts, device)


def other_dtypes(buffer: Any, device: str) -> None:
    """Dtypes that cannot be added cross as they are, with scales beside them or without."""
    rank = buffer.rank
    job = shared_job(buffer.group_size, seed=3)
    numbers = [(x.float() * 9).clamp(-100, 100) for x in job.x]
    scales = [x.float()[:, :4].abs() + 1 for x in job.x]
    for dtype in (torch.int8, torch.bool, torch.int16, torch.float64, torch.float8_e4m3fnuz):
        plain = [x.to(dtype) for x in numbers]
        forms: list[list[Any]] = [plain]
        if dtype.itemsize == 1:
            forms.append(list(zip(plain, scales)))
        for sent in forms:
            for routes in ("none", "ids and weights"):
                got = dispatched(buffer, device, job, on(device, sent[rank]), routes)
                check_rows(got[0], sent, job, rank, device, (dtype, routes))
            again = buffer.dispatch(on(device, sent[rank]), handle=got[4])[0]
            check_rows(again, sent, job, rank, device, (dtype, "again"))


def every_dispatch(buffer: Any, device: str) -> None:
    """All combinations of what is sent, with which routes, exact or worst case, and how it ends."""
    jobs, rank = [shared_job(buffer.group_size, experts) for experts in (16, 19)], buffer.rank
    combinations = product(device, KINDS, ROUTES, (False, True))
    for number, (kind, routes, worst, way) in enumerate(combinations):
        if worst and routes == "none":
            continue
        words = (kind, routes, worst, way)
        job = jobs[(number // 8 + number // 2) % 2]
        there = arrived(job, rank)
        rows = len(there.token)
        most = sum(len(x) for x in job.x) + 2 if worst else 0
        sent = inputs(job, kind)
        alignment = (1, 8, 128)[number % 3]
        how = {"expert_alignment": alignment, "num_worst_tokens": most}
        if number // 3 % 2:
            how["config"] = deep_ep.Config(20, 8, 256)
        x = on(device, sent[rank])
        got, ids, weights, counts, handle, event = dispatched(
            buffer, device, job, x, routes, way, **how
        )
        wait(event, way)
        length = most if worst else rows
        assert (got[0] if isinstance(got, tuple) else got).shape[0] == length, words
        check_rows(got, sent, job, rank, device, words)
        padded = [-(-count // alignment) * alignment for count in there.per_expert]
        assert counts == ([] if worst else padded), words
        assert (ids is None) == (routes == "none") and (weights is None) == ("wei" not in routes)
        if ids is not None:
            expected = there.topk_idx.int() if "i32" in routes else there.topk_idx
            same(ids[:rows], expected, device, words)
            assert ids.shape[0] == length and (ids[rows:] == -1).all(), words
        if weights is not None:
            same(weights[:rows], there.topk_weights, device, words)
            assert weights.shape[0] == length, words

        again = buffer.dispatch(x, handle=handle, **ended(buffer, way))
        wait(again[5], way)
        assert again[1:5] == (None, None, None, None), words
        assert (again[0][0] if isinstance(got, tuple) else again[0]).shape[0] == length, words
        check_rows(again[0], sent, job, rank, device, words)


def every_combine(buffer: Any, device: str) -> None:
    """All combinations of dtype, biases, weights and ends."""
    job, rank = shared_job(buffer.group_size, seed=2), buffer.rank
    random = torch.Generator().manual_seed(3)
    sizes = [(len(x), x.shape[1]) for x in job.x]
    biases = [[torch.randn(size, generator=random) for size in sizes] for _ in range(2)]
    for dtype, kind, weighted, worst, way in product(
        device,
        (torch.bfloat16, torch.float16, torch.float32),
        ("none", "one", "one of two", "two"),
        ("none", "as routes", "other"),
        (False, True),
    ):
        words = (dtype, kind, weighted, worst, way)
        x = [one.to(dtype) for one in job.x]
        most = 200 if worst else 0
        got = dispatched(buffer, device, job, x[rank].to(device), num_worst_tokens=most)
        rows, weights, handle = got[0], got[2], got[4]
        if weighted == "other":  # a handle serves weights of any number of slots
            weights = weights.repeat(1, 2)[:, :5]
        own = [bias[rank].to(dtype) for bias in biases]
        added = {"none": [], "one": own[:1], "one of two": own[:1], "two": own}[kind]
        here = [bias.to(device) for bias in added]
        bias: Any = None if kind == "none" else here[0]
        if "two" in kind:
            bias = (here[0], here[1] if kind == "two" else None)
        config = buffer.get_combine_config(job.ranks) if kind == "two" else None
        y, back, event = buffer.combine(
            expert(rank, rows),
            handle,
            topk_weights=None if weighted == "none" else weights.contiguous(),
            bias=bias,
            config=config,
            **ended(buffer, way),
        )
        wait(event, way)
        same(y, combined(job, rank, answers(job, rank, x), added), device, words)
        assert (back is None) == (weighted == "none"), words
        if back is not None:
            expected = returned_weights(job, rank)
            if weighted == "other":
                expected = expected.repeat(1, 2)[:, :5].contiguous()
            same(back, expected, device, words)


def returned_weights(job: Job, rank: int) -> Tensor:
    """Weights travel to the rank of their expert and back; those of unused slots become 0."""
    return torch.where(job.topk_idx[rank] >= 0, job.topk_weights[rank], 0.0)


def worst_case_begins_as_exact(buffer: Any, device: str) -> None:
    job, x = shared_job(buffer.group_size, seed=4), None
    x = job.x[buffer.rank].to(device)
    exact = dispatched(buffer, device, job, x)
    worst = dispatched(buffer, device, job, x, num_worst_tokens=300)
    for a, b in zip(exact[:3], worst[:3]):
        same(b[: len(a)], a.cpu(), device)
    tokens = exact[4][3]
    same(worst[4][3][: len(tokens)], tokens.cpu(), device)
    assert worst[4][3].shape == (300,)


def lopsided(buffer: Any, device: str) -> None:
    """All tokens to one expert; nobody has a token; a rank receives nothing."""
    rank, ranks = buffer.rank, buffer.group_size
    for case in ("one expert", "no token", "no route"):
        job = lopsided_job(ranks, case)
        got = dispatched(buffer, device, job, job.x[rank].to(device))
        check_rows(got[0], job.x, job, rank, device, case)
        assert got[3] == arrived(job, rank).per_expert, case
        assert all(isinstance(one, Tensor) for one in got[4]), case
        assert got[4][7 if several_hosts(ranks) else 3].shape[0] == len(arrived(job, rank).token), (
            case
        )
        y, back, _ = buffer.combine(expert(rank, got[0]), got[4], topk_weights=got[2])
        same(y, combined(job, rank, answers(job, rank, job.x)), device, case)
        same(back, returned_weights(job, rank), device, case)


def grows(buffer: Any, device: str) -> None:
    """A Buffer of nothing carries what comes, and several results are alive at once."""
    job = make_job(buffer.group_size, hidden=1 << 15, seed=10)
    x = job.x[buffer.rank].to(device)
    alive = [dispatched(buffer, device, job, x) for _ in range(4)]
    for got in alive:
        check_rows(got[0], job.x, job, buffer.rank, device, "")


def changing_experts(buffer: Any, device: str) -> None:
    """The numbers of experts and slots may change from call to call, also beyond what the original
    takes, and handles stay good."""
    rank = buffer.rank
    alive = []
    for experts, topk in ((16, 3), (8, 1), (1200, 40), (16, 3)):
        job = shared_job(buffer.group_size, experts, topk=topk, seed=experts)
        assert first_expert(job, buffer.group_size) == experts
        alive.append((job, dispatched(buffer, device, job, job.x[rank].to(device))))
    for job, got in alive:
        check_rows(got[0], job.x, job, rank, device, job.experts)
        assert got[3] == arrived(job, rank).per_expert
        y = buffer.combine(expert(rank, got[0]), got[4])[0]
        same(y, combined(job, rank, answers(job, rank, job.x)), device, job.experts)


def internode_names(buffer: Any, device: str) -> None:
    """Every argument by its name, and in its place."""
    job, rank = shared_job(buffer.group_size), buffer.rank
    x, idx = job.x[rank].to(device), job.topk_idx[rank].to(device)
    weights = job.topk_weights[rank].to(device)
    config = deep_ep.Config(8)
    per_rank, per_host, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, job.experts)
    layout = (per_rank, per_host, in_ranks, per_expert)
    got = buffer.internode_dispatch(x, None, *layout, idx, weights, 2, config)
    check_rows(got[0], job.x, job, rank, device, "")
    assert all(count % 2 == 0 for count in got[3])
    when = {"previous_event": buffer.capture(), "async_finish": True}
    when["allocate_on_comm_stream"] = True
    again = buffer.internode_dispatch(x=x, handle=got[4], config=config, **when)
    wait(again[5], "async")
    check_rows(again[0], job.x, job, rank, device, "again")
    most = sum(map(len, job.x))
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank")
    worst = buffer.internode_dispatch(
        x,
        **dict(zip(names, layout)),
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
        expert_alignment=2,
        num_worst_tokens=most,
    )
    assert len(worst[0]) == most and worst[3] == []
    check_rows(worst[0], job.x, job, rank, device, "worst case")

    rows, bias = expert(rank, got[0]), torch.ones_like(x)
    y, sums, _ = buffer.internode_combine(rows, got[4], got[2], (bias, bias), config)
    expected = combined(job, rank, answers(job, rank, job.x), (bias.cpu(), bias.cpu()))
    same(y, expected, device)
    same(sums, returned_weights(job, rank), device)
    when["previous_event"] = buffer.capture()
    named = {"topk_weights": got[2], "bias": (bias, bias), "config": config}
    for call in (buffer.internode_combine, buffer.combine):
        y, _, event = call(x=rows, handle=got[4], **named, **when)
        wait(event, "async")
        same(y, expected, device)


def leaves_with_calls_pending(buffer: Any, device: str) -> None:
    """Nobody has waited for what was asked for; ranks leave at once, in no order."""
    job, rank = shared_job(buffer.group_size), buffer.rank
    buffer.explicitly_destroy = True
    got = dispatched(buffer, device, job, job.x[rank].to(device), way="async")
    last = buffer.combine(got[0], got[4], async_finish=True)
    buffer.destroy()
    assert buffer.runtime is None
    del got, last


def captured(buffer: Any, device: str) -> None:
    """Layout, dispatch and combine in a CUDA graph, replayed with other routes."""
    jobs = [make_job(buffer.group_size, seed=seed) for seed in (21, 22, 23)]
    rank = buffer.rank
    x, idx, weights = (
        one[rank].to(device) for one in (jobs[0].x, jobs[0].topk_idx, jobs[0].topk_weights)
    )
    fixed = Job(jobs[0].ranks, jobs[0].experts, [x] * 16, [idx] * 16, [weights] * 16)
    most = {"num_worst_tokens": 200}

    def step() -> Any:
        got = dispatched(buffer, device, fixed, x, **most)
        y, back, _ = buffer.combine(got[0], got[4], topk_weights=got[2])
        return got, y, back

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, y, back = step()
    for job in jobs:
        x.copy_(job.x[rank])
        idx.copy_(job.topk_idx[rank])
        weights.copy_(job.topk_weights[rank])
        graph.replay()
        torch.cuda.synchronize()
        check_rows(got[0], job.x, job, rank, device, "")
        same(got[1][: len(arrived(job, rank).token)], arrived(job, rank).topk_idx, device)
        rows = [job.x[rank][in_rank(job, rank)[:, r]] for r in range(job.ranks)]
        same(y, combined(job, rank, rows), device)
        same(back, returned_weights(job, rank), device)
        same(got[4][0], rows_between(job).cumsum(0).int(), device)
        same(got[4][1][:, -1], rows_between(job)[rank], device)


ALL = [
    layouts,
    every_dispatch,
    other_dtypes,
    every_combine,
    worst_case_begins_as_exact,
    lopsided,
    grows,
    changing_experts,
    internode_names,
    leaves_with_calls_pending,
]
"""For every device."""
