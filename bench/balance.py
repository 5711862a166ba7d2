"""A training step when some experts are busy: as it is, with EPLB's fixed copies, and balanced.

    python bench/balance.py [--ranks 8] [--steps 12] [--json FILE] [--plot FILE]
    python bench/balance.py --loads FILE      the load of each rank over a training, not timed

Ranks are processes; a row takes `--row-us` in the forward of its expert and twice that in the
backward, asleep, so that the figures do not depend on how many cores there are. In each step of a
skewed run a share of all slots names experts of one rank, another one every third step, so that it
has 4 or 8 times the mean load. Contenders come in turn in each step:

    uniform     routes without skew, no copies: the least that skewed routes could take
    unbalanced  the skewed routes, no copies
    static      copies by ferry.ExpertPlacement, once, from the loads of the whole run, which a
                planner in operation does not know; gradients of copies are not even added up
    balanced    ExpertParallel(balance=slots): planned for each batch, weights and gradients move
    no skew     the same with the routes of uniform: what balancing costs where nothing is to do

A step is the median of the slowest rank's time; beside it the CPU time that a rank used, which
other work on the machine alters less. `--parts` adds contenders that leave a part out, which says
what the part costs: the sums of gradients, the fetching of weights, and both, so that what is left
is planning, routes and the second call of the experts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import job

TOPK = 2


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--local", type=int, default=4, help="experts of a rank")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--row-us", type=float, default=200.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--parts", action="store_true", help="what each part of balancing costs")
    parser.add_argument("--copy-rows", type=int, help="as of ExpertParallel")
    job.add_outputs(parser)
    parser.add_argument("--loads", type=Path, help="train, and write the loads there")
    return parser.parse_args()


def experts_of(count: int, args: argparse.Namespace, paced: bool) -> Any:
    """`count` experts, each a linear layer."""
    import torch
    from torch import Tensor, nn

    class Pace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            ctx.seconds = len(rows) * args.row_us * 1e-6
            time.sleep(ctx.seconds)
            return rows.view_as(rows)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            time.sleep(2 * ctx.seconds)
            return grad

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = args.hidden
            self.weight = nn.Parameter(torch.randn(count, width, width) / width**0.5)

        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            if paced:
                rows = Pace.apply(rows)
            blocks = zip(rows.tensor_split(offsets[1:-1]), self.weight)
            return torch.cat([block @ weight for block, weight in blocks])

    return Experts()


def routes(args: argparse.Namespace, rank: int, step: int, skew: int) -> Any:
    """Different experts for each token; skew 1: uniform."""
    import torch

    experts = args.ranks * args.local
    make = torch.Generator().manual_seed(1000 * step + rank)
    scores = torch.rand(args.tokens, experts, generator=make)
    share = (skew - 1) / (args.ranks - 1)  # of tokens that stay on the busy rank
    busy = step // 3 % args.ranks * args.local
    chosen = torch.rand(args.tokens, generator=make) < share
    scores[:, busy : busy + args.local] += chosen[:, None].float()
    return scores.topk(TOPK).indices


class Rank:
    """The contenders on one rank: a layer and how routes come to it."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        import ferry
        import ferry.torch

        torch.set_num_threads(1)
        boot = ferry.from_environment()
        self.args, self.ranks = args, ferry.Collectives(boot)
        self.rank = self.ranks.rank
        experts = args.ranks * args.local
        places = experts + args.ranks * args.slots
        self.placement = ferry.ExpertPlacement(
            experts=experts, ranks=args.ranks, slots=args.local + args.slots
        )
        groups = [ferry.Group(boot, experts=each) for each in (experts, places, places)]
        plain, static, balanced = groups
        self.groups = groups
        self.plain = ferry.torch.ExpertParallel(plain, experts_of(args.local, args, True))
        self.static = ferry.torch.ExpertParallel(
            static, experts_of(args.local + args.slots, args, True)
        )
        self.balanced = ferry.torch.ExpertParallel(
            balanced,
            experts_of(args.local, args, True),
            balance=args.slots,
            collectives=self.ranks,
            **({} if args.copy_rows is None else {"copy_rows": args.copy_rows}),
        )
        # As from the layer before: without, the rows would not go backward.
        self.x = torch.randn(args.tokens, args.hidden, requires_grad=True)
        self.weights = torch.ones(args.tokens, TOPK)

    def gathered(self, mine: Any) -> Any:
        import torch

        every = torch.empty(self.ranks.size, *mine.shape, dtype=mine.dtype)
        self.ranks.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
        return every

    def place(self, skew: int) -> None:
        """EPLB's copies, from the loads of the run."""
        import torch

        load = torch.zeros(self.args.ranks * self.args.local)
        for step in range(self.args.steps):
            ids = routes(self.args, self.rank, step, skew).flatten()
            load += torch.bincount(ids, minlength=len(load))
        whole = self.gathered(load).sum(0).tolist()
        self.placement.balance(list(range(self.args.ranks)), whole)

    def step(self, name: str, ids: Any) -> tuple[float, float]:
        """Of a forward, a backward and an update of weights: seconds of the slowest rank, and
        seconds of CPU of a rank."""
        import torch

        layer = {"uniform": self.plain, "unbalanced": self.plain, "static": self.static}.get(
            name, self.balanced
        )
        leave_out(PARTS.get(name, ()))
        self.ranks.barrier()
        start, used = time.perf_counter(), time.process_time()
        if name == "static":
            ids = self.placement.places(ids, self.rank)
        layer(self.x, ids, self.weights).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 1e-6 * parameter.grad
                parameter.grad = None
            self.x.grad = None
        spent = time.perf_counter() - start, time.process_time() - used
        times, cpu = self.gathered(torch.tensor(spent, dtype=torch.float64)).T
        return times.max().item(), cpu.mean().item()


