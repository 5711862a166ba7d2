"""Direct and hierarchical crossing between hosts (network namespaces) whose links are shaped, and
what the cost model of docs/design/domains_network.md says of both. A measurement, no test.

    crossing_speed.py [--shapes HOSTSxRANKS ...] [--mbit N ...] [--topk N ...] [--json FILE]

Each host is a domain: shared memory inside, libfabric over TCP between. Every rank draws as many
experts for each token as --topk says, from all ranks. Times are medians of the slowest rank. "Link
alone": what the busiest host sends, at the rate of its link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hosts import Hosts
from job import lines_of, until_end

import ferry

EACH = 8  # experts of a rank
INSIDE_SPEED = 8  # of memory, in speeds of the network: core/crossing_plan.hpp
Routes = npt.NDArray[np.int64]


def routes_of(rank: int, ranks: int, tokens: int, topk: int) -> Routes:
    """Expert ids `[tokens, topk]`."""
    random = np.random.default_rng([topk, rank])
    return np.stack([random.permutation(EACH * ranks)[:topk] for _ in range(tokens)])


def formula(hosts: int, each: int, tokens: int, topk: int) -> dict[str, float]:
    """Rows over the network of the busiest rank, by the cost model, computed from the routes."""
    ranks = hosts * each
    # Of each source: tokens with an expert on a rank, and on a host.
    goes = np.zeros((ranks, tokens, ranks), bool)
    for source in range(ranks):
        owners = routes_of(source, ranks, tokens, topk) // EACH
        np.put_along_axis(goes[source], owners, True, axis=1)
    to_rank = goes.sum(1)
    to_host = goes.reshape(ranks, tokens, hosts, each).any(3).sum(1)
    host = np.arange(ranks) // each
    apart = host[:, None] != host[None, :]
    direct = np.maximum((to_rank * apart).sum(1), (to_rank * apart).sum(0))
    hierarchical = []
    for rank in range(ranks):
        others = [peer for peer in range(ranks) if host[peer] != host[rank]]
        feeders = [peer for peer in others if peer % each == rank % each]
        out = sum(to_host[rank, there] for there in range(hosts) if there != host[rank])
        into = sum(to_host[peer, host[rank]] for peer in feeders)
        spread = sum(to_rank[peer, host == host[rank]].sum() for peer in feeders)
        hierarchical.append(max(out, into) + spread / INSIDE_SPEED)
    return {"direct": float(direct.max()), "hierarchical": float(max(hierarchical))}


def measure(given: argparse.Namespace) -> None:
    """A rank: prints a line of JSON for each number of experts and each crossing."""
    with ferry.Group(
        ferry.from_environment(), experts=EACH * int(os.environ["WORLD_SIZE"])
    ) as group:
        x = np.ones((given.tokens, given.hidden), np.float32)
        for topk in given.topk:
            plan = group.plan(routes_of(group.rank, group.size, given.tokens, topk))
            for crossing in ("direct", "hierarchical"):
                times: list[tuple[float, float]] = []
                used = 0
                for _ in range(given.rounds + 1):
                    group.barrier()
                    before, start = group.network().put_bytes, time.perf_counter()
                    received = group.dispatch(x, plan, crossing=crossing)
                    group.barrier()
                    used, there = group.network().put_bytes - before, time.perf_counter()
                    group.combine(received.x, plan, crossing=crossing)
                    group.barrier()
                    times.append((there - start, time.perf_counter() - there))
                said = {
                    "topk": topk,
                    "crossing": crossing,
                    "automatic": plan.crossing(),
                    "dispatch_ms": statistics.median(t[0] for t in times[1:]) * 1e3,
                    "combine_ms": statistics.median(t[1] for t in times[1:]) * 1e3,
                    "bytes": used,
                }
                print(json.dumps(said), flush=True)


def run(given: argparse.Namespace, hosts: int, each: int, rate: int) -> dict[str, Any]:
    """`rate`: Mbit/s at which a host sends."""
    command = [sys.executable, __file__, "--tokens", str(given.tokens), "--hidden",
               str(given.hidden), "--rounds", str(given.rounds), "--topk",
               *map(str, given.topk)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Hosts(hosts, own_boot_ids=True) as machines:
        logs = Path(folder)
        machines.shape(f"{rate}mbit")
        until_end(machines.start_ranks(each, command, logs), logs)
        said = [lines_of(logs, rank) for rank in range(hosts * each)]
    cases: dict[int, dict[str, Any]] = {}
    for lines in zip(*said, strict=True):
        sent = [line["bytes"] for line in lines]
        host_bytes = max(sum(sent[first : first + each]) for first in range(0, len(sent), each))
        one = lines[0]
        case = cases.setdefault(
            one["topk"],
            {
                "topk": one["topk"],
                "rows": formula(hosts, each, given.tokens, one["topk"]),
                "automatic": one["automatic"],
            },
        )
        case[one["crossing"]] = {
            "dispatch_ms": max(line["dispatch_ms"] for line in lines),
            "combine_ms": max(line["combine_ms"] for line in lines),
            "host_bytes": host_bytes,
            "link_ms": host_bytes * 8 / rate / 1e3,
        }
    return {"hosts": hosts, "ranks": each, "mbit": rate, "cases": list(cases.values())}


def show(result: dict[str, Any]) -> None:
    """A line for each number of experts: direct, then hierarchical."""
    print(f"{result['hosts']} hosts x {result['ranks']} ranks, {result['mbit']} Mbit/s a host")
    print("top-k   rows (cost model)  automatic      link alone, ms  dispatch, ms   combine, ms")
    for case in result["cases"]:
        text = f"{case['topk']:5}"
        text += f" {case['rows']['direct']:8.0f} {case['rows']['hierarchical']:8.0f} "
        text += f" {case['automatic']:12} "
        for name in ("link_ms", "dispatch_ms", "combine_ms"):
            text += f" {case['direct'][name]:6.0f} {case['hierarchical'][name]:6.0f} "
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["2x4"], help="hosts x ranks of each")
    parser.add_argument("--mbit", type=int, nargs="+", default=[200], help="that a host sends")
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of a rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given)
        return
    runs = []
    for shape in given.shapes:
        hosts, each = map(int, shape.split("x"))
        for rate in given.mbit:
            runs.append(run(given, hosts, each, rate))
            show(runs[-1])
    if given.json:
        result = {
            "command": "python tests/hosts/crossing_speed.py " + " ".join(sys.argv[1:]),
            "machine": f"{os.uname().machine}, {os.cpu_count()} cores",
            "ferry": ferry.__version__,
            **{name: getattr(given, name) for name in ("tokens", "hidden", "rounds")},
            "runs": runs,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
