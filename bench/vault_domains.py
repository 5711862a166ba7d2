"""How fast a vault over several domains gives state, beside how fast it takes it.

    ferry run -n 6 -- python bench/vault_domains.py [MiB]

Three virtual domains of two ranks, which libfabric joins. In each round all put so many bytes,
which go to the next domain, and each then fetches (`recover`) and takes (`get`) what a rank of the
next domain has put: a copy that lies in neither its memory nor its domain's, as of a process that
joins. Prints medians of the rounds, of the slowest rank: bytes of a rank / seconds.
"""

from __future__ import annotations

import statistics
import sys
import time

import job
import numpy as np

import ferry

ROUNDS, DOMAIN = 15, 2


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    boot = job.bootstrap(ranks=6)
    group = ferry.Group(boot, experts=boot.size, domain_size=DOMAIN, network="ofi")
    state = np.arange(mib << 17, dtype=np.float64)
    out = np.empty_like(state)
    wanted = (group.rank + DOMAIN) % group.size
    vault = ferry.Vault(group, ferry.Vault.bytes_of({group.rank: state}))
    vault.recover([wanted])
    vault.put(0, {group.rank: state})
    slowest = []
    for step in job.shown(range(1, ROUNDS + 1), "rounds"):
        group.commit(step)
        group.barrier()
        start = time.perf_counter()
        vault.put(step, {group.rank: state})
        put = time.perf_counter()
        group.barrier()
        fetch = time.perf_counter()
        vault.recover([wanted])
        vault.get(wanted, out)
        got = time.perf_counter()
        assert (out == state).all()
        mine = np.array([[put - start, got - fetch, 0.0, 0.0]], np.float32)
        plan = group.plan(np.arange(group.size)[np.newaxis])
        slowest.append(group.dispatch(mine, plan).x.max(axis=0)[:2])
    group.barrier()
    if group.rank == 0:
        taken, given = (mib / 1024 / statistics.median(times) for times in zip(*slowest))
        ratio = statistics.median(put / get for put, get in slowest)
        print(f"{mib} MiB a rank: put {taken:.2f}, recover and get {given:.2f} GiB/s; "
              f"{ratio:.0%} of put's rate (median of {ROUNDS} rounds)")  # fmt: skip


if __name__ == "__main__":
    main()
