"""Copies of experts on other ranks, for `EPBuffer`: Ferry does it, by a table of the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ferry
import ferry.torch
from deep_ep.arguments import check_memory, is_strided, words
from deep_ep.errors import require, require_integer
from deep_ep.event import EventHandle, EventOverlap
from deep_ep.sizes import TMA_STEP
from deep_ep.streams import event_of

Some = Tensor | Sequence[Tensor]


class Balancing:
    """The half of an EPBuffer that moves experts. `_ranks`: collectives where the tensors lie."""

    _lb_storage: Tensor
    num_ranks: int

    def _ranks(self, device: torch.device) -> ferry.Collectives:
        raise NotImplementedError

    def lb_get_theoretical_num_sms(self) -> int:
        """The default of the next two: as many as Ferry's collectives use by themselves, 0."""
        return 0

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Some,
        expert_weights: Some,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> EventOverlap:
        """Collective. The slots that the mapping names become copies of experts.

        redundant_expert_weights: [C, ...] in the region of `lb_allocation_plan_or_num_bytes`, or
        several. expert_weights: [L, ...], as many. Bytes of an expert: as many on both sides, a
        multiple of `get_num_tma_alignment()`. redundancy_mapping: i32 [R, C], the same on all
        ranks: slot c of rank r copies this expert, -1: none. On GPUs the CPU waits for it.
        num_sms: 0: Ferry's own default, the only value. previous_event: the call waits for it; it
        stands on the current stream.
        """
        call = "lb_prefetch_weights"
        copies = _several(call, "redundant_expert_weights", redundant_expert_weights)
        own = _several(call, "expert_weights", expert_weights)
        pairs = f"{len(copies)} and {len(own)} tensors"
        require(0 < len(copies) == len(own), call, "expert_weights", pairs, "as many of both")
        table = self._table(call, redundancy_mapping, num_sms, previous_event)
        for copy, source in zip(copies, own):
            self._require_region(call, "redundant_expert_weights", copy)
            size = source[:1].numel() * source.element_size()
            step = f"a multiple of {TMA_STEP} bytes an expert"
            require(size % TMA_STEP == 0, call, "expert_weights", f"{size} bytes", step)
            ferry.torch.copy_experts(self._ranks(source.device), source, copy, table)
        return EventOverlap(EventHandle())

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> EventOverlap:
        """Collective. Adds what the slots hold, f32 [C, n] in the region, to the gradients of the
        experts that they copy, f32 [L, n], in ascending rank, then slot. The other arguments: as of
        `lb_prefetch_weights`."""
        call = "lb_reduce_grads"
        for name, one in (
            ("redundant_expert_grads", redundant_expert_grads),
            ("expert_grads", expert_grads),
        ):
            _check_tensor(call, name, one)
        self._require_region(call, "redundant_expert_grads", redundant_expert_grads)
        table = self._table(call, redundancy_mapping, num_sms, previous_event)
        ranks = self._ranks(expert_grads.device)
        ferry.torch.reduce_experts(ranks, redundant_expert_grads, expert_grads, table)
        return EventOverlap(EventHandle())

    def _table(self, call: str, mapping: Tensor, num_sms: int, previous: Any) -> list[list[int]]:
        sms = require_integer(call, "num_sms", num_sms, 0, "0, Ferry's own default")
        require(sms == 0, call, "num_sms", sms, "0, Ferry's own default")
        good = isinstance(mapping, Tensor) and mapping.dtype == torch.int32 and mapping.dim() == 2
        wanted = f"torch.int32 of shape ({self.num_ranks}, any)"
        require(good, call, "redundancy_mapping", getattr(mapping, "dtype", mapping), wanted)
        check_memory(call, redundancy_mapping=mapping)
        event = event_of(call, previous)
        if event is not None:
            event.current_stream_wait()
        found: list[list[int]] = mapping.tolist()
        return found

    def _require_region(self, call: str, name: str, tensor: Tensor) -> None:
        region = self._lb_storage
        begin = tensor.data_ptr() - region.data_ptr()
        size = tensor.numel() * tensor.element_size()
        good = size == 0 or 0 <= begin <= region.numel() - size
        expected = "one in the region of lb_allocation_plan_or_num_bytes"
        require(good, call, name, "a tensor that lies elsewhere", expected)


def _several(call: str, name: str, given: Some) -> list[Tensor]:
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in several:
        _check_tensor(call, name, one)
    return several


def _check_tensor(call: str, name: str, given: Any) -> None:
    good = is_strided(given) and given.dim() > 0
    require(good, call, name, words(given), "a strided tensor, its first dimension that of experts")
    check_memory(call, **{name: given})
