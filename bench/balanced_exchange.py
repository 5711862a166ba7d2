"""Dispatch + combine of uniform, skewed and balanced routes, and what moving experts costs.

    python bench/balanced_exchange.py [--device cpu|cuda] [--tokens 4096] [--json FILE]

Every rank is a process, on GPUs one for each. Skewed routes are Zipf's: expert number n of a
shuffled order is chosen with weight n**-zipf, a token's top-k are different experts. Contenders, in
turn in each sample, in both orders of rows:

    uniform     routes without skew, no copies
    skewed      no copies
    balanced    the same routes, copies by ferry.BatchBalancer, which are there already

and each once more with all that its plan takes: for all `Group.plan`, and for balanced before it
the counts, their all-gather, the plan of copies and the places of the routes, which are others in
each exchange: the planner remembers 64 batches. On GPUs these are
kernels (ferry.torch.GpuBalancer), whose times are told one by one, and of the plan for 8 to 64
ranks, too. The sums are checked before anything is timed. A sample is the slowest rank's time; on
GPUs it is `--chain` exchanges between two CUDA events, divided, after an all-reduce.

Then the moves: every rank fetches `--slots` experts of the next one, and gradients (f32) of as many
copies are added up, beside a copy and an addition of as many bytes between two buffers of a rank's
own, all ranks at once, until the last one is done; medians. `--experts-kib` is the size
of an expert. All are in registered memory, which is shared on CPUs.

A rank that takes longer than `--limit` seconds in all says where it is, and ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import job

HOST = {"ranks": 2, "tokens": 512, "hidden": 1024, "experts": 32, "iterations": 15, "chain": 1}
GPUS = {"ranks": 0, "tokens": 4096, "hidden": 7168, "experts": 256, "iterations": 20, "chain": 4}
SIZES = {"cpu": 8 << 10, "cuda": 64 << 10}  # KiB of an expert
ORDERS = ("rank_major", "expert_major")


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("-n", "--ranks", type=int, help="2; with cuda one for each GPU")
    parser.add_argument("--tokens", type=int, help="of each rank")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--zipf", type=float, default=1.2)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--chain", type=int, help="exchanges of a sample")
    parser.add_argument("--sms", type=int, default=16, help="of each call on GPUs")
    parser.add_argument("--experts-kib", type=int, help="of one expert")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a rank")
    job.add_outputs(parser)
    args = parser.parse_args()
    for name, value in (GPUS if args.device == "cuda" else HOST).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.experts_kib = args.experts_kib or SIZES[args.device]
    return args


def routes(args: argparse.Namespace, rank: int, zipf: float) -> Any:
    """Different experts for each token; which are busy is the same on all ranks."""
    import torch

    order = torch.randperm(args.experts, generator=torch.Generator().manual_seed(7))
    weight = (order + 1.0).pow(-zipf).log()
    make = torch.Generator().manual_seed(rank)
    noise = -torch.empty(args.tokens, args.experts).exponential_(generator=make).log()
    return (weight + noise).topk(args.topk).indices


class Rank:
    """One rank: its group, its routes and how it measures."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        import ferry

        torch.set_num_threads(1)
        boot = ferry.from_environment()
        on_gpu: dict[str, Any] = {}
        self.device = torch.device("cpu")
        if args.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            on_gpu = {"backend": "cuda", "device": self.device}
        self.args = args
        self.host = ferry.Collectives(boot, deadline=20)
        self.rank, self.size = self.host.rank, self.host.size
        self.balancer = self.new_balancer(args.experts, self.size, args.slots)
        self.local = args.experts // self.size
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        most = args.tokens * args.topk * args.hidden * self.dtype.itemsize
        self.group = ferry.Group(
            boot,
            experts=self.balancer.group_experts,
            deadline=20,
            memory_bytes=max(64 << 20, 2 * self.size * most if on_gpu else 0),
            **on_gpu,
        )
        moved = (self.local + 3 * args.slots) * args.experts_kib << 10
        self.ranks = ferry.Collectives(boot, deadline=20, memory_bytes=moved + (64 << 20), **on_gpu)
        make = torch.Generator().manual_seed(100 + self.rank)
        x = torch.randint(-4, 5, (args.tokens, args.hidden), generator=make)
        self.x = x.to(self.device, self.dtype)
        self.token = torch.zeros(1, device=self.device)
        self.ids = {zipf: routes(args, self.rank, zipf).to(self.device) for zipf in (0, args.zipf)}
        few = [routes(args, self.rank + 1000 * i, args.zipf) for i in range(9)]
        half = args.tokens // 2
        mixed = [torch.cat([a[:half], b[half:]]) for a in few for b in few]
        self.batches = [ids.to(self.device) for ids in mixed]
        self.turn = 0
        self.balanced_places()

    def new_balancer(self, experts: int, ranks: int, slots: int) -> Any:
        """Of this rank's device."""
        import ferry

        sizes = {"experts": experts, "ranks": ranks, "slots": slots}
        if self.args.device == "cpu":
            return ferry.BatchBalancer(**sizes)
        import ferry.torch

        return ferry.torch.GpuBalancer(**sizes, device=self.device)

    def counts_of_all(self, ids: Any) -> Any:
        """Of these routes on all ranks."""
        import torch

        mine = self.balancer.counts(ids)
        every = torch.empty(self.size, len(mine), dtype=torch.int32, device=self.device)
        (self.ranks if self.args.device == "cuda" else self.host).all_gather(mine, every)
        return every

    def balanced_places(self) -> Any:
        """All that balancing does for skewed routes whose copies are there."""
        return self.places_of(self.ids[self.args.zipf])

    def places_of_next(self) -> Any:
        """The same of other routes in each of 81 calls."""
        self.turn += 1
        return self.places_of(self.batches[self.turn % len(self.batches)])

    def places_of(self, ids: Any) -> Any:
        self.balancer.plan(self.counts_of_all(ids))
        self.balancer.fetched()
        return self.balancer.places(ids, self.rank)

    def home(self, zipf: float) -> Any:
        ids = self.ids[zipf]
        return ids + ids // self.local * self.args.slots

    def exchange(self, plan: Any, order: str) -> Any:
        """To the experts and back, which leave rows as they are."""
        options = {"order": order, "num_sms": self.args.sms if self.args.device == "cuda" else 0}
        got = self.group.dispatch(self.x, plan, **options)
        return self.group.combine(got.x, plan, **options).x

    def check(self, places: Any, plan: Any) -> None:
        """Sums of small integers, exact in any order."""
        import torch

        ranks = places // (self.local + self.args.slots)
        apart = sum((ranks == rank).any(1).int() for rank in range(self.size))
        for order, times in zip(ORDERS, (apart[:, None], self.args.topk)):
            if not torch.equal(self.exchange(plan, order), (self.x.float() * times).to(self.dtype)):
                raise SystemExit(f"rank {self.rank}: wrong sums, {order}")

    def seconds(self, call: Callable[[], object], chain: int) -> float:
        """Of one of `chain` calls, in step with the other ranks."""
        import torch

        if self.args.device == "cpu":
            call()  # not in the cache of what ran before
            self.host.barrier()
            start = time.perf_counter()
            for _ in range(chain):
                call()
            return (time.perf_counter() - start) / chain
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.host.barrier()
        torch.cuda._sleep(1_000_000)  # the CPU is ahead of the GPU when the sample begins
        self.ranks.all_reduce(self.token)
        begin.record()
        for _ in range(chain):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / chain

    def gathered(self, mine: Any) -> Any:
        import torch

        every = torch.empty(self.size, *mine.shape, dtype=mine.dtype)
        self.host.all_gather(mine, every)
        return every

    def times(
        self, calls: dict[str, Callable[[], object]], chain: int, of: Any = statistics.median
    ) -> dict[str, float]:
        """Microseconds of the slowest rank: the median of all samples, or another figure."""
        import torch

        times: dict[str, list[float]] = {name: [] for name in calls}
        for sample in job.shown(range(-self.args.warmup, self.args.iterations), "exchanges"):
            for name, call in calls.items():
                took = self.seconds(call, chain)
                if sample >= 0:
                    times[name].append(took)
        slowest = self.gathered(torch.tensor(list(times.values()))).amax(0)
        return {n: of(t) * 1e6 for n, t in zip(times, slowest.tolist())}


