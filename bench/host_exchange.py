"""Ferry against PyTorch's Gloo and against the copy rate, processes on one host.

    python bench/host_exchange.py [--tokens 1024] [--hidden 4096] [--json FILE]

Every rank is a process with one torch thread. In each round, after an untimed call of the same kind
and aligned by a barrier, every rank times

- copy: one copy of as many bytes as it receives, between two warm buffers of its own,
- Ferry: dispatch with a cached plan, full dispatch (plan included), combine from registered rows,
  combine from an ordinary tensor,
- Gloo: `index_select` + `all_to_all_single`, and `all_to_all_single` + `index_add_` back; it also
  sends one row for each (token, destination rank), from indices made beforehand.

A sample is the slowest rank's time; the figure is the median over rounds. Bytes: dispatch counts
the rows received once, combine the rows and the output; the sum over ranks divided by the sample's
time is the aggregate rate. The results are checked against each other before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser.parse_args()


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(args: argparse.Namespace) -> int:
    """Runs this file once for each rank; returns the first exit code that is not 0."""
    env = dict(
        os.environ,
        WORLD_SIZE=str(args.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        FERRY_PORT=str(free_port()),
        FERRY_SECRET=secrets.token_hex(16),
        OMP_NUM_THREADS="1",
    )
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=dict(env, RANK=str(rank)))
        for rank in range(args.ranks)
    ]
    return next((code for code in [rank.wait() for rank in ranks] if code), 0)


@dataclass
class Case:
    """What is timed: its name, the bytes of this rank, the call."""

    name: str
    bytes: int
    call: Callable[[], object]


class Bench:
    """One dtype on one rank."""

    def __init__(self, args: argparse.Namespace, group, dtype) -> None:
        import torch

        generator = torch.Generator().manual_seed(args.seed * 1000 + group.rank)
        shape = (args.tokens, args.hidden)
        self.group = group
        self.x = torch.randint(-8, 8, shape, generator=generator).to(dtype)
        scores = torch.rand((args.tokens, args.experts), generator=generator)
        self.topk_idx = scores.topk(args.topk, dim=1).indices
        self.plan = group.plan(self.topk_idx)
        self.out = torch.empty_like(self.x)
        self.make_gloo_lists(args)
        rows = self.plan.recv_rows()
        self.ordinary = torch.ones((rows, args.hidden), dtype=dtype)
        self.copy_from = torch.ones((rows, args.hidden), dtype=dtype)
        self.copy_to = torch.zeros((rows, args.hidden), dtype=dtype)
        self.gloo_recv = torch.zeros((rows, args.hidden), dtype=dtype)
        self.received = group.dispatch(self.x, self.plan)
        self.check()

    def make_gloo_lists(self, args: argparse.Namespace) -> None:
        """Which tokens go to which rank, one row for each (token, rank)."""
        import torch

        ranks = self.topk_idx // (args.experts // self.group.size)
        lists = [(ranks == peer).any(dim=1).nonzero().flatten() for peer in range(self.group.size)]
        self.send_index = torch.cat(lists)
        self.send_splits = [len(rows) for rows in lists]
        self.recv_splits = list(self.plan.recv_rows_per_rank())

    def gloo_dispatch(self):
        """Gather, then exchange."""
        import torch.distributed as dist

        gathered = self.x.index_select(0, self.send_index)
        dist.all_to_all_single(self.gloo_recv, gathered, self.recv_splits, self.send_splits)
        return self.gloo_recv

    def gloo_combine(self):
        """Exchange back, then add."""
        import torch
        import torch.distributed as dist

        back = torch.empty((len(self.send_index), self.x.shape[1]), dtype=self.x.dtype)
        dist.all_to_all_single(back, self.gloo_recv, self.send_splits, self.recv_splits)
        self.out.zero_()
        return self.out.index_add_(0, self.send_index, back)

    def check(self) -> None:
        """Both must bring the same rows, and the same sums (small integers: exact)."""
        import torch

        if not torch.equal(self.gloo_dispatch(), self.received.x):
            raise SystemExit("Gloo and Ferry received different rows")
        if not torch.equal(self.gloo_combine(), self.group.combine(self.received.x, self.plan).x):
            raise SystemExit("Gloo and Ferry combined to different sums")

    def cases(self) -> list[Case]:
        """In the order in which each round runs them."""
        group, plan, x, routes = self.group, self.plan, self.x, self.topk_idx
        row = x.shape[1] * x.element_size()
        rows = plan.recv_rows() * row
        both = rows + x.shape[0] * row
        combine = group.combine
        return [
            Case("copy", rows, lambda: self.copy_to.copy_(self.copy_from)),
            Case("ferry dispatch, cached", rows, lambda: group.dispatch(x, plan)),
            Case("ferry dispatch, full", rows, lambda: group.dispatch(x, group.plan(routes))),
            Case("ferry combine", both, lambda: combine(self.received.x, plan, out=self.out)),
            Case(
                "ferry combine, ordinary input",
                both,
                lambda: combine(self.ordinary, plan, out=self.out),
            ),
            Case("gloo dispatch", rows, self.gloo_dispatch),
            Case("gloo combine", both, self.gloo_combine),
        ]


def measure(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Median time of the slowest rank, and the aggregate rate, for each case."""
    import torch
    import torch.distributed as dist

    cases = bench.cases()
    times = torch.zeros((rounds, len(cases)), dtype=torch.float64)
    for at in range(-2, rounds):  # two rounds to warm up
        for i, case in enumerate(cases):
            case.call()  # each is timed in its own steady state, not in the cache of the one before
            bench.group.barrier()
            start = time.perf_counter()
            case.call()
            if at >= 0:
                times[at, i] = time.perf_counter() - start
        if bench.group.rank == 0:
            print(f"\r  round {max(at + 1, 0)}/{rounds}", end="", file=sys.stderr, flush=True)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    total = torch.tensor([float(case.bytes) for case in cases], dtype=torch.float64)
    dist.all_reduce(total)
    figures = {}
    for i, case in enumerate(cases):
        samples = sorted(times[:, i].tolist())
        median = statistics.median(samples)
        figures[case.name] = {
            "ms": median * 1e3,
            "p95_ms": samples[int(0.95 * (len(samples) - 1))] * 1e3,
            "gb_per_s": float(total[i]) / median * 1e-9,
        }
    return figures


