"""A group goes on in place without ranks that left. In docs/elastic.md a rank is killed."""

from __future__ import annotations

import numpy as np
import pytest
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


def test_bad_steps_are_refused() -> None:
    with ferry.Group(ferry.threads(1)[0], experts=1) as group:
        with pytest.raises(ferry.InvalidArgumentError, match="commit: step"):
            group.commit(0)
        assert group.view().ranks == [0]
