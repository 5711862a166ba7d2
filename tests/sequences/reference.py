"""What exchanges bring, written from the definition ("Semantics" and "Arithmetic" of
docs/design.md), for all ranks at once and without a thought for speed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from sequences.arithmetic import Array, add, fma, logfmt_error, quantise, rounded, wide


class Arrival(NamedTuple):
    """A row that comes to a rank."""

    source: int
    token: int


class Routing:
    """The routes of all ranks, `routes[r]`: int [T_r, K]. Experts lie in contiguous blocks, the
    first E mod R ranks hold one more."""

    def __init__(self, routes: list[Array], experts: int) -> None:
        self.routes, self.ranks, self.experts = routes, len(routes), experts
        least, more = divmod(experts, self.ranks)
        sizes = [least + (rank < more) for rank in range(self.ranks)]
        self.first = [sum(sizes[:rank]) for rank in range(self.ranks + 1)]
        self.topk = routes[0].shape[1]

    def local_experts(self, rank: int) -> int:
        return self.first[rank + 1] - self.first[rank]

    def local(self, source: int, rank: int) -> Array:
        """[T, K]: local expert ids on `rank`, -1: not there."""
        ids = self.routes[source]
        here = (ids >= self.first[rank]) & (ids < self.first[rank + 1])
        return np.where(here, ids - self.first[rank], -1)

    def tokens_for(self, source: int, rank: int) -> list[int]:
        """Ascending; a token goes to a rank once, however many of its slots are there."""
        return [int(t) for t in np.flatnonzero((self.local(source, rank) >= 0).any(axis=1))]

    def arrivals(self, rank: int, sources: Iterable[int] | None = None) -> list[Arrival]:
        """Ascending source, then token."""
        among = range(self.ranks) if sources is None else sorted(sources)
        return [Arrival(s, t) for s in among for t in self.tokens_for(s, rank)]

    def gathered(self, of_sources: list[Array], rank: int) -> Array:
        """Rows of the sources' [T, ...] arrays as they arrive."""
        parts = [of_sources[s][self.tokens_for(s, rank)] for s in range(self.ranks)]
        return np.concatenate(parts)

    def arrived_ids(self, rank: int) -> Array:
        """i64 [n, K]."""
        return self.gathered([self.local(s, rank) for s in range(self.ranks)], rank).astype(
            np.int64
        )

    def sent(self) -> Array:
        """[R, R]: rows from each rank to each."""
        ranks = range(self.ranks)
        return np.array([[len(self.tokens_for(s, d)) for d in ranks] for s in ranks])

    def slot_rows(self, rank: int, alignment: int) -> tuple[Array, Array]:
        """i64 [n, K]: the expert-major row of each slot; i64 [L + 1]: where experts begin."""
        ids = self.arrived_ids(rank)
        rows = np.full(ids.shape, -1, np.int64)
        offsets = [0]
        for expert in range(self.local_experts(rank)):
            places = np.argwhere(ids == expert)  # rank-major order, then slot
            for count, (n, k) in enumerate(places):
                rows[n, k] = offsets[-1] + count
            offsets.append(offsets[-1] + -(-len(places) // alignment) * alignment)
        return rows, np.array(offsets, np.int64)


def sum_slots(rows: Array, slots: Array, weights: Array | None) -> Array:
    """Expert-major rows to one row for each arrival: ascending k from +0, rounded to the dtype."""
    total = np.zeros((len(slots), rows.shape[1]), np.float32)
    for k in range(slots.shape[1]):
        here = slots[:, k] >= 0
        values = wide(rows[slots[here, k]])
        if weights is None:
            total[here] = add(total[here], values)
        else:
            total[here] = fma(weights[here, k : k + 1], values, total[here])
    return rounded(total, rows.dtype)


def sum_ranks(
    routing: Routing, of_ranks: list[Array], owner: int, domains: list[int] | None = None
) -> Array:
    """[n, ...] of every rank, one for each arrival, to f32 [T, ...] of their owner: ascending rank
    from +0. `domains`, hierarchical: each domain's sum is rounded to the dtype of the rows, then
    the domains are added in ascending order."""
    tokens = len(routing.routes[owner])
    shape = (tokens, *of_ranks[owner].shape[1:])
    cells = sorted(set(domains)) if domains else [0]
    total = np.zeros(shape, np.float32)
    for cell in cells:
        part = np.zeros(shape, np.float32)
        for rank in range(routing.ranks):
            if domains and domains[rank] != cell:
                continue
            from_owner = [a.source == owner for a in routing.arrivals(rank)]
            mine = routing.tokens_for(owner, rank)
            part[mine] = add(part[mine], wide(of_ranks[rank][np.array(from_owner, bool)]))
        total = add(total, wide(rounded(part, of_ranks[owner].dtype))) if domains else part
    return total


def crossing_cost(routing: Routing, domains: list[int]) -> tuple[float, float]:
    """Direct and hierarchical, in rows over the network of the busiest rank: docs/design.md, "Which
    mode"."""
    ranks = range(routing.ranks)
    sent = routing.sent()
    out, into, spread = np.zeros((3, routing.ranks))
    direct = np.zeros(routing.ranks)
    for s in ranks:
        across = [d for d in ranks if domains[d] != domains[s]]
        direct[s] = max(sent[s, across].sum(), sent[across, s].sum())
        for domain in set(domains) - {domains[s]}:
            members = [d for d in ranks if domains[d] == domain]
            tokens = {t for d in members for t in routing.tokens_for(s, d)}
            index = [r for r in ranks if domains[r] == domains[s]].index(s)
            forwarder = members[index % len(members)]
            out[s] += len(tokens)
            into[forwarder] += len(tokens)
            spread[forwarder] += sent[s, members].sum()
    return float(direct.max()), float(np.maximum(np.maximum(out, into), spread / 8).max())


class LatencyRows:
    """Where the rows of a latency dispatch lie on a rank: `reach[r]` are the sources that come."""

    def __init__(self, routing: Routing, reach: list[set[int]]) -> None:
        self.routing, self.reach = routing, reach

    def of_source(self, rank: int, source: int) -> list[int]:
        """Tokens in the block of a source, rank-major."""
        return self.routing.tokens_for(source, rank) if source in self.reach[rank] else []

    def of_expert(self, rank: int, expert: int) -> list[tuple[int, int, int]]:
        """(source, token, slot) in the block of a local expert."""
        return [
            (source, int(t), int(k))
            for source in sorted(self.reach[rank])
            for t, k in np.argwhere(self.routing.local(source, rank) == expert)
        ]


class Sums(NamedTuple):
    """[T, H] of an owner; `error`: how far others may be from it, None: not at all."""

    x: Array
    error: Array | None


class InFlight(NamedTuple):
    """Rows as their owner takes them, f32, and how far they may be off."""

    values: Array
    error: Array


def in_flight(rows: Array, format: str) -> InFlight:
    nothing = np.zeros(rows.shape, np.float64)
    if format == "e4m3":
        return InFlight(quantise(rows).values(), nothing)
    return InFlight(wide(rows), logfmt_error(rows) if format == "logfmt10" else nothing)


class LatencySums:
    """`rows[r]`: as rank r gives them to combine, [L, R*C, H] or, where `by_rank[r]`, [R, C, H].
    `weights[r]`: f32 [T, K]. `reach[r]`: the ranks whose parts of this combine come to r."""

    def __init__(
        self,
        layout: LatencyRows,
        rows: list[Array],
        by_rank: list[bool],
        weights: list[Array],
        path: str,
        format: str,
    ) -> None:
        self.layout, self.rows, self.by_rank = layout, rows, by_rank
        self.weights, self.path, self.format = weights, path, format

    def _slots(self, rank: int, owner: int) -> dict[tuple[int, int], Array]:
        """(token, slot) of an owner: the row of it on a rank."""
        found: dict[tuple[int, int], Array] = {}
        for expert in range(self.layout.routing.local_experts(rank)):
            for at, (source, token, slot) in enumerate(self.layout.of_expert(rank, expert)):
                if source == owner:
                    found[token, slot] = self.rows[rank][expert, at]
        return found

    def _of_rank(self, rank: int, owner: int) -> tuple[list[int], Array]:
        """Tokens of the owner and their rows, one for each, in the dtype."""
        if self.by_rank[rank]:
            tokens = self.layout.of_source(rank, owner)
            return tokens, self.rows[rank][owner, : len(tokens)]
        tokens = self.layout.of_source(rank, owner)
        slots = self._slots(rank, owner)
        hidden = self.rows[rank].shape[-1]
        total = np.zeros((len(tokens), hidden), np.float32)
        for at, token in enumerate(tokens):
            for k in range(self.layout.routing.topk):
                if (token, k) in slots:
                    weight = self.weights[owner][token, k : k + 1]
                    total[at] = fma(weight, wide(slots[token, k]), total[at])
        return tokens, rounded(total, self.rows[rank].dtype)

    def of(self, owner: int, reach: set[int]) -> Sums:
        tokens, hidden = len(self.layout.routing.routes[owner]), self.rows[owner].shape[-1]
        total = np.zeros((tokens, hidden), np.float32)
        error, size = np.zeros((2, tokens, hidden))
        if self.path == "per_slot":
            slots: dict[tuple[int, int], Array] = {}
            for rank in sorted(reach):
                slots |= self._slots(rank, owner)
            for token, k in sorted(slots):
                row = in_flight(slots[token, k][None], self.format)
                weight = self.weights[owner][token, k : k + 1]
                total[token] = fma(weight, row.values[0], total[token])
                error[token] += abs(weight) * row.error[0]
                size[token] += abs(weight.astype(np.float64) * row.values[0])
        else:
            for rank in sorted(reach):
                at, rows = self._of_rank(rank, owner)
                flying = in_flight(rows, self.format)
                total[at] = add(total[at], flying.values)
                error[at] += flying.error
                size[at] += abs(flying.values)
        x = rounded(total, self.rows[owner].dtype)
        if self.format != "logfmt10":
            return Sums(x, None)
        relative, absolute = ROUNDING[x.dtype.name]
        return Sums(x, error + (error + size) * relative + absolute)


# Of a sum, relative and absolute: operations in fp32, and one rounding to a dtype on either side.
ROUNDING = {
    "float32": (2.0**-18, 1e-30),
    "float16": (2.0**-9, 1e-7),
    "bfloat16": (2.0**-6, 1e-30),
}
