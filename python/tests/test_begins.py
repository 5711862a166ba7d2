"""One process begins an elastic group, and the others join when they come."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import threading
import time
from multiprocessing.connection import wait
from typing import Any

import pytest
from rank_processes import forks, free_port
from test_joins import DEVICES, bootstrap

import ferry

RANKS, TOKENS, HIDDEN = 4, 16, 64
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"backend": "host"},
    "domains": {"backend": "host", "domain_size": 2, "network": "ofi"},
    "cuda": {"backend": "cuda"},
}


def place_of(kind: str, rank: int) -> tuple[dict[str, Any], str]:
    """What a group is made with, and where its tensors are."""
    import torch

    if kind != "cuda":
        return PLACES[kind], "cpu"
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return {**PLACES[kind], "device": device}, f"cuda:{device}"


def meet(group: Any, ranks: list[int], step: int, device: str, tired: bool) -> bool:
    """Every token goes to all ranks. Whether any rank is tired: all see the same."""
    import torch

    mine = 4.0 * (100 * step + group.rank) + tired
    routes = torch.tensor([2 * rank for rank in ranks], device=device).repeat(TOKENS, 1)
    plan = group.plan(routes)
    got = group.dispatch(torch.full((TOKENS, HIDDEN), mine, device=device), plan)
    sums = group.combine(got.x, plan).x
    values = got.x[:, 0].cpu().reshape(len(ranks), TOKENS)
    assert (values == values[:, :1]).all() and (sums.cpu() == len(ranks) * mine).all()
    said, tired_ones = (values[:, 0] // 4).tolist(), values[:, 0] % 4
    assert said == [100 * step + rank for rank in ranks]
    return bool(tired_ones.any())


def train(rank: int, meets: Any, kind: str, begins: bool, dies: float, pipe: Any) -> None:
    """Sends its views, until it is told to end. `dies`: seconds after which this process kills
    itself, if it has no place by then; 0: not."""
    faulthandler.dump_traceback_later(100)  # where it waits
    where, device = place_of(kind, rank)
    killer = threading.Timer(dies, os.kill, (os.getpid(), signal.SIGKILL))
    if dies:
        killer.start()
    boot = bootstrap(meets, rank, RANKS, begin=begins, join=not begins)
    group = ferry.Group(
        boot, experts=2 * RANKS, elastic="begins", deadline=20, memory_bytes=1 << 23, **where
    )
    killer.cancel()
    view = group.view()
    assert view.ranks == [rank] if begins else rank in view.joined
    step, tired = view.step + 1, False
    pipe.send(view.ranks)
    while not tired:
        try:
            tired = meet(group, view.ranks, step, device, pipe.poll())
            changed = group.commit(step)
            step += 1
        except (ferry.PeerFailedError, ferry.PeerLeftError, ferry.DeadlineExceededError):
            changed, tired = True, False
        if changed:
            view = group.regroup()
            step = view.step + 1
            pipe.send(view.ranks)
    group.barrier()
    group.destroy()
    faulthandler.cancel_dump_traceback_later()


class Job:
    """The processes of one group, by rank."""

    def __init__(self, kind: str, meets: Any) -> None:
        self.kind, self.meets, self.context = kind, meets, forks()
        self.processes: dict[int, Any] = {}
        # One for each process: who is killed holds no lock that others wait for.
        self.pipes: dict[int, Any] = {}
        self.views: dict[int, list[int]] = {}

    def start(self, rank: int, begins: bool = False, dies: float = 0) -> None:
        self.pipes[rank], other = self.context.Pipe()
        args = (rank, self.meets, self.kind, begins, dies, other)
        self.processes[rank] = self.context.Process(target=train, args=args, daemon=True)
        self.views.pop(rank, None)
        self.processes[rank].start()
        other.close()

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()

    def hear(self) -> None:
        ready = wait([*self.pipes.values()], 0.1)
        for rank in [rank for rank, pipe in self.pipes.items() if pipe in ready]:
            try:
                self.views[rank] = self.pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                del self.pipes[rank]

    def await_view(self, ranks: list[int], seconds: float = 60) -> None:
        """Until all of them have that view."""
        end = time.monotonic() + seconds
        while any(self.views.get(rank) != ranks for rank in ranks):
            assert time.monotonic() < end, (ranks, self.views)
            codes = [self.processes[rank].exitcode for rank in ranks]
            assert codes == [None] * len(ranks), (ranks, codes)
            self.hear()

    def came(self, rank: int) -> bool:
        """Whether it has a place; it may have died before."""
        while rank not in self.views and self.processes[rank].exitcode is None:
            self.hear()
        return rank in self.views

    def finish(self) -> None:
        for pipe in self.pipes.values():
            pipe.send("end")
        for process in self.processes.values():
            process.join(30)
        assert [process.exitcode for process in self.processes.values()] == [0] * RANKS

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [*DEVICES, "domains", "store"])
def test_one_begins_and_the_others_come_while_some_die(kind: str, tmp_path: Any) -> None:
    if kind == "store":
        begin_and_kill("cpu", ("file", str(tmp_path / "store")))
    else:
        begin_and_kill(kind, ("tcp", free_port()))


def begin_and_kill(kind: str, meets: Any) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    order = choice.sample(range(RANKS), RANKS)
    job = Job(kind, meets)
    try:
        job.start(order[0], begins=True)
        job.await_view(order[:1])
        for rank in order[1:3]:
            job.start(rank)
            time.sleep(choice.uniform(0, 0.1))
        job.await_view(sorted(order[:3]))
        # The last one dies while it joins, unless it is quick.
        job.start(order[3], dies=choice.uniform(0.001, 0.2))
        if not job.came(order[3]):
            job.start(order[3])
        job.await_view(list(range(RANKS)))
        victim = choice.randrange(RANKS)  # also the one that has begun
        job.kill(victim)
        job.await_view([rank for rank in range(RANKS) if rank != victim])
        job.start(victim)
        job.await_view(list(range(RANKS)))
        job.finish()
    finally:
        job.close()
