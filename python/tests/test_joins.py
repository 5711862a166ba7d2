"""A process takes the place of a rank that died, on either engine."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from gpus import needs_gpu
from rank_processes import forks, free_port

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


def train(rank: int, port: int, kind: str, joins: bool, told: Any) -> None:
    import torch

    where: dict[str, Any] = {"backend": "host"}
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        where = {"backend": "cuda", "device": device.index}
    boot = ferry.tcp(rank=rank, size=RANKS, port=port, secret="a test", join=joins)
    group = ferry.Group(
        boot, experts=2 * RANKS, elastic="joins", deadline=60, memory_bytes=1 << 23, **where
    )
    view = group.view()
    assert view.joined == ([VICTIM] if joins else [])
    step, back = view.step + 1, joins
    while step <= LAST or not back:
        if rank == VICTIM and step == DIES_AT and not joins:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            one_step(group, view, step, device)
            if group.commit(step):
                view, back = group.regroup(), True
                assert (view.joined, view.lost, view.step) == ([VICTIM], [], step)
            step += 1
        except (ferry.PeerFailedError, ferry.DeadlineExceededError):
            view = group.regroup()
            step, back = view.step + 1, back or VICTIM in view.joined
    group.barrier()
    told.put((rank, joins, view.ranks, view.epoch >= 3))
    group.destroy()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", DEVICES)
def test_a_process_takes_the_place_of_a_rank_that_died(kind: str) -> None:
    context, port = forks(), free_port()
    told = context.Queue()

    def start(rank: int, joins: bool) -> Any:
        process = context.Process(target=train, args=(rank, port, kind, joins, told), daemon=True)
        process.start()
        return process

    ranks = [start(rank, joins=False) for rank in range(RANKS)]
    ranks[VICTIM].join(100)
    assert ranks[VICTIM].exitcode == -signal.SIGKILL
    ranks[VICTIM] = start(VICTIM, joins=True)
    for process in ranks:
        process.join(100)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert sorted(told.get(timeout=10) for _ in ranks) == [
        (rank, rank == VICTIM, [0, 1, 2], True) for rank in range(RANKS)
    ]
