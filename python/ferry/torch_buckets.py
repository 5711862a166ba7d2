"""Gradients that are views of registered memory, in buckets that are reduced during the backward.

A bucket is sent when autograd has accumulated its last gradient, buckets in one order on all ranks.
Gradients that autograd made elsewhere, as after `zero_grad()`, move there just before. What a
backward did not bring counts as zeros, and is sent at its end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ferry._ferry import Event
from ferry.arguments import refuse
from ferry.torch_gradients import MeanOfRanks

_UNIT = 32  # elements that each gradient's room is a multiple of: vectors stay aligned
Named = list[tuple[str, nn.Parameter]]


@dataclass
class _Bucket:
    """Neighbouring gradients, reduced by one call."""

    memory: Tensor
    members: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)  # in this backward
    sent: bool = False  # in this backward


def memory_bytes(parameters: Named) -> int:
    """That `GradientBuckets` takes."""
    return sum(_room(p) * p.element_size() for _, p in parameters) + len(parameters) + (1 << 16)


def _room(parameter: Tensor) -> int:
    return -(-parameter.numel() // _UNIT) * _UNIT


class GradientBuckets:
    """Of one model. All ranks go through their backwards in the same order."""

    def __init__(
        self, named: Named, mean: MeanOfRanks, bucket_bytes: int, finds_unused: bool
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._mean = mean
        self._bucket_bytes = bucket_bytes
        self._used: Tensor | None = None
        if finds_unused:
            self._used = mean.collectives.empty((len(named),), torch.uint8)
        self._memory = {
            dtype: mean.collectives.empty(
                (sum(_room(p) for p in self._parameters if p.dtype == dtype),), dtype
            ).zero_()
            for dtype in dict.fromkeys(p.dtype for p in self._parameters)
        }
        self._order = list(reversed(range(len(named))))  # a guess, until there was a backward
        self._lay()
        self._seen_order = False
        self.synchronises = True
        self.stopped = False
        self.busy_seconds = 0.0
        self.steps = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _Arrival(self, index)
            )
            for index, parameter in enumerate(self._parameters)
        ]

    def _lay(self) -> None:
        """Divides the memory among the parameters, in the order in which gradients come."""
        self._buckets: list[_Bucket] = []
        self._views: dict[int, Tensor] = {}
        starts = dict.fromkeys(self._memory, 0)
        last: dict[torch.dtype, _Bucket] = {}
        for index in self._order:
            parameter = self._parameters[index]
            dtype, room = parameter.dtype, _room(parameter)
            start = starts[dtype]
            starts[dtype] += room
            memory, bucket = self._memory[dtype], last.get(dtype)
            together = room + (0 if bucket is None else bucket.memory.numel())
            if bucket is None or together * parameter.element_size() > self._bucket_bytes:
                bucket = last[dtype] = _Bucket(memory[start:start])
                self._buckets.append(bucket)
            bucket.memory = memory[start - bucket.memory.numel() : start + room]
            bucket.members.append(index)
            strides = torch.empty_like(parameter, device="meta").stride()
            self._views[index] = memory.as_strided(parameter.size(), strides, start)
        self._of = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._expect()

    def _expect(self) -> None:
        """The state between two backwards."""
        for bucket in self._buckets:
            bucket.missing, bucket.sent = set(bucket.members), False
        self._next = 0  # bucket to be sent
        self._began: float | None = None  # this backward, whose end is asked for
        self._events: list[Event] = []
        self._arrived: list[int] = []
        self._unused: list[int] = []  # of those sent

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """A forward has brought these, from which the backward begins."""
        inside_backward = torch._C._current_graph_task_id() != -1  # a checkpoint runs it again
        if self._began is not None and not inside_backward:  # the last backward failed
            events = self._events
            self._expect()
            for event in events:  # its gradients are still written
                event.wait()
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(lambda _: self._begin())  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        if self._began is None:
            self._began = time.perf_counter()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)

    def arrive(self, index: int) -> None:
        """The gradient of this parameter has been accumulated."""
        self._begin()
        if not self.synchronises:
            return
        bucket = self._of[index]
        if index in bucket.missing:
            bucket.missing.remove(index)
            self._arrived.append(index)
        elif bucket.sent:
            refuse(
                "DistributedDataParallel: backward",
                f"a second gradient of {self._names[index]!r} when the first one had been sent",
                "one for each parameter, as without use_reentrant=True of a checkpoint",
            )
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.sent = True
        to: list[Tensor] = []
        values: list[Tensor] = []
        for index in bucket.members:
            parameter, view = self._parameters[index], self._views[index]
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                self._unused.append(index)
            elif gradient.layout != torch.strided:
                refuse(
                    "DistributedDataParallel: backward",
                    f"a gradient of {self._names[index]!r} of layout {gradient.layout}",
                    "a strided one: sparse=False of the embedding",
                )
            elif gradient.data_ptr() != view.data_ptr():
                to.append(view)
                values.append(gradient)
            parameter.grad = view
        if to:
            torch._foreach_copy_(to, values)
        self._events.append(self._mean.start(bucket.memory))

    def _finish(self) -> None:
        """torch's callback at the end of a backward."""
        began = self._began or 0.0
        try:
            arrived = self._arrived
            while arrived and self._next < len(self._buckets):
                self._send()
            if arrived and self._used is not None:
                self._used.fill_(1)
                self._used[self._unused] = 0
                self._events.append(self._mean.start_used(self._used))
            self.busy_seconds += time.perf_counter() - began
            for event in self._events:
                event.wait()
        finally:
            self._expect()
        if not arrived:
            return
        self.steps += 1
        if self._used is not None:
            for index in (self._used == 0).nonzero().flatten().tolist():
                self._parameters[index].grad = None
        if not self._seen_order:
            self._seen_order = True
            self._reorder(arrived)

    def _reorder(self, arrived: list[int]) -> None:
        """Collective. From here on, buckets are filled in the order in which rank 0 has just got
        its gradients; those that it has not got come last."""
        absent = set(self._order).difference(arrived)
        order = torch.tensor(arrived + [index for index in self._order if index in absent])
        self._mean.collectives.broadcast(order, 0)
        if order.tolist() == self._order:
            return
        self._order = order.tolist()
        kept = {memory.dtype: memory.clone() for memory in self._memory.values()}
        before = self._views
        self._lay()
        for index, view in before.items():
            parameter, place = self._parameters[index], self._views[index]
            old = kept[place.dtype].as_strided(view.size(), view.stride(), view.storage_offset())
            place.copy_(old)
            if parameter.grad is not None:
                parameter.grad = place

    def stop(self) -> None:
        """Leaves the gradients alone from here on."""
        self.stopped = True
        for hook in self._hooks:
            hook.remove()


def is_reduced(parameter: Tensor) -> bool:
    """Whether some buckets have this parameter's gradient."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, _Arrival) and hook.in_use for hook in hooks.values())


class _Arrival:
    """torch's hook of a parameter, which must not keep the buckets alive."""

    def __init__(self, buckets: GradientBuckets, index: int) -> None:
        self._buckets = weakref.ref(buckets)
        self._index = index

    @property
    def in_use(self) -> bool:
        """Whether the buckets are still there."""
        return self._buckets() is not None

    def __call__(self, parameter: Tensor) -> None:
        buckets = self._buckets()
        if buckets is not None:
            buckets.arrive(self._index)