def show(dtype: str, figures: dict[str, dict[str, float]]) -> None:
    """A table for one dtype."""
    copy = figures["copy"]["gb_per_s"]
    print(f"\n{dtype:<31} {'median ms':>10} {'p95 ms':>9} {'GB/s':>7} {'of copy':>8} {'x Gloo':>7}")
    for name, figure in figures.items():
        gloo = figures["gloo combine" if "combine" in name else "gloo dispatch"]
        times = "" if name == "copy" else f"{gloo['ms'] / figure['ms']:.2f}"
        print(
            f"  {name:<29} {figure['ms']:>10.2f} {figure['p95_ms']:>9.2f} "
            f"{figure['gb_per_s']:>7.2f} {figure['gb_per_s'] / copy:>8.2f} {times:>7}"
        )


def run_rank(args: argparse.Namespace) -> None:
    """One rank: measures both dtypes; rank 0 prints."""
    import torch
    import torch.distributed as dist

    import ferry

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    group = ferry.Group(ferry.from_environment(), experts=args.experts, memory_bytes=512 << 20)
    for dtype in (torch.bfloat16, torch.float32):
        bench = Bench(args, group, dtype)
        results[str(dtype).removeprefix("torch.")] = measure(bench, args.rounds)
        del bench
    if group.rank == 0:
        for name, figures in results.items():
            show(name, figures)
        if args.json:
            report = {
                "command": " ".join(["python", *sys.argv]),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "ferry": ferry.__version__,
                "torch": torch.__version__,
                "shape": {k: v for k, v in vars(args).items() if k != "json"},
                "figures": results,
            }
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    group.barrier()
    group.destroy()
    dist.destroy_process_group()


def main() -> int:
    """Launcher without RANK in the environment, rank with it."""
    args = arguments()
    if args.experts % args.ranks:
        raise SystemExit(f"--experts {args.experts}: expected a multiple of --ranks {args.ranks}")
    if "RANK" not in os.environ:
        return launch(args)
    run_rank(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
