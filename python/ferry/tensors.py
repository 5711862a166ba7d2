"""Tensors in and out without copies: NumPy, torch, JAX, TensorFlow and what else speaks DLPack, on
CPU and GPU.

A caller's array is read (or, as `out`, written) where it lies. A result is Ferry's own memory as an
array of the caller's framework; the memory goes back when the last array on it is dropped.

bf16 and fp8 do not exist in NumPy: they come as arrays of `ml_dtypes`, or as uint16 / uint8 beside
`dtype="bf16"`, and go out the same way. torch's own dtypes need no tag.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

from ferry import _ferry
from ferry.arguments import choice, describe, integer, loaded, refuse
from ferry.frameworks import array_of, as_numpy
from ferry.streams import CPU, Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

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


class Like:
    """What results look like: the framework of an input."""

    __slots__ = ("framework", "ml_dtypes")

    def __init__(self, framework: str, ml_dtypes: bool = False) -> None:
        # "numpy", "torch", "cupy", "jax", "tensorflow"; "dlpack": a ferry Tensor
        self.framework = framework
        self.ml_dtypes = ml_dtypes  # NumPy with the dtypes of ml_dtypes


NUMPY = Like("numpy")
TORCH = Like("torch")
CUPY = Like("cupy")
DLPACK = Like("dlpack")


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
    place: Place | None = CPU,
) -> tuple[_ferry.View, Like]:
    """The caller's array as the C++ side reads it, and what results on it should look like.

    expected: the dtypes that the argument takes, for messages; empty: every dtype. place: where it
    must lie; None: anywhere, as only its address is asked for.
    """
    torch = loaded("torch")
    if torch is not None and dtype is None and place is not None and place.gpu is None:
        plain = _ferry.View.of_torch(value, name, writable)  # four times as quick as what follows
        if plain is not None:
            return plain, TORCH
    if torch is not None and isinstance(value, torch.Tensor):
        _check_place(name, value.device.type, value.device.index, place)
        if value.requires_grad and place is not None and torch.is_grad_enabled():
            _refuse_gradient(name)
        plain, dtype = _plain_torch(torch, name, value, dtype, writable)
        if writable and not value.is_inference():
            # Autograd refuses to go backward through what it saved and this call writes over.
            torch.autograd.graph.increment_version(value)
        if value.device.type == "cuda":
            ordered = place is not None and place.ordered
            return _gpu_view(torch, name, plain, dtype, expected, ordered), TORCH
        return _ferry.View(plain, name, dtype, writable, expected), TORCH
    numpy = loaded("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        _check_place(name, "cpu", None, place)
        plain, dtype, like = _plain_numpy(name, value, dtype, expected)
        return _ferry.View(plain, name, dtype, writable, expected), like
    immutable = as_numpy(name, value, writable) if place is None or place.gpu is None else None
    if immutable is not None:
        plain, dtype, _ = _plain_numpy(name, immutable[0], dtype, expected)
        return _ferry.View(plain, name, dtype, False, expected), Like(immutable[1])
    if place is not None and place.gpu is not None:
        return _dlpack_view(name, value, dtype, writable, expected, place)
    made = _ferry.View(value, name, dtype, writable, expected)
    if made.gpu is not None:
        _check_place(name, "cuda", made.gpu, place)
    return made, NUMPY


def plain_view(name: str, value: Any, writable: bool) -> _ferry.View | None:
    """The elements of a torch tensor in CPU memory, if it is as plain as most are. It takes a
    microsecond, DLPack eight. None: `view` has to look at it.
    """
    torch = loaded("torch")
    if torch is None or type(value) is not torch.Tensor or not value.is_cpu:
        return None
    dtype = _torch_dtype(value.dtype)
    if dtype is None or value.requires_grad or value.layout is not torch.strided:
        return None
    if not value.is_contiguous() or value.is_neg():
        return None
    memory = storage_of(name, value)
    if writable and not value.is_inference():
        torch.autograd.graph.increment_version(value)  # as in `view`
    return _ferry.View.of_elements(memory, name, value.data_ptr(), value.numel(), dtype)


def optional_view(name: str, value: Any, *rules: Any, **more: Any) -> _ferry.View | None:
    """The same for an argument that may be None."""
    return None if value is None else view(name, value, *rules, **more)[0]


def on_gpu(value: Any) -> bool:
    """Whether it is a tensor of torch on a GPU."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.Tensor) and bool(value.is_cuda)


