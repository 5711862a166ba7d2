"""What compressed gradients do to a training: the demo's model, with its dense sums in formats.

    python bench/gradient_formats.py [--formats exact e4m3 ...] [--seeds 7 8 9] [--json FILE]

Four ranks on this host in two domains of two train the model of examples/moe_lm once for each seed
and format, with the demo's settings. `ferry.Collectives` sums the dense gradients in f32; loads of
the experts and losses are summed by Gloo in f64, as in the demo. Told are the final held-out loss
and, of rank 0, what crossed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import job

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "moe_lm"))
RANKS, DOMAIN = 4, 2


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["exact", "e4m3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--steps", type=int, default=250)
    job.add_outputs(parser)
    return parser.parse_args()


def run_rank(given: argparse.Namespace) -> None:
    """What every rank does: a line for each run on rank 0."""
    import torch
    import torch.distributed as dist

    import ferry
    from settings import Settings
    from worker import Trainer

    class Compressed(Trainer):
        """The demo's trainer, its dense gradients summed in a format."""

        def __init__(
            self, settings: Settings, group: ferry.Group, ranks: ferry.Collectives, format: str
        ) -> None:
            super().__init__(settings, group)
            self.sums, self.format = ranks, format

        def _sum_over_ranks(self, loss: torch.Tensor) -> float:
            dense = self.model.dense_parameters()
            flat = torch.cat([p.grad.flatten() for p in dense]).float()  # the demo has f64
            self.sums.all_reduce(flat, format=self.format)
            for parameter, total in zip(dense, flat.split([p.numel() for p in dense]), strict=True):
                parameter.grad.copy_(total.view_as(parameter))
            routers = [layer.router for layer in self.model.moe_layers()]
            rest = torch.cat([router.load for router in routers] + [loss.detach().reshape(1)])
            dist.all_reduce(rest)
            loads = rest[:-1].split([len(router.load) for router in routers])
            for router, load in zip(routers, loads, strict=True):
                router.rebalance(load, self.settings.balance_rate)
            return float(rest[-1])

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def meeting(port: int) -> ferry.Bootstrap:
        return ferry.tcp(
            rank=int(os.environ["RANK"]),
            size=RANKS,
            port=int(os.environ["FERRY_PORT"]) + port,
            secret=os.environ["FERRY_SECRET"],
        )

    bootstrap = meeting(0)
    runs = []
    for seed in given.seeds:
        for format in given.formats:
            job.say_progress(f"{format}, seed {seed}: starting")
            settings = replace(Settings(steps=given.steps), seed=seed)
            with (
                ferry.Group(bootstrap, experts=settings.experts) as group,
                ferry.Collectives(bootstrap, domain_size=DOMAIN, memory_bytes=0) as ranks,
            ):
                trainer = Compressed(settings, group, ranks, format)
                steps = job.shown(range(given.steps), f"{format}, seed {seed}")
                losses = [trainer.step(number) for number in steps]
                job.say_progress(f"{format}, seed {seed}: held-out loss")
                held_out = trainer.held_out_loss(settings.held_out_windows)
                used = ranks.compression()
                dist.barrier()
            job.say_progress("")
            runs.append({
                "seed": seed,
                "format": format,
                "held_out": held_out,
                "last_losses": statistics.mean(losses[-20:]),
                "dense_parameters": sum(p.numel() for p in trainer.model.dense_parameters()),
                "fallen_back": used.fallen_back,
                "spikes": used.spikes,
                "relative_error": used.relative_error,
                "wire_bytes": used.wire_bytes,
                "exact_bytes": used.exact_bytes,
            })
            if dist.get_rank() == 0:
                print(json.dumps(runs[-1]), flush=True)
    if dist.get_rank() == 0:
        finish(given, runs)
    dist.barrier()


def finish(given: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """The comparison with the first format, and the file."""
    means = {
        format: statistics.mean(run["held_out"] for run in runs if run["format"] == format)
        for format in given.formats
    }
    for format, mean in means.items():
        change = mean / means[given.formats[0]] - 1
        print(f"{format:10} held-out loss {mean:.4f}, {100 * change:+.2f} %")
    settings = {"ranks": RANKS, "domain_size": DOMAIN, "steps": given.steps}
    job.write(given, job.report(settings) | {"held_out_means": means, "runs": runs})


if __name__ == "__main__":
    parsed = arguments()
    if job.is_rank():
        run_rank(parsed)
    else:
        sys.exit(job.launch(RANKS))
