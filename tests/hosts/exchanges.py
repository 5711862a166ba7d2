"""A rank of test_hosts: exchanges until an error, says which, and makes a new group when told to.

exchanges.py DEADLINE FOLDER    lines of JSON; waits for FOLDER/again before the new group
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ferry

EXPERTS, TOKENS, HIDDEN, TOPK = 8, 64, 256, 2


def exchange(group: ferry.Group, number: int) -> None:
    """One exchange, every sum checked."""
    random = np.random.default_rng([number, group.rank])
    routes = np.stack([random.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)])
    x = random.integers(-100, 100, (TOKENS, HIDDEN)).astype(np.float32)
    plan = group.plan(routes)
    y = group.combine(group.dispatch(x, plan).x, plan).x
    owners = routes * group.size // EXPERTS
    copies = (1 + (owners[:, 0] != owners[:, 1])).astype(np.float32)
    np.testing.assert_array_equal(y, x * copies[:, None])


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    deadline, folder = float(sys.argv[1]), Path(sys.argv[2])
    config: dict[str, Any] = {
        "experts": EXPERTS,
        "deadline": deadline,
        "memory_bytes": 1 << 20,
        "fabric": "ofi",
    }
    with ferry.Group(ferry.from_environment(), **config) as group:
        number = 0
        try:
            while True:
                exchange(group, number)
                number += 1
                if number == 5:
                    say(going=True)
        except ferry.Error as error:
            say(kind=type(error).__name__, peer=error.peer, when=time.monotonic(), text=str(error))
    while not (folder / "again").exists():
        time.sleep(0.05)
    os.environ["FERRY_PORT"] = "29600"
    # Its deadline is for a machine that is busy, not for a fault.
    with ferry.Group(ferry.from_environment(), **(config | {"deadline": 30.0})) as group:
        exchange(group, 1)
        group.barrier()
        say(again=True)


if __name__ == "__main__":
    main()
