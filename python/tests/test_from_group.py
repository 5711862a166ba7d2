"""Ranks of a group meet by the group itself, also when those are dead that had the store."""

from __future__ import annotations

import numpy as np
import pytest
from rank_threads import run_ranks
from test_processes import environment, finish, start

import ferry

SHM = "dict()"
DOMAINS = 'dict(domain_size=2, network="ofi")'

LOSES = """
import signal
wires = {wires}
boot = ferry.from_environment()
group = ferry.Group(boot, experts=10, deadline=20, memory_bytes=1 << 20, **wires)

def collectives_of_all():
    boot = ferry.from_group(group)
    ranks = group.view().ranks
    assert (boot.rank, boot.size) == (ranks.index(group.rank), len(ranks))
    collectives = ferry.Collectives(boot, deadline=20, memory_bytes=1 << 20, **wires)
    x = np.full(1000, group.rank, np.float32)
    collectives.all_reduce(x)
    assert (x == sum(ranks)).all(), (x[0], ranks)
    return collectives

def die(rank):
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)

def lose(call):
    while True:
        try:
            call()
        except (ferry.PeerFailedError, ferry.DeadlineExceededError) as error:
            return error, group.regroup()
"""


def run_losses(code: str, wires: str, killed: set[int]) -> None:
    """Five ranks, of which some die."""
    children = [start(LOSES.format(wires=wires) + code, **v) for v in environment(5)]
    for rank, (status, out, err) in enumerate(finish(children)):
        if rank in killed:
            assert status == -9, err
        else:
            assert (status, out) == (0, "good\n"), err


@pytest.mark.parametrize("wires", [SHM, DOMAINS])
def test_the_rank_that_had_the_store_dies(wires: str) -> None:
    code = """
first = collectives_of_all()
die(0)
error, view = lose(group.barrier)
assert error.peer == 0 and view.ranks == [1, 2, 3, 4]
second = collectives_of_all()
die(3)
error, view = lose(group.barrier)
assert error.peer == 3 and view.ranks == [1, 2, 4]
third = collectives_of_all()
group.barrier()
print("good")
"""
    run_losses(code, wires, {0, 3})


@pytest.mark.parametrize("wires", [SHM, DOMAINS])
def test_a_rank_that_dies_while_they_meet_is_named(wires: str) -> None:
    code = """
def meet_in_vain():
    boot = ferry.from_group(group)
    boot.all_gather(b"once")
    die(0)
    ferry.Collectives(boot, deadline=20, **wires)

error, view = lose(meet_in_vain)
assert error.peer == 0 and view.ranks == [1, 2, 3, 4], (error, view)
collectives_of_all()
group.barrier()
print("good")
"""
    run_losses(code, wires, {0})


def test_another_group_of_the_same_ranks() -> None:
    def body(group: ferry.Group) -> None:
        with ferry.Group(ferry.from_group(group), experts=4, deadline=20) as other:
            assert (other.rank, other.size) == (group.rank, 2)
            latency = ferry.LatencyExchange(other, capacity=4, hidden=64, topk=1, dtype="f32")
            x = np.ones((4, 64), np.float32)
            got = latency.dispatch(x, np.arange(4).reshape(4, 1))
            assert got.counts.sum() == 4
            other.barrier()

    run_ranks(2, body)


def test_what_is_too_long_is_refused_before_anything_moves() -> None:
    def body(group: ferry.Group) -> None:
        boot = ferry.from_group(group)
        if group.rank == 0:
            with pytest.raises(ferry.InvalidArgumentError, match="all_gather: mine: got 268435457"):
                boot.all_gather(bytes((1 << 28) + 1))
        assert boot.all_gather(b"%d" % group.rank) == [b"0", b"1"]

    run_ranks(2, body)


def test_groups_and_nothing_else() -> None:
    with pytest.raises(ferry.InvalidArgumentError, match="from_group: group: got 7"):
        ferry.from_group(7)  # type: ignore[arg-type]
    group = ferry.Group(ferry.threads(1)[0], experts=1)
    boot = ferry.from_group(group)
    assert boot.all_gather(b"alone") == [b"alone"]
    group.destroy()
    with pytest.raises(ferry.DestroyedError):
        boot.all_gather(b"alone")
    with pytest.raises(ferry.DestroyedError):
        ferry.from_group(group)
