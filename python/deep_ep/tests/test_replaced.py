"""A rank is killed, the others go on with their Buffer, and a process takes its place there."""

from __future__ import annotations

import faulthandler
import os
import signal
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from gpus import needs_gpu
from rank_processes import forks, free_port, run_to_an_end
from rank_threads import run_threads
from test_endings import leave

import deep_ep
import ferry
from deep_ep.groups import Groups

RANKS, BACK, DIES_AT, LAST, HIDDEN, TOKENS = 4, 1, 3, 8, 256, 12
EXPERTS, MORE = 8, 10  # the latter only while a rank is missing
PAIRS = {"domain_size": 2, "network": "ofi"}
LOSSES = (ferry.PeerFailedError, ferry.PeerLeftError, ferry.DeadlineExceededError)
ON_GPUS = [pytest.mark.gpu, needs_gpu]


class Rank:
    """One with a buffer of this kind, which a process that joins makes as the others do."""

    def __init__(self, kind: str, device: Any, how: dict[str, Any], meets: dict[str, Any]) -> None:
        self.device = device
        group = deep_ep.ElasticGroup(ferry.tcp(**meets, secret="a test"), "replaced", **how)
        options: dict[str, Any] = {"explicitly_destroy": True}
        if kind in ("Buffer", "shrinking"):
            options |= {"low_latency_mode": True, "enable_shrink": kind == "shrinking"}
        self.kind = "Buffer" if kind == "shrinking" else kind
        self.buffer: Any = getattr(deep_ep, self.kind)(group, **options)
        assert (group.rank(), group.size()) == (meets["rank"], RANKS)
        self.rank = group.rank()

    def routed(self, step: int, experts: int, layer: int) -> tuple[Any, Any]:
        """Tokens of small whole numbers, and routes to ranks that are there."""
        random = torch.Generator().manual_seed(100 * step + 10 * self.rank + layer)
        there = torch.tensor([
            expert for rank in self.buffer.view().ranks for expert in owned(rank, experts)
        ])
        ids = there[torch.rand(TOKENS, len(there), generator=random).topk(2).indices]
        x = torch.randint(1, 9, (TOKENS, 1), generator=random).expand(TOKENS, HIDDEN)
        return x.to(torch.bfloat16).contiguous().to(self.device), ids.to(self.device)

    def throughput(self, step: int, experts: int) -> None:
        x, ids = self.routed(step, experts, 0)
        if self.kind == "Buffer":
            per_rank, _, per_expert, there, _ = self.buffer.get_dispatch_layout(ids, experts)
            rows, _, _, _, handle, _ = self.buffer.dispatch(
                x, None, per_rank, None, there, per_expert, ids
            )
        else:
            rows, _, _, handle, _ = self.buffer.dispatch(
                x, ids, num_experts=experts, num_max_tokens_per_rank=TOKENS
            )
        ranks_of = torch.tensor([r for r in range(RANKS) for _ in owned(r, experts)])[ids.cpu()]
        copies = 1 + (ranks_of[:, 0] != ranks_of[:, 1])
        y = self.buffer.combine(rows, handle)[0]
        assert torch.equal(y.cpu(), x.cpu() * copies[:, None])

    def low_latency(self, step: int, experts: int) -> None:
        x, ids = self.routed(step, experts, 1)
        weights = torch.ones(ids.shape, device=self.device)
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x, ids, TOKENS, experts, use_fp8=False
        )
        mine = torch.tensor(owned(self.rank, experts), device=self.device) + 1
        made = (rows * mine[:, None, None]).to(rows.dtype)
        y, _, _ = self.buffer.low_latency_combine(made, ids, weights, handle)
        assert torch.equal(y, (x.float() * (ids + 1).sum(1, keepdim=True)).to(y.dtype))


def owned(rank: int, experts: int) -> range:
    small, more = divmod(experts, RANKS)
    begin = rank * small + min(rank, more)
    return range(begin, begin + small + (rank < more))


