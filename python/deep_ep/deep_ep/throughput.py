"""Throughput mode."""

from __future__ import annotations

import torch

import ferry


class Throughput:
    """The throughput half of a Buffer. The other half provides what is declared here."""

    rank: int
    group_size: int

    def _group_for(self, num_experts: int, device: torch.device) -> ferry.Group:
        raise NotImplementedError
