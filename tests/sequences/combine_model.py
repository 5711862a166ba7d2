"""The way back of throughput mode: combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sequences.arithmetic import DTYPES, SUM_DTYPES, Array, add, normal, rounded, wide
from sequences.model import Call, Calls, Model, Step, alike, generator, require, values, whole
from sequences.reference import sum_ranks, sum_slots
from sequences.throughput_model import Combined, Plan, Received, row_bytes

REFUSED = ("InvalidArgumentError",)


@dataclass
class Brought:
    """What all ranks give to a combine."""

    used: Plan
    order: str
    alignment: int
    dtype: str
    hidden: int
    rows: list[Array]
    weights: list[Array]
    crossing: str
    fresh: bool  # rows of the caller's, not those of a result


def what_is_brought(model: Model, step: Step) -> Brought:
    used: Plan = model.plans[step["plan"]]
    order, alignment, dtype, hidden = (step[k] for k in ("order", "alignment", "dtype", "hidden"))
    fresh = step["source"] in ("fresh", "registered")
    if fresh:
        counts = step["rows"] or [used.rows(r, order, alignment) for r in range(model.ranks)]
        rows = [
            values(generator(step, "sums", r), (counts[r], hidden), dtype, step["special"])
            for r in range(model.ranks)
        ]
    else:
        received = model.received[step["source"]]
        require(isinstance(received, Received) and received.plan == step["plan"])
        require(len(received.alive) == model.ranks)
        order, alignment, dtype = received.order, received.alignment, received.dtype
        rows, hidden = received.rows, received.rows[0].shape[1]
    require(dtype in SUM_DTYPES and row_bytes(dtype, hidden) % 16 == 0)
    weights = [
        normal(generator(step, "weights", r), used.routing.arrived_ids(r).shape)
        for r in range(model.ranks)
    ]
    crossing = used.crossed if step["crossing"] == "automatic" else step["crossing"]
    if len(set(model.domains)) == 1:
        crossing = "direct"
    return Brought(used, order, alignment, dtype, hidden, rows, weights, crossing, fresh)


def combine(model: Model, step: Step) -> Calls:
    require(not model.gone)
    brought = what_is_brought(model, step)
    require(step["weights"] or not step["apply"])
    require(brought.order == "expert_major" or (brought.alignment == 1 and not step["apply"]))
    refused = alike([not takes(brought, rank) for rank in range(model.ranks)])
    refused |= brought.crossing == "hierarchical" and not brought.used.spread
    sums = None if refused else Sums(model, step, brought)
    calls: Calls = []
    for rank in range(model.ranks):
        given = what_a_rank_gives(step, brought, rank)
        call = Call("combine", given, REFUSED if refused else (), name=step["as"])
        if sums is not None:
            sums.expect(call, rank)
        calls.append(call)
    if not refused:
        model.received[step["as"]] = Combined(set(range(model.ranks)))
    return calls


def what_a_rank_gives(step: Step, brought: Brought, rank: int) -> dict[str, Any]:
    given: dict[str, Any] = {k: step[k] for k in ("plan", "crossing", "stream", "source")}
    given |= {"order": brought.order, "alignment": brought.alignment, "bad": rank in step["bad"]}
    given["apply_weights"] = step["apply"]
    if brought.fresh:
        given["rows"] = brought.rows[rank]
    if step["weights"]:
        given["topk_weights"] = brought.weights[rank]
    shape = (len(brought.used.routing.routes[rank]), brought.hidden)
    if step["out"]:
        given["out"] = np.zeros(shape, DTYPES[brought.dtype])
    for bias in range(step["biases"]):
        rng = generator(step, f"bias{bias}", rank)
        given[f"bias{bias}"] = values(rng, shape, brought.dtype, step["special"])
    return given


def takes(brought: Brought, rank: int) -> bool:
    """Whether a plan takes so many rows of a rank: exactly those of the order, or the
    max_recv_rows of a dispatch in it that was not refused."""
    used, order, alignment = brought.used, brought.order, brought.alignment
    if order == "expert_major" and not used.layouts:
        return False  # no dispatch has brought the routes
    same = [w for o, a, w in used.layouts if o == order and a == alignment]
    if order == "expert_major" and not same and any(o == order for o, _, _ in used.layouts):
        return False  # another alignment than that of its dispatches
    valid = {used.rows(rank, order, alignment)} | {w[rank] for w in same if w[rank] > 0}
    return len(brought.rows[rank]) in valid


class Sums:
    """What a combine brings."""

    def __init__(self, model: Model, step: Step, brought: Brought) -> None:
        self.step, self.brought = step, brought
        self.routing = brought.used.routing
        self.domains = model.domains if brought.crossing == "hierarchical" else None
        self.of_ranks = []
        for rank, rows in enumerate(brought.rows):
            if brought.order == "rank_major":
                self.of_ranks.append(rows[: len(self.routing.arrivals(rank))])
                continue
            slots, _ = self.routing.slot_rows(rank, brought.alignment)
            weights = brought.weights[rank] if step["apply"] else None
            self.of_ranks.append(sum_slots(rows, slots, weights))

    def expect(self, call: Call, rank: int) -> None:
        total = sum_ranks(self.routing, self.of_ranks, rank, self.domains)
        for bias in range(self.step["biases"]):
            total = add(total, wide(call.given[f"bias{bias}"]))
        call.parts.append(whole("x", rounded(total, self.brought.rows[rank].dtype)))
        if self.step["weights"]:
            back = sum_ranks(self.routing, self.brought.weights, rank, self.domains)
            call.parts.append(whole("topk_weights", back))