def serve(
    kind: str,
    where: str,
    how: dict[str, Any],
    die: tuple[int, ...],
    meets: dict[str, Any],
    told: Any,
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(30)  # where it waits
    device = torch.device(where)
    if where == "cuda":
        device = torch.device(where, meets["rank"] % torch.cuda.device_count())
        torch.cuda.set_device(device)
    one = Rank(kind, device, how, meets)
    buffer, back = one.buffer, meets["join"]
    left = [rank for rank in range(RANKS) if rank not in die]
    whole = sorted({*left, BACK})
    assert buffer.runtime.get_physical_domain_size()[0] == (2 if how else 1)
    view = buffer.view()
    assert view.joined == ([BACK] if back else [])
    while view.step < LAST or not back:
        step = view.step + 1
        if one.rank in die and step == DIES_AT and not meets["join"]:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            one.throughput(step, EXPERTS)
            if kind != "shrinking" and (step % 2 or view.lost):
                one.throughput(step, MORE if view.lost else RANKS)
            if one.kind == "Buffer":
                one.low_latency(step, EXPERTS)
            if buffer.commit(step):
                assert buffer.regroup() == whole
                assert buffer.view().joined == [BACK]
                back = True
        except LOSSES:
            assert set(left) <= set(buffer.regroup())
            back = back or BACK in buffer.view().joined
        view = buffer.view()
    leave(buffer)
    faulthandler.cancel_dump_traceback_later()
    told.put((one.rank, meets["join"], view.ranks == whole))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "where", "how", "die"),
    [
        ("Buffer", "cpu", {}, (1, 3)),
        ("Buffer", "cpu", PAIRS, (1, 3)),
        ("shrinking", "cpu", {}, (1,)),
        ("ElasticBuffer", "cpu", PAIRS, (1,)),
        ("EPBuffer", "cpu", {}, (0, 1)),
        pytest.param("Buffer", "cuda", {}, (1,), marks=ON_GPUS),
        pytest.param("EPBuffer", "cuda", {}, (1,), marks=ON_GPUS),
    ],
)
def test_a_process_takes_the_place_of_a_rank(
    kind: str, where: str, how: dict[str, Any], die: tuple[int, ...]
) -> None:
    """Of one or two that are killed one comes back, and all groups are made anew with it."""
    context, port = forks("deep_ep"), free_port()
    told = context.Queue()

    def start(rank: int, join: bool) -> Any:
        meets = {"rank": rank, "size": RANKS, "port": port, "join": join}
        arguments = (kind, where, how, die, meets, told)
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        return process

    ranks = {rank: start(rank, join=False) for rank in range(RANKS)}
    try:
        for dead in die:
            ranks[dead].join(40)
            assert ranks.pop(dead).exitcode == -signal.SIGKILL
        ranks[BACK] = start(BACK, join=True)
        assert set(run_to_an_end([*ranks.values()])) == {0}
        assert sorted(told.get(timeout=10) for _ in ranks) == [
            (rank, rank == BACK, True) for rank in sorted(ranks)
        ]
    finally:
        for rank in ranks.values():
            rank.kill()


@pytest.mark.parametrize("domain_size", [0, 2])
def test_one_process_begins(domain_size: int, tmp_path: Path) -> None:
    """Of four ranks; two join it, and one never comes."""
    how = PAIRS | {"arbiter": tmp_path} if domain_size else {}
    port = free_port()

    def rank(number: int) -> None:
        if number == 2:
            return
        begins = number == 3
        meets = {"rank": number, "size": RANKS, "port": port, "begin": begins, "join": not begins}
        one = Rank("EPBuffer", torch.device("cpu"), how, meets)
        buffer = one.buffer
        while len(buffer.view().ranks) < 3:
            try:
                if not buffer.commit(buffer.view().step + 1):
                    continue
            except ferry.PeerFailedError:  # of a rank that has seen it first
                pass
            buffer.regroup()
        assert buffer.view().lost == [2]
        for experts in (EXPERTS, MORE):
            one.throughput(1, experts)
        leave(buffer)

    run_threads(RANKS, rank)


