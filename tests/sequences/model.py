"""The state that a sequence has brought all ranks to, and what a step of it is made of.

A sequence is plain data: the group's configuration and a list of steps, the same for all ranks.
Data of a step follow from its seed. `steps.py` says what a step means, and which are illegal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sequences.arithmetic import DTYPES, Array, rounded
from sequences.reference import Routing

Step = dict[str, Any]
Sequence = dict[str, Any]


class IllegalError(Exception):
    """The definition does not say what this step does here."""


def require(legal: bool) -> None:
    if not legal:
        raise IllegalError


def alike(refused: list[bool]) -> bool:
    """Whether all ranks refuse a call. What some refuse and others wait in is no sequence."""
    require(len(set(refused)) <= 1)
    return bool(refused) and refused[0]


class Part(NamedTuple):
    """Values that a result must hold: `result.<name>[index]`."""

    name: str
    index: Any
    value: Array
    error: Array | None = None  # how far from it is good enough


@dataclass
class Call:
    """One rank's share of a step."""

    do: str
    given: dict[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()  # one of these classes must be raised
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    name: str = ""  # of the result


Calls = list[Call | None]


def whole(name: str, value: Array) -> Part:
    return Part(name, ..., value)


class Model:
    """All ranks between two steps."""

    def __init__(self, sequence: Sequence) -> None:
        self.ranks: int = sequence["ranks"]
        self.experts: int = sequence["experts"]
        # A simulated network joins ranks that share no memory.
        size = 1 if sequence["fabric"] == "sim" else sequence["domain_size"] or self.ranks
        self.domains = [rank // size for rank in range(self.ranks)]
        self.crossing: str = sequence["crossing"]
        self.simulated = "sim" in (sequence["fabric"], sequence["network"])
        self.gone: set[int] = set()  # destroyed their groups
        self.plans: dict[str, Any] = {}
        self.received: dict[str, Any] = {}  # throughput mode, alive
        self.exchanges: dict[str, Any] = {}
        self.latency: dict[str, Any] = {}  # results of latency mode, of dispatch and combine
        self.names: set[str] = set()  # of all results so far

    @property
    def here(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.gone]

    def routing(self, step: Step) -> Routing:
        """Of the routes that a step makes."""
        require(len(step["tokens"]) >= self.ranks)
        routes = []
        for rank in range(self.ranks):
            rng = generator(step, "routes", rank)
            shape = (step["tokens"][rank], step["topk"])
            ids = rng.integers(-1, self.experts, shape)
            if step["style"] == "one":  # all to one expert, but for what is unused
                ids[ids >= 0] = step["seed"] % self.experts
            if step["style"] == "distinct":
                order = [rng.permutation(max(self.experts, shape[1]))[: shape[1]] for _ in ids]
                ids = np.array(order, np.int64).reshape(shape)
                ids[ids >= self.experts] = -1
            routes.append(ids)
        return Routing(routes, self.experts)


def generator(step: Step, what: str, rank: int) -> np.random.Generator:
    return np.random.default_rng([step["seed"], rank, *what.encode()])


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, special: bool) -> Array:
    """Random rows; of integers any bits, of floats magnitudes whose sums are rounded."""
    kind = DTYPES[dtype]
    if kind.kind in "iu":
        return rng.integers(0, 100, shape).astype(kind)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape))
    if special:
        odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-6, 300.0])
        x = np.where(rng.random(shape) < 0.05, odd[rng.integers(0, len(odd), shape)], x)
    return rounded(x.astype(np.float32), kind)
