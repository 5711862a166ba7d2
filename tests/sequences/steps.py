"""What a sequence means: which of its steps are legal, what each rank gives and must get.

A step that ranks could not make together, or that names what is not there, is illegal and leaves
the model as it was; so any steps may be taken out, if those that are illegal then go, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sequences import combine_model, latency_model, masks_model, throughput_model
from sequences.model import Call, Calls, IllegalError, Model, Sequence, Step, require


def drop(model: Model, step: Step) -> Calls:
    """A result goes, on some ranks."""
    name, ranks = step["of"], step["ranks"]
    table: dict[str, Any] = model.received if name in model.received else model.latency
    result = table[name]
    require(bool(ranks) and set(ranks) <= result.alive)
    result.alive -= set(ranks)
    if not result.alive:
        del table[name]
    for rank in ranks:
        result.dropped(rank)
    return [Call("drop", {"of": name}) if r in ranks else None for r in range(model.ranks)]


def barrier(model: Model, step: Step) -> Calls:
    require(not model.gone)
    return [Call("barrier") for _ in range(model.ranks)]


STEPS: dict[str, Callable[[Model, Step], Calls]] = {
    "plan": throughput_model.plan,
    "dispatch": throughput_model.dispatch,
    "combine": combine_model.combine,
    "exchange": latency_model.exchange,
    "ldispatch": latency_model.dispatch,
    "lcombine": latency_model.combine,
    "receive": latency_model.receive,
    "split": masks_model.split,
    "clear": masks_model.clear,
    "rejoin": masks_model.rejoin,
    "leave": masks_model.leave,
    "drop": drop,
    "barrier": barrier,
}


def take(model: Model, step: Step) -> Calls:
    """The calls of all ranks."""
    name = step.get("as", "")
    require(name == "" or name not in model.names)
    try:
        calls = STEPS[step["do"]](model, step)
    except (KeyError, IndexError) as missing:
        raise IllegalError from missing
    if name:
        model.names.add(name)
    return calls


def meaning(sequence: Sequence) -> tuple[list[Step], list[Calls]]:
    """The steps of a sequence that are legal, and the calls that they are."""
    model, steps, calls = Model(sequence), [], []
    for step in sequence["steps"]:
        try:
            calls.append(take(model, step))
            steps.append(step)
        except IllegalError:
            continue
    return steps, calls
