"""Low-latency mode."""

from __future__ import annotations

import torch

import ferry


class LowLatency:
    """The low-latency half of a Buffer. The other half provides what is declared here."""

    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool

    def _group_for(self, num_experts: int, device: torch.device) -> ferry.Group:
        raise NotImplementedError

    def _open_low_latency(self) -> None:
        """Called at the end of the constructor, on all ranks: prepares this half's own state."""

    def _close_low_latency(self) -> None:
        """Called by `destroy`, before the groups are left: drops what holds their memory."""
