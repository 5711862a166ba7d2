"""A process takes the place of a rank that died, and has its state, on either engine."""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

import pytest
from gpus import needs_gpu
from rank_processes import forks, free_port, run_to_an_end

import ferry

RANKS, VICTIM, DIES_AT, LAST, HIDDEN = 3, 1, 5, 12, 64
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def one_step(group: Any, view: Any, step: int, device: Any) -> None:
    """Tokens of this rank go to experts of ranks that are there; each comes back from all its
    ranks."""
    import torch

    random = torch.Generator().manual_seed(1000 * step + group.rank)
    ranks = torch.tensor(view.ranks)[torch.randint(len(view.ranks), (40, 2), generator=random)]
    value = float(100 * step + group.rank)
    plan = group.plan((2 * ranks).to(device))
    got = group.dispatch(torch.full((40, HIDDEN), value, device=device), plan)
    sums = group.combine(got.x, plan).x
    assert set(got.x[:, 0].tolist()) <= {float(100 * step + rank) for rank in view.ranks}
    copies = 1 + (ranks[:, 0] != ranks[:, 1])
    assert torch.equal(sums.cpu(), (copies * value)[:, None].expand(40, HIDDEN))


class State:
    """What each rank has after a step, on its device and on the CPU, in a vault."""

    def __init__(self, group: Any, device: Any, joins: bool) -> None:
        self.group, self.device, self.loses = group, device, not joins
        self.vault = ferry.Vault(group, ferry.Vault.bytes_of({0: self.of(0, 0)}))

    def of(self, rank: int, step: int) -> list[Any]:
        import torch

        value = 100.0 * step + rank
        return [
            torch.full((300, 5), value, device=self.device, dtype=torch.bfloat16),
            torch.full((3,), value, dtype=torch.float64),
            torch.tensor([step % 2 == 0], device=self.device),
        ]

    def put(self, step: int) -> None:
        self.vault.put(step, {self.group.rank: self.of(self.group.rank, step)})

    def settle(self, view: Any) -> int:
        """The step that all go on from, whole: after `view`, of which ranks may be lost or new."""
        import torch

        step = self.vault.recover()
        if step is None:
            self.put(0)
            return 0
        there = {*view.ranks, *(view.lost if self.loses else [])} - {*view.joined}
        self.loses = False  # who was lost has put nothing since
        keys = self.vault.keys()
        assert there <= {*keys}, f"step {step}: of {keys} some of {there} are missing"
        for key in keys:
            out = self.of(99, 99)
            self.vault.get(key, out)
            for i, (got, put) in enumerate(zip(out, self.of(key, step), strict=True)):
                assert torch.equal(got, put), f"key {key}, tensor {i}, step {step}: {got} {put}"
        return step


def bootstrap(meets: tuple[str, Any], rank: int, size: int, **how: bool) -> Any:
    """By which the ranks of a job meet: tcp and its port, or a store and where it is."""
    way, where = meets
    if way == "tcp":
        return ferry.tcp(rank=rank, size=size, port=where, secret="a test", **how)
    import torch.distributed as dist

    if way == "etcd":
        store: Any = ferry.EtcdStore(where)
    elif way == "file":
        store = dist.FileStore(where, -1)
    else:
        store = dist.TCPStore("127.0.0.1", where, None, False)
    return ferry.from_store(store, rank, size, name=f"job of {os.getppid()}", **how)


def train(rank: int, meets: tuple[str, Any], kind: str, joins: bool, told: Any) -> None:
    import torch

    faulthandler.dump_traceback_later(25)  # where it waits
    where: dict[str, Any] = {"backend": "host"}
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        where = {"backend": "cuda", "device": device.index}
    boot = bootstrap(meets, rank, RANKS, join=joins)
    group = ferry.Group(
        boot, experts=2 * RANKS, elastic="joins", deadline=20, memory_bytes=1 << 23, **where
    )
    view = group.view()
    assert view.joined == ([VICTIM] if joins else [])
    state, changed, back = State(group, device, joins), True, joins
    step = 0
    while changed or step <= LAST or not back:
        if rank == VICTIM and step == DIES_AT and not joins:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if changed:
                step, changed = state.settle(view) + 1, False
            one_step(group, view, step, device)
            one_waits = group.commit(step)
            state.put(step)
            if one_waits:
                view, back, changed = group.regroup(), True, True
                assert (view.joined, view.lost, view.step) == ([VICTIM], [], step)
            step += 1
        except (ferry.PeerFailedError, ferry.DeadlineExceededError):
            view, changed = group.regroup(), True
            back = back or VICTIM in view.joined
    group.barrier()
    faulthandler.cancel_dump_traceback_later()
    told.put((rank, joins, view.ranks, view.epoch >= 3))
    group.destroy()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", DEVICES)
def test_a_process_takes_the_place_of_a_rank_that_died(kind: str) -> None:
    replace_one(kind, ("tcp", free_port()))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("way", ["file", "torch"])
def test_by_the_store_in_which_the_ranks_met(way: str, tmp_path: Any) -> None:
    import torch.distributed as dist

    if way == "file":
        replace_one("cpu", (way, str(tmp_path / "store")))
        return
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    replace_one("cpu", (way, store.port))


def replace_one(kind: str, meets: tuple[str, Any]) -> None:
    context = forks()
    told = context.Queue()

    def start(rank: int, joins: bool) -> Any:
        process = context.Process(target=train, args=(rank, meets, kind, joins, told), daemon=True)
        process.start()
        return process

    ranks = [start(rank, joins=False) for rank in range(RANKS)]
    try:
        assert run_to_an_end(ranks) == [None, -signal.SIGKILL, None]
        ranks[VICTIM] = start(VICTIM, joins=True)
        assert run_to_an_end(ranks) == [0, 0, 0]
        assert sorted(told.get(timeout=10) for _ in ranks) == [
            (rank, rank == VICTIM, [0, 1, 2], True) for rank in range(RANKS)
        ]
    finally:
        for rank in ranks:
            rank.kill()
