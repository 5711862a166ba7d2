"""How fast a vault takes and gives state, beside plain copies of as many bytes.

    python bench/vault.py [MiB]

Two ranks are threads. Each round copies, puts and gets one after another; the medians of the
rounds, and the median of put / copy and of get / put within the same round, are printed as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import job
import numpy as np

import ferry

ROUNDS = 30


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(boot: ferry.Bootstrap, mib: int, results: list[dict[str, float]]) -> None:
    state = np.arange(mib << 17, dtype=np.float64)
    other = np.zeros_like(state)
    with ferry.Group(boot, experts=2) as group:
        tensors = {group.rank: state}
        vault = ferry.Vault(group, ferry.Vault.bytes_of(tensors))
        vault.recover()
        vault.put(0, tensors)
        steps = range(1, ROUNDS + 1)
        for step in job.shown(steps, "rounds") if group.rank == 0 else steps:
            group.commit(step)
            if group.rank == 0:  # rank 1 waits meanwhile
                result = {"copy": seconds(lambda: np.copyto(other, state))}
                result["put"] = seconds(lambda step=step: vault.put(step, tensors))
            else:
                vault.put(step, tensors)
            vault.recover()
            if group.rank == 0:
                result["get"] = seconds(lambda: vault.get(0, other))
                results.append(result)
            group.barrier()


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    results: list[dict[str, float]] = []
    ranks = [
        threading.Thread(target=measure, args=(boot, mib, results)) for boot in ferry.threads(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    results = results[2:]  # the first two write to pages that are new
    line: dict[str, float] = {"mib": mib, "rounds": len(results)}
    for name in ("copy", "put", "get"):
        line[f"{name}_gb_s"] = (
            mib / 1024 * 1.073741824 / statistics.median(r[name] for r in results)
        )
    line["put_of_copy"] = statistics.median(r["copy"] / r["put"] for r in results)
    line["get_of_put"] = statistics.median(r["put"] / r["get"] for r in results)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
