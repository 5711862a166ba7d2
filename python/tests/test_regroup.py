"""A group goes on in place without ranks that left. In docs/elastic.md a rank is killed."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from rank_processes import forks, free_port
from rank_threads import run_threads

import ferry


def test_the_others_go_on_when_a_rank_leaves() -> None:
    bootstraps = ferry.threads(3)
    x = np.ones((4, 16), np.float32)

    def rank(number: int) -> None:
        group = ferry.Group(bootstraps[number], experts=6, deadline=20, memory_bytes=1 << 20)
        plan = group.plan(np.tile([0, 5], (4, 1)))
        group.commit(3)
        if number == 0:
            group.destroy()
            return
        with pytest.raises(ferry.PeerLeftError, match="rank 0"):
            group.barrier()
        view = group.regroup()
        assert (view.epoch, view.ranks, view.lost, view.step) == (2, [1, 2], [0], 3)
        assert repr(group.view()) == "GroupView(epoch=2, ranks=[1, 2], lost=[0], step=3, joined=[])"
        assert group.view() == view
        assert view != "a view"
        with pytest.raises(ferry.InvalidArgumentError, match="a plan of epoch 1"):
            group.dispatch(x, plan)
        with pytest.raises(ferry.InvalidArgumentError, match="expert 0 of rank 0"):
            group.plan(np.zeros((4, 1), np.int64))
        with pytest.raises(ferry.InvalidArgumentError, match="commit: step"):
            group.commit(3)
        plan = group.plan(np.tile([2, 5], (4, 1)))
        got = group.dispatch(x, plan)
        assert (group.combine(got.x, plan).x == 2).all()
        assert group.commit(4) is False
        assert group.view().step == 4
        group.barrier()
        group.destroy()

    run_threads(3, rank)


def regroup_in_a_row(rank: int, port: int, told: Any) -> None:
    boot = ferry.tcp(rank=rank, size=3, port=port, secret="a test")
    with ferry.Group(boot, experts=3, deadline=20, memory_bytes=1 << 20) as group:
        choice, views = random.Random(rank), []
        for _ in range(30):
            time.sleep(choice.uniform(0, 0.004))
            view = group.regroup()
            views.append((view.epoch, view.ranks))
        group.barrier()
        told.put(views)


def test_processes_that_regroup_in_a_row_have_one_epoch_each() -> None:
    context, port = forks(), free_port()
    told = context.Queue()
    ranks = [
        context.Process(target=regroup_in_a_row, args=(rank, port, told), daemon=True)
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    for _ in ranks:
        assert told.get(timeout=60) == [(epoch, [0, 1, 2]) for epoch in range(2, 32)]
    for process in ranks:
        process.join(20)
        assert process.exitcode == 0


def test_bad_steps_are_refused() -> None:
    with ferry.Group(ferry.threads(1)[0], experts=1) as group:
        with pytest.raises(ferry.InvalidArgumentError, match="commit: step"):
            group.commit(0)
        assert group.view().ranks == [0]


def test_of_several_that_begin_at_once_one_does() -> None:
    for _ in range(8):
        port, at_once = free_port(), threading.Barrier(4)

        def rank(number: int, port: int = port, at_once: threading.Barrier = at_once) -> int:
            boot = ferry.tcp(rank=number, size=4, port=port, secret="a test", begin=True)
            at_once.wait()
            try:
                group = ferry.Group(boot, experts=4, elastic="at once", memory_bytes=1 << 16)
            except ferry.RefusedError:
                at_once.wait()
                return 0
            at_once.wait()
            assert group.view().ranks == [number]
            group.destroy()
            return 1

        assert sum(run_threads(4, rank)) == 1


def test_a_group_begins_again_when_all_its_ranks_have_ended() -> None:
    port, ended = free_port(), threading.Event()
    config = {"experts": 4, "elastic": "again", "deadline": 100, "memory_bytes": 1 << 16}

    def rank(number: int) -> None:
        how = {"join": True} if number else {"begin": True}
        boot = ferry.tcp(rank=number, size=2, port=port, secret="a test", **how)
        if number == 1:
            with pytest.raises(ferry.DeadlineExceededError, match="all its ranks have ended"):
                ferry.Group(boot, **config)
            ended.set()
            return
        group = ferry.Group(boot, **config)
        while not group.commit(group.view().step + 1):
            pass
        group.destroy()
        assert ended.wait(40)  # it has waited for its deadline otherwise
        again = ferry.Group(boot, **config)
        assert again.view().lost == [1]
        again.destroy()

    run_threads(2, rank)
