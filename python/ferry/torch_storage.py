"""Results as torch's own memory: their storages can be resized, and other streams recorded.

torch takes memory that comes by DLPack for memory that nobody may resize: programs that free a
tensor by `untyped_storage().resize_(0)` fail. A storage differs from torch's own in two fields
alone, the allocator that new memory comes from and the mark that says it can be resized. `own` sets
both: a resize then drops Ferry's memory, which goes back to the group, and takes torch's. torch has
no call for it in Python, and linking with torch would tie Ferry to one version. So where the two
fields lie is found once, by comparing storages of both kinds, and tried before it is used; if that
fails, as with a torch that lays storages out in another way, results are left as they came.

`Tensor.record_stream` asks torch's allocator, which knows its own memory alone. Once there is a
result on a GPU, the method asks Ferry's groups first about memory that is not torch's.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch

from ferry._ferry import set_storage
from ferry.torch_streams import record_with_group

_SEEN_BYTES = 80  # no version's storage object is smaller
_record_with_torch: Any = torch.Tensor.record_stream
_address = getattr(torch._C, "_storage_address", lambda one: one.untyped_storage()._cdata)


class _Places(NamedTuple):
    """Byte offsets in torch's storage object."""

    resizable_at: int
    allocator_at: int


class _Block(bytearray):
    """Memory that is not torch's, and can be watched."""


def own(tensor: Any) -> Any:
    """The tensor, alone on memory that is not torch's, as if it were torch's."""
    places = _places()
    if places is not None:
        resizable_at, allocator_at = places
        set_storage(_address(tensor), resizable_at, allocator_at, _allocator(tensor.get_device()))
    return tensor


@cache
def _allocator(gpu: int) -> int:
    """The address of torch's allocator for that GPU, or -1: for CPU memory."""
    places = _places()
    assert places is not None
    device = "cpu"
    if gpu >= 0:
        device = f"cuda:{gpu}"
        torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign, assignment]
    made = torch.empty(1, dtype=torch.uint8, device=device).untyped_storage()
    seen = _seen(made)[places.allocator_at : places.allocator_at + 8]
    return int.from_bytes(seen, "little")


@cache
def _places() -> _Places | None:
    """None: not found, and storages stay as they are."""
    sizes = (64, 64, 192, 4096)
    torchs = [torch.empty(n, dtype=torch.uint8, device="cpu").untyped_storage() for n in sizes]
    others = [torch.frombuffer(bytearray(n), dtype=torch.uint8).untyped_storage() for n in sizes]
    ours, theirs = ([_seen(one) for one in kind] for kind in (others, torchs))
    marks = [
        at
        for at in range(_SEEN_BYTES)
        if all(one[at] == 0 for one in ours) and all(one[at] == 1 for one in theirs)
    ]
    allocators = [
        at
        for at in range(0, _SEEN_BYTES, 8)
        if not any(any(one[at : at + 8]) for one in ours)
        and len({one[at : at + 8] for one in theirs}) == 1
        and int.from_bytes(theirs[0][at : at + 8], "little") > max(sizes)
    ]
    if len(marks) != 1 or len(allocators) != 1:
        return None
    places = _Places(marks[0], allocators[0])
    return places if _right(places) else None


def _seen(storage: Any) -> bytes:
    return ctypes.string_at(storage._cdata, _SEEN_BYTES)


def _right(places: _Places) -> bool:
    """Whether a storage with these fields set gives its memory back and takes torch's."""
    block = _Block(64)
    kept = weakref.ref(block)
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    del block
    storage = tensor.untyped_storage()
    if storage.resizable():
        return False
    allocator = torch.empty(1, dtype=torch.uint8, device="cpu").untyped_storage()
    at = slice(places.allocator_at, places.allocator_at + 8)
    if _address(tensor) != storage._cdata:
        return False
    set_storage(storage._cdata, *places, int.from_bytes(_seen(allocator)[at], "little"))
    if not storage.resizable() or kept() is None:
        return False
    storage.resize_(0)
    if kept() is not None or storage.nbytes() != 0:
        return False
    storage.resize_(64)
    return storage.nbytes() == 64 and bool((tensor.fill_(7) == 7).all())


def _record_stream(tensor: Any, stream: Any) -> None:
    """`Tensor.record_stream` for the memory of groups, too."""
    if not _of_group(tensor) or not record_with_group(
        tensor.data_ptr(), str(tensor.device), stream
    ):
        _record_with_torch(tensor, stream)


def _of_group(tensor: Any) -> bool:
    """Whether its memory may be a group's: it lies on a GPU and is not torch's."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cuda:
        return False
    if tensor.layout != torch.strided or tensor.data_ptr() == 0:
        return False
    is_torchs = getattr(torch._C, "_has_Standard_Deleter", None)
    return is_torchs is None or not is_torchs(_address(tensor))
