"""torch.distributed over Ferry: `init_process_group("ferry")`, once `ferry.torch` is imported.

A Python subclass of ProcessGroup, so nothing links libtorch. Calls run in the order in which they
were made: at once if nothing is under way and the caller waits anyway, else on one thread of the
group, so that a training goes on meanwhile. Transfers between two ranks are beside that order.
Tensors that are not on the CPU go to a process group of their device, made at the first of them.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ferry import torch_reductions
from ferry._ferry import Stream
from ferry.arguments import refuse
from ferry.bootstrap import from_store
from ferry.collectives import Collectives
from ferry.meetings import next_meeting
from ferry.tensors import dense, storage_of
from ferry.torch_work import AllWork, FerryWork, TransferWork, WorkerWork, guarded

_MOST_SECONDS = 1e8
# Up to torch 2.6 a call from C++ does not keep the Python object of what it returned.
_KEPT_WORKS = 0 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7) else 256


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if not dist.is_nccl_available():
        refuse("ferry process group: tensor", "one on a GPU, without NCCL", "a torch with NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    prefixed = dist.distributed_c10d.PrefixStore("nccl", store)
    return dist.ProcessGroupNCCL(prefixed, rank, size, options)


# Makes the process group for tensors of that kind of device, from (store, rank, size, timeout).
delegates: dict[str, Callable[[Any, int, int, timedelta], Any]] = {"cuda": _nccl}


def _tensor_in(args: Any) -> torch.Tensor | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg
        if isinstance(arg, (list, tuple)) and (found := _tensor_in(arg)) is not None:
            return found
    return None


def _by_device(*names: str) -> Callable[[Any], Any]:
    """A call of CPU tensors; with others it goes to their process group, by the first of `names`
    that it has."""

    def decorate(call: Any) -> Any:
        @functools.wraps(call)
        def either(self: FerryProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensor = _tensor_in(args)
            if tensor is None or tensor.device.type == "cpu":
                return call(self, *args, **kwargs)
            return self._named(tensor.device.type, names)(*args, **kwargs)

        return either

    return decorate


class FerryProcessGroup(dist.ProcessGroup):
    """Ranks of a torch process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        store = dist.distributed_c10d.PrefixStore(next_meeting(store, rank, size, "ferry"), store)
        self._rank, self._size, self._store, self._limit = rank, size, store, timeout
        self._timeout = min(timeout.total_seconds(), _MOST_SECONDS)
        boot = from_store(store, rank, size)
        self._ranks = Collectives(boot, deadline=self._timeout, memory_bytes=1 << 20)
        self._transfers = Stream()
        self._worker = ThreadPoolExecutor(1, "ferry-process-group", self._is_worker)
        self._on_worker = threading.local()
        self._last: Future[None] | None = None
        self._lock = threading.Lock()
        self._together: list[FerryWork] | None = None
        self._kept: deque[FerryWork] = deque(maxlen=_KEPT_WORKS)
        self._others: dict[str, Any] = {}
        self._name = self._desc = ""

    @property
    def collectives(self) -> Collectives:
        """What carries CPU tensors. Its own calls of all ranks come between those of the group in
        the order in which they are made."""
        return self._ranks

    # What torch asks of every group.
    def getBackendName(self) -> str:  # noqa: N802
        return "ferry"

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def name(self) -> str:
        return "ferry"

    # By which torch 2.4 asks, without asking the above.
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def abort(self) -> None:
        """Leaves; calls under way raise, here and on the peers."""
        self._ranks.destroy()
        for other in self._others.values():
            other.abort()

    def shutdown(self) -> None:
        """Leaves, after the calls that are under way."""
        self._worker.shutdown()
        self._ranks.destroy()
        for other in self._others.values():
            other.shutdown()

    def _named(self, kind: str, names: tuple[str, ...]) -> Any:
        with self._lock:
            if kind not in self._others:
                if kind not in delegates:
                    known = " or ".join(["cpu", *delegates])
                    refuse("ferry process group: tensor", f"device {kind}", f"device {known}")
                self._others[kind] = delegates[kind](
                    self._store, self._rank, self._size, self._limit
                )
        other = self._others[kind]
        return getattr(other, next(name for name in names if hasattr(other, name)))

    # The order of calls.
    def _is_worker(self) -> None:
        self._on_worker.yes = True

    def _enter(
        self, call: str, opts: Any, result: list[torch.Tensor], run: Callable[[], None]
    ) -> FerryWork:
        with self._lock:
            idle = self._last is None or self._last.done()
            if not getattr(opts, "asyncOp", True) and idle:
                guarded(run, call, result)
                return self._keep(FerryWork(result, self._timeout))
            if getattr(self._on_worker, "yes", False):
                # A call from what follows another one, which the thread waits for.
                guarded(run, call, result)
                return self._keep(FerryWork(result, self._timeout))
            guarded(self._check_process)
            self._last = self._worker.submit(guarded, run, call, result)
            return self._keep(WorkerWork(self._last, result, self._timeout))

    def _check_process(self) -> None:
        """A forked child has no thread of the group, and would wait for it."""
        _ = self._ranks.size

    def _keep(self, work: FerryWork) -> FerryWork:
        if _KEPT_WORKS:
            self._kept.append(work)
        if self._together is not None:
            self._together.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._named(device.type, ("_start_coalescing",))(device)
            return
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._named(device.type, ("_end_coalescing",))(device)
        works, self._together = self._together or [], None
        return self._keep(AllWork(works, self._timeout))

    # Reductions.
    @_by_device("allreduce")
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> FerryWork:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def run() -> None:
            for tensor in tensors:
                torch_reductions.all_reduce(self._ranks, tensor.detach(), op)

        return self._enter("all_reduce", opts, tensors, run)

    @_by_device("allreduce_coalesced")
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> FerryWork:
        work: FerryWork = self.allreduce(tensors, opts)
        return work

    @_by_device("reduce")
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> FerryWork:
        def run() -> None:
            torch_reductions.agree(self._ranks, "reduce", f"dst={opts.rootRank}")
            for tensor in tensors:
                mine = tensor.detach()
                storage_of("ferry process group: tensor", mine)
                mine = mine if self._rank == opts.rootRank else mine.clone()
                torch_reductions.all_reduce(self._ranks, mine, opts.reduceOp)

        return self._enter("reduce", opts, tensors, run)

    @_by_device("reduce_scatter_single", "_reduce_scatter_base")
    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any
    ) -> FerryWork:
        def run() -> None:
            torch_reductions.reduce_scatter(
                self._ranks, output.detach(), whole.detach(), opts.reduceOp
            )

        return self._enter("reduce_scatter", opts, [output], run)

    @_by_device("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> FerryWork:
        def run() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                torch_reductions.reduce_scatter(
                    self._ranks, output.detach(), whole.detach(), opts.reduceOp
                )

        return self._enter("reduce_scatter", opts, outputs, run)

    @_by_device("reduce_scatter")
    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> FerryWork:
        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                _check_blocks(output, parts, self._rank, self._size)
                for one in (output, *parts):
                    storage_of("ferry process group: tensor", one)
                # Blocks may have sizes of their own: each is reduced by all, and kept by one.
                if len({part.numel() for part in parts}) == 1:
                    whole = torch.cat([part.detach().reshape(-1) for part in parts])
                    torch_reductions.reduce_scatter(
                        self._ranks, output.detach(), whole, opts.reduceOp
                    )
                    continue
                for r, part in enumerate(parts):
                    block = part.detach().clone()
                    torch_reductions.all_reduce(self._ranks, block, opts.reduceOp)
                    if r == self._rank:
                        output.detach().copy_(block.view(output.shape))

        return self._enter("reduce_scatter", opts, outputs, run)

    # Calls that only move.
    @_by_device("broadcast")
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> FerryWork:
        def run() -> None:
            for tensor in tensors:
                with _Bytes(tensor) as raw:
                    self._ranks.broadcast(raw, opts.rootRank)

        return self._enter("broadcast", opts, tensors, run)

    @_by_device("allgather")
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> FerryWork:
        def run() -> None:
            for outs, mine in zip(outputs, inputs, strict=True):
                self._gather_all(outs, mine)

        return self._enter("all_gather", opts, [out for outs in outputs for out in outs], run)

    def _gather_all(self, outs: list[torch.Tensor], mine: torch.Tensor) -> None:
        raw = _bytes_of(mine)
        sizes = [out.nbytes for out in outs]
        if any(size != raw.numel() for size in sizes):  # then every rank gives another size
            got = torch.empty(sum(sizes), dtype=torch.uint8)
            self._ranks.all_to_all(
                raw.repeat(self._size),
                got,
                send_counts=[raw.numel()] * self._size,
                recv_counts=sizes,
            )
        else:
            got = torch.empty(sum(sizes), dtype=torch.uint8)
            self._ranks.all_gather(raw, got)
        _unpack(got, outs)

    @_by_device("allgather_coalesced")
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> FerryWork:
        def run() -> None:
            for i, mine in enumerate(inputs):
                self._gather_all([of_rank[i] for of_rank in outputs], mine)

        return self._enter("all_gather", opts, [out for outs in outputs for out in outs], run)

    @_by_device("all_gather_single", "_allgather_base")
    def all_gather_single(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> FerryWork:
        def run() -> None:
            with _Bytes(output) as raw:
                self._ranks.all_gather(_bytes_of(mine), raw)

        return self._enter("all_gather", opts, [output], run)

    @_by_device("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> FerryWork:
        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                with _Bytes(output) as raw:
                    self._ranks.all_gather(_bytes_of(mine), raw)

        return self._enter("all_gather", opts, outputs, run)

    @_by_device("all_to_all_single", "alltoall_base")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        mine: torch.Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        opts: Any = None,
    ) -> FerryWork:
        def run() -> None:
            with _Bytes(output) as raw:
                self._ranks.all_to_all(
                    _bytes_of(mine),
                    raw,
                    send_counts=_byte_counts("input", mine, send_counts, self._size),
                    recv_counts=_byte_counts("output", output, recv_counts, self._size),
                )

        return self._enter("all_to_all", opts, [output], run)

    @_by_device("alltoall")
    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> FerryWork:
        def run() -> None:
            self._exchange([_bytes_of(tensor) for tensor in inputs], outputs)

        return self._enter("all_to_all", opts, outputs, run)

    @_by_device("gather")
    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> FerryWork:
        def run() -> None:
            nothing = torch.empty(0, dtype=torch.uint8)
            sent = [nothing] * self._size
            sent[opts.rootRank] = _bytes_of(inputs[0])
            root = self._rank == opts.rootRank
            self._exchange(sent, outputs[0] if root else [nothing] * self._size)

        return self._enter("gather", opts, outputs[0] if outputs else inputs, run)

    @_by_device("scatter")
    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> FerryWork:
        def run() -> None:
            nothing = torch.empty(0, dtype=torch.uint8)
            root = self._rank == opts.rootRank
            sent = [_bytes_of(t) for t in inputs[0]] if root else [nothing] * self._size
            got = [nothing] * self._size
            got[opts.rootRank] = outputs[0]
            self._exchange(sent, got)

        return self._enter("scatter", opts, outputs, run)

    def _exchange(self, sent: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
        """`sent[r]`, bytes, go to rank r; `outs[r]` takes what rank r sends."""
        got = torch.empty(sum(out.nbytes for out in outs), dtype=torch.uint8)
        self._ranks.all_to_all(
            torch.cat(sent),
            got,
            send_counts=[one.numel() for one in sent],
            recv_counts=[out.nbytes for out in outs],
        )
        _unpack(got, outs)

    def barrier(self, opts: Any = None) -> FerryWork:
        return self._enter("barrier", opts, [], self._ranks.barrier)

    # Between two ranks.
    @_by_device("send")
    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> FerryWork:
        raw = _bytes_of(tensors[0])
        end = self._ranks.send(raw, peer, tag, stream=self._transfers)
        return self._keep(TransferWork(end, tensors, self._timeout, self._rank))

    @_by_device("recv")
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> FerryWork:
        into = _Bytes(tensors[0])
        end = self._ranks.recv(into.raw, peer, tag, stream=self._transfers)
        return self._keep(TransferWork(end, tensors, self._timeout, peer, into.write_back))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> FerryWork:
        refuse("recv: src", "None", "a rank: Ferry receives from a rank that is named")

    # Their names up to torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        refuse("ferry process group: tensor", f"layout {tensor.layout}", "a dense one")
    storage_of("ferry process group: tensor", tensor)
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Bytes:
    """`raw`: the bytes of a tensor, to be written. Of one that is not contiguous, `write_back`
    copies them there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._dense = dense("ferry process group: tensor", self._tensor)
        self.raw = _bytes_of(self._dense)

    def write_back(self) -> None:
        if self._dense.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._dense)

    def __enter__(self) -> torch.Tensor:
        return self.raw

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.write_back()


def _unpack(got: torch.Tensor, outs: list[torch.Tensor]) -> None:
    """One behind the other."""
    for out in outs:
        storage_of("ferry process group: tensor", out)
    parts = torch.split(got, [out.nbytes for out in outs])
    for out, part in zip(outs, parts, strict=True):
        if part.numel() > 0:
            # A copy begins where any dtype may.
            out.detach().copy_(part.clone().view(out.dtype).view(out.shape))


def _check_blocks(output: torch.Tensor, blocks: list[torch.Tensor], rank: int, size: int) -> None:
    """Of a reduce_scatter of lists."""
    if len(blocks) != size:
        refuse("reduce_scatter: input_list", f"{len(blocks)} tensors", f"{size}, one for each rank")
    own = blocks[rank]
    if (own.numel(), own.dtype) != (output.numel(), output.dtype):
        refuse(
            f"reduce_scatter: input_list[{rank}]",
            f"{own.numel()} elements of {own.dtype}",
            f"those of output, {output.numel()} of {output.dtype}",
        )


def _byte_counts(name: str, tensor: torch.Tensor, rows: list[int], size: int) -> list[int]:
    """Bytes of each block, of so many rows; equal blocks where none are given."""
    if tensor.dim() == 0:
        refuse(f"all_to_all: {name}", "a tensor without dimensions", "one with rows")
    if not rows:
        if len(tensor) % size:
            refuse(f"all_to_all: {name}", f"{len(tensor)} rows", f"a multiple of {size}")
        rows = [len(tensor) // size] * size
    if len(rows) != size or sum(rows) != len(tensor):
        got = f"{len(rows)} sizes, {sum(rows)} rows together"
        refuse(
            f"all_to_all: {name}_split_sizes", got, f"{size}, for the {len(tensor)} rows of {name}"
        )
    row = tensor.nbytes // len(tensor) if len(tensor) else 0
    return [count * row for count in rows]


def register() -> None:
    """Makes "ferry" a backend of torch.distributed."""
    if dist.is_available() and "ferry" not in dist.Backend.backend_list:
        dist.Backend.register_backend("ferry", FerryProcessGroup, devices=["cpu", "cuda"])
