"""What a second NIC gives: hosts (network namespaces) whose interfaces are shaped, ranks that use
one of them or more. A measurement, no test.

    nics_speed.py [--nics N ...] [--mbit N ...] [--rounds N] [--json FILE]

Two hosts with one rank each. Every token goes to the other rank, so that each dispatch sends
TOKENS rows one way over each network. Times are medians of the slower rank. "Link alone": what it
sends, at the rate of its interfaces together.
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
from job import lines_of, until_end

import ferry

TOKENS, HIDDEN = 2048, 2048  # 16 MiB


def measure(rounds: int) -> None:
    """A rank: prints a line of JSON."""
    with ferry.Group(ferry.from_environment(), experts=2, memory_bytes=64 << 20) as group:
        x = np.ones((TOKENS, HIDDEN), np.float32)
        plan = group.plan(np.full((TOKENS, 1), 1 - group.rank))
        times: list[tuple[float, float]] = []
        for _ in range(rounds + 1):
            group.barrier()
            before, start = group.network().put_bytes, time.perf_counter()
            received = group.dispatch(x, plan)
            group.barrier()
            used, there = group.network().put_bytes - before, time.perf_counter()
            group.combine(received.x, plan)
            group.barrier()
            times.append((there - start, time.perf_counter() - there))
        said = {
            "dispatch_ms": statistics.median(t[0] for t in times[1:]) * 1e3,
            "combine_ms": statistics.median(t[1] for t in times[1:]) * 1e3,
            "bytes": used,
            "nics": [nic.bytes for nic in group.nics()],
        }
        print(json.dumps(said), flush=True)


def run(nics: int, rate: int, rounds: int) -> dict[str, Any]:
    """`rate`: Mbit/s of each interface."""
    names = ",".join(f"eth{nic}" for nic in range(nics))
    variables = {"FERRY_OFI_NICS": names}
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(2, nics=nics, own_boot_ids=True, variables=variables) as machines,
    ):
        logs = Path(folder)
        machines.shape(f"{rate}mbit")
        command = [sys.executable, __file__, "--rank", "--rounds", str(rounds)]
        until_end(machines.start_ranks(1, command, logs), logs)
        said = [lines_of(logs, rank)[0] for rank in range(2)]
    sent = max(line["bytes"] for line in said)
    return {
        "nics": nics,
        "mbit": rate,
        "bytes": sent,
        "link_ms": sent * 8 / (rate * nics) / 1e3,
        "dispatch_ms": max(line["dispatch_ms"] for line in said),
        "combine_ms": max(line["combine_ms"] for line in said),
        "nic_bytes": said[0]["nics"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nics", type=int, nargs="+", default=[1, 2], help="of a host")
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000], help="of each interface")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        measure(given.rounds)
        return
    print("Mbit/s  NICs  link alone, ms  dispatch, ms  combine, ms  MB by each")
    results = []
    for rate in given.mbit:
        for nics in given.nics:
            one = run(nics, rate, given.rounds)
            results.append(one)
            shares = " ".join(f"{bytes / 1e6:.1f}" for bytes in one["nic_bytes"])
            print(
                f"{rate:6} {nics:5} {one['link_ms']:15.1f} {one['dispatch_ms']:13.1f} "
                f"{one['combine_ms']:12.1f}  {shares}"
            )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
