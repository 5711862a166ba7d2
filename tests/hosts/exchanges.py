"""A rank of test_hosts_faults: exchanges, says what happened to it, makes a new group when told.

    exchanges.py [--latency | --elastic [--arbiter]] DEADLINE FOLDER FABRIC CROSSING

Prints lines of JSON. In throughput mode it exchanges until an error, and with --elastic, where it
commits its steps, it goes on by `regroup`, and makes collectives of those that are left; in latency
mode (with masks) it exchanges until FOLDER/again is there; every sum is checked. Then it waits for
FOLDER/again, and tries a new group.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ferry

EXPERTS, TOKENS, HIDDEN, TOPK = 12, 64, 256, 2
GOES_ON = 20  # exchanges after a mask


class Load:
    """Tokens of a rank, whole numbers, so that sums are exact in any order."""

    def __init__(self, group: ferry.Group, number: int) -> None:
        random = np.random.default_rng([number, group.rank])
        there = np.isin(np.arange(EXPERTS) * group.size // EXPERTS, group.view().ranks)
        experts = np.flatnonzero(there)
        self.routes = np.stack([random.permutation(experts)[:TOPK] for _ in range(TOKENS)])
        self.weights = random.integers(1, 4, (TOKENS, TOPK)).astype(np.float32)
        self.x = random.integers(-100, 100, (TOKENS, HIDDEN)).astype(np.float32)
        self.owners = self.routes * group.size // EXPERTS


def exchange(group: ferry.Group, number: int) -> None:
    """One exchange in throughput mode."""
    load = Load(group, number)
    plan = group.plan(load.routes)
    y = group.combine(group.dispatch(load.x, plan).x, plan).x
    copies = (1 + (load.owners[:, 0] != load.owners[:, 1])).astype(np.float32)
    np.testing.assert_array_equal(y, load.x * copies[:, None])


def exchange_masked(group: ferry.Group, latency: ferry.LatencyExchange, number: int) -> None:
    """One exchange in latency mode: the sums lack what masked ranks hold, and nothing else."""
    load = Load(group, number)
    before = np.array(latency.masked())
    received = latency.dispatch(load.x, load.routes)
    y = latency.combine(received.x, received, load.weights, path="per_rank").x
    after = np.array(latency.masked())
    # Of a rank that was masked in this call all of a token is there, or nothing.
    least = load.weights * ~after[load.owners]
    doubtful = load.weights * (after & ~before)[load.owners]
    one_rank = load.owners[:, 0] == load.owners[:, 1]
    both = doubtful.sum(1)
    options = [0 * both, both]
    options += [np.where(one_rank, 0, doubtful[:, k]) for k in range(TOPK)]
    sums = [load.x * (least.sum(1) + more)[:, None] for more in options]
    right = np.any([(y == expected).all(1) for expected in sums], axis=0)
    assert right.all(), f"rank {group.rank}: wrong sums of tokens {np.flatnonzero(~right)}"


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def until_error(group: ferry.Group, again: Path) -> None:
    number = 0
    try:
        while not again.exists():
            exchange(group, number)
            number += 1
            if number == 5:
                say(going=True, fabric=group.fabric_name)
    except ferry.Error as error:
        say(kind=type(error).__name__, peer=error.peer, when=time.monotonic(), text=str(error))


def regroup(group: ferry.Group, again: Path) -> None:
    """Commits steps until an error; then those who may go on do so for a while."""
    step = 0
    try:
        while not again.exists():
            step += 1
            exchange(group, step)
            group.commit(step)
            if step == 5:
                say(going=True, fabric=group.fabric_name)
    except ferry.Error as error:
        say(kind=type(error).__name__, peer=error.peer, when=time.monotonic(), text=str(error))
    try:
        view = group.regroup()
        for step in range(view.step + 1, view.step + GOES_ON):
            exchange(group, step)
            group.commit(step)
        sum_by_collectives(group)
        say(ranks=view.ranks, epoch=view.epoch)
        while not again.exists():  # the arbiter's file goes with the last rank of the view
            time.sleep(0.05)
        group.barrier()
    except ferry.Error as error:
        say(stopped=str(error))


def sum_by_collectives(group: ferry.Group) -> None:
    """They meet by the group: the host that had the store may be gone."""
    with ferry.Collectives(ferry.from_group(group), deadline=30.0, memory_bytes=1 << 20) as ranks:
        x = np.full(1000, group.rank, np.float32)
        ranks.all_reduce(x)
        np.testing.assert_array_equal(x, sum(group.view().ranks))
        ranks.barrier()


def without_some(group: ferry.Group, again: Path) -> None:
    latency = ferry.LatencyExchange(
        group, capacity=TOKENS, hidden=HIDDEN, topk=TOPK, dtype="f32", masks=True
    )
    number, masked_at = 0, 0
    while not again.exists():
        exchange_masked(group, latency, number)
        number += 1
        masks = [rank for rank, masked in enumerate(latency.masked()) if masked]
        if number == 5:
            say(going=True, fabric=group.fabric_name)
        if masks and masked_at == 0:
            masked_at = number
            say(first=masks, when=time.monotonic())
        if masked_at and number == masked_at + GOES_ON:
            say(masked=masks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--arbiter", action="store_true", help="its file is in FOLDER")
    parser.add_argument("deadline", type=float)
    parser.add_argument("folder", type=Path)
    parser.add_argument("fabric")
    parser.add_argument("crossing")
    given = parser.parse_args()
    config: dict[str, Any] = {
        "experts": EXPERTS,
        "memory_bytes": 1 << 20,
        "fabric": given.fabric,
        "crossing": given.crossing,
        "arbiter": given.folder if given.arbiter else "",
    }
    # libfabric looks at the machine once: that would be part of the deadline.
    ferry.Group(ferry.threads(1)[0], experts=1, fabric="ofi").destroy()
    again = given.folder / "again"
    run: Callable[[ferry.Group, Path], None] = without_some if given.latency else until_error
    if given.elastic:
        run = regroup
    with ferry.Group(ferry.from_environment(), deadline=given.deadline, **config) as group:
        run(group, again)
    while not again.exists():
        time.sleep(0.05)
    os.environ["FERRY_PORT"] = "29600"
    # Its deadline is for a machine that is busy, not for a fault.
    with ferry.Group(ferry.from_environment(), deadline=30.0, **config) as group:
        exchange(group, 1)
        group.barrier()
        say(again=True)


if __name__ == "__main__":
    main()
