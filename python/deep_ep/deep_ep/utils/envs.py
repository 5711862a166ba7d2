"""What callers ask about the machine."""

from __future__ import annotations

from typing import Any

import torch


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Collective: hosts, or other groups of ranks that share memory, and the ranks of one. group:
    as of an ElasticBuffer; or a buffer, which only answers."""
    return domain_sizes(group, True)


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Collective: the same; without allow_hybrid_mode one group of all ranks."""
    return domain_sizes(group, allow_hybrid_mode)


def check_nvlink_connections(group: Any) -> None:
    """Nothing is demanded: GPUs that reach each other over PCIe alone serve, too."""


def check_torch_deterministic() -> None:
    """torch does not fill new memory, which would cost a kernel for each result."""
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not (torch.are_deterministic_algorithms_enabled() and filled), (
        "torch.utils.deterministic.fill_uninitialized_memory: got True beside deterministic "
        "algorithms; expected False"
    )


def domain_sizes(group: Any, allow_hybrid_mode: bool) -> tuple[int, int]:
    """Of a group, collective; or of a buffer."""
    from deep_ep.buffers.base import BufferBase, bootstrap_of
    from deep_ep.errors import refuse_destroyed
    from deep_ep.groups import Groups
    from deep_ep.runtime import Runtime

    runtime = getattr(group, "runtime", None)
    if runtime is None and isinstance(group, BufferBase):
        refuse_destroyed()
    if runtime is None:
        groups = Groups(bootstrap_of("get_physical_domain_size", group), 0)
        runtime = Runtime(groups.everyone, 0, 0)
        groups.destroy()
    found: tuple[int, int] = runtime.get_logical_domain_size(allow_hybrid_mode)
    return found
