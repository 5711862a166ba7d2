"""all_reduce between hosts (network namespaces) with unequal links, as root. No test.

    all_reduce_speed.py [--hosts 4] [--ranks 1] [--mbit 1000] [--slow HOST ...] [--pair A B]
                        [--json FILE]

Every host is a domain. What a host sends and what it gets are limited to --mbit each, of host
--slow to a quarter; -1: of none; what the hosts of --pair send each other to a tenth. In each
round the contenders come in turn: every algorithm with equal shares, and the choice. Times are
medians of the slowest rank, and so is the comparison: the choice against the best of the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from hosts import Hosts
from job import lines_of, until_end, write_report

import ferry

Result = dict[str, Any]
EQUAL = ("ring", "tree", "direct", "hierarchical")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="of a host")
    parser.add_argument("--mbit", type=float, default=1000, help="of a link, each way")
    parser.add_argument("--slow", type=int, nargs="+", default=[0, 1, 2, 3], help="host, -1: none")
    parser.add_argument("--pair", type=int, nargs=2, help="two hosts")
    parser.add_argument("--bytes", type=int, default=32 << 20, help="of a tensor, f32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=8, help="calls of the choice before")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(given: argparse.Namespace) -> None:
    """A rank: prints a line of JSON with the seconds of each call of each contender."""
    x = np.zeros(given.bytes // 4, np.float32)
    with ferry.Collectives(ferry.from_environment()) as ranks:
        equal = [1] * ranks.domains
        ways: dict[str, dict[str, Any]] = {
            name: {"algorithm": name}
            | ({"shares": equal} if name in ("direct", "hierarchical") else {})
            for name in EQUAL
        }
        ways["choice"] = {"any_order": True}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.warm_up):
            ranks.all_reduce(x, **ways["choice"])
        for _ in range(given.rounds):
            for name, options in ways.items():
                ranks.barrier()
                start = time.perf_counter()
                ranks.all_reduce(x, **options)
                times[name].append(time.perf_counter() - start)
        told = {"times": times}
        chosen = ranks.choice(given.bytes, any_order=True)
        told["choice"] = {name: getattr(chosen, name) for name in CHOICE}
        print(json.dumps(told), flush=True)


CHOICE = (
    "algorithm",
    "shares",
    "predicted_seconds",
    "observed_seconds",
    "latency_seconds",
    "bytes_per_second",
    "slow_pairs",
)


def run(given: argparse.Namespace, slow: int) -> Result:
    command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(given.hosts, own_boot_ids=True) as machines,
    ):
        for host in range(given.hosts):
            machines.shape_link(host, given.mbit / (4 if host == slow else 1))
        if given.pair:
            machines.shape_pair(*given.pair, given.mbit / 10, given.mbit)
        logs = Path(folder)
        until_end(machines.start_ranks(given.ranks, command, logs), logs)
        said = [lines_of(logs, rank)[0] for rank in range(given.hosts * given.ranks)]
    seconds = {
        name: statistics.median(
            max(line["times"][name][i] for line in said) for i in range(given.rounds)
        )
        for name in said[0]["times"]
    }
    best = min(EQUAL, key=lambda name: seconds[name])
    saved = 1 - seconds["choice"] / seconds[best]
    print(
        f"slow host {slow:2}: "
        + ", ".join(f"{name} {value * 1e3:.0f}" for name, value in seconds.items())
        + f" ms; choice {100 * saved:.0f} % less than {best}; {said[0].get('choice')}"
    )
    return {
        "slow_host": slow,
        "seconds": seconds,
        "best_of_equal": best,
        "saved": saved,
        "choice": said[0].get("choice"),
    }


def main() -> None:
    given = arguments()
    if given.rank:
        measure(given)
        return
    runs = [run(given, slow) for slow in given.slow]
    write_report(given.json, runs)


if __name__ == "__main__":
    main()
