"""A group of ranks that exchange tokens: throughput mode."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ferry import _ferry
from ferry.arguments import (
    INT32_MAX,
    UINT64_MAX,
    choice,
    describe,
    flag,
    instance,
    integer,
    optional,
    refuse,
    seconds,
)
from ferry.errors import Error
from ferry.results import ArrayT, Combined, Received
from ferry.tensors import (
    TORCH,
    Like,
    array,
    dtype_named,
    is_torch_dtype,
    like_of,
    optional_view,
    view,
)

FABRICS = {
    "automatic": _ferry.FabricKind.automatic,
    "local": _ferry.FabricKind.local,
    "shm": _ferry.FabricKind.shm,
    "sim": _ferry.FabricKind.sim,
}
BACKENDS = {
    "automatic": _ferry.Backend.automatic,
    "host": _ferry.Backend.host,
    "cuda": _ferry.Backend.cuda,
}
ORDERS = {
    "rank_major": _ferry.RowOrder.rank_major,
    "expert_major": _ferry.RowOrder.expert_major,
}
ROUTE_DTYPES = "i64 or i32"
SUM_DTYPES = 'f32, bf16 or f16 (dtype="bf16" or dtype="f16" beside a uint16 array)'
DEFAULT_MEMORY_BYTES = 64 << 20
MOST_MEMORY_BYTES = 64 << 40


class Group:
    """R ranks that exchange tokens. All ranks make the same calls in the same order; concurrent
    exchanges take two groups. A group that failed stays failed: every later call raises.

    Making a group is collective. The arguments must be the same on all ranks, or creation raises
    `Mismatch` naming the rank and the field that differ.

    Args:
        bootstrap: how the ranks find each other: `threads`, `tcp`, `from_environment`, ...
        experts: in the whole group; contiguous blocks, the first E mod R ranks hold one more.
        deadline: seconds, of every wait. What is late raises `DeadlineExceeded`.
        memory_bytes: registered at creation for receive tensors; grows by agreement.
        fabric: "automatic", "local" (threads), "shm" (processes), "sim" (adversarial, for tests).
        backend: "automatic", "host", "cuda".
        sim_seed: of the sim fabric.

    Use it as a context manager to leave the group at the end of the block. Exchanges are not
    differentiable by themselves: `ferry.torch` is. A group cannot be used in a process that was
    forked after it was made. Waits release the GIL and end with KeyboardInterrupt on Ctrl-C.
    """

    def __init__(
        self,
        bootstrap: _ferry.Bootstrap,
        *,
        experts: int,
        deadline: float = 60.0,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        fabric: str = "automatic",
        backend: str = "automatic",
        sim_seed: int = 1,
    ) -> None:
        self._raw = _ferry.Group(
            instance("Group: bootstrap", bootstrap, _ferry.Bootstrap, "a ferry.Bootstrap"),
            integer("Group: experts", experts, 1),
            seconds("Group: deadline", deadline),
            integer("Group: memory_bytes", memory_bytes, 0, MOST_MEMORY_BYTES),
            choice("Group: fabric", fabric, FABRICS),
            choice("Group: backend", backend, BACKENDS),
            integer("Group: sim_seed", sim_seed, 0, UINT64_MAX),
        )

    @property
    def rank(self) -> int:
        """This rank."""
        return self._raw.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._raw.size

    @property
    def experts(self) -> int:
        """Experts in the whole group."""
        return self._raw.experts

    @property
    def local_experts(self) -> int:
        """Experts on this rank."""
        return self._raw.local_experts

    @property
    def fabric_name(self) -> str:
        """By which wire the ranks reach each other: "local", "shm", "sim"."""
        return self._raw.fabric_name

    @property
    def destroyed(self) -> bool:
        """True after `destroy`."""
        return self._raw.destroyed

    def plan(self, topk_idx: Any, *, stream: _ferry.Stream | None = None) -> _ferry.Plan:
        """Collective. Counts and swaps: where every row goes and what arrives.

        topk_idx: i64 or i32 [T, K], values -1 (unused) or 0 to E-1. T may differ between ranks and
        be 0, K may not differ; 1 <= K <= 64. Without a stream: returns when the counts are known.
        """
        return self._raw.plan(
            view("plan: topk_idx", topk_idx, expected=ROUTE_DTYPES)[0], _stream("plan", stream)
        )

    def dispatch(
        self,
        x: ArrayT,
        plan: _ferry.Plan,
        *,
        topk_weights: Any = None,
        scales: Any = None,
        order: str = "rank_major",
        alignment: int = 1,
        worst_case_rows: int = 0,
        out: ArrayT | None = None,
        dtype: Any = None,
        stream: _ferry.Stream | None = None,
    ) -> Received[ArrayT]:
        """Collective. Carries every token to the ranks that its route names, one copy a rank.

        Args:
            x: [T, H] dense, any dtype, row bytes a multiple of 16; H and dtype as on all ranks.
            plan: of this group, for the same T.
            topk_weights: f32 [T, K], carried along.
            scales: f32 [T, C], any strides: one scale for each token and 128 channels of fp8.
            order: "rank_major": one row for each (token, this rank). "expert_major": one row for
                each slot, in blocks of ascending local expert.
            alignment: expert-major: every expert's rows padded with zero rows to a multiple.
            worst_case_rows: > 0: the output has this many rows whatever arrives, so nothing waits
                for the count. More arrivals raise `Exhausted`.
            out: the caller's own output [rows, H] instead of registered memory: one copy more.
            dtype: of x, where its array cannot say it ("bf16" beside uint16, ...).
            stream: None: returns finished results. Otherwise they are valid after `event`, and the
                arrays given are kept until then.
        """
        x_view, like = view("dispatch: x", x, _optional_dtype("dispatch: dtype", dtype))
        raw = self._raw.dispatch(
            x_view,
            _plan("dispatch", plan),
            optional_view("dispatch: topk_weights", topk_weights, expected="f32"),
            optional_view("dispatch: scales", scales, expected="f32"),
            choice("dispatch: order", order, ORDERS),
            integer("dispatch: alignment", alignment, 1),
            integer("dispatch: worst_case_rows", worst_case_rows),
            optional_view("dispatch: out", out, x_view.dtype, True),
            _stream("dispatch", stream),
        )
        return Received(raw, like, out)

    def combine(
        self,
        rows: ArrayT,
        plan: _ferry.Plan,
        *,
        order: str = "rank_major",
        alignment: int = 1,
        topk_weights: Any = None,
        apply_weights: bool = False,
        bias0: Any = None,
        bias1: Any = None,
        out: ArrayT | None = None,
        dtype: Any = None,
        stream: _ferry.Stream | None = None,
    ) -> Combined[ArrayT]:
        """Collective. For each own token: the sum over the ranks that it went to, 0 if it went
        nowhere. fp32, from +0 in ascending rank order, one rounding to nearest even at the end.

        Args:
            rows: f32, bf16 or f16, [n, H] rank-major or [M, H] expert-major, dense, in the order
                that the dispatch gave. Rows in registered memory (`empty`, a received `x`) are read
                in place by the peers; others are copied once.
            order, alignment: of `rows`, as given to dispatch. Expert-major rows are first summed on
                each rank in ascending k.
            topk_weights: f32 [n, K], rank-major: carried back and summed over ranks.
            apply_weights: expert-major only: multiply each slot's row by its weight.
            bias0, bias1: [T, H], dtype of the rows: added in fp32 after the ranks, in this order.
            out: [T, H], the caller's own output.
            dtype: of rows, where its array cannot say it.
            stream: as for dispatch.
        """
        rows_view, like = view(
            "combine: rows", rows, _optional_dtype("combine: dtype", dtype), expected=SUM_DTYPES
        )
        raw = self._raw.combine(
            rows_view,
            _plan("combine", plan),
            choice("combine: order", order, ORDERS),
            integer("combine: alignment", alignment, 1),
            optional_view("combine: topk_weights", topk_weights, expected="f32"),
            flag("combine: apply_weights", apply_weights),
            optional_view("combine: bias0", bias0, rows_view.dtype),
            optional_view("combine: bias1", bias1, rows_view.dtype),
            optional_view("combine: out", out, rows_view.dtype, True),
            _stream("combine", stream),
        )
        return Combined(raw, like, out)

    def empty(self, shape: tuple[int, ...], dtype: Any = "bf16", like: Any = None) -> Any:
        """A dense array in registered memory, not set to anything. Not collective.

        shape: one to three extents. dtype: "f32", "bf16", ... or a dtype of NumPy or torch. like:
        "numpy", "torch" or an array: what comes back; None: torch for a dtype of torch, else NumPy.
        Raises `Exhausted` when the free registered memory does not hold it.
        """
        chosen = TORCH if like is None and is_torch_dtype(dtype) else like_of("empty: like", like)
        if chosen == TORCH and "torch" not in sys.modules:
            refuse("empty: like", '"torch"', "torch to be imported first")
        if not isinstance(shape, (tuple, list)):
            refuse("empty: shape", describe(shape), "a tuple of extents")
        extents = [integer("empty: shape", extent) for extent in shape]
        if not 1 <= len(extents) <= 3:
            refuse("empty: shape", f"{len(extents)} dimensions", "1 to 3")
        if isinstance(dtype, type) and dtype.__module__.startswith("ml_dtypes"):
            chosen = Like(chosen.framework, True)
        return array(self._raw.empty(extents, dtype_named("empty: dtype", dtype)), chosen)

    def is_registered(self, pointer: Any) -> bool:
        """True when an array's first element, or an address, lies in registered memory."""
        if isinstance(pointer, int):
            return self._raw.is_registered(
                integer("is_registered: pointer", pointer, 0, UINT64_MAX)
            )
        carrier = None
        if getattr(getattr(pointer, "dtype", None), "name", None) == "uint16":
            carrier = _ferry.Dtype.bf16
        return self._raw.is_registered(view("is_registered: pointer", pointer, carrier)[0].address)

    def barrier(self) -> None:
        """Collective. Returns when every rank has called it."""
        self._raw.barrier()

    def memory(self) -> _ferry.MemoryUse:
        """Bytes that this rank holds, exact."""
        return self._raw.memory()

    @staticmethod
    def memory_hint(
        *,
        experts: int,
        ranks: int,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        fabric: str = "automatic",
    ) -> _ferry.MemoryUse:
        """What `memory` says right after creation with these arguments and number of ranks."""
        return _ferry.Group.memory_hint(
            integer("memory_hint: experts", experts, 1),
            integer("memory_hint: memory_bytes", memory_bytes, 0, MOST_MEMORY_BYTES),
            choice("memory_hint: fabric", fabric, FABRICS),
            integer("memory_hint: ranks", ranks, 1, INT32_MAX),
        )

    def time(self) -> _ferry.TimeUse:
        """Nanoseconds that this rank has spent inside exchanges since creation."""
        return self._raw.time()

    def destroy(self) -> None:
        """Leaves the group. Not collective, never waits for peers; those that still exchange get
        `PeerLeft`. Later calls raise `Destroyed`. Arrays stay valid until they are dropped."""
        self._raw.destroy()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        try:
            if "_raw" in self.__dict__ and not self.destroyed:
                return (
                    f"<ferry.Group: rank {self.rank} of {self.size}, {self.experts} experts, "
                    f"fabric {self.fabric_name}>"
                )
        except Error:  # in a forked child; or destroyed by another thread meanwhile
            pass
        return "<ferry.Group, not usable>"


def _stream(call: str, stream: Any) -> _ferry.Stream | None:
    return optional(f"{call}: stream", stream, _ferry.Stream, "a ferry.Stream")


def _plan(call: str, plan: Any) -> _ferry.Plan:
    return instance(f"{call}: plan", plan, _ferry.Plan, "a ferry.Plan, as Group.plan returns it")


def _optional_dtype(name: str, dtype: Any) -> _ferry.Dtype | None:
    return None if dtype is None else dtype_named(name, dtype)


__all__ = ["Group"]
