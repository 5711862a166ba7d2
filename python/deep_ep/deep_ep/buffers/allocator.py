"""`BufferAllocator` of DeepEP V2.5: tensors that are planned before there is memory for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_ep.arguments import check_dtype, is_strided, shapes_of, words
from deep_ep.errors import refuse, require
from deep_ep.sizes import MOST_BYTES, SIZE_STEP, round_up
from ferry.arguments import shown, whole_number


class BufferAllocator:
    """A plan of tensors, which a buffer makes views of its memory. Each begins at a multiple of
    `alignment` bytes."""

    def __init__(self) -> None:
        self.alignment = SIZE_STEP
        self.allocations: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One more tensor: of the meta device until a buffer is made of the plan, then the same
        object is a view of its memory."""
        self.require_open("allocate")
        check_dtype("allocate", dtype)
        (own, *_), several = shapes_of("allocate", shape)
        require(not several, "allocate", "shapes", shown(shape), "one shape")
        size = math.prod(own) * dtype.itemsize
        left = MOST_BYTES - self.num_bytes
        require(size <= left, "allocate", "shapes", f"{shown(shape)} of {dtype}", f"{left} bytes")
        tensor = torch.empty(own, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes += round_up(size, self.alignment)
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Makes the tensors views of `storage`, num_bytes of u8, dense."""
        self.require_open("materialize")
        good = is_strided(storage) and storage.dtype == torch.uint8 and storage.is_contiguous()
        good = good and storage.shape == (self.num_bytes,)
        expected = f"torch.uint8 of shape ({self.num_bytes},)"
        require(good, "materialize", "storage", words(storage), expected)
        for tensor, offset in self.allocations:
            part = storage[offset : offset + tensor.numel() * tensor.element_size()]
            view = part.view(tensor.dtype).view(tensor.shape)
            try:
                torch.utils.swap_tensors(tensor, view)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                got = f"{words(tensor)} with views or weak references ({error})"
                refuse("materialize", "plan", got, "those taken once the buffer is made")
        self.materialized = True

    def require_open(self, call: str) -> None:
        """A plan serves one buffer."""
        require(not self.materialized, call, "plan", "one that has its memory", "a new plan")


def planned_bytes(call: str, name: str, given: Any) -> tuple[BufferAllocator | None, int]:
    """A plan and its bytes, or None and a number of bytes."""
    if isinstance(given, BufferAllocator):
        given.require_open(call)
        return given, given.num_bytes
    size = whole_number(given)
    if size is None or not 0 <= size <= MOST_BYTES:
        refuse(call, name, shown(given), "a BufferAllocator, or a number of bytes")
    return None, size
