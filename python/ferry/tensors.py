"""Tensors in and out without copies: NumPy, torch, and whatever else speaks DLPack.

A caller's array is read (or, as `out`, written) where it lies. A result is Ferry's own memory as an
array of the caller's framework; the memory goes back when the last array on it is dropped.

bf16 and fp8 do not exist in NumPy: they come as arrays of `ml_dtypes`, or as uint16 / uint8 beside
`dtype="bf16"`, and go out the same way. torch's own dtypes need no tag.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

from ferry import _ferry
from ferry.arguments import choice, refuse

Dtype = _ferry.Dtype

DTYPES = {
    "f32": Dtype.f32,
    "bf16": Dtype.bf16,
    "f16": Dtype.f16,
    "e4m3": Dtype.e4m3,
    "e5m2": Dtype.e5m2,
    "i32": Dtype.i32,
    "i64": Dtype.i64,
    "u8": Dtype.u8,
}

# What NumPy, ml_dtypes and torch call them, so that their dtype objects serve as dtypes, too.
_LONG_NAMES = {
    "float32": Dtype.f32,
    "bfloat16": Dtype.bf16,
    "float16": Dtype.f16,
    "float8_e4m3fn": Dtype.e4m3,
    "float8_e5m2": Dtype.e5m2,
    "int32": Dtype.i32,
    "int64": Dtype.i64,
    "uint8": Dtype.u8,
}
# The names that NumPy has no dtype of its own for, and the unsigned integer that carries them.
_CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_ML_NAMES = {Dtype.bf16: "bfloat16", Dtype.e4m3: "float8_e4m3fn", Dtype.e5m2: "float8_e5m2"}


class Like(NamedTuple):
    """What results look like: the framework of an input."""

    framework: str  # "numpy" or "torch"
    ml_dtypes: bool = False  # NumPy with the dtypes of ml_dtypes


NUMPY = Like("numpy")
TORCH = Like("torch")


def dtype_named(name: str, value: Any) -> _ferry.Dtype:
    """A dtype from "bf16", "bfloat16", a NumPy, ml_dtypes or torch dtype."""
    if isinstance(value, _ferry.Dtype):
        return value
    if isinstance(value, type):
        value = getattr(value, "__name__", value)  # numpy.float32, ml_dtypes.bfloat16
    if not isinstance(value, str):
        own = getattr(value, "name", None)  # numpy.dtype
        spelled = own if isinstance(own, str) else str(value).removeprefix("torch.")
        if spelled in _LONG_NAMES:
            return _LONG_NAMES[spelled]
    elif value in _LONG_NAMES:
        return _LONG_NAMES[value]
    return choice(name, value, DTYPES)


def view(
    name: str,
    value: Any,
    dtype: _ferry.Dtype | None = None,
    writable: bool = False,
    expected: str = "",
) -> tuple[_ferry.View, Like]:
    """The caller's array as the C++ side reads it, and what results on it should look like.

    expected: the dtypes that the argument takes, for messages; empty: every dtype.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        plain, dtype = _plain_torch(torch, name, value, dtype, writable)
        return _ferry.View(plain, name, dtype, writable, expected), TORCH
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        plain, dtype, like = _plain_numpy(name, value, dtype, expected)
        return _ferry.View(plain, name, dtype, writable, expected), like
    return _ferry.View(value, name, dtype, writable, expected), NUMPY


def optional_view(
    name: str,
    value: Any,
    dtype: _ferry.Dtype | None = None,
    writable: bool = False,
    expected: str = "",
) -> _ferry.View | None:
    """The same for an argument that may be None."""
    return None if value is None else view(name, value, dtype, writable, expected)[0]


