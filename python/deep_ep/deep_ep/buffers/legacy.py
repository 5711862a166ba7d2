"""The name that V2 has for the module of `Buffer`."""

from __future__ import annotations

from deep_ep.buffer import Buffer

__all__ = ["Buffer"]
