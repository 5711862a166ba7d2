"""Results beside what they must hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from sequences.arithmetic import Array, same_bits
from sequences.model import Call, Part


class WrongError(Exception):
    """A result is not what the reference says."""

    def __init__(self, kind: str, what: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.what = kind, what


def whole_of(result: Any, part: Part) -> Any:
    """The tensor of a result, or a plan's answer, that a part is of."""
    found = getattr(result, part.name)
    if callable(found):
        found = found(part.index) if isinstance(part.index, int) else found()
    if isinstance(found, np.ndarray) or not hasattr(found, "__dlpack__"):
        return found
    return np.from_dlpack(found)


def compare(result: Any, call: Call, kind: str = "wrong") -> None:
    for name, shape in call.shapes.items():
        got = getattr(result, name).shape
        if got != shape:
            raise WrongError(kind, name, f"{name}: shape {got}, expected {shape}")
    for part in call.parts:
        got = whole_of(result, part)
        if not isinstance(got, np.ndarray):
            if not np.array_equal(np.asarray(got), part.value):
                raise WrongError(kind, part.name, f"{part.name}: {got}, expected {part.value}")
            continue
        got = got[part.index]
        if got.dtype in (np.uint8, np.uint16) and part.value.dtype.itemsize == got.dtype.itemsize:
            got = got.view(part.value.dtype)  # e4m3 of f32 rows, which say nothing of ml_dtypes
        if part.error is None:
            equal = same_bits(got, part.value)
        else:
            equal = got.shape == part.value.shape and close(got, part.value, part.error)
        if not equal:
            raise WrongError(kind, part.name, difference(part, got))


def close(got: Array, value: Array, error: Array) -> bool:
    a, b = got.astype(np.float64), value.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = (np.abs(a - b) <= error) | (a == b) | (np.isnan(a) & np.isnan(b))
    return bool(near.all())


def difference(part: Part, got: Array) -> str:
    words = f"{part.name}[{part.index}]: {got.dtype} {got.shape}"
    if got.shape != part.value.shape or got.dtype != part.value.dtype:
        return f"{words}, expected {part.value.dtype} {part.value.shape}"
    a, b = np.atleast_1d(got).astype(np.float64), np.atleast_1d(part.value).astype(np.float64)
    other = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not other.any():
        return f"{words} differs in the sign of a zero"
    at = tuple(int(i) for i in np.argwhere(other)[0])
    return f"{words} differs in {int(other.sum())} values, first at {at}: {a[at]} for {b[at]}"


def overwrite(array: Any) -> None:
    """Nobody may read it any more."""
    if isinstance(array, np.ndarray) and array.size and array.flags.writeable:
        array[...] = np.array(0x5A).astype(array.dtype)
