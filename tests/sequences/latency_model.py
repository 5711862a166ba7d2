"""Steps of latency mode: exchange, dispatch, combine, receive."""

from __future__ import annotations

from typing import Any

import numpy as np

from sequences.arithmetic import DTYPES, normal
from sequences.latency_state import (
    OF_BEFORE,
    REFUSED,
    Dispatched,
    Exchange,
    Result,
    arrived,
    awake,
    rows_given,
    shapes,
)
from sequences.model import Call, Calls, Model, Part, Step, alike, generator, require, values
from sequences.reference import LatencyRows, LatencySums, Routing


def exchange(model: Model, step: Step) -> Calls:
    require(not model.gone)
    size = {k: step[k] for k in ("capacity", "hidden", "topk", "dtype", "order", "masks")}
    require(DTYPES[step["dtype"]].itemsize * step["hidden"] % 16 == 0)
    everybody = set(range(model.ranks))
    made = Exchange(**size, cells=[everybody], asleep=set(), generation=[0] * model.ranks)
    made.keeps = [(set(), set()) for _ in range(model.ranks)]
    model.exchanges[step["as"]] = made
    return [Call("exchange", dict(size), name=step["as"]) for _ in range(model.ranks)]


def dispatch(model: Model, step: Step) -> Calls:
    on: Exchange = model.exchanges[step["on"]]
    ranks = awake(model, on)
    orders = {step["orders"][rank] for rank in ranks}
    require(step["topk"] <= on.topk and max(step["tokens"][: model.ranks]) <= on.capacity)
    require(step["weights"] or len(orders) == 1)
    require(step["scale_format"] == "f32" or step["format"] == "e4m3")
    routing = model.routing(step)
    refused = refusal(on, step, routing, ranks)
    result = dispatched(model, on, step, routing)
    calls: Calls = [None] * model.ranks
    for rank in ranks:
        call = calls[rank] = Call("ldispatch", given_by(result, rank), refused, name=step["as"])
        if refused:
            continue
        on.generation[rank] = result.generation
        result.keep(rank)
        expected = Call("receive", {}, (), shapes(model, on, step, rank), arrived(result, rank))
        result.settle(call, rank, expected)
        if on.masks and not model.gone and rank not in step["hooks"]:
            call.given["masked"] = [peer not in on.cell(rank) for peer in range(model.ranks)]
    if refused:
        return calls
    if step["knocks"] and not model.simulated:
        for rank in on.asleep - model.gone:
            calls[rank] = Call("ldispatch", given_by(result, rank), ("EvictedError",))
    model.latency[step["as"]] = result
    return calls


def refusal(on: Exchange, step: Step, routing: Routing, ranks: list[int]) -> tuple[str, ...]:
    """By what all ranks refuse a dispatch. Ranks of different cells need not do so for the same
    reason, but the model takes only what does."""
    found: set[tuple[str, ...]] = set()
    for cell in on.cells:
        mine = [rank for rank in ranks if rank in cell]
        if not mine:
            continue
        no_fan_out = on.order == "rank_major"
        wrong = alike([no_fan_out and step["orders"][r] == "expert_major" for r in mine])
        wrong |= alike([crowds(routing, r, on.capacity) for r in mine])
        full = alike([bool(on.keeps[r][(on.generation[r] + 1) % 2]) for r in mine])
        found.add(REFUSED if wrong else ("ExhaustedError",) if full else ())
    require(len(found) == 1)
    return found.pop()


def crowds(routing: Routing, rank: int, capacity: int) -> bool:
    """At most `capacity` slots of a rank may name one expert."""
    ids = routing.routes[rank]
    return bool((np.bincount(ids[ids >= 0]) > capacity).any())


def dispatched(model: Model, on: Exchange, step: Step, routing: Routing) -> Dispatched:
    """The result of a dispatch that is made now."""
    ranks = awake(model, on)
    generation = on.generation[ranks[0]] + 1
    require(all(on.generation[rank] + 1 == generation for rank in ranks))
    reach = [on.cell(rank) - on.asleep for rank in range(model.ranks)]
    rows, weights = [], []
    for rank, route in enumerate(routing.routes):
        rng = generator(step, "rows", rank)
        rows.append(values(rng, (len(route), on.hidden), on.dtype, step["special"]))
        weights.append(normal(rng, route.shape))
    return Dispatched(
        step["as"],
        on,
        step,
        generation,
        [set(cell) for cell in on.cells],
        set(ranks),
        rows=LatencyRows(routing, reach),
        given=rows,
        weights=weights,
    )