def contenders(
    rank: Rank, places: dict[str, Any], plans: dict[str, Any], order: str
) -> dict[str, Callable[[], object]]:
    """What is timed."""
    calls: dict[str, Callable[[], object]] = {}
    for name, plan in plans.items():
        calls[name] = lambda plan=plan: rank.exchange(plan, order)
    for name, each in places.items():
        calls[f"{name}, plan included"] = lambda each=each: rank.exchange(
            rank.group.plan(each), order
        )
    calls["balanced, plan included"] = lambda: rank.exchange(
        rank.group.plan(rank.places_of_next()), order
    )
    return calls


def measure_exchange(rank: Rank) -> dict[str, Any]:
    """Times of all contenders, and the rows of the heaviest rank."""
    import torch

    zipf, balanced = rank.args.zipf, "balanced"
    places = {"uniform": rank.home(0), "skewed": rank.home(zipf)}
    places[balanced] = rank.balanced_places()
    plans = {name: rank.group.plan(each) for name, each in places.items()}
    over, found = {}, {}
    for name, plan in plans.items():
        rank.check(places[name], plan)
        owner = places[name].flatten().cpu() // (rank.local + rank.args.slots)
        load = rank.gathered(torch.bincount(owner, minlength=rank.size)).sum(0)
        over[name] = load.max().item() / load.double().mean().item()
    for order in ORDERS:
        found[order] = rank.times(contenders(rank, places, plans, order), rank.args.chain)
    alone = rank.times({"places": rank.places_of_next}, rank.args.chain)
    return {"us": found, "heaviest_over_mean": over, "balance_alone_us": alone["places"]}


