"""V2.5's functions on buffers."""

from __future__ import annotations

from typing import Any

from deep_ep.errors import refuse_destroyed, require, require_integer, require_only_context
from deep_ep.utils.envs import domain_sizes
from ferry.arguments import shown

__all__ = ["barrier", "get_comm_stream", "get_logical_domain_size", "get_physical_domain_size"]


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """Collective: `buffer.barrier`. context_idx: of a BucketBuffer, which of its groups; of others
    None or 0."""
    _require_buffer("barrier", buffer, "barrier")
    groups = getattr(buffer, "groups", None)
    if groups is None:
        require_only_context("barrier", context_idx)
        buffer.barrier(wait_comm_stream, with_cpu_sync, sequential)
        return
    if context_idx is not None:
        expected = f"None or 0 to {len(groups) - 1}"
        index = require_integer("barrier", "context_idx", context_idx, 0, expected)
        require(index < len(groups), "barrier", "context_idx", index, expected)
        context_idx = index
    group = None if context_idx is None else groups[context_idx]
    buffer.barrier(wait_comm_stream, with_cpu_sync, sequential, group=group)


def get_comm_stream(buffer: Any) -> Any:
    """The torch.cuda.Stream of a buffer's asynchronous exchanges."""
    _require_buffer("get_comm_stream", buffer, "runtime")
    if buffer.runtime is None:
        refuse_destroyed()
    return buffer.runtime.get_comm_stream()


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """As of `deep_ep.get_physical_domain_size`."""
    return domain_sizes(group_or_buffer, True)


def get_logical_domain_size(
    group_or_buffer: Any, allow_hybrid_mode: bool | None = None
) -> tuple[int, int]:
    """As of `deep_ep.get_logical_domain_size`; None: as the buffer, True of a group."""
    if allow_hybrid_mode is None:
        allow_hybrid_mode = getattr(group_or_buffer, "allow_hybrid_mode", True)
    return domain_sizes(group_or_buffer, allow_hybrid_mode)


def _require_buffer(call: str, given: Any, name: str) -> None:
    """It has what the call needs, and is no class."""
    good = hasattr(given, name) and not isinstance(given, type)
    require(good, call, "buffer", shown(given), "a buffer")
