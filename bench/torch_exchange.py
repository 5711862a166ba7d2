"""Ferry beside PyTorch's collectives and a copy, in one run: Gloo on CPUs, NCCL on GPUs.

    python bench/torch_exchange.py [--device cpu|cuda] [--tokens 1024] [--hidden 4096] [--json FILE]

Every rank is a process, on GPUs one for each. Of each number of tokens and dtype:

- copy: one copy of as many bytes as a rank receives, between two warm buffers of its own,
- Ferry: dispatch with a cached plan, full dispatch (plan included), combine from registered rows,
  combine from an ordinary tensor,
- PyTorch: `all_to_all_single` alone, of rows gathered before; on GPUs, where PyTorch has it,
  `symm_mem.all_to_all_vdev` alone, of such rows in symmetric memory (NVSHMEM), which swaps counts
  on the GPU; `index_select` + `all_to_all_single` (dispatch); `all_to_all_single` + `index_add_`
  back (combine). It sends one row for each (token, destination rank), too, from indices and counts
  made beforehand: compare with cached lines.

A sample is the slowest rank's time; figures are medians. On CPUs ranks are aligned by a barrier,
behind an untimed call of the same kind; GB/s are of all ranks together, and a combine also counts
its output. On GPUs a sample is `--chain` calls between two CUDA events, divided, after the GPUs
were aligned by an all-reduce; GB/s are of one GPU. The results are checked against each other
before anything is timed. On GPUs rows of e4m3 are carried as bytes, by NCCL alone: `ferry bench`
has Ferry's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import job

HOST = {"ranks": 4, "tokens": "1024", "hidden": 4096, "experts": 64, "iterations": 15, "warmup": 2}
GPUS = {"ranks": 0, "tokens": "4096", "hidden": 7168, "experts": 256, "iterations": 30, "warmup": 5}


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("-n", "--ranks", type=int, help="4; with cuda one for each GPU")
    parser.add_argument("--tokens", help="of each rank; several with commas between them")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--iterations", "--rounds", type=int)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--chain", type=int, default=4, help="calls of a sample on GPUs")
    parser.add_argument("--sms", type=int, default=16, help="of Ferry's calls on GPUs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--symmetric",
        action=argparse.BooleanOptionalAction,
        help="symmetric memory beside NCCL; by default where PyTorch has it",
    )
    parser.add_argument(
        "--stages", action="store_true", help="on CPUs: where a combine from ordinary rows goes"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    for name, value in (GPUS if args.device == "cuda" else HOST).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.tokens = [int(word) for word in str(args.tokens).split(",")]
    return args


class SymmetricMemory:
    """PyTorch's all-to-all of rows in order, in symmetric memory; made by all ranks together."""

    @staticmethod
    def available() -> bool:
        try:
            import torch.distributed._symmetric_memory as symmetric

            return symmetric.is_nvshmem_available()
        except (ImportError, AttributeError):
            return False

    def __init__(self, rows: int, gathered, send: list[int]) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        symmetric.set_backend("NVSHMEM")
        self.group = dist.group.WORLD.group_name
        device, shape = gathered.device, (rows, gathered.view(torch.uint8).shape[1])
        self.gathered, self.arrived = (
            symmetric.empty(shape, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.send = symmetric.empty(len(send), dtype=torch.int64, device=device)
        self.came = symmetric.empty((2, len(send)), dtype=torch.int64, device=device)
        for tensor in (self.gathered, self.arrived, self.send, self.came):
            symmetric.rendezvous(tensor, group=self.group)
        self.gathered[: len(gathered)].copy_(gathered.view(torch.uint8))
        self.send.copy_(torch.tensor(send))
        torch.cuda.synchronize()
        dist.barrier()

    def all_to_all(self):
        import torch

        torch.ops.symm_mem.all_to_all_vdev(
            self.gathered, self.arrived, self.send, self.came, self.group
        )
        return self.arrived


@dataclass
class Case:
    """What is timed: its name, the bytes of this rank, the call."""

    name: str
    bytes: int
    call: Callable[[], object]
    before: Callable[[], object] = lambda: None  # not timed


class Exchange:
    """One number of tokens and one dtype on one rank."""

    def __init__(self, args: argparse.Namespace, group, tokens: int, dtype) -> None:
        import torch

        self.args, self.group, self.tokens, self.dtype = args, group, tokens, dtype
        self.device = torch.device(args.device)  # of GPUs: the current one
        self.peers = "NCCL" if args.device == "cuda" else "Gloo"
        generator = torch.Generator().manual_seed(args.seed * 1000 + group.rank)
        x = torch.randint(-8, 8, (tokens, args.hidden), generator=generator, dtype=torch.float32)
        scores = torch.rand((tokens, args.experts), generator=generator)
        routes = scores.topk(args.topk, dim=1).indices
        ranks = routes // (args.experts // group.size)
        lists = [(ranks == peer).any(dim=1).nonzero().flatten() for peer in range(group.size)]
        self.x, self.routes = x.to(self.device).to(dtype), routes.to(self.device)
        self.send_index = torch.cat(lists).to(self.device)
        self.send = [len(rows) for rows in lists]
        self.plan = group.plan(self.routes)
        self.recv = list(self.plan.recv_rows_per_rank())
        self.out = torch.empty_like(self.x)
        shape = (sum(self.recv), args.hidden)
        ones = torch.ones(shape, device=self.device).to(dtype)
        self.ordinary, self.copy_from = ones, ones.clone()
        self.copy_to, self.arrived = ones.clone(), ones.clone()
        self.gathered = self.gather()
        self.symmetric = None
        if args.symmetric:
            self.symmetric = SymmetricMemory(tokens * group.size, self.gathered, self.send)
        self.with_ferry = dtype.itemsize > 1
        self.sms = {"num_sms": args.sms} if args.device == "cuda" else {}
        self.dispatch()
        if self.with_ferry:
            self.received = group.dispatch(self.x, self.plan, **self.sms)
            self.check()

    def gather(self):
        import torch

        rows = self.x.view(torch.uint8).index_select(0, self.send_index)
        return rows.view(self.dtype)

    def all_to_all(self, gathered=None):
        """Rows that lie in order already."""
        import torch
        import torch.distributed as dist

        of_bytes = [rows.view(torch.uint8) for rows in (self.arrived, self.gathered)]
        if gathered is not None:
            of_bytes[1] = gathered.view(torch.uint8)
        dist.all_to_all_single(*of_bytes, self.recv, self.send)
        return self.arrived

    def dispatch(self):
        """Gather, then exchange."""
        return self.all_to_all(self.gather())

    def combine(self):
        """Exchange back, then add."""
        import torch
        import torch.distributed as dist

        back = torch.empty_like(self.gathered)
        of_bytes = (rows.view(torch.uint8) for rows in (back, self.arrived))
        dist.all_to_all_single(*of_bytes, self.send, self.recv)
        self.out.zero_()
        return self.out.index_add_(0, self.send_index, back)

    def check(self) -> None:
        """All must bring the same rows, and the same sums (small integers: exact)."""
        import torch

        if self.symmetric:
            came = self.symmetric.all_to_all()[: len(self.arrived)].view(self.dtype)
            if not torch.equal(self.arrived, came):
                raise SystemExit(f"{self.peers} and symmetric memory received different rows")
        if not torch.equal(self.arrived, self.received.x):
            raise SystemExit(f"{self.peers} and Ferry received different rows")
        sums = self.group.combine(self.received.x, self.plan, **self.sms).x
        if not torch.equal(self.combine(), sums):
            raise SystemExit(f"{self.peers} and Ferry combined to different sums")

    def ferry_full(self):
        """Plan included."""
        return self.group.dispatch(self.x, self.group.plan(self.routes), **self.sms)

    def ferry_combine(self, rows=None):
        """Of an ordinary tensor unless others are given."""
        given = self.ordinary if rows is None else rows
        return self.group.combine(given, self.plan, out=self.out, **self.sms)

    def write_rows(self) -> None:
        """What a combine from an ordinary tensor writes to registered memory: others' rows."""
        rank, to = self.group.rank, self.received.x
        first = sum(self.recv[:rank])
        for rows in (slice(0, first), slice(first + self.recv[rank], None)):
            to[rows].copy_(self.ordinary[rows])

    def cases(self) -> list[Case]:
        """In the order in which they are measured."""
        group, plan, x, sms = self.group, self.plan, self.x, self.sms
        row = x.shape[1] * x.element_size()
        rows = sum(self.recv) * row
        both = rows + (x.shape[0] * row if self.args.device == "cpu" else 0)
        cases = [Case("copy", rows, lambda: self.copy_to.copy_(self.copy_from))]
        if self.with_ferry:
            cases += [
                Case("ferry dispatch, cached", rows, lambda: group.dispatch(x, plan, **sms)),
                Case("ferry dispatch, full", rows, self.ferry_full),
                Case("ferry combine", both, lambda: self.ferry_combine(self.received.x)),
                Case("ferry combine, ordinary input", both, self.ferry_combine),
            ]
        if self.args.stages and self.with_ferry:
            registered = cases[-2].call
            others = rows - self.recv[group.rank] * row
            cases += [
                Case("ferry rows written", others, self.write_rows),
                Case("ferry combine, written rows", both, registered, self.write_rows),
            ]
        cases.append(Case(f"{self.peers} all-to-all alone", rows, self.all_to_all))
        if self.symmetric:
            cases.append(Case("symmetric memory alone", rows, self.symmetric.all_to_all))
        cases.append(Case(f"{self.peers} dispatch", rows, self.dispatch))
        if self.with_ferry:
            cases.append(Case(f"{self.peers} combine", both, self.combine))
        return cases


def host_sample(case: Case) -> float:
    """Microseconds of one call, in its own steady state, not in the cache of the one before."""
    import torch.distributed as dist

    case.call()
    case.before()
    dist.barrier()
    start = time.perf_counter()
    made = case.call()
    taken = time.perf_counter() - start
    del made  # outside the measured time
    return taken * 1e6


class GpuSampler:
    """Microseconds of one of `calls` calls, the GPUs aligned."""

    def __init__(self, calls: int) -> None:
        import torch

        self.calls = calls
        self.token = torch.zeros(1, device="cuda")
        self.hold = torch.zeros((2, 768 << 20), dtype=torch.uint8, device="cuda")

    def __call__(self, case: Case) -> float:
        import torch
        import torch.distributed as dist

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        self.hold[0].copy_(self.hold[1])  # the CPU is ahead of the GPU when the sample begins
        dist.all_reduce(self.token)
        begin.record()
        made = [case.call() for _ in range(self.calls)]
        end.record()
        end.synchronize()
        del made
        return begin.elapsed_time(end) * 1e3 / self.calls


def measure(exchange: Exchange, sample: Callable[[Case], float]) -> list[dict]:
    """Of each case the slowest rank of each sample; each round runs all of them."""
    import torch
    import torch.distributed as dist

    args, cases = exchange.args, exchange.cases()
    times = torch.zeros((args.iterations, len(cases)), dtype=torch.float64, device=exchange.device)
    for at in job.shown(range(-args.warmup, args.iterations), f"{exchange.tokens} tokens"):
        for i, case in enumerate(cases):
            us = sample(case)
            if at >= 0:
                times[at, i] = us
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    total = torch.tensor([float(case.bytes) for case in cases], device=exchange.device)
    dist.all_reduce(total)
    among = exchange.group.size if args.device == "cuda" else 1
    results = []
    for i, case in enumerate(cases):
        samples = times[:, i].tolist()
        p50 = statistics.median(samples)
        line = {
            "name": case.name,
            "dtype": {4: "f32", 2: "bf16", 1: "e4m3"}[exchange.dtype.itemsize],
            "tokens": exchange.tokens,
            "sms": args.sms if args.device == "cuda" and "ferry" in case.name else 0,
            "logical_bytes": int(total[i]),
            "p50_us": p50,
            "p95_us": job.percentile(samples, 0.95),
            "logical_gbps": float(total[i]) / among / p50 * 1e-3,
        }
        results.append(line)
    return results


def show(results: list[dict]) -> None:
    """A table for one number of tokens and one dtype."""
    by_name = {line["name"]: line for line in results}
    peers = "NCCL" if "NCCL dispatch" in by_name else "Gloo"
    copy = by_name["copy"]["logical_gbps"]
    print(
        f"\n{results[0]['tokens']} tokens, {results[0]['dtype']:<17} {'p50 us':>10} "
        f"{'p95 us':>10} {'GB/s':>8} {'of copy':>8} {'x ' + peers:>7}"
    )
    for name, line in by_name.items():
        other = by_name.get(f"{peers} combine" if "combine" in name else f"{peers} dispatch")
        times = f"{other['p50_us'] / line['p50_us']:.2f}" if other and name != "copy" else ""
        print(
            f"  {name:<29} {line['p50_us']:>10.1f} {line['p95_us']:>10.1f} "
            f"{line['logical_gbps']:>8.2f} {line['logical_gbps'] / copy:>8.2f} {times:>7}"
        )


def run_rank(args: argparse.Namespace) -> None:
    """One rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    import ferry

    dtypes = [torch.bfloat16, torch.float32]
    on_gpu: dict = {}
    sample: Callable[[Case], float] = host_sample
    if args.device == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, as `ferry bench` has it
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dtypes = [torch.bfloat16, torch.float8_e4m3fn]
        on_gpu = {"backend": "cuda", "device": device}
        dist.init_process_group("nccl", device_id=device)
        if args.symmetric is None:
            args.symmetric = SymmetricMemory.available()
        sample = GpuSampler(args.chain)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    most = max(args.tokens) * args.hidden * 4 * dist.get_world_size()
    group = ferry.Group(
        ferry.from_environment(),
        experts=args.experts,
        memory_bytes=max(512 << 20, (args.chain + 2) * most if on_gpu else 0),
        **on_gpu,
    )
    results = []
    for tokens in args.tokens:
        for dtype in dtypes:
            job.say_progress(f"{tokens} tokens: results are checked")
            exchange = Exchange(args, group, tokens, dtype)
            lines = measure(exchange, sample)
            del exchange
            results += lines
            if group.rank == 0:
                show(lines)
    if group.rank == 0 and args.json:
        settings = job.settings_of(args, group.size)
        report = job.report(settings, torch.cuda.get_device_name() if on_gpu else "")
        report |= {"version": f"ferry {ferry.__version__}, torch {torch.__version__}"}
        report |= {"data_checked": True, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    group.barrier()
    group.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(job.run_exchange(arguments(), run_rank))
