"""Exchanges and results of latency mode, and what a dispatch brings."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sequences.arithmetic import Array, packed_exponents, quantise
from sequences.model import Call, Model, Part, Step, generator, require, values, whole
from sequences.reference import LatencyRows, Routing

REFUSED = ("InvalidArgumentError",)
OF_BEFORE = ("EvictedError", "InvalidArgumentError")  # a result of before a rejoin


@dataclass
class Exchange:
    capacity: int
    hidden: int
    topk: int
    dtype: str
    order: str
    masks: bool
    cells: list[set[int]]  # ranks that mask each other are in different ones
    asleep: set[int]  # make no calls until a rejoin
    generation: list[int]
    base: int = 0  # results up to here are of before a rejoin
    moved: bool = False  # masks were set since then: which buffer is next after a rejoin is open
    gone: set[int] = field(default_factory=set)  # who had left when masks were set
    # Of each rank, for even and odd generations: names of what keeps a buffer.
    keeps: list[tuple[set[str], set[str]]] = field(default_factory=list)

    def cell(self, rank: int) -> set[int]:
        return next((cell for cell in self.cells if rank in cell), set())


@dataclass
class Result:
    """Of a dispatch or a combine, on all ranks."""

    name: str
    on: Exchange
    step: Step
    generation: int
    cells: list[set[int]]  # at the dispatch
    alive: set[int]
    received: set[int] = field(default_factory=set)
    later: dict[int, Call] = field(default_factory=dict)  # what receive() must bring

    def keep(self, rank: int) -> None:
        self.on.keeps[rank][self.generation % 2].add(self.name)

    def release(self, rank: int) -> None:
        self.on.keeps[rank][self.generation % 2].discard(self.name)

    def dropped(self, rank: int) -> None:
        self.release(rank)

    def settle(self, call: Call, rank: int, expected: Call) -> None:
        """What the call brings at once, or, with a hook, when it is received."""
        if rank in self.step["hooks"]:
            self.later[rank] = expected
        else:
            call.parts, call.shapes = expected.parts, expected.shapes
            self.received.add(rank)


@dataclass
class Dispatched(Result):
    rows: LatencyRows = field(kw_only=True)
    given: list[Array] = field(kw_only=True)  # x of every rank
    weights: list[Array] = field(kw_only=True)
    combined: set[int] = field(default_factory=set)

    @property
    def routing(self) -> Routing:
        return self.rows.routing

    def by_rank(self, rank: int) -> bool:
        return bool(self.step["orders"][rank] == "rank_major")

    def reach(self, rank: int) -> set[int]:
        """Whose part of a combine comes to `rank`."""
        there: set[int] = next((cell for cell in self.cells if rank in cell), set())
        return there & self.on.cell(rank) - self.on.asleep


def awake(model: Model, on: Exchange) -> list[int]:
    require(on.masks or not model.gone)
    return [rank for rank in model.here if rank not in on.asleep]


def unsettled(model: Model, on: Exchange) -> bool:
    """Whether something was sent and may still be received."""
    return any(r.on is on and r.alive - r.received for r in model.latency.values())


def shapes(model: Model, on: Exchange, step: Step, rank: int) -> dict[str, tuple[int, ...]]:
    rows = model.ranks * on.capacity
    blocks = Routing([np.zeros((0, 1))] * model.ranks, model.experts).local_experts(rank)
    if step["orders"][rank] == "rank_major":
        return {"x": (model.ranks, on.capacity, on.hidden)}
    return {"x": (blocks, rows, on.hidden)}


def arrived(result: Dispatched, rank: int) -> list[Part]:
    """All that a dispatch brings to a rank, where it is defined."""
    step, rows, scales = result.step, result.given, None
    if step["format"] == "e4m3":
        quantised = [quantise(x, step["scale_format"] != "f32") for x in result.given]
        rows, scales = [q.codes for q in quantised], [q.scales for q in quantised]
        if step["scale_format"] == "ue8m0_packed":
            scales = [packed_exponents(s) for s in scales]
    by_rank = result.by_rank(rank)
    blocks = []
    if by_rank:
        for source in range(result.routing.ranks):
            tokens = result.rows.of_source(rank, source)
            blocks.append([(source, t) for t in tokens])
    else:
        for expert in range(result.routing.local_experts(rank)):
            blocks.append([(s, t) for s, t, _ in result.rows.of_expert(rank, expert)])
    parts = [whole("counts", np.array([len(block) for block in blocks], np.int32))]
    for at, block in enumerate(blocks):
        if not block:
            continue
        index = (at, slice(len(block)))
        parts.append(Part("x", index, np.stack([rows[s][t] for s, t in block])))
        parts.append(Part("source_token", index, np.array([t for _, t in block], np.int32)))
        if scales is not None:
            parts.append(Part("scales", index, np.stack([scales[s][t] for s, t in block])))
    return parts + (routes_by_rank(result, rank) if by_rank else [ranges(blocks, result)])


def ranges(blocks: list[list[tuple[int, int]]], result: Dispatched) -> Part:
    """i64 [L, R]: (first row << 32) | rows, of each source in each expert's block."""
    of = np.zeros((len(blocks), result.routing.ranks), np.int64)
    for at, block in enumerate(blocks):
        first = 0
        for source in range(result.routing.ranks):
            count = sum(s == source for s, _ in block)
            of[at, source] = first << 32 | count
            first += count
    return whole("ranges", of)


def routes_by_rank(result: Dispatched, rank: int) -> list[Part]:
    """Rank-major results show local ids and weights, -1 and 0 in rows that are not valid."""
    on, ranks = result.on, result.routing.ranks
    ids = np.full((ranks, on.capacity, on.topk), -1, np.int32)
    weights = np.zeros((ranks, on.capacity, on.topk), np.float32)
    topk = result.routing.topk
    for source in range(ranks):
        tokens = result.rows.of_source(rank, source)
        local = result.routing.local(source, rank)[tokens]
        ids[source, : len(tokens), :topk] = local
        sent = result.weights[source][tokens]
        weights[source, : len(tokens), :topk] = np.where(local >= 0, sent, np.float32(0))
    parts = [whole("topk_idx", ids)]
    return [*parts, whole("topk_weights", weights)] if result.step["weights"] else parts


def rows_given(model: Model, of: Dispatched, step: Step, rank: int, same: bool) -> Array:
    """What a rank gives to combine: noise, and where it gives what it got, that."""
    on = of.on
    rng = generator(step, "sums", rank)
    if of.by_rank(rank):
        shape = (model.ranks, on.capacity, on.hidden)
    else:
        blocks = of.routing.local_experts(rank)
        shape = (blocks, model.ranks * on.capacity, on.hidden)
    rows = values(rng, shape, on.dtype, step["special"] and step["format"] != "logfmt10")
    if not same:
        return rows
    for index in np.ndindex(shape[:1]):
        if of.by_rank(rank):
            block = [(index[0], t) for t in of.rows.of_source(rank, index[0])]
        else:
            block = [(s, t) for s, t, _ in of.rows.of_expert(rank, index[0])]
        for at, (source, token) in enumerate(block):
            rows[index[0], at] = of.given[source][token]
    return rows