def _check_place(name: str, kind: str, index: int | None, place: Place | None) -> None:
    """Refuse a tensor that lies elsewhere than the group works."""
    if place is None:
        if kind in ("cpu", "cuda"):
            return
    elif place.gpu is None:
        if kind == "cpu":
            return
    elif kind == "cuda" and index == place.gpu:
        return
    got = f"a tensor on device {kind if index is None else f'{kind}:{index}'}"
    if place is None or place.gpu is None:
        more = ', or make the group with backend="cuda"' if kind == "cuda" else ""
        refuse(
            name,
            got,
            "a tensor in CPU memory, because this group runs on the host engine; call .cpu() on it "
            f"first{more}",
        )
    refuse(
        name, got, f'one on {place.words}, the GPU of this rank; call .to("{place.words}") first'
    )


def _refuse_gradient(name: str) -> NoReturn:
    argument = name.rpartition(" ")[2]
    refuse(
        name,
        "a tensor that requires a gradient, which this call would drop",
        f"ferry.torch, whose calls carry gradients; or {argument}.detach(), or the call under "
        "torch.no_grad(), if no gradient is wanted",
    )


def _gpu_view(
    torch: Any, name: str, value: Any, dtype: _ferry.Dtype | None, expected: str, ordered: bool
) -> _ferry.View:
    """Of a torch tensor on a GPU. Without DLPack, which would order streams: ours are ordered."""
    own = _torch_dtype(value.dtype)
    spelled = str(value.dtype).removeprefix("torch.")
    if dtype is None:
        if own is None:
            refuse(name, f"dtype {spelled}", f"dtype {expected or ', '.join(DTYPES)}")
        dtype = own
    elif own != dtype:
        carriers = {Dtype.bf16: "uint16", Dtype.f16: "uint16"}
        carriers |= {Dtype.e4m3: "uint8", Dtype.e5m2: "uint8"}
        carrier = carriers.get(dtype)
        if spelled != carrier:
            more = f", or {carrier} that carries it" if carrier else ""
            refuse(name, f"dtype {spelled}", f"dtype {dtype.name}{more}")
    return _ferry.View.of_gpu(
        value.untyped_storage(),
        name,
        value.data_ptr(),
        value.shape,
        value.stride(),
        dtype,
        value.device.index,
        ordered,
    )


def _dlpack_view(
    name: str,
    value: Any,
    dtype: _ferry.Dtype | None,
    writable: bool,
    expected: str,
    place: Place,
) -> tuple[_ferry.View, Like]:
    """Of any other array on a GPU, which makes its memory ready for the call's stream."""
    export = getattr(value, "__dlpack__", None)
    device = getattr(value, "__dlpack_device__", None)
    if not callable(export) or not callable(device):
        refuse(
            name,
            f"an object of type {type(value).__name__} that gives no DLPack tensor",
            f"a torch tensor on {place.words}, or an array there that speaks DLPack",
        )
    kind, index = device()
    on_gpu = int(kind) in (2, 13)  # kDLCUDA, kDLCUDAManaged
    _check_place(name, "cuda" if on_gpu else "cpu", int(index) if on_gpu else None, place)
    legacy_default = 1
    capsule = export(stream=place.handle or legacy_default)
    like = CUPY if type(value).__module__.partition(".")[0] == "cupy" else _dlpack_like()
    return _ferry.View(capsule, name, dtype, writable, expected), like


def _dlpack_like() -> Like:
    return TORCH if "torch" in sys.modules else DLPACK


def _plain_torch(
    torch: Any, name: str, value: Any, dtype: _ferry.Dtype | None, writable: bool
) -> tuple[Any, _ferry.Dtype | None]:
    """A tensor whose memory is what it says, and its dtype when DLPack cannot say it."""
    if value.layout != torch.strided:
        refuse(name, f"a tensor of layout {value.layout}", "a strided tensor")
    if value.requires_grad:
        value = value.detach()
    storage_of(name, value)
    if value.is_neg():  # the memory holds the elements without their sign
        lazy = "a tensor with torch's negative bit (a lazy view)"
        if writable:
            refuse(name, lazy, "one that can be written as it lies; call .resolve_neg() on it")
        try:
            value = value.resolve_neg()
        except RuntimeError:  # torch cannot negate fp8
            refuse(
                name, f"{lazy} of dtype {value.dtype}", "one without, as torch cannot resolve it"
            )
    own = _torch_dtype(value.dtype)
    if own in (Dtype.e4m3, Dtype.e5m2):
        return value.view(torch.uint8), _agreed(name, own, dtype)
    return value, dtype