def skewed_counts(ranks: int, experts: int, seed: int) -> Any:
    """i32 [ranks, experts] of a batch: 32768 slots a rank, by Zipf's law with 1.2."""
    import torch

    make = torch.Generator().manual_seed(seed)
    weight = (torch.randperm(experts, generator=make) + 1.0).pow(-1.2)
    drawn = weight.expand(ranks, -1).multinomial(32768, True, generator=make)
    return torch.stack([torch.bincount(each, minlength=experts) for each in drawn]).int()


def measure_plans(rank: Rank) -> dict[str, float]:
    """Microseconds of the kernels of a plan, each alone; of plans for more ranks, with no copy
    there (anew) and those of another batch (again), the median and the most of ten batches."""
    import torch

    import ferry

    def alone(call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    ids, balancer = rank.ids[rank.args.zipf], rank.balancer
    every, mine = rank.counts_of_all(ids), balancer.counts(ids)
    others = iter([rank.counts_of_all(each) for each in rank.batches])
    steps: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "counts": lambda: balancer.counts(ids),
        "all-gather": lambda: rank.ranks.all_gather(mine, every),
        "plan, as before": lambda: balancer.plan(every),
        "plan, another batch": lambda: balancer.plan(next(others)),
        "fetched": balancer.fetched,
        "places": lambda: balancer.places(ids, rank.rank),
    }
    found = {}
    for name, step in job.shown(steps.items(), "planning"):
        found[name] = statistics.median(alone(step) for _ in range(rank.args.iterations))
    for ranks, experts in ((4, 256), (8, 256), (16, 256), (32, 256), (64, 384)):
        on_gpu = rank.new_balancer(experts, ranks, 2)
        on_cpu = ferry.BatchBalancer(experts=experts, ranks=ranks, slots=2)
        times: dict[str, list[float]] = {"anew": [], "again": []}
        for seed in range(20):
            counts = skewed_counts(ranks, experts, seed)
            if seed % 2 == 0:
                for owner in range(ranks):
                    on_gpu.invalidate(owner)
                    on_cpu.invalidate(owner)
            given = counts.to(rank.device)
            took = alone(functools.partial(on_gpu.plan, given))
            times["again" if seed % 2 else "anew"].append(took)
            on_cpu.plan(counts)
            for each in (on_gpu, on_cpu):
                each.fetched()
            if on_gpu.table.tolist() != on_cpu.table or on_gpu.load.tolist() != on_cpu.load:
                raise SystemExit(f"rank {rank.rank}: another plan than the CPU's, {ranks} ranks")
        for name, each in times.items():
            found[f"plan of {ranks} ranks, {experts} experts, {name}"] = statistics.median(each)
            found[f"plan of {ranks} ranks, {experts} experts, {name}, most"] = max(each)
    return found


