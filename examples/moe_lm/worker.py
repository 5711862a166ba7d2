"""One rank of the demo: trains its share and writes what happened. Started by `ferry run`."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ferry
import ferry.torch
from data import batch_at, load_corpus, windows
from model import MoeLanguageModel
from settings import Settings


class Trainer:
    """The model, its optimizer, and the sums over ranks that keep the dense parts equal."""

    def __init__(self, settings: Settings, group: ferry.Group) -> None:
        rank, ranks = group.rank, group.size
        if settings.shares % ranks:
            raise ValueError(f"{settings.shares} shares do not divide over {ranks} ranks")
        self.settings, self.group, self.rank, self.ranks = settings, group, rank, ranks
        self.corpus = load_corpus()
        self.all_reduce_seconds = 0.0
        self.device = torch.device(group.device)
        # Drawn on the CPU: the same start on either device.
        self.model = MoeLanguageModel(settings, group, local_experts(settings, rank, ranks))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, number: int) -> float:
        """One step over the global batch; returns its mean loss, the same on every rank."""
        s = self.settings
        batch = self._share(batch_at(self.corpus.train, number, s.batch, s.context, s.seed))
        for options in self.optimizer.param_groups:
            options["lr"] = learning_rate(s, number)
        self.optimizer.zero_grad()
        # Divided by the global count: gradients of experts, which see every rank's tokens, are
        # complete as they are; those of dense parameters are summed over ranks.
        loss = self._losses(batch).double().sum() / (s.batch * s.context)
        loss.backward()
        total = self._sum_over_ranks(loss)
        self.optimizer.step()
        return total

    def held_out_loss(self, count: int, zeroed: bool = False) -> float:
        """Mean loss over `count` held-out windows; `zeroed`: without the experts' output."""
        s = self.settings
        scored = windows(self.corpus.held_out, count, s.context)
        for layer in self.model.moe_layers():
            layer.zeroed = zeroed
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for part in scored.split(s.quick_windows):
                total += self._losses(self._share(part)).double().sum().cpu()
        for layer in self.model.moe_layers():
            layer.zeroed = False
        dist.all_reduce(total)
        return total.item() / (count * s.context)

    def mean_over_ranks(self, values: list[float]) -> list[float]:
        """Each value's mean over all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return (total / self.ranks).tolist()

    def _share(self, sequences: torch.Tensor) -> torch.Tensor:
        """This rank's shares `[S, B, C + 1]` of all `sequences` `[shares · B, C + 1]`."""
        shares = sequences.view(self.settings.shares, -1, sequences.shape[1])
        return shares.tensor_split(self.ranks)[self.rank].to(self.device)

    def _losses(self, shares: torch.Tensor) -> torch.Tensor:
        """The loss of each token of these shares, in nats."""
        logits = self.model(shares[:, :, :-1])
        return F.cross_entropy(logits.flatten(0, 1), shares[:, :, 1:].flatten(), reduction="none")

    def _sum_over_ranks(self, loss: torch.Tensor) -> float:
        """Sum dense gradients, loads and the loss over ranks in fp64, in one all-reduce."""
        dense = self.model.dense_parameters()
        routers = [layer.router for layer in self.model.moe_layers()]
        parts = [p.grad.flatten() for p in dense]
        parts += [router.load for router in routers] + [loss.detach().reshape(1)]
        flat = torch.cat(parts).cpu()
        before = time.perf_counter()
        dist.all_reduce(flat)
        self.all_reduce_seconds += time.perf_counter() - before
        sums = flat.split([len(part) for part in parts])
        for parameter, total in zip(dense, sums):
            parameter.grad.copy_(total.view_as(parameter))
        for router, load in zip(routers, sums[len(dense) :]):
            router.rebalance(load, self.settings.balance_rate)
        return sums[-1].item()


