"""Where the tensors of a test lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])]
"""For parametrize."""


def device_of(buffer: Any, device: str) -> torch.device:
    """Of this rank, which is a thread: ranks take the GPUs in turn."""
    if device != "cuda":
        return torch.device(device)
    ordinal = buffer.rank % torch.cuda.device_count()
    torch.cuda.set_device(ordinal)
    return torch.device("cuda", ordinal)
