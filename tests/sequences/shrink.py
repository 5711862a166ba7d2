"""Makes a sequence that fails as small as it can, so that it still fails in the same way."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from sequences.model import Sequence, Step
from sequences.ranks import Failure
from sequences.steps import meaning

Fails = Callable[[Sequence], Failure | None]

SIMPLER_GROUP: dict[str, list[Any]] = {
    "domain_size": [0],
    "network": ["automatic"],
    "crossing": ["automatic", "direct"],
    "fabric": ["local"],
    "memory_bytes": [1 << 20],
    "experts": [1, 2, 3, 4],
    "processes": [False],
}
SIMPLER_STEP: dict[str, list[Any]] = {
    "topk": [1, 2],
    "capacity": [1, 2],
    "alignment": [1],
    "style": ["any"],
    "idx": ["i64"],
    "special": [False],
    "stream": [False],
    "weights": [False],
    "apply": [False],
    "knocks": [False],
    "biases": [0],
    "scales": [0],
    "brings": [[]],
    "bad": [[]],
    "hooks": [[]],
    "out": [0, False],
    "dtype": ["f32"],
    "hidden": [4, 8, 16, 128],
    "format": ["as_is"],
    "scale_format": ["f32"],
    "order": ["rank_major", "expert_major"],
    "source": ["fresh"],
    "crossing": ["automatic"],
    "worst": [None],
    "asleep": [[]],
    "masks": [False],
    "seed": [1],
}


def alike(a: Failure, b: Failure | None) -> bool:
    if b is None or a["kind"] != b["kind"]:
        return False
    return a["kind"] in ("hang", "crash") or (a["do"], a["what"]) == (b["do"], b["what"])


class Shrinker:
    def __init__(self, fails: Fails, failure: Failure, seconds: float) -> None:
        self.fails, self.failure = fails, failure
        self.end = time.monotonic() + seconds
        self.tried: set[str] = set()

    def better(self, candidate: Sequence) -> Sequence | None:
        """The candidate without its illegal steps, if that fails like the whole did."""
        candidate = candidate | {"steps": meaning(candidate)[0]}
        key = json.dumps(candidate, sort_keys=True)
        if key in self.tried or time.monotonic() > self.end:
            return None
        self.tried.add(key)
        found = self.fails(candidate)
        if not alike(self.failure, found):
            return None
        assert found is not None
        self.failure = found
        return candidate

    def shrink(self, sequence: Sequence) -> Sequence:
        while True:
            before = json.dumps(sequence)
            sequence = self.without_steps(sequence)
            for candidates in (fewer_ranks, simpler_group, simpler_steps):
                sequence = self.first_better(sequence, candidates)
            if json.dumps(sequence) == before or time.monotonic() > self.end:
                return sequence

    def without_steps(self, sequence: Sequence) -> Sequence:
        size = max(1, len(sequence["steps"]) // 2)
        while True:
            at = len(sequence["steps"])
            while at > 0:
                steps = sequence["steps"]
                at = max(0, min(at, len(steps)) - size)
                less = self.better(sequence | {"steps": steps[:at] + steps[at + size :]})
                sequence = less or sequence
            if size == 1:
                return sequence
            size //= 2

    def first_better(
        self, sequence: Sequence, candidates: Callable[[Sequence], Iterator[Sequence]]
    ) -> Sequence:
        """Takes what is better until nothing is."""
        found: Sequence | None = sequence
        while found is not None:
            sequence = found
            found = next((b for c in candidates(sequence) if (b := self.better(c))), None)
        return sequence


def fewer_ranks(sequence: Sequence) -> Iterator[Sequence]:
    for ranks in range(1, sequence["ranks"]):
        smaller = copy.deepcopy(sequence) | {"ranks": ranks}
        for step in smaller["steps"]:
            for key in ("ranks", "hooks", "bad", "brings", "asleep"):
                if key in step:
                    step[key] = [rank for rank in step[key] if rank < ranks]
            if "cells" in step:
                step["cells"] = [[r for r in cell if r < ranks] for cell in step["cells"]]
        yield smaller


def simpler_group(sequence: Sequence) -> Iterator[Sequence]:
    for key, choices in SIMPLER_GROUP.items():
        for value in choices:
            if sequence[key] == value:
                break
            if key != "fabric" or not sequence["processes"]:
                local = {"fabric": "local"} if key == "processes" else {}
                yield sequence | {key: value} | local


def simpler_steps(sequence: Sequence) -> Iterator[Sequence]:
    for at, step in enumerate(sequence["steps"]):
        for simpler in simpler_step(step):
            steps = [*sequence["steps"][:at], simpler, *sequence["steps"][at + 1 :]]
            yield sequence | {"steps": steps}


def simpler_step(step: Step) -> Iterator[Step]:
    for key, choices in SIMPLER_STEP.items():
        for value in choices:
            if key not in step or step[key] == value:
                break
            yield step | {key: value}
    for key in ("tokens", "worst", "rows"):
        for rank, count in enumerate(step.get(key) or []):
            for fewer in sorted({0, 1, count // 2, count - 1}):
                if 0 <= fewer < count:
                    yield step | {key: [*step[key][:rank], fewer, *step[key][rank + 1 :]]}
