"""The interfaces of DeepEP, carried by Ferry: `Buffer` of 1.2.1, `ElasticBuffer` of V2,
`EPBuffer` and others of V2.5.

docs/deep_ep.md of Ferry says what is the same and what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from ferry import Group as _Group  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "deep_ep: Ferry is not installed beside it (the index's project `ferry` is another one); "
        "run `pip install . ./python/deep_ep` in the root of Ferry's sources"
    ) from _error

from deep_ep import comm, utils
from deep_ep._C import (
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)
from deep_ep.buffer import Buffer
from deep_ep.buffers.allocator import BufferAllocator
from deep_ep.buffers.base import BufferBase
from deep_ep.buffers.bucket import BucketBuffer, BucketSession
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.buffers.engram import EngramBuffer
from deep_ep.buffers.ep import EPBuffer
from deep_ep.buffers.pp import PPBuffer
from deep_ep.config import Config, topk_idx_t
from deep_ep.elastic_group import ElasticGroup
from deep_ep.ep_handle import EPHandle
from deep_ep.errors import absent as _absent
from deep_ep.event import EventHandle, EventOverlap
from deep_ep.hybrid_ep_buffer import HybridEPBuffer, HybridEpConfigInstance
from deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size

__version__ = "1.2.1"

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "ElasticGroup",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEpConfigInstance",
    "PPBuffer",
    "comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise _absent("deep_ep", name)
