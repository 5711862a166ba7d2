"""Steps of throughput mode: plan and dispatch. `combine_model.py` has the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sequences.arithmetic import DTYPES, SUM_DTYPES, Array, normal, quantise
from sequences.model import (
    Call,
    Calls,
    Model,
    Part,
    Step,
    generator,
    require,
    values,
    whole,
)
from sequences.reference import Routing, crossing_cost


@dataclass
class Plan:
    routing: Routing
    crossing: str  # of calls that say "automatic"
    layouts: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    crossed: str = "direct"  # by the last dispatch that was not refused
    spread: bool = False  # one of them was hierarchical

    def rows(self, rank: int, order: str, alignment: int) -> int:
        if order == "rank_major":
            return len(self.routing.arrivals(rank))
        return int(self.routing.slot_rows(rank, alignment)[1][-1])


@dataclass
class Received:
    """A result of a dispatch."""

    plan: str
    order: str
    alignment: int
    dtype: str
    rows: list[Array]  # x of every rank; what is not defined is zero here
    alive: set[int]

    def dropped(self, rank: int) -> None:
        pass


@dataclass
class Combined:
    alive: set[int]

    def dropped(self, rank: int) -> None:
        pass


def row_bytes(dtype: str, hidden: int) -> int:
    return int(DTYPES[dtype].itemsize) * hidden


def plan(model: Model, step: Step) -> Calls:
    require(not model.gone)
    routing = model.routing(step)
    made = Plan(routing, chosen_crossing(model, routing))
    calls: Calls = []
    for rank in range(model.ranks):
        given = {"topk_idx": routing.routes[rank].astype(DTYPES[step["idx"]])}
        calls.append(Call("plan", given, parts=plan_parts(made, rank), name=step["as"]))
    model.plans[step["as"]] = made
    return calls


def plan_parts(made: Plan, rank: int) -> list[Part]:
    """All that a plan can be asked for."""
    routing = made.routing
    sent, ids = routing.sent(), routing.arrived_ids(rank)
    slots = [int((ids == e).sum()) for e in range(routing.local_experts(rank))]
    return [
        whole("tokens", np.array(len(routing.routes[rank]))),
        whole("topk", np.array(routing.topk)),
        whole("recv_rows", np.array(len(ids))),
        whole("recv_rows_per_rank", sent[:, rank]),
        whole("send_rows_per_rank", sent[rank]),
        whole("rank_rows", sent.astype(np.int32)),
        whole("slots_per_expert", np.array(slots, np.int64)),
        Part("expert_major_rows", 1, np.array(made.rows(rank, "expert_major", 1))),
        Part("expert_major_rows", 4, np.array(made.rows(rank, "expert_major", 4))),
        whole("crossing", np.array(made.crossing)),
    ]


def chosen_crossing(model: Model, routing: Routing) -> str:
    if len(set(model.domains)) == 1:
        return "direct"
    if model.crossing != "automatic":
        return model.crossing
    direct, hierarchical = crossing_cost(routing, model.domains)
    return "hierarchical" if hierarchical < direct else "direct"


@dataclass
class Sent:
    """What each rank brings to a dispatch, and as what it arrives."""

    dtype: str
    given: list[dict[str, Any]]
    rows: list[Array]
    scales: list[Array] | None
    weights: list[Array] | None


def what_is_sent(step: Step, routing: Routing) -> Sent:
    quantises = step["format"] == "e4m3"
    require(row_bytes("e4m3" if quantises else step["dtype"], step["hidden"]) % 16 == 0)
    require(not quantises or (step["dtype"] in SUM_DTYPES and step["scales"] == 0))
    given_by: list[dict[str, Any]] = []
    rows: list[Array] = []
    scales: list[Array] = []
    weights: list[Array] = []
    for rank, route in enumerate(routing.routes):
        rng = generator(step, "rows", rank)
        shape = (len(route), step["hidden"])
        x = values(rng, shape, step["dtype"], step["special"])
        given: dict[str, Any] = {"x": x}
        if quantises:
            quantised = quantise(x, step["scale_formats"][rank] == "f32_pow2")
            rows.append(quantised.codes)
            scales.append(quantised.scales)
            if rank in step["brings"]:
                given = {"x": quantised.codes, "scales": quantised.scales}
            else:
                given |= {"format": "e4m3", "scale_format": step["scale_formats"][rank]}
        else:
            rows.append(x)
            scales.append(rng.random((len(route), step["scales"])).astype(np.float32))
            if step["scales"]:
                given["scales"] = scales[-1]
        weights.append(normal(rng, route.shape))
        if step["weights"]:
            given["topk_weights"] = weights[-1]
        given_by.append(given)
    return Sent(
        "e4m3" if quantises else step["dtype"],
        given_by,
        rows,
        scales if quantises or step["scales"] else None,
        weights if step["weights"] else None,
    )


def dispatch(model: Model, step: Step) -> Calls:
    require(not model.gone)
    order, alignment = step["order"], step["alignment"]
    require(order == "expert_major" or alignment == 1)
    fused = step["plan"] is None
    if fused:
        routing = model.routing(step["routes"])
        used = Plan(routing, chosen_crossing(model, routing))
    else:
        used = model.plans[step["plan"]]
    sent = what_is_sent(step, used.routing)
    crossing = used.crossing if step["crossing"] == "automatic" else step["crossing"]
    if len(set(model.domains)) == 1:
        crossing = "direct"
    need = [used.rows(rank, order, alignment) for rank in range(model.ranks)]
    most = [max(n, used.rows(r, "rank_major", 1)) for r, n in enumerate(need)]
    worst = step["worst"] or [0] * model.ranks
    refused = any(0 < w < n for w, n in zip(worst, most))
    calls: Calls = []
    rows = []
    for rank in range(model.ranks):
        given = sent.given[rank] | {"order": order, "alignment": alignment}
        given |= {"max_recv_rows": worst[rank], "crossing": step["crossing"]}
        given |= {"stream": step["stream"], "bad": rank in step["bad"]}
        if fused:
            given["topk_idx"] = used.routing.routes[rank].astype(DTYPES[step["routes"]["idx"]])
        else:
            given["plan"] = step["plan"]
        if step["out"]:
            most_rows = (worst[rank] or need[rank]) + step["out"] - 1
            given["out"] = np.zeros((most_rows, step["hidden"]), DTYPES[sent.dtype])
        call = Call("dispatch", given, ("ExhaustedError",) if refused else (), name=step["as"])
        if not refused:
            rows.append(expect_received(call, used, sent, rank, step, worst[rank]))
        calls.append(call)
    if refused:
        return calls
    used.layouts.append((order, alignment, tuple(worst)))
    used.crossed = crossing
    used.spread |= crossing == "hierarchical"
    everybody = set(range(model.ranks))
    name = step["plan"]
    if fused:
        name = step["as"] + ".plan"
        model.plans[name] = used
    model.received[step["as"]] = Received(name, order, alignment, sent.dtype, rows, everybody)
    return calls


def expect_received(call: Call, used: Plan, sent: Sent, rank: int, step: Step, worst: int) -> Array:
    """Fills in what a dispatch must bring to a rank; returns its x."""
    routing = used.routing
    rows = routing.gathered(sent.rows, rank)
    scales = routing.gathered(sent.scales, rank) if sent.scales else None
    ids = routing.arrived_ids(rank)
    n, side = len(ids), worst or len(ids)
    tokens = np.array([a.token for a in routing.arrivals(rank)], np.int32)
    call.parts += [tail_of_minus_one("topk_idx", ids, side)]
    call.parts += [tail_of_minus_one("source_token", tokens, side)]
    if sent.weights is not None:
        arrived = routing.gathered(sent.weights, rank)
        local = np.where(ids >= 0, arrived, np.float32(0))
        call.parts.append(Part("topk_weights", slice(n), local))
        call.shapes["topk_weights"] = (side, routing.topk)
    if step["order"] == "rank_major":
        x = np.zeros((worst or n, step["hidden"]), rows.dtype)
        x[:n] = rows
        call.parts.append(Part("x", slice(n), rows))
        if scales is not None:
            call.parts.append(Part("scales", slice(n), scales))
    else:
        slots, offsets = routing.slot_rows(rank, step["alignment"])
        x = np.zeros((worst or int(offsets[-1]), step["hidden"]), rows.dtype)
        places = slots[slots >= 0]
        x[places] = np.repeat(rows, (slots >= 0).sum(axis=1), axis=0)
        call.parts += [whole("x", x), whole("expert_offsets", offsets)]
        call.parts.append(tail_of_minus_one("slot_rows", slots, side))
        if scales is not None:
            repeated = np.repeat(scales, (slots >= 0).sum(axis=1), axis=0)
            call.parts.append(Part("scales", places, repeated))
    call.shapes["x"] = x.shape
    if scales is not None:
        call.shapes["scales"] = (len(x), scales.shape[1])
    return x


def tail_of_minus_one(name: str, rows: Array, count: int) -> Part:
    """Rows past the last one that arrived are -1."""
    full = np.full((count, *rows.shape[1:]), -1, rows.dtype)
    full[: len(rows)] = rows
    return whole(name, full)
