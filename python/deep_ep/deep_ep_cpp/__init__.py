"""The name of the original's extension module, for callers that import from it."""

from __future__ import annotations

from deep_ep.buffer import Buffer as _Buffer
from deep_ep.config import Config, topk_idx_t
from deep_ep.event import EventHandle
from deep_ep.runtime import Runtime as Buffer

get_low_latency_rdma_size_hint = _Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = _Buffer.is_sm90_compiled

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "get_low_latency_rdma_size_hint",
    "is_sm90_compiled",
    "topk_idx_t",
]
