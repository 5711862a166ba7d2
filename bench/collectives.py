"""Ferry's collectives against PyTorch's Gloo and Open MPI, processes on one host.

    python bench/collectives.py [--ranks 4] [--rounds 15] [--pin] [--json FILE] [--plot FILE]

Every rank is a process with one torch thread. With `mpirun` and mpi4py (Debian: openmpi-bin; the
Python index: mpi4py) Open MPI takes part, otherwise it is left out. In each round the contenders
come in turn; each makes one untimed call, then as many as take about ten milliseconds.

wall: the slowest rank's time of a call; cpu: the CPU time of all ranks divided by the cores that
they may use, which says more on a busy machine. Both are medians over the rounds. Results are
compared before anything is timed. --pin: each rank stays on one core, the same number on each;
otherwise the system may run them all on one, or move them, and a line that one core wrote and
another one reads costs several times as much where they share no cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import job

SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 32 << 20)
Calls = dict[str, Callable[[], object]]


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, nargs="*", default=SIZES, help="of a tensor, f32")
    parser.add_argument("--calls", nargs="*", default=["all_reduce", "all_to_all"])
    parser.add_argument("--pin", action="store_true", help="each rank stays on one core")
    job.add_outputs(parser)
    return parser.parse_args()


def has_mpi() -> bool:
    """Whether Open MPI can take part."""
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def launch(args: argparse.Namespace) -> int:
    """Runs this file once for each rank; returns the first exit code that is not 0."""
    told = {"FERRY_BENCH_RANKS": str(args.ranks)}
    if not has_mpi():
        return job.launch(args.ranks, **told)
    options = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
    command = ["mpirun", "-n", str(args.ranks), *options, sys.executable, *sys.argv]
    return subprocess.run(command, env=job.environment(**told), check=False).returncode


class Rank:
    """The contenders on one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import ferry

        torch.set_num_threads(1)
        self.cores = sorted(os.sched_getaffinity(0))
        self.mpi: Any = None
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            from mpi4py import MPI

            self.mpi = MPI
            os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
        self.rank = int(os.environ["RANK"])
        self.size = args.ranks
        if args.pin:  # before threads start, which stay there too
            at = self.rank * len(self.cores) // self.size
            os.sched_setaffinity(0, {self.cores[at]})
        store = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)
        self.ferry = ferry.Collectives(
            ferry.tcp(
                rank=self.rank,
                size=self.size,
                port=int(os.environ["FERRY_PORT"]),
                secret=os.environ["FERRY_SECRET"],
            ),
            memory_bytes=4 * max(args.bytes) + (1 << 20),
        )

    def meet(self) -> None:
        """Returns when every rank is here."""
        self.ferry.barrier()

    def gather(self, figures: Any) -> Any:
        """A row of each rank."""
        import torch

        every = torch.empty((self.size, len(figures)), dtype=figures.dtype)
        self.ferry.all_gather(figures.view(torch.uint8), every.view(torch.uint8))
        return every

    def sample(self, call: Callable[[], object], repeats: int) -> tuple[float, float]:
        """Seconds of a call, and of CPU time."""
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            call()
        wall, used = time.perf_counter() - start, time.process_time() - cpu
        return wall / repeats, used / repeats

    def check_sums(self, calls: Calls, used: dict[str, Any]) -> None:
        """used: what each contender reduces. Afterwards they are 0."""
        import torch

        for name, call in calls.items():
            x = used[name]
            brought = torch.arange(len(x), device=x.device) % 97
            x.copy_(brought + self.rank)
            call()
            expected = brought * self.size + self.size * (self.size - 1) // 2
            if not torch.equal(x, expected.float()):
                raise SystemExit(f"{name} reduced to a wrong sum")
        for x in used.values():
            x.zero_()

    def all_reduce(self, bytes_: int) -> Calls:
        """In place, f32, of small integers, so that every sum is exact."""
        import torch
        import torch.distributed as dist

        x = torch.zeros(bytes_ // 4)
        registered = self.ferry.empty((bytes_ // 4,), torch.float32)
        registered.zero_()
        y = x.clone()
        calls: Calls = {
            "gloo": lambda: dist.all_reduce(x),
            "ferry": lambda: self.ferry.all_reduce(x),
            "ferry, registered": lambda: self.ferry.all_reduce(registered),
        }
        if self.mpi:
            world, in_place, buffer = self.mpi.COMM_WORLD, self.mpi.IN_PLACE, y.numpy()
            calls["mpi"] = lambda: world.Allreduce(in_place, buffer)
        used = {"ferry, registered": registered, "mpi": y}
        self.check_sums(calls, {name: used.get(name, x) for name in calls})
        return calls

    def all_to_all(self, bytes_: int) -> Calls:
        """Equal blocks, f32."""
        import torch
        import torch.distributed as dist

        x = torch.arange(bytes_ // 4, dtype=torch.float32) + self.rank
        outs = {name: torch.zeros_like(x) for name in ("gloo", "ferry", "ferry, NumPy", "mpi")}
        source, into = x.numpy(), outs["ferry, NumPy"].numpy()
        calls: Calls = {
            "gloo": lambda: dist.all_to_all_single(outs["gloo"], x),
            "ferry": lambda: self.ferry.all_to_all(x, outs["ferry"]),
            "ferry, NumPy": lambda: self.ferry.all_to_all(source, into),
        }
        if self.mpi:
            world, target = self.mpi.COMM_WORLD, outs["mpi"].numpy()
            calls["mpi"] = lambda: world.Alltoall(source, target)
        for name, call in calls.items():
            call()
            if not torch.equal(outs[name], outs["gloo"]):
                raise SystemExit(f"{name} brought other blocks than Gloo")
        return calls


def measure(rank: Rank, calls: Calls, rounds: int, words: str) -> dict[str, dict[str, float]]:
    """Medians in microseconds for each contender."""
    import torch
    import torch.distributed as dist

    cores = len(rank.cores)
    counts: dict[str, int] = {}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for at in job.shown(range(-1, rounds), words):
        for name, call in calls.items():
            call()
            rank.meet()
            repeats = counts.get(name, 3)
            figures = torch.tensor(rank.sample(call, repeats), dtype=torch.float64)
            rank.meet()
            every = rank.gather(figures)
            wall, used = every[:, 0].max().item(), every[:, 1].sum().item() / cores
            if at < 0:
                counts[name] = min(200, max(1, round(0.01 / wall)))
            else:
                samples[name].append((wall, used))
    dist.barrier()
    return {
        name: {
            "wall_us": statistics.median(wall for wall, _ in taken) * 1e6,
            "cpu_us": statistics.median(cpu for _, cpu in taken) * 1e6,
        }
        for name, taken in samples.items()
    }


def show(results: list[dict[str, Any]], others: dict[str, str]) -> None:
    """One row for each call and size; the figure of each of the others, times that of this."""
    heads = " ".join(
        f"{other + '/' + kind.removesuffix('_us'):>9}" for other, kind in others.items()
    )
    print(f"call        bytes      contender              wall us     cpu us  {heads}")
    for result in results:
        figures = result["figures"]
        for name, figure in figures.items():
            ratios = " ".join(
                f"{figures[other][kind] / figure[kind]:9.2f}" if other in figures else " " * 9
                for other, kind in others.items()
            )
            print(
                f"{result['call']:11} {result['bytes']:9}  {name:20} {figure['wall_us']:10.1f} "
                f"{figure['cpu_us']:10.1f}  {ratios}"
            )


def run_rank(args: argparse.Namespace, rank: Rank, others: dict[str, str], **facts: object) -> None:
    """What every rank does. facts: for the file, too."""
    results = []
    for call in args.calls:
        for size in args.bytes:
            calls = getattr(rank, call)(size)
            figures = measure(rank, calls, args.rounds, f"{call} {size}")
            results.append({"call": call, "bytes": size, "figures": figures})
    if rank.rank == 0:
        show(results, others)
        facts = facts | {
            "machine": platform.processor() or platform.machine(),
            "cores": len(rank.cores),
            "ranks": args.ranks,
            "rounds": args.rounds,
            "results": results,
        }
        job.write(args, facts)
    rank.ferry.destroy()


if __name__ == "__main__":
    parsed = arguments()
    if "FERRY_BENCH_RANKS" in os.environ:
        run_rank(parsed, Rank(parsed), {"gloo": "cpu_us", "mpi": "cpu_us"}, pinned=parsed.pin)
    else:
        sys.exit(launch(parsed))