def measure_moves(rank: Rank) -> dict[str, Any]:
    """Bytes a second of all ranks together."""
    import torch

    from ferry.torch import copy_experts, reduce_experts

    args, size = rank.args, rank.size
    named = [
        [(owner + 1) % size * rank.local + slot for slot in range(args.slots)]
        for owner in range(size)
    ]
    table: Any = named
    if args.device == "cuda":  # as a plan on a GPU is
        table = torch.tensor(named, dtype=torch.int32, device=rank.device)
    width = args.experts_kib * 256
    empty = rank.ranks.empty
    experts, slots = (empty((n, width), torch.float32) for n in (rank.local, args.slots))
    experts.fill_(rank.rank)
    slots.fill_(0)
    own = empty((2, args.slots * width), torch.float32)
    own.fill_(0)

    def alone(call: Callable[..., object]) -> None:
        call(own[1])
        if args.device == "cpu":  # as a move ends: ranks that share cores begin one after another
            rank.host.barrier()

    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: alone(own[0].copy_),
        "add": lambda: alone(own[0].add_),
        "fetch": lambda: copy_experts(rank.ranks, experts, slots, table),
        "reduce": lambda: reduce_experts(rank.ranks, slots, experts, table),
    }
    copy_experts(rank.ranks, experts, slots, table)
    for slot, expert in enumerate(named[rank.rank]):
        if not (slots[slot] == expert // rank.local).all():
            raise SystemExit(f"rank {rank.rank}: slot {slot} holds another expert")
    slots.zero_()  # what is added
    took = rank.times(calls, 1)
    bytes_ = size * args.slots * width * 4
    return {"bytes": bytes_, "gbps": {name: bytes_ / us * 1e-3 for name, us in took.items()}}


def show(result: dict[str, Any]) -> None:
    """Tables."""
    for order, times in result["us"].items():
        print(f"{order:30} {'us':>10} {'x uniform':>10}")
        for name, us in times.items():
            base = "uniform, plan included" if "plan" in name else "uniform"
            print(f"  {name:28} {us:10.1f} {us / times[base]:10.3f}")
    print("heaviest rank over mean:", end="")
    print(*(f" {name} {over:.3f}" for name, over in result["heaviest_over_mean"].items()), sep=",")
    print(f"counts, their all-gather, plan and places: {result['balance_alone_us']:.1f} us")
    for name, us in result.get("kernels_us", {}).items():
        print(f"  {name:50} {us:10.1f} us")
    moves = result["moves"]
    print(f"{moves['bytes'] >> 20} MiB of experts:", end="")
    rates = moves["gbps"]
    print(*(f" {n} {r:.2f} GB/s ({r / rates['copy']:.2f})" for n, r in rates.items()), sep=",")


def run_rank(args: argparse.Namespace) -> None:
    """What every rank does."""
    faulthandler.dump_traceback_later(args.limit, exit=True)
    rank = Rank(args)
    result = measure_exchange(rank)
    if args.device == "cuda":
        result["kernels_us"] = measure_plans(rank)
    result["moves"] = measure_moves(rank)
    if rank.rank == 0:
        show(result)
        import torch

        gpu = torch.cuda.get_device_name() if args.device == "cuda" else ""
        job.write(args, job.report(job.settings_of(args, rank.size), gpu) | result)
    rank.host.barrier()
    rank.group.destroy()


if __name__ == "__main__":
    sys.exit(job.run_exchange(arguments(), run_rank))
