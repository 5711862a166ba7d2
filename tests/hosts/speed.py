"""Measures between hosts (network namespaces) whose links are shaped, as root. No test.

    speed.py crossings [--shapes HOSTSxRANKS ...] [--topk N ...] [--limit HOSTS]
    speed.py nics [--nics N ...]
    speed.py raw NETWORK_SPEED
    speed.py reduce [--shapes HOSTSxRANKS ...] [--mib N ...] [--formats FORMAT ...]
    all: [--mbit N ...] [--rounds N] [--tokens N] [--hidden N] [--json FILE]

crossings: direct and hierarchical, and what the cost model of docs/design/domains_network.md says
of both. Each host is a domain. Each token has --topk experts, of all hosts or of --limit of them.
nics: what a second NIC gives. Two hosts with one rank each; every token goes to the other rank.
reduce: all_reduce of --mib MiB of f32, of ordinary and of registered memory, in each of --formats,
against Gloo's of f32, in turn. Each host is a domain.
raw: Ferry over libfabric against libfabric alone; the program is that of bench/network_speed.cpp.
A rate of 0: as fast as the interfaces are.

Times of all but raw are medians of the slowest rank. "Link alone": what the busiest host sends,
at the rate of its interfaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hosts import Hosts
from job import lines_of, until_end, write_report

import ferry

EACH = 8  # experts of a rank
INSIDE_SPEED = 8  # of memory, in speeds of the network: core/crossing_plan.hpp
Routes = npt.NDArray[np.int64]
Result = dict[str, Any]


def routes_of(given: argparse.Namespace, rank: int, ranks: int, hosts: int, topk: int) -> Routes:
    """Expert ids `[tokens, topk]`."""
    if given.what == "nics":
        return np.full((given.tokens, 1), EACH * (1 - rank))
    random = np.random.default_rng([topk, rank])
    experts = EACH * ranks
    routes = []
    for _ in range(given.tokens):
        order = random.permutation(experts)
        if 0 < given.limit < hosts:
            host = order // (experts // hosts)
            order = order[np.isin(host, random.permutation(hosts)[: given.limit])]
        routes.append(order[:topk])
    return np.stack(routes)


def rows_by_model(given: argparse.Namespace, hosts: int, each: int, topk: int) -> dict[str, float]:
    """Rows over the network of the busiest rank, by the cost model, computed from the routes."""
    ranks = hosts * each
    # Of each source: tokens with an expert on a rank, and on a host.
    goes = np.zeros((ranks, given.tokens, ranks), bool)
    for source in range(ranks):
        owners = routes_of(given, source, ranks, hosts, topk) // EACH
        np.put_along_axis(goes[source], owners, True, axis=1)
    to_rank = goes.sum(1)
    to_host = goes.reshape(ranks, given.tokens, hosts, each).any(3).sum(1)
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
        hierarchical.append(max(out, into, spread / INSIDE_SPEED))
    return {"direct": float(direct.max()), "hierarchical": float(max(hierarchical))}


def measure(given: argparse.Namespace, hosts: int) -> None:
    """A rank: prints a line of JSON for each number of experts and each crossing."""
    experts = EACH * int(os.environ["WORLD_SIZE"])
    crossings = ("direct", "hierarchical") if given.what == "crossings" else ("automatic",)
    with ferry.Group(ferry.from_environment(), experts=experts, memory_bytes=64 << 20) as group:
        x = np.ones((given.tokens, given.hidden), np.float32)
        for topk in given.topk:
            plan = group.plan(routes_of(given, group.rank, group.size, hosts, topk))
            for crossing in crossings:
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
                    "nics": [nic.bytes for nic in group.nics()],
                }
                print(json.dumps(said), flush=True)


def measure_reduce(given: argparse.Namespace) -> None:
    """A rank: prints a line of JSON for each size and contender."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bytes_ = max(given.mib) << 20
    with ferry.Collectives(ferry.from_environment(), memory_bytes=bytes_ + (1 << 20)) as ranks:
        for mib in given.mib:
            ordinary = torch.randn((mib << 20) // 4) * 1e-3
            registered = ranks.empty((len(ordinary),), torch.float32)
            registered.copy_(ordinary)
            fresh = ordinary.clone()  # what e4m3 has rounded would cross exactly
            inputs = {"gloo": ordinary}
            calls: dict[str, Any] = {"gloo": lambda x=ordinary: dist.all_reduce(x)}
            for name, x in (("ordinary", ordinary), ("registered", registered)):
                for kind in given.formats:
                    options = {} if kind == "exact" else {"format": kind}
                    inputs[f"{kind}, {name}"] = x
                    calls[f"{kind}, {name}"] = lambda x=x, options=options: ranks.all_reduce(
                        x, op="mean", **options
                    )
            times: dict[str, list[float]] = {name: [] for name in calls}
            sent = dict.fromkeys(calls, 0)
            for _ in range(given.rounds + 1):
                for name, call in calls.items():
                    inputs[name].copy_(fresh)
                    ranks.barrier()
                    before, start = ranks.network().put_bytes, time.perf_counter()
                    call()
                    ranks.barrier()
                    times[name].append(time.perf_counter() - start)
                    sent[name] = ranks.network().put_bytes - before
            for name in calls:
                said = {
                    "mib": mib,
                    "contender": name,
                    "ms": statistics.median(times[name][1:]) * 1e3,
                    "bytes": sent[name],
                }
                print(json.dumps(said), flush=True)


def run_ranks(
    hosts: int, each: int, mbit: int, nics: int = 1, **variables: str
) -> list[list[Result]]:
    """This program's ranks on hosts whose interfaces send at `mbit` each: what each rank said."""
    command = [sys.executable, __file__, *sys.argv[1:], "--hosts", str(hosts)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(hosts, nics=nics, own_boot_ids=True, variables=variables) as machines,
    ):
        logs = Path(folder)
        machines.shape(f"{mbit}mbit")
        until_end(machines.start_ranks(each, command, logs), logs)
        return [lines_of(logs, rank) for rank in range(hosts * each)]


def run(given: argparse.Namespace, hosts: int, each: int, mbit: int, nics: int) -> list[Result]:
    """Ranks on hosts whose interfaces send at `mbit` each: a result for each line of a rank."""
    variables = {"FERRY_OFI_NICS": ",".join(f"eth{i}" for i in range(nics))} if nics > 1 else {}
    said = run_ranks(hosts, each, mbit, nics, **variables)
    results = []
    for lines in zip(*said, strict=True):
        sent = [line["bytes"] for line in lines]
        busiest = max(sum(sent[first : first + each]) for first in range(0, len(sent), each))
        results.append(
            {key: lines[0][key] for key in ("topk", "crossing", "automatic")}
            | {key: max(line[key] for line in lines) for key in ("dispatch_ms", "combine_ms")}
            | {"host_bytes": busiest, "link_ms": busiest * 8 / (mbit * nics) / 1e3}
            | {"nic_bytes": lines[0]["nics"]}
        )
    return results


def crossings(given: argparse.Namespace, mbit: int) -> list[Result]:
    found = []
    for shape in given.shapes:
        hosts, each = map(int, shape.split("x"))
        print(f"{hosts} hosts x {each} ranks, {mbit} Mbit/s a host")
        print("top-k   crossing      automatic     rows by model  link, dispatch, combine, ms")
        for one in run(given, hosts, each, mbit, 1):
            rows = rows_by_model(given, hosts, each, one["topk"])[one["crossing"]]
            print(
                f"{one['topk']:5}   {one['crossing']:13} {one['automatic']:13} {rows:8.0f} "
                f"{one['link_ms']:20.0f} {one['dispatch_ms']:9.0f} {one['combine_ms']:9.0f}"
            )
            found.append({"hosts": hosts, "ranks": each, "mbit": mbit, "rows": rows} | one)
    return found


def nics(given: argparse.Namespace, mbit: int) -> list[Result]:
    found = []
    print("Mbit/s  NICs  link alone, ms  dispatch, ms  combine, ms  MB by each")
    for count in given.nics:
        one = run(given, 2, 1, mbit, count)[0]
        shares = " ".join(f"{bytes / 1e6:.1f}" for bytes in one["nic_bytes"])
        print(
            f"{mbit:6} {count:5} {one['link_ms']:15.1f} {one['dispatch_ms']:13.1f} "
            f"{one['combine_ms']:12.1f}  {shares}"
        )
        found.append({"nics": count, "mbit": mbit} | one)
    return found


def reduce(given: argparse.Namespace, mbit: int) -> list[Result]:
    found: list[Result] = []
    for shape in given.shapes:
        hosts, each = map(int, shape.split("x"))
        print(f"{hosts} hosts x {each} ranks, {mbit} Mbit/s a host")
        print("  MiB   contender                 ms     of gloo   link alone, ms")
        gloo = 0.0
        for lines in zip(*run_ranks(hosts, each, mbit), strict=True):
            one = {"hosts": hosts, "ranks": each, "mbit": mbit} | lines[0]
            one["ms"] = max(line["ms"] for line in lines)
            sent = [line["bytes"] for line in lines]
            one["host_bytes"] = max(
                sum(sent[first : first + each]) for first in range(0, len(sent), each)
            )
            if one["contender"] == "gloo":
                gloo = one["ms"]
                # A ring of all ranks crosses each link once.
                one["host_bytes"] = 2 * (len(sent) - 1) * (one["mib"] << 20) // len(sent)
            one["link_ms"] = one["host_bytes"] * 8 / mbit / 1e3
            one["of_gloo"] = gloo / one["ms"]
            print(
                f"{one['mib']:5}   {one['contender']:20} {one['ms']:8.1f} {one['of_gloo']:10.2f} "
                f"{one['link_ms']:14.1f}",
                flush=True,
            )
            found.append(one)
    return found


def raw(given: argparse.Namespace, mbit: int) -> list[Result]:
    """The program's JSON, with the rate. Against the best raw write: dispatch and combine in shares
    of its rate, few tokens in times of its latency."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as machines:
        if mbit > 0:
            machines.shape(f"{mbit}mbit")
        hosts = ",".join(f"{name}={machines.address(i)}" for i, name in enumerate(machines.names))
        file = Path(folder) / "figures.json"
        options = ["--hosts", hosts, "--rounds", str(given.rounds), "--json", str(file)]
        subprocess.run([given.program, *options], check=True, stdout=subprocess.DEVNULL)
        found: Result = json.loads(file.read_text())
    print(f"{mbit or 'as fast as they are':>8} Mbit/s")
    for figure in found["figures"]:
        if "share_of_raw" in figure:
            print(f"  {figure['name']:32} {100 * figure['share_of_raw']:6.0f} %")
        else:
            print(f"  {figure['name']:32} {figure['times_raw']:6.2f} x")
    return [found | {"mbit": mbit}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_subparsers(dest="what", required=True)
    for name, mbit, rounds, tokens in (
        ("crossings", [200], 3, 128),
        ("nics", [1000], 5, 2048),
        ("reduce", [1000], 5, 0),
        ("raw", [0, 10000, 5000, 1000], 15, 0),
    ):
        kind = kinds.add_parser(name)
        kind.add_argument("--mbit", type=int, nargs="+", default=mbit, help="of each interface")
        kind.add_argument("--rounds", type=int, default=rounds)
        kind.add_argument("--tokens", type=int, default=tokens, help="of a rank")
        kind.add_argument("--hidden", type=int, default=2048)
        kind.add_argument("--json", type=Path)
        kind.add_argument("--hosts", type=int, default=0, help=argparse.SUPPRESS)  # of a rank
        kind.set_defaults(topk=[1])
    kinds.choices["crossings"].add_argument("--shapes", nargs="+", default=["2x4"], help="of each")
    kinds.choices["crossings"].add_argument("--topk", type=int, nargs="+", default=[1, 2, 4, 8])
    kinds.choices["crossings"].add_argument("--limit", type=int, default=0, help="hosts of a token")
    kinds.choices["reduce"].add_argument("--shapes", nargs="+", default=["2x4", "4x2"])
    kinds.choices["reduce"].add_argument("--mib", type=int, nargs="+", default=[32])
    kinds.choices["reduce"].add_argument(
        "--formats", nargs="+", default=["exact", "bf16", "f16", "e4m3", "automatic"]
    )
    kinds.choices["nics"].add_argument("--nics", type=int, nargs="+", default=[1, 2])
    kinds.choices["raw"].add_argument("program", type=Path, metavar="NETWORK_SPEED")
    given = parser.parse_args()
    if given.hosts:
        measure_reduce(given) if given.what == "reduce" else measure(given, given.hosts)
        return
    measured = {"crossings": crossings, "nics": nics, "raw": raw, "reduce": reduce}[given.what]
    runs = [one for mbit in given.mbit for one in measured(given, mbit)]
    write_report(given.json, runs)


if __name__ == "__main__":
    main()
