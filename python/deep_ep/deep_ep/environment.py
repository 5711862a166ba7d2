"""The environment variables that this package reads, all of them."""

from __future__ import annotations

import os

import torch

from deep_ep.errors import MOST_SECONDS

DEADLINE_S = 100.0


def deadline(default: float = DEADLINE_S) -> float:
    """FERRY_DEADLINE: seconds that any wait for a peer may take."""
    return _number("FERRY_DEADLINE", default)


def shows_buffers() -> bool:
    """EP_BUFFER_DEBUG: whether a buffer says what it is when it is made."""
    return os.environ.get("EP_BUFFER_DEBUG", "0") not in ("", "0")


def qp_depth() -> int:
    """NVSHMEM_QP_DEPTH: only reported, as `Buffer.nvshmem_qp_depth`: there are no such queues."""
    return int(_number("NVSHMEM_QP_DEPTH", 1024))


def topk_idx_dtype() -> torch.dtype:
    """TOPK_IDX_BITS, or as V2 calls it EP_NUM_TOPK_IDX_BITS, whose 0 is 64: what `topk_idx_t` is.
    Routes of 32 and of 64 bits are taken whatever it is."""
    later = os.environ.get("EP_NUM_TOPK_IDX_BITS", "0")
    name, bits = ("EP_NUM_TOPK_IDX_BITS", later)
    if later in ("", "0"):
        name, bits = "TOPK_IDX_BITS", os.environ.get("TOPK_IDX_BITS", "64")
    if bits not in ("32", "64"):
        raise ValueError(f"{name}: got {bits!r}; expected 32 or 64")
    return torch.int32 if bits == "32" else torch.int64


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < MOST_SECONDS:
        raise ValueError(f"{name}: got {text!r}; expected a positive number below 1e9")
    return value
