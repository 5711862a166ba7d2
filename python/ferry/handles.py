"""Groups and plans as integers, which is how they cross into the operators of `torch.ops.ferry`."""

from __future__ import annotations

import itertools
import threading
from weakref import WeakSet, WeakValueDictionary

from ferry.errors import DestroyedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_numbers = itertools.count(1)
_alive: WeakValueDictionary[int, Any] = WeakValueDictionary()
_groups: WeakSet[Any] = WeakSet()
_groups_lock = threading.Lock()  # of additions and of walks, which threads may make at once


def register(thing: Any) -> int:
    """A number for it, never used twice; it names the thing while somebody else keeps that."""
    number = next(_numbers)
    _alive[number] = thing
    return number


def find(name: str, number: int, what: str, keep: str) -> Any:
    """The thing with that number. Raises `DestroyedError` when it is gone."""
    thing = _alive.get(number)
    if thing is None:
        raise DestroyedError(
            f"{name}: got handle {number}, which names no {what} now; expected {keep}"
        )
    return thing


def register_group(group: Any) -> int:
    """`register` of a group, which `groups` then knows."""
    with _groups_lock:
        _groups.add(group)
    return register(group)


def groups() -> list[Any]:
    """All groups that are alive, destroyed ones too. Plans, of which there may be thousands, cost
    nothing here."""
    with _groups_lock:
        return list(_groups)
