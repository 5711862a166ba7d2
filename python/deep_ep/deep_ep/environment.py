"""The environment variables that this package reads, all of them."""

from __future__ import annotations

import os

import torch

DEADLINE_S = 100.0


def deadline(default: float = DEADLINE_S) -> float:
    """FERRY_DEADLINE: seconds that any wait for a peer may take."""
    return _number("FERRY_DEADLINE", default)


def qp_depth() -> int:
    """NVSHMEM_QP_DEPTH: only reported, as `Buffer.nvshmem_qp_depth`: there are no such queues."""
    return int(_number("NVSHMEM_QP_DEPTH", 1024))


def topk_idx_dtype() -> torch.dtype:
    """TOPK_IDX_BITS: what `topk_idx_t` is. Routes of 32 and of 64 bits are taken whatever it is."""
    bits = os.environ.get("TOPK_IDX_BITS", "64")
    if bits not in ("32", "64"):
        raise ValueError(f"TOPK_IDX_BITS: got {bits!r}; expected 32 or 64")
    return torch.int32 if bits == "32" else torch.int64


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise ValueError(f"{name}: got {text!r}; expected a positive number")
    return value
