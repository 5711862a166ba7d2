"""The name that V2 has for the module of events."""

from __future__ import annotations

from deep_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
