"""Helpers of DeepEP that callers import; each release's are in the modules of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep_ep.errors import absent as _absent
from deep_ep.utils.envs import check_nvlink_connections
from deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise _absent("deep_ep.utils", name)
