"""Tensors on memory that others look after.

DeepEP's callers drop nothing: they keep a received tensor in a variable until the next call has
overwritten that variable, while Ferry takes a result as used until its last tensor is gone. So
callers get tensors that look at the same memory and keep it mapped, but do not keep the result:
what they see changes once a later dispatch is given the buffer, as the interface says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferry import torch_storage

# The public call looks at what it is given first, which takes as long as this.
_from_capsule = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)


class _Bytes:
    """Memory as NumPy and torch import it; whoever imports it keeps `keeper`."""

    def __init__(self, address: int, size: int, on_gpu: bool, keeper: object) -> None:
        self.keeper = keeper
        interface = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        setattr(self, "__cuda_array_interface__" if on_gpu else "__array_interface__", interface)


def borrowed(tensor: Tensor, keeper: object) -> Tensor:
    """A tensor on the same memory as `tensor`, which is not empty. It stays mapped as long as
    `keeper` lives; what keeps `tensor` is not kept."""
    elements = 1 + sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride())
    )
    memory = _Bytes(tensor.data_ptr(), elements * tensor.element_size(), tensor.is_cuda, keeper)
    plain: Any
    if tensor.is_cuda:
        plain = torch.as_tensor(memory, device=tensor.device)
    else:
        plain = torch.from_numpy(np.asarray(memory))
    typed: Tensor = plain.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return typed


def tensor_of(made: Any) -> Tensor:
    """A torch tensor of one that Ferry made; of its bytes if that is of fp8. For what every call
    makes: quicker than a result's own properties, which serve all frameworks and keep it."""
    tensor: Tensor = torch_storage.own(_from_capsule(made.dlpack()))
    return tensor
