"""Plain arguments: checked by name, so that a message says which one, what it got and expected."""

from __future__ import annotations

import functools
import numbers
import operator
import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping

from ferry.errors import InvalidArgumentError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")


INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1
_SAME_WORDS = {"auto": "automatic", "automatic": "auto"}
_BOUNDS = {
    INT32_MAX: "2^31 - 1",
    UINT32_MAX: "2^32 - 1",
    2**46: "64 TiB",
    INT64_MAX: "2^63 - 1",
    UINT64_MAX: "2^64 - 1",
}


def renamed_keywords(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For functions whose keywords have new names: `names` of earlier releases, which go with the
    next one, still work, with a DeprecationWarning."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        called = f"{function.__qualname__}()"

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> T:
            take_new_names(called, names, keywords)
            return function(*args, **keywords)

        return call

    return decorate


def take_new_names(call: str, names: dict[str, str], keywords: dict[str, Any]) -> None:
    """The old names among `keywords` of the call become the new ones, with a warning to who has
    called the decorated function."""
    for old, new in names.items():
        if old not in keywords:
            continue
        if new in keywords:
            raise TypeError(f"{call} got {new} and its old name, {old}")
        message = f"{call}: {old} is deprecated; use {new}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        keywords[new] = keywords.pop(old)


_loaded: dict[str, Any] = {}


def loaded(name: str) -> Any:
    """A module that is imported. None also while another thread still imports it: nothing of it is
    there yet, and no value is."""
    module = _loaded.get(name)
    if module is None:
        module = sys.modules.get(name)
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            return None
        if module is not None:
            _loaded[name] = module
    return module


def tensor_words(value: object) -> str | None:
    """Dtype and shape of a tensor of torch: its elements may be freed, or on a GPU. None: it is
    none."""
    torch = loaded("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    extents = "other rows" if value.is_nested else f"shape {tuple(value.shape)}"
    return f"{value.dtype} of {extents}"


class _Shown(reprlib.Repr):
    """`repr` of what may hold tensors, at a few levels."""

    def repr1(self, x: Any, level: int) -> str:
        words = tensor_words(x)
        if words is not None:
            return words
        return super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, tuple):  # of a class of its own, whose repr would print what is in it
            return type(x).__name__ + self.repr_tuple(tuple(tuple.__iter__(x)), level)
        return repr(x)


_MOST_SHOWN = 60  # characters
_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxlong = 2 * _MOST_SHOWN


def shown(value: object) -> str:
    """`repr`, short, that reads no tensor and raises nothing."""
    words = tensor_words(value)
    if words is None:
        try:
            words = _SHOWN.repr(value)
        except Exception:  # of the object, or an integer of more digits than Python likes to print
            words = "an object that cannot be printed"
    words = " ".join(words.split())
    return words if len(words) <= _MOST_SHOWN else words[: _MOST_SHOWN - 3] + "..."


def describe(value: object) -> str:
    """A value in a message: short, with its type when that says more."""
    words = shown(value)
    return f"{words} ({type(value).__name__})" if not isinstance(value, str) else words


def refuse(name: str, got: str, expected: str) -> NoReturn:
    """Raise InvalidArgumentError in the words that all of Ferry uses."""
    raise InvalidArgumentError(f"{name}: got {got}; expected {expected}")


def whole_number(value: Any) -> int | None:
    """Anything with `__index__`, but no bool and no tensor whose element is not there; None: it is
    no such thing."""
    if type(value) is int:
        return value
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not value.is_meta and not value.is_nested
        if not plain or value.numel() != 1:
            return None
        if value.untyped_storage().nbytes() < (value.storage_offset() + 1) * value.itemsize:
            return None
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def integer(name: str, value: Any, low: int = 0, high: int = INT64_MAX) -> int:
    """An integer (anything with `__index__`, but no bool) from `low` to `high`."""
    number = whole_number(value)
    if number is None:
        refuse(name, describe(value), "an integer")
    if low <= number <= high:
        return number
    got = str(number) if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"
    if high not in _BOUNDS:
        refuse(name, got, f"{low} to {high}")
    refuse(name, got, f"at least {low}" if number < low else f"at most {_BOUNDS[high]}")


def number(name: str, value: Any, expected: str = "a number") -> float:
    """A real number, but no bool; the C++ side checks the range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, describe(value), expected)
    try:
        return float(value)
    except OverflowError:
        return refuse(name, "a number that no float can hold", expected)


def seconds(name: str, value: Any) -> float:
    """A number of seconds."""
    return number(name, value, "a number of seconds")


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        refuse(name, describe(value), "True or False")
    return value


def text(name: str, value: Any) -> str:
    """A string, of characters that UTF-8 has."""
    if not isinstance(value, str):
        refuse(name, describe(value), "a string")
    if any("\ud800" <= one <= "\udfff" for one in value):
        refuse(name, ascii(value), "characters that UTF-8 has")
    return value


def choice(name: str, value: Any, table: Mapping[str, T]) -> T:
    """One of the words of `table`. "auto" and "automatic" are the same."""
    if isinstance(value, str):
        for word in (value, _SAME_WORDS.get(value, value)):
            if word in table:
                return table[word]
    words = ", ".join(f'"{word}"' for word in table)
    refuse(name, describe(value), f"one of {words}")


def instance(name: str, value: Any, cls: type[T], expected: str) -> T:
    """An object of class `cls`."""
    if not isinstance(value, cls):
        refuse(name, describe(value), expected)
    return value


def optional(name: str, value: Any, cls: type[T], expected: str) -> T | None:
    """An object of class `cls`, or None."""
    return None if value is None else instance(name, value, cls, f"{expected} or None")