PARTS = {
    "no gradients": ("reduce_experts",),
    "no weights": ("copy_experts",),
    "neither": ("reduce_experts", "copy_experts"),
}


def leave_out(names: tuple[str, ...]) -> None:
    """What `ExpertParallel` calls for copies does nothing; the figures are wrong then."""
    import ferry
    from ferry import torch_balance, torch_replicas

    for name in ("reduce_experts", "copy_experts"):
        call = (lambda *_, **__: ferry.Event()) if name in names else getattr(torch_replicas, name)
        setattr(torch_balance, name, call)


def measure(rank: Rank, skew: int) -> dict[str, Any]:
    """Medians in milliseconds, how they compare with uniform, and what balancing moved."""
    args = rank.args
    rank.place(skew)
    times: dict[str, list[tuple[float, float]]] = {}
    over, fetched = [], []
    for step in job.shown(range(args.steps), f"skew {skew}"):
        even, skewed = (routes(args, rank.rank, step, each) for each in (1, skew))
        parts = PARTS if args.parts else ()
        for name in ("uniform", "no skew", "unbalanced", "static", *parts, "balanced"):
            ids = even if name in ("uniform", "no skew") else skewed
            times.setdefault(name, []).append(rank.step(name, ids))
        balancer = rank.balanced.balancer
        over.append(max(balancer.load) * args.ranks / sum(balancer.load))
        fetched.append(sum(expert >= 0 for row in balancer.fetches for expert in row))
    columns = {name: zip(*each) for name, each in times.items()}
    both = {name: [statistics.median(c) * 1e3 for c in each] for name, each in columns.items()}
    medians = {name: took for name, (took, _) in both.items()}
    return {
        "skew": skew,
        "step_ms": medians,
        "cpu_ms": {name: cpu for name, (_, cpu) in both.items()},
        "over_uniform": {name: took / medians["uniform"] for name, took in medians.items()},
        "heaviest_over_mean": max(over),
        "copies_fetched": statistics.median(fetched),
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Loads of all ranks before and after balancing, in each step of a training whose router is
    left to itself: no loss keeps the experts equally busy."""
    import torch

    import ferry
    import ferry.torch

    torch.set_num_threads(1)
    boot = ferry.from_environment()
    ranks = ferry.Collectives(boot)
    experts = args.ranks * args.local
    group = ferry.Group(boot, experts=experts + args.ranks * args.slots)
    torch.manual_seed(0)
    router = torch.nn.Linear(args.hidden, experts)
    centres = torch.randn(experts, args.hidden)
    torch.manual_seed(1 + ranks.rank)
    layer = ferry.torch.ExpertParallel(
        group, experts_of(args.local, args, False), balance=args.slots, collectives=ranks
    )
    optimizer = torch.optim.Adam([*router.parameters(), *layer.parameters()], lr=0.01)
    before, after, losses = [], [], []
    for _ in job.shown(range(args.steps), "training"):
        kinds = torch.randint(0, experts, (args.tokens,))
        x = centres[kinds] + torch.randn(args.tokens, args.hidden)
        weights, ids = router(x).softmax(1).topk(TOPK)
        loss = (layer(x, ids, weights) - x.flip(1)).pow(2).mean() / args.ranks
        optimizer.zero_grad()
        loss.backward()
        for parameter in router.parameters():
            ranks.all_reduce(parameter.grad)
        optimizer.step()
        home = torch.bincount(ids.flatten() // args.local, minlength=args.ranks)
        ranks.all_reduce(home)
        total = loss.detach().reshape(1)
        ranks.all_reduce(total)
        before.append(home.tolist())
        after.append(layer.balancer.load)
        losses.append(round(total.item(), 4))
    ranks.barrier()
    group.destroy()
    return {"before": before, "after": after, "losses": losses}


def run_rank(args: argparse.Namespace) -> None:
    """What every rank does."""
    settings = {name: getattr(args, name) for name in ("ranks", "local", "slots", "tokens")}
    settings |= {"hidden": args.hidden, "steps": args.steps, "topk": TOPK}
    if args.loads:
        facts = job.report(settings) | train(args)
        if os.environ["RANK"] == "0":
            args.loads.write_text(json.dumps(facts) + "\n")
        return
    rank = Rank(args)
    runs = [measure(rank, skew) for skew in (4, 8)]
    if rank.rank == 0:
        for run in runs:
            print(f"busiest rank {run['skew']} times the mean:")
            for name, took in run["step_ms"].items():
                over, cpu = run["over_uniform"][name], run["cpu_ms"][name]
                print(f"  {name:12} {took:8.1f} ms a step, {over:5.2f}; CPU {cpu:6.2f} ms a rank")
        job.write(args, job.report(settings | {"row_us": args.row_us}) | {"runs": runs})
    rank.ranks.barrier()
    for group in rank.groups:
        group.destroy()


if __name__ == "__main__":
    parsed = arguments()
    if job.is_rank():
        run_rank(parsed)
    else:
        sys.exit(job.launch(parsed.ranks))
