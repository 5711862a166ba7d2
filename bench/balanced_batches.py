"""A training step when half of the ranks are half as fast: equal batches and balanced ones.

    python bench/balanced_batches.py [--ranks 4] [--steps 40] [--json FILE] [--plot FILE]

Ranks are processes; a sample takes 4 ms on the first half of them and 8 ms on the others, asleep,
so that the figures do not depend on how many cores there are. A step is the median of the slowest
rank's time over the last half of the steps. Ideal: batches in the ratio of the speeds, 2/3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import job


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=96, help="samples of all ranks together")
    parser.add_argument("--steps", type=int, default=40)
    job.add_outputs(parser)
    return parser.parse_args()


def run_rank(args: argparse.Namespace) -> None:
    """What every rank does."""
    import torch
    from torch import Tensor, nn

    import ferry
    import ferry.torch

    torch.set_num_threads(1)
    ranks = ferry.Collectives(ferry.from_environment(), memory_bytes=1 << 20)
    cost = 0.004 if ranks.rank < ranks.size // 2 else 0.008

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(cost * len(x))
            return super().forward(x)

    medians: dict[str, float] = {}
    shares: dict[str, list[int]] = {}
    x = torch.randn(args.steps * args.batch, 64)
    for name, every in (("equal", args.steps), ("balanced", 8)):
        model = ferry.torch.DistributedDataParallel(Slow(64, 64), ranks)
        sampler = ferry.torch.BalancedSampler(len(x), args.batch, model, every=every)
        times = []
        for batch in job.shown(sampler, f"{name} batches"):
            start = time.perf_counter()
            model.zero_grad()
            (model(x[batch]).pow(2).mean() * sampler.weight(len(batch))).backward()
            times.append(time.perf_counter() - start)
        medians[name] = statistics.median(times[len(times) // 2 :]) * 1e3
        shares[name] = sampler.shares
    if ranks.rank == 0:
        saved = 1 - medians["balanced"] / medians["equal"]
        for name, took in medians.items():
            print(f"{name:10} {took:7.1f} ms a step, samples {shares[name]}")
        print(f"balanced batches cut the step by {saved:.0%}")
        facts = {name: getattr(args, name) for name in ("ranks", "batch", "steps")}
        job.write(args, facts | {"step_ms": medians, "shares": shares, "saved": saved})
    ranks.barrier()
    ranks.destroy()


if __name__ == "__main__":
    parsed = arguments()
    if job.is_rank():
        run_rank(parsed)
    else:
        sys.exit(job.launch(parsed.ranks))
