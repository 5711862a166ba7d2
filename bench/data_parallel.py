"""A training step of copies of a model on several ranks: what averaging the gradients costs.

    python bench/data_parallel.py [--ranks 4] [--rounds 15] [--json FILE] [--plot FILE]

Every rank is a process with one torch thread and a model of 8 linear layers, 8.4 million
parameters. The contenders come in turn in each round: no exchange at all; torch's DDP over Gloo;
the same with Ferry's communication hook; Ferry's DDP, whose gradients lie in registered memory.

wall: the slowest rank's time of a step; cpu: the CPU time of all ranks divided by the cores that
they may use. Both are medians over the rounds. exchange: what a step takes beyond one without an
exchange, the median of the differences. Gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from typing import Any

import job


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    job.add_outputs(parser)
    return parser.parse_args()


class Rank:
    """The contenders on one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import ferry
        import ferry.torch

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.ranks = ferry.Collectives(ferry.torch.from_process_group())
        self.x = torch.randn(
            args.batch, args.width, generator=torch.Generator().manual_seed(self.ranks.rank)
        )

        def model() -> torch.nn.Module:
            torch.manual_seed(0)
            layers = (torch.nn.Linear(args.width, args.width) for _ in range(args.layers))
            return torch.nn.Sequential(*layers)

        hooked = DistributedDataParallel(model())
        state = ferry.torch.Gradients("exact", collectives=self.ranks)
        hooked.register_comm_hook(state, ferry.torch.gradient_hook)
        self.models: dict[str, Any] = {
            "no exchange": model(),
            "torch DDP, gloo": DistributedDataParallel(model()),
            "torch DDP, ferry hook": hooked,
            "ferry DDP": ferry.torch.DistributedDataParallel(model()),
        }

    def step(self, name: str) -> None:
        """Forward and backward; an optimizer would take the same time after each."""
        model = self.models[name]
        model.zero_grad()
        model(self.x).pow(2).sum().backward()

    def check(self) -> None:
        """All contenders have the same means, up to the order of the additions."""
        import torch

        for name in self.models:
            self.step(name)
        _, *others = ([p.grad for p in model.parameters()] for model in self.models.values())
        for gradients in others[1:]:
            for mine, gloo in zip(gradients, others[0]):
                if not torch.allclose(mine, gloo, rtol=1e-3, atol=1e-5 * gloo.abs().max().item()):
                    raise SystemExit("the contenders have different gradients")


def measure(rank: Rank, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds for each contender."""
    import torch

    cores = len(os.sched_getaffinity(0))
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in rank.models}
    for _ in job.shown(range(rounds), "rounds"):
        for name in rank.models:
            rank.step(name)
            rank.ranks.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            for _ in range(3):
                rank.step(name)
            took = [time.perf_counter() - start, time.process_time() - cpu]
            rank.ranks.barrier()
            every = torch.empty((rank.ranks.size, 2), dtype=torch.float64)
            mine = torch.tensor(took, dtype=torch.float64) / 3
            rank.ranks.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
            samples[name].append((every[:, 0].max().item(), every[:, 1].sum().item() / cores))
    base = [cpu for _, cpu in samples["no exchange"]]
    return {
        name: {
            "wall_us": statistics.median(wall for wall, _ in taken) * 1e6,
            "cpu_us": statistics.median(cpu for _, cpu in taken) * 1e6,
            "exchange_cpu_us": statistics.median(c - b for (_, c), b in zip(taken, base)) * 1e6,
        }
        for name, taken in samples.items()
    }


def run_rank(args: argparse.Namespace) -> None:
    """What every rank does."""
    rank = Rank(args)
    rank.check()
    figures = measure(rank, args.rounds)
    if rank.ranks.rank == 0:
        gloo = figures["torch DDP, gloo"]["exchange_cpu_us"]
        print("\ncontender                  wall us     cpu us  exchange cpu us  gloo/this")
        for name, figure in figures.items():
            ratio = gloo / figure["exchange_cpu_us"] if figure["exchange_cpu_us"] > 0 else 0
            print(
                f"{name:22} {figure['wall_us']:11.0f} {figure['cpu_us']:10.0f} "
                f"{figure['exchange_cpu_us']:16.0f} {ratio:10.2f}"
            )
        facts = {
            "machine": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "ranks": args.ranks,
            "rounds": args.rounds,
            "parameters": sum(p.numel() for p in rank.models["no exchange"].parameters()),
            "figures": figures,
        }
        job.write(args, facts)
    rank.ranks.barrier()
    rank.ranks.destroy()


if __name__ == "__main__":
    parsed = arguments()
    if job.is_rank():
        run_rank(parsed)
    else:
        sys.exit(job.launch(parsed.ranks))
