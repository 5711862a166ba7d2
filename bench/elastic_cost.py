"""What it costs to commit each step while nothing fails: blocks of steps in pairs.

    ferry run -n 2 -- python bench/elastic_cost.py [--pairs 200] [--steps 4] [--tokens 1024]

A step of throughput mode in an elastic group: plan, dispatch, an expert that multiplies its rows,
combine. Blocks of steps with a commit each and without take turns in one group, in changing order:
both meet the same load of the machine and lie in the same memory. Prints the median over pairs
of (time with) / (time without) - 1 and its 95 % interval, of the wall and the CPU time of rank 0.

    ferry run -n 2 -- python bench/elastic_cost.py --decode [--pairs 200] [--steps 50] [--tokens 8]

The same of latency mode, where an exchange with masks goes on without ranks that fail: dispatch
and combine of such an exchange, and of one without masks.
"""

from __future__ import annotations

import argparse
import statistics
import time

import job
import numpy as np
from observe_cost import median_of

import ferry

HIDDEN, TOPK, EXPERTS = 2048, 2, 8


class Steps:
    def __init__(self, group: ferry.Group, tokens: int) -> None:
        random = np.random.default_rng(group.rank)
        self.group, self.step = group, 0
        self.x = random.standard_normal((tokens, HIDDEN), np.float32)
        self.routes = np.stack([random.permutation(EXPERTS)[:TOPK] for _ in range(tokens)])

    def block(self, steps: int, commits: bool) -> tuple[float, float]:
        """Wall and CPU seconds."""
        self.group.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            plan = self.group.plan(self.routes)
            rows = self.group.dispatch(self.x, plan).x
            rows *= 2
            self.group.combine(rows, plan)
            if commits:
                self.step += 1
                self.group.commit(self.step)
        return time.perf_counter() - wall, time.process_time() - cpu


class Decode:
    def __init__(self, group: ferry.Group, tokens: int) -> None:
        random = np.random.default_rng(group.rank)
        shape = {"capacity": tokens, "hidden": HIDDEN, "topk": TOPK, "dtype": "f32"}
        self.group = group
        self.exchanges = [
            ferry.LatencyExchange(group, **shape, masks=masks) for masks in (False, True)
        ]
        self.x = random.standard_normal((tokens, HIDDEN), np.float32)
        self.routes = np.stack([random.permutation(EXPERTS)[:TOPK] for _ in range(tokens)])
        self.weights = np.full((tokens, TOPK), 0.5, np.float32)

    def block(self, steps: int, masks: bool) -> tuple[float, float]:
        """Wall and CPU seconds."""
        exchange = self.exchanges[masks]
        self.group.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            got = exchange.dispatch(self.x, self.routes)
            exchange.combine(got.x, got, self.weights, path="per_rank")
        return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--steps", type=int, help="of a block (4; of --decode 50)")
    parser.add_argument("--tokens", type=int, help="of a rank (1024; of --decode 8)")
    given = parser.parse_args()
    given.steps = given.steps or (50 if given.decode else 4)
    given.tokens = given.tokens or (8 if given.decode else 1024)
    elastic = "" if given.decode else "cost"
    group = ferry.Group(job.bootstrap(ranks=2), experts=EXPERTS, elastic=elastic)
    steps = (Decode if given.decode else Steps)(group, given.tokens)
    steps.block(given.steps, True)
    pairs = []
    for number in job.shown(range(given.pairs), "pairs"):
        first = number % 2 == 0
        times = {costs: steps.block(given.steps, costs) for costs in (first, not first)}
        pairs.append((times[False], times[True]))
    group.barrier()
    if group.rank != 0:
        return
    for at, clock in enumerate(("wall", "CPU")):
        step = statistics.median(plain[at] for plain, _ in pairs) / given.steps
        low, middle, high = median_of([100 * (costs[at] / plain[at] - 1) for plain, costs in pairs])
        more = median_of([1e6 * (costs[at] - plain[at]) / given.steps for plain, costs in pairs])
        print(
            f"{clock}: a step {step * 1e3:.3f} ms, with {'masks' if given.decode else 'commit'} "
            f"{middle:+.2f} % ({low:+.2f} to {high:+.2f}, {given.pairs} pairs); "
            f"{more[1]:+.2f} us ({more[0]:+.2f} to {more[2]:+.2f})"
        )


if __name__ == "__main__":
    main()
