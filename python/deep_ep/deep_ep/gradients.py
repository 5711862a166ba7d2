"""Calls without a gradient, as the interface has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_set_enabled = torch._C._set_grad_enabled
P = ParamSpec("P")
T = TypeVar("T")


def without_gradients(call: Callable[P, T]) -> Callable[P, T]:
    """The call, which takes tensors that require a gradient, and whose results do not. Ferry's own
    calls refuse such tensors; those of the original take them, and its callers, who stand in
    autograd functions of their own or want no gradient, may rely on that."""

    @wraps(call)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():  # as in every autograd function: nothing to do
            return call(*args, **kwargs)
        _set_enabled(False)  # torch.no_grad(), which takes five times as long
        try:
            return call(*args, **kwargs)
        finally:
            _set_enabled(True)

    return inner