def local_experts(settings: Settings, rank: int, ranks: int) -> range:
    """The experts of a rank: contiguous blocks, the first (experts mod ranks) one larger."""
    size, more = divmod(settings.experts, ranks)
    first = rank * size + min(rank, more)
    return range(first, first + size + (rank < more))


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then half a cosine down to zero at the end."""
    if step < settings.warm_up:
        return settings.learning_rate * (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def train(
    trainer: Trainer, report: Callable[[dict[str, Any]], None], stop_after: int
) -> dict[str, Any]:
    """Run the steps, with a line for `report` after each; returns what the run came to."""
    s = trainer.settings
    losses, held_out = [], []
    stepping, exchanging, waiting = 0.0, 0, 0
    for number in range(stop_after):
        # The clocks run in steps alone: evaluation is not training.
        before, used = time.perf_counter(), trainer.group.time()
        losses.append(trainer.step(number))
        stepping += time.perf_counter() - before
        now = trainer.group.time()
        exchanging += now.exchange_ns - used.exchange_ns
        waiting += now.wait_ns - used.wait_ns
        line: dict[str, Any] = {"step": number + 1, "loss": losses[-1]}
        if (number + 1) % s.evaluate_every == 0:
            line["held_out"] = trainer.held_out_loss(s.quick_windows)
            held_out.append((number + 1, line["held_out"]))
        report(line)
    spent = [exchanging / 1e9, waiting / 1e9, trainer.all_reduce_seconds]
    shares = trainer.mean_over_ranks([seconds / stepping for seconds in spent])
    result = {
        "ranks": trainer.ranks,
        "device": trainer.device.type,
        "fabric": trainer.group.fabric_name,
        "settings": asdict(s),
        "losses": losses,
        "held_out": held_out,
        "final_held_out": trainer.held_out_loss(s.held_out_windows),
        "zeroed_held_out": trainer.held_out_loss(s.held_out_windows, zeroed=True),
        "tokens_per_second": stop_after * s.batch * s.context / stepping,
        "exchange_share": shares[0],
        "exchange_wait_share": shares[1],
        "all_reduce_share": shares[2],
    }
    (cpu_seconds,) = trainer.mean_over_ranks([_cpu_seconds()])
    return result | {"cpu_seconds": cpu_seconds * trainer.ranks}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def use_gpu(rank: int) -> int:
    """This rank's GPU, ranks round-robin, and arithmetic that gives the same bits in every run."""
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return device


def main() -> None:
    """Read the arguments and the environment of `ferry run`, then train.

    Rank 0 writes a line of `progress.jsonl` after each step, and `result.json` at the end.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for this run's files")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--stop-after", type=int, help="steps of these that are run; default: all")
    for name in ("fabric", "crossing"):
        help = "of the group; default: automatic"
        parser.add_argument(f"--{name}", default="automatic", help=help)
    for name in ("batch", "shares", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    parser.add_argument("--held-out", type=int, default=Settings.held_out_windows)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("RANK is not set; start train.py, which starts the ranks with `ferry run`")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    where: dict[str, Any] = {}
    if arguments.device == "cuda":
        where = {"backend": "cuda", "device": use_gpu(rank)}
    # For the sums of dense gradients. It meets through a file, so that the address of `ferry run`
    # stays that of the group.
    meeting = (arguments.out / "store").resolve()
    dist.init_process_group(
        "ferry",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    settings = Settings(
        steps=arguments.steps,
        batch=arguments.batch,
        shares=arguments.shares,
        context=arguments.context,
        held_out_windows=arguments.held_out,
        quick_windows=min(max(Settings.quick_windows, arguments.shares), arguments.held_out),
    )
    # Every rank writes; only rank 0's is kept.
    name = arguments.out / "progress.jsonl" if rank == 0 else os.devnull
    with (
        ferry.Group(
            ferry.from_environment(),
            experts=settings.experts,
            fabric=arguments.fabric,
            crossing=arguments.crossing,
            **where,
        ) as group,
        open(name, "w", buffering=1) as progress,
    ):
        trainer = Trainer(settings, group)
        stop_after = arguments.stop_after or settings.steps
        result = train(trainer, lambda line: print(json.dumps(line), file=progress), stop_after)
    if rank == 0:
        (arguments.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
