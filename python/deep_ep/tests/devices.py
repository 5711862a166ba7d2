"""Where the tensors of a test lie."""

from __future__ import annotations

from typing import Any

import torch


def device_of(buffer: Any, device: str) -> torch.device:
    """Of this rank: ranks take the GPUs in turn."""
    if device != "cuda":
        return torch.device(device)
    ordinal = buffer.rank % torch.cuda.device_count()
    torch.cuda.set_device(ordinal)
    return torch.device("cuda", ordinal)
