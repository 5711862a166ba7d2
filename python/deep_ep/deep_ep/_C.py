"""The name of V2's extension module, for callers that import from it."""  # noqa: N999

from __future__ import annotations

from deep_ep.config import Config, topk_idx_t
from deep_ep.event import EventHandle
from deep_ep.sizes import SIZE_STEP, TMA_STEP


def get_elastic_buffer_alignment() -> int:
    """Bytes, of which buffer sizes are multiples."""
    return SIZE_STEP


def get_num_allocation_alignment() -> int:
    """The same, of tensors that a BufferAllocator plans."""
    return SIZE_STEP


def get_num_rdma_alignment() -> int:
    """The same, of tensors that a session allocates."""
    return TMA_STEP


def get_num_tma_alignment() -> int:
    """Bytes, of which an expert's weights are a multiple."""
    return TMA_STEP


__all__ = [
    "Config",
    "EventHandle",
    "get_elastic_buffer_alignment",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "topk_idx_t",
]