def _plain_torch(
    torch: Any, name: str, value: Any, dtype: _ferry.Dtype | None, writable: bool
) -> tuple[Any, _ferry.Dtype | None]:
    """A tensor whose memory is what it says, and its dtype when DLPack cannot say it."""
    if value.device.type != "cpu":
        refuse(
            name,
            f"a tensor on device {value.device}",
            "a tensor in CPU memory (this build has no CUDA engine); call .cpu() on it first",
        )
    if value.layout != torch.strided:
        refuse(name, f"a tensor of layout {value.layout}", "a strided tensor")
    if value.requires_grad:
        value = value.detach()
    if value.is_neg():  # the memory holds the elements without their sign
        lazy = "a tensor with torch's negative bit (a lazy view)"
        if writable:
            refuse(name, lazy, "one that can be written as it lies; call .resolve_neg() on it")
        try:
            value = value.resolve_neg()
        except NotImplementedError:  # torch cannot negate fp8
            refuse(
                name, f"{lazy} of dtype {value.dtype}", "one without, as torch cannot resolve it"
            )
    own = _torch_dtype(value.dtype)
    if own in (Dtype.e4m3, Dtype.e5m2):
        return value.view(torch.uint8), _agreed(name, own, dtype)
    return value, dtype


@cache
def _torch_dtype(dtype: Any) -> _ferry.Dtype | None:
    return _LONG_NAMES.get(str(dtype).removeprefix("torch."))


def _plain_numpy(
    name: str, value: Any, dtype: _ferry.Dtype | None, expected: str
) -> tuple[Any, _ferry.Dtype | None, Like]:
    """The same for NumPy, and what results on it should look like."""
    size = value.itemsize
    if any(
        extent > 1 and stride % size
        for extent, stride in zip(value.shape, value.strides)
        if size > 0
    ):
        refuse(
            name,
            f"a NumPy array with strides of {value.strides} bytes over elements of {size} bytes, "
            "like a field of a structured array",
            "strides of whole elements; call numpy.ascontiguousarray on it first",
        )
    own = value.dtype.name
    if own in _CARRIERS:
        dtype = _agreed(name, _LONG_NAMES[own], dtype)
        return value.view(_CARRIERS[own]), dtype, Like("numpy", True)
    if not value.dtype.isnative or value.dtype.kind not in "fiucb":
        wanted = f"a native numeric dtype{f': {expected}' if expected else ''}"
        refuse(name, f"a NumPy array of dtype {value.dtype}", wanted)
    return value, dtype, NUMPY


def _agreed(name: str, own: _ferry.Dtype, tag: _ferry.Dtype | None) -> _ferry.Dtype:
    if tag is not None and tag != own:
        refuse(name, f"dtype {own.name}", f"dtype {tag.name}")
    return own


def array(tensor: _ferry.Tensor | None, like: Like) -> Any:
    """A result as an array of the caller's framework; shares memory with it."""
    if tensor is None:
        return None
    if like.framework == "torch":
        return _torch_array(tensor)
    result = tensor.numpy()
    if like.ml_dtypes and tensor.dtype in _ML_NAMES:
        import ml_dtypes

        result = result.view(getattr(ml_dtypes, _ML_NAMES[tensor.dtype]))
    return result


def _torch_array(tensor: _ferry.Tensor) -> Any:
    result = tensor.torch()
    if tensor.dtype in (Dtype.e4m3, Dtype.e5m2):
        torch = sys.modules["torch"]
        result = result.view(getattr(torch, _ML_NAMES[tensor.dtype]))
    return result


def like_of(name: str, value: Any) -> Like:
    """From the word "numpy" or "torch", an example array, or None (NumPy)."""
    if value is None:
        return NUMPY
    if isinstance(value, str):
        return choice(name, value, {"numpy": NUMPY, "torch": TORCH})
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return TORCH
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return Like("numpy", value.dtype.name in _CARRIERS)
    return refuse(name, f"an object of type {type(value).__name__}", '"numpy", "torch" or an array')


def is_torch_dtype(value: Any) -> bool:
    """True for a dtype object of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype)
