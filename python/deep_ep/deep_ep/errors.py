"""What a wrong use raises."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any, NoReturn

from ferry.arguments import shown, whole_number

MOST_SECONDS = 1e9


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
    number = whole_number(value)
    if number is None:
        refuse(call, argument, shown(value), expected)
    require(least is None or number >= least, call, argument, value, expected)
    return number


def require_positive(
    call: str, argument: str, value: Any, expected: str, or_zero: bool = False
) -> None:
    """A real number above 0, or that, no bool."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not (0 < value < math.inf or (or_zero and value == 0)):
        refuse(call, argument, shown(value), expected)


def require_seconds(call: str, argument: str, value: Any) -> None:
    """How long a wait may take."""
    expected = "more than 0 seconds, and less than 1e9"
    require_positive(call, argument, value, expected)
    require(value < MOST_SECONDS, call, argument, value, expected)


def require_only_context(call: str, context_idx: Any) -> None:
    """The index of a group of ranks in a buffer that has one."""
    good = context_idx is None or whole_number(context_idx) == 0
    require(good, call, "context_idx", context_idx, "None or 0")


def require_flags(call: str, **flags: Any) -> None:
    """True or False, or what stands for them: 1, 0 and None, and those of NumPy."""
    for argument, value in flags.items():
        if isinstance(value, bool) or value is None:
            continue
        if type(value).__name__ not in ("bool", "bool_") and whole_number(value) not in (0, 1):
            refuse(call, argument, shown(value), "True or False")


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
    got = got if isinstance(got, str) else shown(got)
    raise EPException(f"{call}: {argument}: got {got}; expected {expected}")
