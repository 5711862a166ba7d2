"""What `ferry simulate` says of exchanges between hosts, beside what they take, as root. No test.

    prediction.py FERRY [--shapes HOSTSxRANKS ...] [--mbit N] [--slow HOST ...] [--topk N ...]
                  [--congestion NAME] [--json FILE]

Every host is a domain, a network namespace. What it sends, and what it gets, is limited to --mbit
each, of host --slow to a quarter; -1: of none. `FERRY doctor --net` measures the links: the rate
(at most what TCP can have of --mbit, or what ranks have that send at once) and the latency between
hosts go to a cluster file, slower hosts to `--slow-nic`. Then both crossings run with recorded
routes, and `FERRY simulate` gets the routes: what the links take. What the cores take is measured
before the links are limited. Both overlap in part, as in a model with `overlap` 2: the prediction
is the root of the sum of their squares. Times are medians of the slowest rank.
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
from hosts import Hosts
from job import lines_of, until_end, write_report
from speed import EACH, routes_of

import ferry

Result = dict[str, Any]
OVERLAP = 2.0  # of links and cores: l and c take (l^p + c^p)^(1/p). A round number.
OF_A_FRAME = 1448 / 1514  # of the bytes of an Ethernet frame those that TCP carries
MEMORY = 8e9  # bytes a second that ranks of a host write to each other; the network is far slower


def both(links: float, cores: float, overlap: float = OVERLAP) -> float:
    """The time of what takes the links and the cores so long."""
    return float((links**overlap + cores**overlap) ** (1 / overlap))


def tcp_rate(mbit: float) -> float:
    """The most that TCP can have of such a link, in bytes a second."""
    return mbit * 1e6 / 8 * OF_A_FRAME


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ferry", help="the command")
    parser.add_argument("--shapes", nargs="+", default=["4x1", "2x4", "4x2"])
    parser.add_argument("--mbit", type=float, default=1000, help="of a host, each way")
    parser.add_argument("--slow", type=int, nargs="+", default=[-1, 1], help="host, -1: none")
    parser.add_argument("--topk", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--tokens", type=int, default=512, help="of a rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--congestion", help="of TCP, as reno; else what hosts have anyway")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--routes", type=Path, help=argparse.SUPPRESS)  # of a rank
    parser.set_defaults(what="crossings", limit=0)  # of routes_of
    return parser.parse_args()


def measure(given: argparse.Namespace) -> None:
    """A rank: prints a line of JSON for each number of experts and each crossing."""
    import torch

    torch.set_num_threads(1)
    experts = EACH * int(os.environ["WORLD_SIZE"])
    with ferry.Group(ferry.from_environment(), experts=experts, memory_bytes=128 << 20) as group:
        x = torch.ones(given.tokens, given.hidden, dtype=torch.bfloat16)
        for topk in given.topk:
            routes = routes_of(given, group.rank, group.size, 0, topk)
            group.record_routes(given.routes / f"routes{topk}")
            plan = group.plan(routes)
            group.record_routes(None)
            rows = torch.ones(plan.recv_rows(), given.hidden, dtype=torch.bfloat16)
            for crossing in ("direct", "hierarchical"):
                times: list[tuple[float, float]] = []
                for _ in range(given.rounds + 1):
                    group.barrier()
                    start = time.perf_counter()
                    received = group.dispatch(x, plan, format="e4m3", crossing=crossing)
                    group.barrier()
                    there = time.perf_counter()
                    group.combine(rows[: len(received.x)], plan, crossing=crossing)
                    group.barrier()
                    times.append((there - start, time.perf_counter() - there))
                said: Result = {"topk": topk, "crossing": crossing}
                for i, call in enumerate(("dispatch", "combine")):
                    said[call] = statistics.median(each[i] for each in times[1:])
                print(json.dumps(said), flush=True)


def cluster_of(links: Result, each: int, mbit: list[float]) -> tuple[str, list[str]]:
    """A cluster file, and the options for slower hosts, of what `ferry doctor --net` said of hosts
    with such links."""
    domains = np.array(links["domains"])
    apart = domains[:, None] != domains[None, :]
    most = np.array([tcp_rate(one) for one in mbit])[domains]
    rates = np.minimum(links["bytes_per_s"], np.minimum(most[:, None], most[None, :]))
    across = rates[apart]
    usual = float(np.median(across[across > across.max() / 2]))
    latency = float(np.median(np.array(links["latency_ns"])[apart]))
    slow, slowest = [], 1.0
    for rank in range(len(domains)):
        own = np.concatenate((rates[rank][apart[rank]], rates[:, rank][apart[:, rank]]))
        if (rate := float(np.sort(own)[len(own) // 2])) < 0.8 * usual:
            slow += ["--slow-nic", f"{rank}:{rate / usual:.4f}"]
            slowest = min(slowest, rate / usual)
    # What pairs have one after the other, all do not have at once: then the slowest decides.
    nic = usual / each
    together = float(np.median(links["together_bytes_per_s"]))
    nic *= min(1.0, together / (nic * slowest))
    lines = (
        f"host_ranks: {each}",
        "memory_gb: 1",
        f"nvlink: {{value: {MEMORY / 1e9}, from: assumed}}",
        f"nic: {{value: {nic / 1e9:.6f}, from: measured}}",
        f"latency_us: {latency / 1e3:.1f}",
    )
    return "\n".join(lines) + "\n", slow


def predicted(
    given: argparse.Namespace,
    folder: Path,
    cluster: Path,
    slow: list[str],
    topk: int,
    crossing: str,
    ranks: int,
) -> dict[str, float]:
    """Seconds of a dispatch and of a combine."""
    model = folder / f"model{topk}.json"
    shape = {"hidden": given.hidden, "experts": EACH * ranks, "topk": topk, "moe_layers": 1}
    more = {"intermediate": 1, "other_parameters": 0, "parameter_bytes": 2}
    model.write_text(json.dumps(shape | more))
    command = [given.ferry, "simulate", "--json", "--cluster", cluster, "--model", model]
    command += ["--ranks", str(ranks), "--routes", folder / f"routes{topk}", *slow]
    command += ["--crossing", crossing]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return {call["call"].split()[0]: call["us"] * 1e-6 for call in json.loads(done.stdout)}


def measured(
    given: argparse.Namespace, machines: Hosts, each: int, folder: Path
) -> dict[tuple[int, str, str], float]:
    """Seconds of the slowest rank, by number of experts, crossing and call."""
    command = [sys.executable, __file__, *sys.argv[1:], "--routes", str(folder)]
    until_end(machines.start_ranks(each, command, folder), folder)
    times = {}
    for lines in zip(
        *(lines_of(folder, rank) for rank in range(len(machines.names) * each)), strict=True
    ):
        for call in ("dispatch", "combine"):
            slowest = max(line[call] for line in lines)
            times[lines[0]["topk"], lines[0]["crossing"], call] = slowest
    return times


def run(given: argparse.Namespace, shape: str, slow: int) -> Result:
    hosts, each = map(int, shape.split("x"))
    with (
        tempfile.TemporaryDirectory() as name,
        Hosts(hosts, own_boot_ids=True) as machines,
    ):
        folder = Path(name)
        for host in range(hosts):
            if given.congestion:
                machines.set_congestion(host, given.congestion)
        cores = measured(given, machines, each, folder)
        mbit = [given.mbit / (4 if host == slow else 1) for host in range(hosts)]
        for host in range(hosts):
            machines.shape_link(host, mbit[host])
        doctor = [given.ferry, "doctor", "--net", "--json"]
        until_end(machines.start_ranks(each, doctor, folder), folder)
        said = (folder / "rank-0.txt").read_text()  # behind lines of progress
        text, slow_nics = cluster_of(json.loads(said[said.index("{") :]), each, mbit)
        cluster = folder / "cluster.yaml"
        cluster.write_text(text)
        cases: dict[int, Result] = {}
        links: dict[str, float] = {}
        for (topk, crossing, call), took in measured(given, machines, each, folder).items():
            if call == "dispatch":  # then its combine
                links = predicted(given, folder, cluster, slow_nics, topk, crossing, hosts * each)
            alone = cores[topk, crossing, call]
            foretold = both(links[call], alone)
            cases.setdefault(topk, {"topk": topk}).setdefault(crossing, {}).update({
                f"{call}_ms": took * 1e3,
                f"{call}_links_ms": links[call] * 1e3,
                f"{call}_cores_ms": alone * 1e3,
                f"{call}_predicted_ms": foretold * 1e3,
            })
            print(
                f"{shape} slow {slow:2} top-{topk} {crossing:13} {call:9}{took * 1e3:8.1f} ms, "
                f"predicted {foretold * 1e3:8.1f} ({100 * (foretold / took - 1):+.0f} %), "
                f"links alone {links[call] * 1e3:.1f}, cores alone {alone * 1e3:.1f}",
                flush=True,
            )
        return {
            "hosts": hosts,
            "ranks": each,
            "mbit": given.mbit,
            "slow": slow,
            "cluster": text.split("\n"),
            "slow_nics": slow_nics[1::2],
            "cases": list(cases.values()),
        }


def main() -> None:
    given = arguments()
    if given.routes:
        measure(given)
        return
    runs = [run(given, shape, slow) for shape in given.shapes for slow in given.slow]
    settings = {name: getattr(given, name) for name in ("tokens", "hidden", "rounds", "congestion")}
    write_report(given.json, runs, **settings)


if __name__ == "__main__":
    main()
