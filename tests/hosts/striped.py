"""A rank of test_hosts_nics: large exchanges, what its NICs carried, and what happened to it.

    striped.py DEADLINE FOLDER

Prints lines of JSON. It exchanges until an error; then it waits for FOLDER/again, and tries a new
group. What arrives is compared bit by bit with what every rank sent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ferry

TOKENS, HIDDEN = 512, 2048  # 4 MiB


def tokens_of(rank: int, number: int) -> npt.NDArray[np.float32]:
    """Whole numbers, so that sums are exact in any order."""
    random = np.random.default_rng([number, rank])
    return random.integers(-1000, 1000, (TOKENS, HIDDEN)).astype(np.float32)


def exchange(group: ferry.Group, number: int) -> None:
    """Every token goes to every rank."""
    x = tokens_of(group.rank, number)
    plan = group.plan(np.tile(np.arange(group.size), (TOKENS, 1)))
    received = group.dispatch(x, plan).x
    all_tokens = np.concatenate([tokens_of(rank, number) for rank in range(group.size)])
    np.testing.assert_array_equal(received, all_tokens)
    np.testing.assert_array_equal(group.combine(received, plan).x, x * group.size)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    deadline, folder = float(sys.argv[1]), Path(sys.argv[2])
    again = folder / "again"
    config: dict[str, Any] = {
        "experts": int(os.environ["WORLD_SIZE"]),
        "memory_bytes": 16 << 20,
        "fabric": "ofi",
    }
    # libfabric looks at the machine once: that would be part of the deadline.
    ferry.Group(ferry.threads(1)[0], experts=1, fabric="ofi").destroy()
    with ferry.Group(ferry.from_environment(), deadline=deadline, **config) as group:
        for number in range(3):
            exchange(group, number)
        nics = [
            {"address": nic.address, "why": nic.why, "bytes": nic.bytes} for nic in group.nics()
        ]
        say(nics=nics, put_bytes=group.network().put_bytes)
        try:
            while True:
                exchange(group, 3)
        except ferry.Error as error:
            say(kind=type(error).__name__, peer=error.peer, when=time.monotonic(), text=str(error))
    while not again.exists():
        time.sleep(0.05)
    os.environ["FERRY_PORT"] = "29600"
    # Its deadline is for a machine that is busy, not for a fault.
    with ferry.Group(ferry.from_environment(), deadline=30.0, **config) as group:
        exchange(group, 4)
        group.barrier()
        say(again=len(group.nics()))


if __name__ == "__main__":
    main()
