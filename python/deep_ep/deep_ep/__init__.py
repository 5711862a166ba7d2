"""The interface of DeepEP 1.2.1, carried by Ferry.

`Buffer` is the way in; docs/deep_ep.md of Ferry says what is the same and what differs.
"""

from __future__ import annotations

try:
    from ferry import Group as _Group  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "deep_ep: Ferry is not installed beside it (the index's project `ferry` is another one); "
        "run `pip install . ./python/deep_ep` in the root of Ferry's sources"
    ) from _error

from deep_ep import utils
from deep_ep.buffer import Buffer
from deep_ep.config import Config, topk_idx_t
from deep_ep.event import EventHandle, EventOverlap

__version__ = "1.2.1"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