def storage_of(name: str, tensor: Any) -> Any:
    """The storage of a strided torch tensor. Refuses one that is too small for the elements, as
    after `untyped_storage().resize_(0)`, by which programs free tensors. A reference to the storage
    keeps the memory, whatever `set_`, `.data =` or `swap_tensors` do to the tensor."""
    storage, reach = tensor.untyped_storage(), tensor.numel()
    if reach > 0 and not tensor.is_contiguous():
        reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + reach) * tensor.element_size() if reach > 0 else 0
    if needed > storage.nbytes():
        got = f"a tensor whose storage was resized to {storage.nbytes()} bytes"
        refuse(name, got, f"at least {needed}, those of shape {list(tensor.shape)}")
    return storage


def dense(name: str, tensor: Any) -> Any:
    """`tensor.contiguous()` that does not read the memory of a freed tensor."""
    if not tensor.is_contiguous() and tensor.layout is sys.modules["torch"].strided:
        storage_of(name, tensor)
    return tensor.contiguous()


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
    if like.framework == "dlpack":
        return tensor
    if like.framework in ("jax", "tensorflow"):
        return array_of(tensor, like.framework)
    if like.framework == "cupy":
        return tensor.cupy()
    result = tensor.numpy()
    if like.ml_dtypes and tensor.dtype in _ML_NAMES:
        import ml_dtypes

        result = result.view(getattr(ml_dtypes, _ML_NAMES[tensor.dtype]))
    return result


def _torch_array(tensor: _ferry.Tensor) -> Any:
    torch = sys.modules["torch"]
    if tensor.gpu is not None:
        torch.cuda.init()
    result = _torch_storage().own(torch.utils.dlpack.from_dlpack(tensor.dlpack()))
    if tensor.dtype in (Dtype.e4m3, Dtype.e5m2):
        result = result.view(getattr(torch, _ML_NAMES[tensor.dtype]))
    return result


@cache
def _torch_storage() -> Any:
    """Imported when torch is there."""
    from ferry import torch_storage

    return torch_storage


def like_of(name: str, value: Any, gpu: int | None = None) -> Like:
    """From the word "numpy" or "torch", an example array, or None: NumPy, or on a GPU torch."""
    words = {"numpy": NUMPY} if gpu is None else {"cupy": CUPY}
    words["torch"] = TORCH
    if value is None:
        return NUMPY if gpu is None else _dlpack_like()
    if isinstance(value, str):
        return choice(name, value, words)
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return TORCH
    numpy = loaded("numpy")
    if gpu is None and numpy is not None and isinstance(value, numpy.ndarray):
        return Like("numpy", value.dtype.name in _CARRIERS)
    if gpu is not None and type(value).__module__.partition(".")[0] == "cupy":
        return CUPY
    listed = ", ".join(f'"{word}"' for word in words)
    return refuse(name, f"an object of type {type(value).__name__}", f"{listed} or an array")


def is_torch_dtype(value: Any) -> bool:
    """True for a dtype object of torch."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.dtype)


def empty_array(
    allocate: Callable[[list[int], _ferry.Dtype], _ferry.Tensor],
    shape: Any,
    dtype: Any,
    like: Any,
    gpu: int | None = None,
) -> Any:
    """Registered memory from `allocate` as an array; the arguments are those of `Group.empty`."""
    of_torch = like is None and is_torch_dtype(dtype)
    chosen = TORCH if of_torch else like_of("empty: like", like, gpu)
    if chosen == TORCH and "torch" not in sys.modules:
        refuse("empty: like", '"torch"', "torch to be imported first")
    if not isinstance(shape, (tuple, list)):
        refuse("empty: shape", describe(shape), "a tuple of extents")
    extents = [integer("empty: shape", extent) for extent in shape]
    if not 1 <= len(extents) <= 3:
        refuse("empty: shape", f"{len(extents)} dimensions", "1 to 3")
    if isinstance(dtype, type) and dtype.__module__.startswith("ml_dtypes"):
        chosen = Like(chosen.framework, True)
    return array(allocate(extents, dtype_named("empty: dtype", dtype)), chosen)
