"""`BucketBuffer` of DeepEP V2.5: collectives on tensors of one registered piece of memory."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.arguments import carried_rows, check_dtype, check_memory, is_strided, shapes_of, words
from deep_ep.buffers.allocator import BufferAllocator, planned_bytes
from deep_ep.buffers.base import BufferBase, bootstrap_of
from deep_ep.errors import refuse, require, require_flags, require_seconds
from deep_ep.event import EventHandle, EventOverlap
from deep_ep.gradients import without_gradients
from deep_ep.groups import Groups
from deep_ep.runtime import Runtime
from deep_ep.sizes import TMA_STEP, round_up
from ferry.arguments import shown, whole_number

Some = Tensor | Sequence[Tensor]


class BucketBuffer(BufferBase):
    """Memory that the ranks of one or several groups reduce and gather tensors in. Its tensors are
    views of `storage`; those of elsewhere take a `session`.

    The sums are Ferry's: in ascending rank, the same bits on all ranks. Calls run on the current
    stream and return an event, whose `wait()` returns a tensor for a tensor, a list for a list.

    Args:
        group: a process group of torch.distributed, a communicator of mpi4py, or several.
        allocation_plan_or_num_bytes: a plan, whose tensors become views of the storage, or its
            bytes. It lies on the GPU once torch has used one, else in CPU memory.
        sl_idx: None, or a service level, which is not set: as of an `ElasticBuffer`.
        num_gpu_timeout_secs: bounds every wait, unless FERRY_DEADLINE does.
    """

    def __init__(
        self,
        group: Any,
        allocation_plan_or_num_bytes: BufferAllocator | int,
        sl_idx: int | None = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(explicitly_destroy)
        name, call = "allocation_plan_or_num_bytes", "BucketBuffer"
        plan, self.num_bytes = planned_bytes(call, name, allocation_plan_or_num_bytes)
        require(self.num_bytes > 0, call, name, self.num_bytes, "at least 1 byte")
        require_seconds(call, "num_gpu_timeout_secs", num_gpu_timeout_secs)
        self.groups = list(group) if isinstance(group, (list, tuple)) else [group]
        require(len(self.groups) > 0, call, "group", "no group", "at least one")
        self._meet(self.groups[0], deadline=num_gpu_timeout_secs, sl_idx=sl_idx)
        self.group = self.groups[0]
        self._others = [
            Groups(bootstrap_of(call, one), 0, num_gpu_timeout_secs) for one in self.groups[1:]
        ]
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        room = 2 * self.num_bytes if on_gpu else self.num_bytes + (1 << 20)
        self._collectives = [one.collectives(device, room) for one in (self._groups, *self._others)]
        others = [Runtime(one.everyone, 0, 0) for one in self._others]
        self.contexts = [self.runtime, *others]
        self.storage: Any = self._collectives[0].empty((self.num_bytes,), "u8", like="torch")
        self.storage.zero_()
        self._session: BucketSession | None = None
        if plan is not None:
            plan.materialize(self.storage)

    def _close(self) -> None:
        self.storage = None
        self.contexts = []
        for one in self._others:
            one.destroy()

    def get_context_idx(self, group: Any) -> int:
        """Of one of `groups`; None: of the only one."""
        if group is None:
            require(len(self.groups) == 1, "get_context_idx", "group", "None", "one of the groups")
            return 0
        for index, one in enumerate(self.groups):
            if one is group:
                return index
        return refuse("get_context_idx", "group", "one of another buffer", "one of the groups")

    def get_theoretical_num_sms(self, op: str, group: Any = None) -> int:
        """Of all_gather, reduce_scatter and all_reduce: 0, Ferry's own default."""
        names = ("all_gather", "reduce_scatter", "all_reduce")
        good = isinstance(op, str) and op in names
        require(good, "get_theoretical_num_sms", "op", shown(op), f"one of {names}")
        self.get_context_idx(group)
        return 0

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        group: Any = None,
    ) -> None:
        """Collective. On GPUs the CPU waits for the current stream, or for all of the GPU with
        with_cpu_sync, and then for the other ranks. The calls run on the current stream, which
        leaves nothing for wait_comm_stream; ranks of several hosts meet in one step."""
        require_flags("barrier", wait_comm_stream=wait_comm_stream, sequential=sequential)
        require_flags("barrier", with_cpu_sync=with_cpu_sync)
        ranks = self._ranks(group)
        if self.storage.is_cuda:
            waits: Any = torch.cuda if with_cpu_sync else torch.cuda.current_stream()
            waits.synchronize()
        ranks.barrier()

    def session(self) -> BucketSession:
        """A `with` block in which tensors of elsewhere are taken, and have room in the storage."""
        return BucketSession(self)

    @without_gradients
    def all_gather(
        self, srcs: Some, dsts: Some | None = None, group: Any = None, num_sms: int | None = None
    ) -> EventOverlap:
        """Collective. Each tensor of all ranks, in ascending order; any dtype.

        srcs: without dsts: block `rank` of a tensor of the storage, which is gathered there. dsts:
        tensors of the storage, of `size` times the bytes, for srcs from anywhere. num_sms: None or
        0. The results are of one dimension.
        """
        call = "all_gather"
        ranks = self._ranks(group)
        sources, packed = _several(call, "srcs", srcs)
        given = [None] * len(sources) if dsts is None else list(_several(call, "dsts", dsts)[0])
        pairs = f"{len(given)} tensors"
        require(len(given) == len(sources), call, "dsts", pairs, f"{len(sources)}, as srcs")
        sms = self._sms(call, num_sms, (0,))
        results, external = [], []
        for src, dst in zip(sources, given):
            self._check(call, src)
            whole, outside = self._gathered(call, ranks, src, dst, group)
            sent = carried_rows(src.reshape(-1))
            ranks.all_gather(sent, whole.view(sent.dtype), num_sms=sms)
            results.append(whole)
            external.append(outside)
        return _ended(call, results, external, packed)

    @without_gradients
    def reduce_scatter(
        self,
        srcs: Some,
        comm_precision: str = "fp32",
        scale: float = 1.0,
        group: Any = None,
        num_sms: int | None = None,
    ) -> EventOverlap:
        """Collective. Block `rank` of each tensor's sum over the ranks, times scale, where it lies.

        srcs: f32, tensors of the storage, of `size` equal blocks; others than the own block keep
        nothing of use. comm_precision: "fp32"; "bf16" between several hosts, in CPU memory:
        partial sums cross so. num_sms: None: Ferry's own default.
        """
        call = "reduce_scatter"
        ranks = self._ranks(group)
        formats = {"fp32": "exact", "bf16": "bf16"}
        good = isinstance(comm_precision, str) and comm_precision in formats
        require(good, call, "comm_precision", shown(comm_precision), "'fp32' or 'bf16'")
        good = comm_precision == "fp32" or (ranks.domains > 1 and not self.storage.is_cuda)
        require(
            good, call, "comm_precision", "'bf16' on one host", "'fp32': sums do not cross hosts"
        )
        how: dict[str, Any] = {
            "format": formats[comm_precision],
            "num_sms": self._sms(call, num_sms),
        }
        if self.storage.is_cuda:
            del how["format"]

        def run(flat: Tensor) -> Tensor:
            good = flat.numel() % ranks.size == 0
            expected = f"a multiple of {ranks.size} elements"
            require(good, call, "srcs", f"{flat.numel()} elements", expected)
            block = flat.view(ranks.size, -1)[ranks.rank]
            ranks.reduce_scatter(flat, block, **how)
            return block

        return self._reduced(call, srcs, scale, group, run)

    @without_gradients
    def all_reduce(
        self, srcs: Some, scale: float = 1.0, group: Any = None, num_sms: int | None = None
    ) -> EventOverlap:
        """Collective. Each tensor, f32 and of the storage, becomes its sum over the ranks, times
        scale. num_sms: None: Ferry's own default."""
        ranks, sms = self._ranks(group), self._sms("all_reduce", num_sms)

        def run(flat: Tensor) -> Tensor:
            ranks.all_reduce(flat, num_sms=sms)
            return flat

        return self._reduced("all_reduce", srcs, scale, group, run)

    def _reduced(
        self, call: str, srcs: Some, scale: float, group: Any, run: Callable[[Tensor], Tensor]
    ) -> EventOverlap:
        sources, packed = _several(call, "srcs", srcs)
        factor = _factor(call, scale)
        results = []
        for src in sources:
            self._check(call, src)
            require(src.dtype == torch.float32, call, "srcs", src.dtype, "torch.float32")
            own = src
            if not self._inside(src):
                own = self._room(call, src.shape, src.dtype, group)
                own.copy_(src)
            made = run(own.view(-1))
            if factor != 1.0:
                made.mul_(factor)
            results.append(made.view(own.shape) if call == "all_reduce" else made)
        return _ended(call, results, [None] * len(results), packed)

    def _gathered(
        self, call: str, ranks: ferry.Collectives, src: Tensor, dst: Tensor | None, group: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Where a tensor is gathered, of one dimension, and what the result is copied to."""
        size, bytes_of_src = ranks.size, src.numel() * src.element_size()
        if dst is not None:
            good = dst.is_contiguous() and dst.numel() * dst.element_size() == size * bytes_of_src
            got = f"{dst.numel() * dst.element_size()} bytes"
            require(good, call, "dsts", got, f"a dense tensor of {size * bytes_of_src} bytes")
            check_memory(call, dsts=dst)
            if self._inside(dst):
                first = dst.data_ptr() - self.storage.data_ptr()
                good, step = first % src.element_size() == 0, f"a multiple of {src.element_size()}"
                require(good, call, "dsts", f"byte {first} of the storage", f"{step}, as of srcs")
                return dst.view(-1).view(src.dtype), None
        elif self._inside(src):
            first = src.data_ptr() - self.storage.data_ptr() - ranks.rank * bytes_of_src
            good = 0 <= first <= self.num_bytes - size * bytes_of_src
            require(
                good, call, "srcs", "a tensor without room beside it", "block `rank` of a tensor"
            )
            return self.storage[first : first + size * bytes_of_src].view(src.dtype), None
        return self._room(call, (size * src.numel(),), src.dtype, group), dst

    def _room(self, call: str, shape: Sequence[int], dtype: torch.dtype, group: Any) -> Tensor:
        if self._session is None:
            expected = "one of the storage, or a call in a session"
            refuse(call, "srcs", "a tensor that lies elsewhere", expected)
        found = self._session.allocate(tuple(shape), dtype, group)
        assert isinstance(found, Tensor)
        return found

    def _check(self, call: str, tensor: Any) -> None:
        good = isinstance(tensor, Tensor) and tensor.device == self.storage.device
        got = f"a tensor of {getattr(tensor, 'device', type(tensor).__name__)}"
        require(good, call, "srcs", got, f"one of {self.storage.device}, where the storage is")
        require(tensor.numel() > 0, call, "srcs", "an empty tensor", "at least one element")
        good = tensor.is_contiguous() or not self._inside(tensor)
        require(good, call, "srcs", f"strides {tensor.stride()}", "a dense tensor of the storage")
        check_memory(call, srcs=tensor)

    def _inside(self, tensor: Tensor) -> bool:
        begin: int = tensor.data_ptr() - self.storage.data_ptr()
        return 0 <= begin < self.num_bytes

    def _ranks(self, group: Any) -> ferry.Collectives:
        self._require_living()
        index = self.get_context_idx(group)
        if self._session is not None:
            self._session.require_group(index)
        return self._collectives[index]

    def _sms(self, call: str, num_sms: int | None, only: tuple[int, ...] = ()) -> int:
        sms = 0 if num_sms is None else whole_number(num_sms)
        good = sms is not None and sms >= 0 and (not only or num_sms is None or sms in only)
        require(good, call, "num_sms", num_sms, "None or 0" if only else "None, or 0 or more")
        return sms or 0


class BucketSession:
    """Room in a buffer's storage, from its beginning, for the time of a `with` block: what the
    storage held before is overwritten."""

    def __init__(self, buffer: BucketBuffer) -> None:
        self.buffer = buffer
        self.alignment = TMA_STEP
        self.num_allocated_bytes = 0
        self.context_idx: int | None = None

    def __enter__(self) -> BucketBuffer:
        self.buffer._require_living()
        nested = self.buffer._session is not None
        require(not nested, "session", "buffer", "one in a session", "one session at a time")
        self.buffer._session = self
        self.num_allocated_bytes, self.context_idx = 0, None
        return self.buffer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.buffer._session = None

    def allocate(
        self, shapes: Any, dtype: torch.dtype = torch.float32, group: Any = None
    ) -> Tensor | tuple[Tensor, ...]:
        """A tensor of the storage for a shape, a tuple of them for several shapes."""
        call = "allocate"
        check_dtype(call, dtype)
        given, several = shapes_of(call, shapes)
        good = self.buffer._session is self
        require(good, call, "session", "one that is not open", "a call in its `with` block")
        self.require_group(self.buffer.get_context_idx(group))
        made = tuple(self._one(shape, dtype) for shape in given)
        return made if several else made[0]

    def require_group(self, index: int) -> None:
        """All calls of a session are of one group."""
        good = self.context_idx in (None, index)
        require(
            good, "session", "group", f"group {index}", f"{self.context_idx}, as the calls before"
        )
        self.context_idx = index

    def _one(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size, first = math.prod(shape) * dtype.itemsize, self.num_allocated_bytes
        left = self.buffer.num_bytes - first
        require(size <= left, "session", "storage", f"{left} bytes that are left", f"{size}")
        self.num_allocated_bytes = min(
            first + round_up(size, self.alignment), self.buffer.num_bytes
        )
        found: Tensor = self.buffer.storage[first : first + size].view(dtype).view(tuple(shape))
        return found


def _several(call: str, name: str, given: Some) -> tuple[list[Tensor], bool]:
    """A list, and whether it was one tensor."""
    packed = isinstance(given, Tensor)
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in several:
        require(is_strided(one), call, name, words(one), "a strided tensor, or a list of them")
    return several, packed  # type: ignore[return-value]


def _factor(call: str, scale: Any) -> float:
    """A number that a float can hold."""
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        try:
            return float(scale)
        except OverflowError:
            pass
    return refuse(call, "scale", shown(scale), "a number, of a float's range")


def _ended(
    call: str, results: list[Tensor], external: list[Tensor | None], packed: bool
) -> EventOverlap:
    """The event of a call, whose wait copies what goes elsewhere and returns the results."""

    @without_gradients
    def hook() -> Any:
        for at, out in enumerate(external):
            if out is not None:
                check_memory(call, dsts=out)
                out.view(-1).copy_(results[at].view(out.dtype))
                results[at] = out
        return results[0] if packed else results

    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(hook)
    event.num_sms = 0  # type: ignore[attr-defined]
    return event
