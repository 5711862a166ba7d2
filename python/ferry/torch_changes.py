"""Whether parameters have changed since copies of them were made."""

from __future__ import annotations

import functools
import itertools

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = itertools.count(1)
_stepped = 0
"""Steps of any optimizer: fused ones write to parameters and torch does not count it."""


def _step(*_: object) -> None:
    global _stepped
    _stepped = next(_steps)  # ranks may be threads: two steps are never the same number


@functools.cache
def count_steps() -> None:
    register_optimizer_step_post_hook(_step)


class Seen:
    """A parameter as it was when its copies were made."""

    def __init__(self, tensor: Tensor) -> None:
        # Held: another tensor may get the address of one that is gone, and begins at the same
        # version. Not by a weakref: torch.utils.swap_tensors refuses tensors that have one.
        self._tensor = tensor
        self._state = self._of(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Writes to inference tensors are not counted by anyone: they have always changed."""
        same = self._tensor is tensor and self._state == self._of(tensor)
        return same and not tensor.is_inference()

    @staticmethod
    def _of(tensor: Tensor) -> tuple[int, int, int]:
        version = 0 if tensor.is_inference() else tensor._version
        steps = _stepped if tensor.requires_grad else 0
        return tensor.data_ptr(), version, steps
