"""What a wrong use raises."""

from __future__ import annotations

import operator
import warnings
from typing import Any, NoReturn


class EPException(AssertionError, RuntimeError):  # noqa: N818
    """A condition of the interface does not hold. Callers know some of these as assertions of
    Python and some as runtime errors of the extension; whichever they catch, it is one."""


def require(condition: bool, call: str, argument: str, got: object, expected: str) -> None:
    """Refuse unless the condition holds. Where the words take time to make, `refuse` is better."""
    if not condition:
        refuse(call, argument, got, expected)


def require_integer(call: str, argument: str, value: Any, least: int | None, expected: str) -> int:
    """Of anything that is an integer, as NumPy's are, but no bool, and not below `least`; None:
    any."""
    if isinstance(value, bool):
        refuse(call, argument, value, expected)
    try:
        number = operator.index(value)
    except TypeError:
        refuse(call, argument, repr(value), expected)
    require(least is None or number >= least, call, argument, value, expected)
    return number


_warned: set[str] = set()


def warn_once(call: str, argument: str, got: object, instead: str) -> None:
    """Of what is asked for and not done, though the call's results are the same."""
    text = f"{call}: {argument}: got {got}; {instead}"
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


def absent(owner: str, name: str) -> AttributeError:
    """What a `__getattr__` raises."""
    return AttributeError(f"{owner} has no {name!r}; docs/deep_ep_names.md lists what is here")


def refuse_destroyed() -> NoReturn:
    """A call on a Buffer after `destroy`."""
    raise EPException("deep_ep: this Buffer is destroyed; make a new one")


def refuse(call: str, argument: str, got: object, expected: str) -> NoReturn:
    raise EPException(f"{call}: {argument}: got {got}; expected {expected}")