class PartOfAGroup:
    """As rank 1 sees it: rank 0 begins it, and dies when all are in; rank 3 has taken its place."""

    def __init__(self) -> None:
        self.views = [[0, 1], [1, 3]]
        self.destroyed = False
        self.commits = 0

    def view(self) -> Any:
        return SimpleNamespace(ranks=self.views[0], step=0)

    def commit(self, step: int) -> bool:
        self.commits += 1
        assert self.commits < 100, "it waits for ever"
        return len(self.views) > 1

    def regroup(self) -> None:
        self.views.pop(0)

    def destroy(self) -> None:
        self.destroyed = True


def test_a_rank_dies_when_all_are_in_a_group_with_empty_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The small group, whose barrier is over, no longer says so."""
    groups, part = object.__new__(Groups), PartOfAGroup()
    groups._base = cast(
        Any, SimpleNamespace(rank=1, size=4, domains=1, nics=list, barrier=lambda: None)
    )
    groups._meeting = cast(Any, SimpleNamespace(all_gather=lambda mine: [mine] * 3))
    groups._left, groups._arbiter, groups._deadline, groups._of_all = [0, 1, 3], {}, 5, {}
    monkeypatch.setattr(groups, "_make", lambda *_, **__: part)
    with pytest.raises(ferry.PeerFailedError, match="rank 1: rank 0 died") as caught:
        groups.of(8, torch.device("cpu"))
    assert (caught.value.peer, part.destroyed) == (0, True)


def test_a_death_ends_the_wait_in_a_group_with_empty_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others regroup the small group meanwhile, and wait there for this rank."""
    groups, part, waits = object.__new__(Groups), PartOfAGroup(), Event()
    ended = Event()

    def barrier() -> None:
        assert waits.wait(5)
        raise ferry.PeerFailedError("rank 0 called regroup", rank=1, peer=0)

    def regroup() -> None:
        waits.set()
        assert ended.wait(5), "nothing ends it"
        raise ferry.DestroyedError("regroup")

    groups._base = cast(Any, SimpleNamespace(rank=1, size=4, domains=1, nics=list, barrier=barrier))
    groups._meeting = cast(Any, SimpleNamespace(all_gather=lambda mine: [mine] * 3))
    groups._left, groups._arbiter, groups._deadline, groups._of_all = [0, 1, 3], {}, 5, {}
    monkeypatch.setattr(groups, "_make", lambda *_, **__: part)
    monkeypatch.setattr(part, "regroup", regroup)
    monkeypatch.setattr(part, "destroy", ended.set)
    with pytest.raises(ferry.PeerFailedError, match="rank 0 called regroup"):
        groups.of(8, torch.device("cpu"))


def test_who_takes_an_elastic_group() -> None:
    boot = ferry.threads(1)[0]
    for bad, word in (((None, "a"), "bootstrap"), ((boot, ""), "name"), ((boot, 3), "name")):
        with pytest.raises(RuntimeError, match=f"ElasticGroup: {word}: got"):
            deep_ep.ElasticGroup(*bad)
    with pytest.raises(RuntimeError, match=r"got a ferry.Bootstrap; .*ElasticGroup\(bootstrap"):
        deep_ep.Buffer(boot)
    group = deep_ep.ElasticGroup(boot, "some")
    for make in (deep_ep.BucketBuffer, partial(deep_ep.PPBuffer, num_max_inflight_tensors=1)):
        with pytest.raises(RuntimeError, match="group: got an ElasticGroup; expected a process"):
            make(group, 1 << 21)
    with pytest.raises(ferry.UnsupportedError, match="processes"):
        deep_ep.Buffer(group)  # threads
