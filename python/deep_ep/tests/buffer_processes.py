"""Runs a test's body on ranks that are processes, each with a Buffer."""

from __future__ import annotations

from typing import Any

from rank_buffers import ThreadComm
from rank_processes import RankProcesses

import deep_ep


def exchange(boot: Any, where: dict[str, Any], body: Any, arguments: Any, options: Any) -> Any:
    """One body on this rank, with a buffer of this device. kind: the name of its class."""
    comm = ThreadComm(boot)
    kind = getattr(deep_ep, options.pop("kind", "Buffer"))
    buffer = kind(comm, **options)
    buffer.explicitly_destroy = True
    try:
        result = body(buffer, "cuda" if where["backend"] == "cuda" else "cpu", *arguments)
        comm.allgather(None)
        return result
    finally:
        buffer.destroy()


class BufferProcesses(RankProcesses):
    """`size` processes on a device."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__(size, device, exchange)