def given_by(result: Dispatched, rank: int) -> dict[str, Any]:
    step = result.step
    given: dict[str, Any] = {k: step[k] for k in ("on", "format", "scale_format")}
    given |= {"order": step["orders"][rank], "hook": rank in step["hooks"]}
    given |= {"x": result.given[rank], "bad": rank in step["bad"] and result.on.capacity + 1}
    given["topk_idx"] = result.routing.routes[rank].astype(DTYPES[step["idx"]])
    if step["weights"]:
        given["topk_weights"] = result.weights[rank]
    return given


def combine(model: Model, step: Step) -> Calls:
    of = model.latency[step["of"]]
    require(isinstance(of, Dispatched))
    on: Exchange = of.on
    ranks = awake(model, on)
    require(set(ranks) <= of.alive)
    all_by_rank = all(of.by_rank(rank) for rank in ranks)
    path = "per_rank" if all_by_rank else step["path"]
    require(path == "per_rank" or not any(of.by_rank(rank) for rank in ranks))
    refused = combine_refusal(of, step, ranks, path)
    same = step["source"] == "same" and of.step["format"] == "as_is"
    rows = [rows_given(model, of, step, rank, same) for rank in range(model.ranks)]
    weights = of.weights
    if not of.step["weights"]:
        shapes = [route.shape for route in of.routing.routes]
        weights = [normal(generator(step, "weights", r), shape) for r, shape in enumerate(shapes)]
    by_rank = [of.by_rank(rank) for rank in range(model.ranks)]
    sums = LatencySums(of.rows, rows, by_rank, weights, path, step["format"])
    result = Result(step["as"], on, step, of.generation, of.cells, set(ranks))
    calls: Calls = [None] * model.ranks
    for rank in ranks:
        given: dict[str, Any] = {k: step[k] for k in ("of", "path", "format")}
        given |= {"on": of.step["on"], "hook": rank in step["hooks"], "bad": rank in step["bad"]}
        given["rows"] = None if same else rows[rank]
        if step["out"]:
            given["out"] = np.zeros(of.given[rank].shape, DTYPES[on.dtype])
        if step["weights"]:
            given["topk_weights"] = weights[rank]
        call = calls[rank] = Call("lcombine", given, refused, name=step["as"])
        if refused:
            continue
        x, error = sums.of(rank, of.reach(rank))
        result.settle(call, rank, Call("receive", parts=[Part("x", ..., x, error)]))
        of.combined.add(rank)
        if rank in step["hooks"]:
            result.keep(rank)
    if not refused:
        model.latency[step["as"]] = result
    return calls


def combine_refusal(of: Dispatched, step: Step, ranks: list[int], path: str) -> tuple[str, ...]:
    if of.generation <= of.on.base:
        return OF_BEFORE
    wrong = alike([r not in of.received or r in of.combined for r in ranks])
    wrong |= of.on.masks and path == "per_slot"
    if step["weights"]:  # they are given once, and with rank-major rows never
        wrong |= of.step["weights"] or alike([of.by_rank(r) for r in ranks])
    else:
        wrong |= alike([not (of.step["weights"] or of.by_rank(r)) for r in ranks])
    return REFUSED if wrong else ()


def receive(model: Model, step: Step) -> Calls:
    """Ranks that took a hook receive, some now and others later."""
    result: Result = model.latency[step["of"]]
    ranks = step["ranks"]
    require(bool(ranks) and set(ranks) <= result.alive - model.gone - result.on.asleep)
    calls: Calls = [None] * model.ranks
    for rank in ranks:
        call = calls[rank] = Call("receive", {"of": step["of"]})
        if rank in result.received:
            call.errors = REFUSED
        elif result.generation <= result.on.base:
            call.errors = OF_BEFORE
        else:
            call.shapes, call.parts = result.later[rank].shapes, result.later[rank].parts
            result.received.add(rank)
            if not isinstance(result, Dispatched):  # a combine lets go of the buffer
                result.release(rank)
    return calls
