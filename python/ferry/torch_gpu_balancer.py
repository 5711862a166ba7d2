"""`ferry.BatchBalancer` on a GPU: a kernel plans batches, and nothing waits for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferry import _ferry
from ferry.arguments import flag, instance, integer
from ferry.errors import UnsupportedError
from ferry.experts import checked_sizes
from ferry.streams import Streams, chosen_gpu
from ferry.tensors import dense, view


class GpuBalancer:
    """`ferry.BatchBalancer` for routes on a GPU: the same plans, bit for bit, made by a kernel.

    The steps and the arguments are those of `BatchBalancer`. Every call runs on torch's current
    stream and returns at once, so that all of it can be captured into a CUDA graph; all calls of
    one balancer are ordered by that stream. In a graph, `invalidate` and `again` hold in every
    replay.

    Up to 64 ranks, and as many experts and slots as the shared memory of a block holds: thousands.
    """

    def __init__(
        self,
        *,
        experts: int,
        ranks: int,
        slots: int,
        domain_size: int = 0,
        copy_rows: int = 0,
        max_rows: int = 0,
        device: Any = None,
    ) -> None:
        given = (experts, ranks, slots, domain_size, copy_rows, max_rows)
        sizes = checked_sizes("GpuBalancer", *given)
        needed = _ferry.GpuBalancer.memory_bytes(*sizes[:3])
        if not _ferry.has_cuda:
            raise UnsupportedError(
                "GpuBalancer: this build of Ferry has the host engine only; expected a build with "
                "FERRY_CUDA=ON, or a BatchBalancer"
            )
        self._gpu = chosen_gpu(device)
        self._streams = Streams(self._gpu)
        self._device = torch.device("cuda", self._gpu)
        self._memory = torch.empty(needed, dtype=torch.uint8, device=self._device)
        place = self._streams.place("GpuBalancer", None, self._memory)
        memory, _ = view("GpuBalancer: memory", self._memory, writable=True, place=place)
        assert place.stream is not None
        self._raw = _ferry.GpuBalancer(*sizes, memory, place.stream)
        self._offsets = self._raw.offsets(self._memory.data_ptr())

    @property
    def experts(self) -> int:
        """Logical experts."""
        return self._raw.experts

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self._raw.ranks

    @property
    def slots(self) -> int:
        """Slots for copies on each rank."""
        return self._raw.slots

    @property
    def group_experts(self) -> int:
        """Experts of the group: the logical ones and all slots."""
        return self._raw.group_experts

    @property
    def table(self) -> Tensor:
        """i32 [ranks, slots] on the GPU, which the next plan changes: as of `BatchBalancer`."""
        return self._part(0, self.ranks * self.slots).view(self.ranks, self.slots)

    @property
    def fetches(self) -> Tensor:
        """The same of what must be fetched."""
        return self._part(1, self.ranks * self.slots).view(self.ranks, self.slots)

    @property
    def load(self) -> Tensor:
        """i32 [ranks]: slots of routes that each rank works on in this batch."""
        return self._part(2, self.ranks)

    @property
    def plan_id(self) -> Tensor:
        """i64 [1]; 0: nothing was planned; -1: a batch was to be planned `again`, and is
        forgotten."""
        return self._part(3, 2).view(torch.int64)

    def _part(self, number: int, words: int) -> Tensor:
        first = self._offsets[number]
        return self._memory[first : first + 4 * words].view(torch.int32)

    def counts(self, topk_idx: Tensor, *, out: Tensor | None = None) -> Tensor:
        """i32 [experts]; ids that are no expert are not counted. out: where they go."""
        routes, place = self._routes("counts", topk_idx)
        if out is None:
            out = torch.empty(self.experts, dtype=torch.int32, device=self._device)
        raw, _ = view("counts: out", out, writable=True, expected="i32", place=place)
        self._raw.counts(routes, raw, place.stream)
        return out

    def invalidate(self, rank: int) -> None:
        """The weights of experts that live on this rank have changed, before the next plan."""
        self._raw.invalidate(integer("invalidate: rank", rank, 0, self.ranks - 1))

    def plan(self, counts: Tensor, *, again: bool = False) -> None:
        """counts: i32 [ranks, experts], of all ranks in order, 2**31 - 1 at most in all; or
        [ranks, experts + 1], whose last column is not 0 for ranks whose experts have changed.
        again: as of `BatchBalancer`; where the batch is forgotten, `plan_id` is -1, and
        `Group.plan` refuses the places."""
        instance("plan: counts", counts, Tensor, "a tensor")
        place = self._streams.place("plan", None, counts)
        counts = dense("plan: counts", counts)
        raw, _ = view("plan: counts", counts, expected="i32", place=place)
        assert place.stream is not None
        self._raw.plan(raw, place.stream, flag("plan: again", again))

    def fetching(self) -> None:
        """As of `BatchBalancer`."""
        self._raw.fetching()

    def fetched(self) -> None:
        """As of `BatchBalancer`."""
        place = self._streams.place("fetched", None, self._memory)
        assert place.stream is not None
        self._raw.fetched(place.stream)

    def places(self, topk_idx: Tensor, rank: int) -> Tensor:
        """i64 [T, K], as of `BatchBalancer`; the routes are not compared with the counts, and
        `Group.plan` refuses an id that is no expert."""
        rank = integer("places: rank", rank, 0, self.ranks - 1)
        routes, place = self._routes("places", topk_idx)
        places = torch.empty(topk_idx.shape, dtype=torch.int64, device=self._device)
        out, _ = view("places: out", places, writable=True, place=place)
        self._raw.places(routes, rank, out, place.stream)
        return places

    def _routes(self, call: str, topk_idx: Tensor) -> tuple[_ferry.View, Any]:
        name = f"{call}: topk_idx"
        instance(name, topk_idx, Tensor, "a tensor")
        place = self._streams.place(call, None, topk_idx)
        return view(name, dense(name, topk_idx), expected="i64 or i32", place=place)[0], place

    def __repr__(self) -> str:
        return (
            f"ferry.torch.GpuBalancer({self.experts} experts, {self.ranks} ranks, "
            f"{self.slots} slots, {self._device})"
        )
