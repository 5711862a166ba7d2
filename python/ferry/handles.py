"""Groups and plans as integers, which is how they cross into the operators of `torch.ops.ferry`."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

from ferry.errors import Destroyed

_numbers = itertools.count(1)
_alive: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(thing: Any) -> int:
    """A number for it, never used twice; it names the thing while somebody else keeps that."""
    number = next(_numbers)
    _alive[number] = thing
    return number


def find(name: str, number: int, what: str, keep: str) -> Any:
    """The thing with that number. Raises `Destroyed` when it is gone."""
    thing = _alive.get(number)
    if thing is None:
        raise Destroyed(f"{name}: got handle {number}, which names no {what} now; expected {keep}")
    return thing


def everything() -> list[Any]:
    """All things that are alive and have a number."""
    return list(_alive.values())
