"""The exchange of `ferry bench --backend cuda` by PyTorch and NCCL, in the same JSON.

    python bench/nccl_exchange.py [--ranks N] [--tokens 4096,128] [--json FILE]

Ranks are processes, one a GPU, started by this file (or by torchrun). Lines:

- all-to-all: `all_to_all_single` alone, of rows that were gathered before,
- dispatch: `index_select` + `all_to_all_single`,
- combine: `all_to_all_single` back + `index_add_`.

One row for each (token, destination rank), from indices and counts made beforehand: no count
exchange, so compare with cached lines. Samples: `--chain` calls between two CUDA events, divided,
after the GPUs were aligned by an all-reduce; of every sample the slowest rank; `single` is one
call. GB/s: rows x row bytes, own rank included (wire: without), a second and GPU at the median.
The rows are checked before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", "--ranks", type=int, default=0, help="0: one for each GPU")
    parser.add_argument(
        "--tokens", default="4096", help="of each rank; several with commas between them"
    )
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--chain", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    args.tokens = [int(word) for word in str(args.tokens).split(",")]
    return args


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(args: argparse.Namespace) -> int:
    """Runs this file once for each rank; returns the first exit code that is not 0."""
    ranks = args.ranks
    if ranks == 0:  # asked in a child: ranks must not inherit a CUDA context
        count = "import torch; print(torch.cuda.device_count())"
        ranks = int(subprocess.run([sys.executable, "-c", count], capture_output=True).stdout or 0)
    if ranks == 0:
        print("nccl_exchange: NO GPU", file=sys.stderr)
        return 1
    env = dict(
        os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank))
        )
        for rank in range(ranks)
    ]
    return next((code for code in [process.wait() for process in processes] if code), 0)


@dataclass
class Exchange:
    """Rows, indices and counts of one configuration on one rank."""

    tokens: int
    dtype: object
    args: argparse.Namespace
    rank: int
    ranks: int
    device: object
    send_index: object = None
    send: list[int] = field(default_factory=list)
    recv: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch
        import torch.distributed as dist

        args, rank, ranks = self.args, self.rank, self.ranks
        generator = torch.Generator().manual_seed(args.seed * 1000 + rank)
        scores = torch.rand((self.tokens, args.experts), generator=generator)
        sizes = [args.experts // ranks + (r < args.experts % ranks) for r in range(ranks)]
        owner = torch.repeat_interleave(torch.arange(ranks), torch.tensor(sizes))
        going = owner[scores.topk(args.topk, dim=1).indices]
        lists = [(going == peer).any(dim=1).nonzero().flatten() for peer in range(ranks)]
        self.send = [len(rows) for rows in lists]
        self.send_index = torch.cat(lists).to(self.device)
        counts = torch.tensor(self.send, device=self.device)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        self.recv = theirs.tolist()
        shape = (self.tokens, args.hidden)
        self.x = torch.randint(-3, 4, shape, device=self.device, dtype=torch.float32)
        self.x = self.x.to(self.dtype)
        self.gathered = self.bytes_of(self.x).index_select(0, self.send_index)
        self.received = torch.zeros(
            (sum(self.recv), self.gathered.shape[1]), dtype=torch.uint8, device=self.device
        )
        self.check()

    @staticmethod
    def bytes_of(tensor):
        """The same memory as bytes: NCCL then carries every dtype."""
        import torch

        return tensor.view(torch.uint8)

    def all_to_all(self):
        """Rows that lie in order already."""
        import torch.distributed as dist

        dist.all_to_all_single(self.received, self.gathered, self.recv, self.send)
        return self.received

    def dispatch(self):
        """Gather, then exchange."""
        import torch.distributed as dist

        gathered = self.bytes_of(self.x).index_select(0, self.send_index)
        dist.all_to_all_single(self.received, gathered, self.recv, self.send)
        return self.received

    def combine(self):
        """Exchange back, then add."""
        import torch
        import torch.distributed as dist

        back = torch.empty_like(self.gathered)
        dist.all_to_all_single(back, self.received, self.send, self.recv)
        out = torch.zeros_like(self.x)
        return out.index_add_(0, self.send_index, back.view(self.dtype))

    def check(self) -> None:
        """Each token comes back as often as it has destinations (small integers: exact)."""
        import torch

        self.dispatch()
        if self.dtype != torch.bfloat16:
            return
        times = torch.bincount(self.send_index, minlength=self.tokens).to(self.dtype)
        if not torch.equal(self.combine(), self.x * times[:, None]):
            raise SystemExit("NCCL brought other rows than were sent")

    def lines(self) -> list[tuple[str, Callable[[], object]]]:
        """What is measured."""
        import torch

        lines = [("NCCL all-to-all alone", self.all_to_all), ("NCCL dispatch", self.dispatch)]
        if self.dtype == torch.bfloat16:
            lines.append(("NCCL combine", self.combine))
        return lines


def sample(call: Callable[[], object], calls: int, token, hold) -> float:
    """Microseconds of one of `calls` calls, the GPUs aligned."""
    import torch
    import torch.distributed as dist

    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    dist.barrier()
    torch.cuda.synchronize()
    hold[0].copy_(hold[1])  # long enough that the CPU is ahead of the GPU when the sample begins
    dist.all_reduce(token)
    begin.record()
    made = [call() for _ in range(calls)]
    end.record()
    end.synchronize()
    del made
    return begin.elapsed_time(end) * 1e3 / calls


def percentile(values: list[float], share: float) -> float:
    """Linear between the neighbours, as `ferry bench` does."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def measure(exchange: Exchange, call: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Chained and single samples, of every sample the slowest rank."""
    import torch
    import torch.distributed as dist

    token = torch.zeros(1, device=exchange.device)
    hold = torch.zeros((2, 768 << 20), dtype=torch.uint8, device=exchange.device)
    found = []
    for calls in (exchange.args.chain, 1):
        times = [
            sample(call, calls, token, hold)
            for _ in range(exchange.args.warmup + exchange.args.iterations)
        ]
        slowest = torch.tensor(times[exchange.args.warmup :], device=exchange.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(slowest.tolist())
    return found[0], found[1]


def result(exchange: Exchange, name: str, chained: list[float], alone: list[float]) -> dict:
    """One line, with the keys of `ferry bench --json`."""
    import torch
    import torch.distributed as dist

    rows = torch.tensor([sum(exchange.send), exchange.send[exchange.rank]], device=exchange.device)
    dist.all_reduce(rows)
    total, to_self = rows.tolist()
    row_bytes = exchange.gathered.shape[1]
    p50 = percentile(chained, 0.5)
    per_second = 1e-3 / p50 / exchange.ranks
    return {
        "name": name,
        "dtype": {2: "bf16", 1: "e4m3"}[exchange.x.element_size()],
        "tokens": exchange.tokens,
        "sms": 0,
        "rows": total,
        "row_bytes": row_bytes,
        "logical_bytes": total * row_bytes,
        "wire_bytes": (total - to_self) * row_bytes,
        "min_us": min(chained),
        "mean_us": statistics.fmean(chained),
        "p50_us": p50,
        "p95_us": percentile(chained, 0.95),
        "single_p50_us": percentile(alone, 0.5),
        "single_p95_us": percentile(alone, 0.95),
        "logical_gbps": total * row_bytes * per_second,
        "wire_gbps": (total - to_self) * row_bytes * per_second,
    }


def show(results: list[dict]) -> None:
    """A table."""
    print(
        f"{'':<24}{'tokens':>8}{'dtype':>7}{'p50 us':>10}{'p95 us':>10}{'alone us':>10}"
        f"{'logical GB/s':>14}{'wire GB/s':>12}"
    )
    for line in results:
        print(
            f"{line['name']:<24}{line['tokens']:>8}{line['dtype']:>7}{line['p50_us']:>10.1f}"
            f"{line['p95_us']:>10.1f}{line['single_p50_us']:>10.1f}{line['logical_gbps']:>14.1f}"
            f"{line['wire_gbps']:>12.1f}"
        )


def run_rank(args: argparse.Namespace) -> None:
    """One rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    results = []
    for tokens in args.tokens:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            exchange = Exchange(tokens, dtype, args, rank, ranks, device)
            for name, call in exchange.lines():
                results.append(result(exchange, name, *measure(exchange, call)))
    if rank == 0:
        show(results)
        if args.json:
            args.json.write_text(json.dumps(report(args, ranks, results), indent=1) + "\n")
    dist.destroy_process_group()


def report(args: argparse.Namespace, ranks: int, results: list[dict]) -> dict:
    """The file, as `ferry bench --json` writes it."""
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    now = datetime.datetime.now(datetime.UTC)
    return {
        "version": f"torch {torch.__version__}, NCCL {nccl}",
        "program": "nccl_exchange.py",
        "command": ["python", *sys.argv],
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name(),
        },
        "settings": {
            "backend": "nccl",
            "ranks": ranks,
            "processes": True,
            "hidden": args.hidden,
            "topk": args.topk,
            "experts": args.experts,
            "routes": "uniform",
            "iterations": args.iterations,
            "warmup": args.warmup,
            "chain": args.chain,
            "seed": args.seed,
        },
        "data_checked": True,
        "results": results,
    }


def main() -> int:
    """Launcher without RANK in the environment, rank with it."""
    args = arguments()
    if "RANK" not in os.environ:
        return launch(args)
    run_rank(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
