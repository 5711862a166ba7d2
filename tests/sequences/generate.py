"""Draws sequences: each step from what the model says is there, kept if that is legal."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from sequences.arithmetic import DTYPES, SUM_DTYPES
from sequences.latency_state import Dispatched
from sequences.model import Calls, IllegalError, Model, Sequence, Step, require
from sequences.steps import take
from sequences.throughput_model import Received

ATTEMPTS = 12  # to draw a step that is legal
KINDS = {
    "throughput": {"plan": 2, "dispatch": 5, "combine": 5, "drop": 3, "barrier": 0.3},
    "latency": {
        "exchange": 0.5,
        "ldispatch": 6,
        "receive": 3,
        "lcombine": 8,
        "drop": 5,
        "rejoin": 1.2,
        "split": 0.7,
        "clear": 0.7,
        "leave": 0.2,
    },
}


def draw(seed: int, processes: bool = False, ranks: int = 0) -> tuple[Sequence, list[Calls]]:
    """The sequence of a seed, and the calls that it is."""
    rng = random.Random(seed)
    size = ranks or rng.choice([1, 2, 2, 2, 2, 3, 3, 3, 4, 4])
    fabric = "shm" if processes else rng.choice(["local"] * 4 + ["sim"])
    domain_size = 0 if fabric == "sim" else rng.choice([0, 0, 0, 1, 2])
    simulated = domain_size > 0 and not processes and rng.random() < 0.3
    sequence: Sequence = {
        "seed": seed,
        "ranks": size,
        "processes": processes,
        "experts": rng.choice([1, 2, 3, 4, 5, 6, 8]),
        "memory_bytes": rng.choice([4096, 1 << 16, 1 << 20]),
        "fabric": fabric,
        "domain_size": domain_size,
        "network": "sim" if simulated else "automatic",
        "crossing": rng.choice(["automatic", "automatic", "direct", "hierarchical"]),
        "sim_seed": seed,
        "steps": [],
    }
    modes = rng.choice([["throughput"]] * 2 + [["latency"]] * 2 + [list(KINDS)])
    generator = Generator(rng, sequence, modes)
    generator.fill(rng.randint(3, 26))
    return sequence, generator.calls


class Generator:
    def __init__(self, rng: random.Random, sequence: Sequence, modes: list[str]) -> None:
        self.rng, self.sequence, self.model = rng, sequence, Model(sequence)
        kinds: dict[str, float] = {}
        for mode in modes:
            kinds |= KINDS[mode]
        self.kinds, self.modes = kinds, modes
        self.ranks: int = sequence["ranks"]
        self.worst: list[tuple[str, str, int, list[int]]] = []  # of dispatches, refused or not
        self.count = 0
        self.calls: list[Calls] = []

    def fill(self, length: int) -> None:
        if "latency" in self.modes:
            self.add("exchange")
        if "throughput" in self.modes:
            self.add("plan")
        for _ in range(length):
            self.add("")

    def add(self, kind: str) -> None:
        for _ in range(ATTEMPTS):
            chosen = kind or self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
            try:
                step = getattr(self, chosen)() | {"do": chosen}
                self.calls.append(take(self.model, step))
            except IllegalError:
                continue
            self.sequence["steps"].append(step)
            return

    # What many steps take

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def some_of(self, names: Iterable[Any]) -> Any:
        among = sorted(names)
        require(bool(among))
        return self.rng.choice(among)

    def some_ranks(self, share: float) -> list[int]:
        return [rank for rank in range(self.ranks) if self.chance(share)]

    def hidden(self, dtype: str) -> int:
        """Rows of 16 bytes are an edge of their own, and so is a second block of scales."""
        unit = 16 // int(DTYPES[dtype].itemsize)
        return unit * self.rng.choice([1, 1, 2, 3, 4, 8, 8, 144 // unit])

    def routes(self, most: int, topk: int) -> Step:
        return {
            "seed": self.rng.randrange(1 << 30),
            "tokens": [
                self.rng.choice([0, most, self.rng.randint(0, most)]) for _ in range(self.ranks)
            ],
            "topk": topk,
            "style": self.rng.choice(["any", "any", "distinct", "one"]),
            "idx": self.rng.choice(["i64", "i32"]),
        }

    # Throughput mode

    def plan(self) -> Step:
        require(len(self.model.plans) <= 3)
        return self.routes(self.rng.choice([1, 3, 8]), self.rng.randint(1, 4)) | {"as": self.name()}

    def dispatch(self) -> Step:
        fused = self.chance(0.15)
        plan = None if fused else self.some_of(self.model.plans)
        order = self.rng.choice(["rank_major", "expert_major"])
        alignment = 1 if order == "rank_major" else self.rng.choice([1, 1, 2, 5])
        quantises = self.chance(0.25)
        dtype = self.rng.choice(SUM_DTYPES if quantises or self.chance(0.7) else list(DTYPES))
        formats = [self.rng.choice(["f32", "f32_pow2"]) for _ in range(self.ranks)]
        step: Step = {
            "as": self.name(),
            "seed": self.rng.randrange(1 << 30),
            "plan": plan,
            "routes": self.routes(4, self.rng.randint(1, 3)) if fused else None,
            "dtype": dtype,
            "hidden": self.rng.choice([16, 128, 144]) if quantises else self.hidden(dtype),
            "special": self.chance(0.15),
            "format": "e4m3" if quantises else "as_is",
            "scale_formats": formats,
            "brings": self.some_ranks(0.2) if quantises else [],
            "scales": 0 if quantises or self.chance(0.8) else self.rng.choice([1, 3]),
            "weights": self.chance(0.4),
            "order": order,
            "alignment": alignment,
            "worst": None,
            "out": self.rng.choice([0, 0, 0, 1, 3]),
            "crossing": self.crossing(),
            "stream": self.chance(0.2),
            "bad": self.some_ranks(0.03),
        }
        if plan is not None and self.chance(0.45):
            step["worst"] = self.worst_case(plan, order, alignment)
        return step

    def worst_case(self, plan: str, order: str, alignment: int) -> list[int]:
        """Enough on all ranks, or on all but some."""
        used = self.model.plans[plan]
        need = [
            max(used.rows(r, order, alignment), used.rows(r, "rank_major", 1))
            for r in range(self.ranks)
        ]
        short = self.some_ranks(0.5) if self.chance(0.4) else []
        rows = [
            max(1, n - 1 if r in short else n + self.rng.choice([0, 1, 3]))
            for r, n in enumerate(need)
        ]
        self.worst.append((plan, order, alignment, rows))
        return rows

    def crossing(self) -> str:
        return self.rng.choice(["automatic", "automatic", "direct", "hierarchical"])

    def combine(self) -> Step:
        plan = self.some_of(self.model.plans)
        layouts = self.model.plans[plan].layouts
        require(bool(layouts) or self.chance(0.2))
        order = self.rng.choice(["rank_major", "expert_major"])
        alignment = 1 if order == "rank_major" else self.rng.choice([1, 1, 2, 5])
        if layouts and self.chance(0.8):
            order, alignment, _ = self.rng.choice(layouts)
        source, rows = self.rng.choice(["fresh", "registered"]), None
        received = [n for n, r in self.model.received.items() if isinstance(r, Received)]
        pick = self.rng.random()
        if pick < 0.5 and received:
            source = self.rng.choice(received)
            plan = self.model.received[source].plan
            order = self.model.received[source].order
        elif pick < 0.75 and self.worst:
            plan, order, alignment, rows = self.rng.choice(self.worst)
        elif pick < 0.8:
            used = self.model.plans[plan]
            rows = [used.rows(rank, order, alignment) + 1 for rank in range(self.ranks)]
        weights = self.chance(0.4)
        dtype = self.rng.choice(SUM_DTYPES)
        return {
            "as": self.name(),
            "seed": self.rng.randrange(1 << 30),
            "plan": plan,
            "source": source,
            "rows": rows,
            "dtype": dtype,
            "hidden": self.hidden(dtype),
            "special": self.chance(0.15),
            "order": order,
            "alignment": alignment,
            "weights": weights,
            "apply": weights and order == "expert_major" and self.chance(0.6),
            "biases": self.rng.choice([0, 0, 1, 2]),
            "out": self.chance(0.2),
            "crossing": self.crossing(),
            "stream": self.chance(0.2),
            "bad": self.some_ranks(0.03),
        }

    def barrier(self) -> Step:
        return {}

    # Both modes

    def drop(self) -> Step:
        results = self.model.received | self.model.latency
        name = self.some_of(results)
        alive = sorted(results[name].alive)
        return {"of": name, "ranks": alive if self.chance(0.85) else self.rng.sample(alive, 1)}

    # Latency mode

    def exchange(self) -> Step:
        require(len(self.model.exchanges) <= 1)
        dtype = self.rng.choice(SUM_DTYPES)
        return {
            "as": self.name(),
            "capacity": self.rng.choice([1, 2, 3, 5, 8]),
            "hidden": self.hidden(dtype),
            "topk": self.rng.randint(1, 4),
            "dtype": dtype,
            "order": self.rng.choice(["expert_major", "expert_major", "rank_major"]),
            "masks": self.chance(0.6),
        }

    def ldispatch(self) -> Step:
        name = self.some_of(self.model.exchanges)
        on = self.model.exchanges[name]
        format = "e4m3" if self.chance(0.3) else "as_is"
        scales = ["f32", "f32_pow2", "ue8m0_packed"] if format == "e4m3" else ["f32"]
        order = self.rng.choice([on.order, "rank_major"])
        orders = [order] * self.ranks
        if self.chance(0.1):
            orders = [self.rng.choice([on.order, "rank_major"]) for _ in orders]
        return self.routes(on.capacity, self.rng.randint(1, on.topk)) | {
            "as": self.name(),
            "on": name,
            "orders": orders,
            "weights": self.chance(0.5),
            "format": format,
            "scale_format": self.rng.choice(scales),
            "hooks": self.hooks(),
            "special": self.chance(0.15),
            "knocks": self.chance(0.3),
            "bad": self.some_ranks(0.03),
        }

    def hooks(self) -> list[int]:
        return self.some_ranks(self.rng.choice([0, 0, 0.5, 1, 1]))

    def receive(self) -> Step:
        late = [n for n, r in self.model.latency.items() if r.alive - r.received]
        name = self.some_of(self.model.latency if self.chance(0.05) else late)
        result = self.model.latency[name]
        ranks = sorted(result.alive - result.received) or sorted(result.alive)[:1]
        return {"of": name, "ranks": ranks if self.chance(0.7) else self.rng.sample(ranks, 1)}

    def lcombine(self) -> Step:
        results = {n: r for n, r in self.model.latency.items() if isinstance(r, Dispatched)}
        ready = [n for n, r in results.items() if r.alive == r.received and not r.combined]
        name = self.some_of(results if self.chance(0.08) else ready)
        of = self.model.latency[name]
        path = "per_rank" if of.on.masks and self.chance(0.9) else "per_slot"
        if not of.on.masks:
            path = self.rng.choice(["per_slot", "per_rank"])
        by_rank = "rank_major" in of.step["orders"]
        return {
            "as": self.name(),
            "of": name,
            "seed": self.rng.randrange(1 << 30),
            "path": path,
            "format": self.rng.choice(["as_is", "as_is", "e4m3", "logfmt10"]),
            "weights": not (by_rank or of.step["weights"]) or self.chance(0.03),
            "hooks": self.hooks(),
            "out": self.chance(0.2),
            "source": self.rng.choice(["same", "fresh"]),
            "special": self.chance(0.15),
            "bad": self.some_ranks(0.03),
        }

    def masked_exchange(self) -> str:
        masked = [n for n, on in self.model.exchanges.items() if on.masks or self.chance(0.05)]
        name: str = self.some_of(masked)
        return name

    def split(self) -> Step:
        name = self.masked_exchange()
        here = self.rng.sample(self.model.here, len(self.model.here))
        require(len(here) >= 2)
        cut = self.rng.randint(1, len(here) - 1)
        cells = [sorted(here[:cut]), sorted(here[cut:])]
        return {"on": name, "cells": cells, "asleep": self.rng.choice([[], cells[0]])}

    def clear(self) -> Step:
        return {"on": self.masked_exchange()}

    def rejoin(self) -> Step:
        return {"on": self.masked_exchange()}

    def leave(self) -> Step:
        return {"rank": self.some_of(self.model.here)}
