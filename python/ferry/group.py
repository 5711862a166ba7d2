"""A group of ranks that exchange tokens: throughput mode."""

from __future__ import annotations

import os
from types import TracebackType

from ferry import _ferry
from ferry.arguments import (
    INT32_MAX,
    UINT64_MAX,
    choice,
    describe,
    flag,
    instance,
    integer,
    refuse,
    seconds,
    text,
)
from ferry.errors import Error, UnsupportedError
from ferry.handles import register_group
from ferry.metrics import metrics_of, serve_as_environment_says, text_of
from ferry.results import ArrayT, Combined, Received
from ferry.routes import RouteFile
from ferry.streams import Streams, chosen_gpu, current_handle, device_name
from ferry.tensors import (
    dtype_named,
    empty_array,
    optional_view,
    view,
)
from ferry.trace import GroupTrace, ranged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path  # which takes some milliseconds to import
    from typing import Any

FABRICS = {
    "automatic": _ferry.FabricKind.automatic,
    "local": _ferry.FabricKind.local,
    "shm": _ferry.FabricKind.shm,
    "sim": _ferry.FabricKind.sim,
    "ofi": _ferry.FabricKind.ofi,
}
NETWORKS = {kind: FABRICS[kind] for kind in ("automatic", "sim", "ofi")}
CROSSINGS = {
    "automatic": _ferry.Crossing.automatic,
    "direct": _ferry.Crossing.direct,
    "hierarchical": _ferry.Crossing.hierarchical,
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
FORMATS = {"as_is": _ferry.WireFormat.as_is, "e4m3": _ferry.WireFormat.e4m3}
SCALE_FORMATS = {
    "f32": _ferry.ScaleFormat.f32,
    "f32_pow2": _ferry.ScaleFormat.f32_pow2,
    "ue8m0_packed": _ferry.ScaleFormat.ue8m0_packed,
}
ROUTE_DTYPES = "i64 or i32"
SUM_DTYPES = 'f32, bf16 or f16 (dtype="bf16" or dtype="f16" beside a uint16 array)'
DEFAULT_MEMORY_BYTES = 64 << 20
MOST_MEMORY_BYTES = 64 << 40


def path(name: str, value: Any, expected: str) -> str:
    if not isinstance(value, (str, os.PathLike)):
        refuse(name, describe(value), expected)
    return text(name, os.fsdecode(value))


def pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        refuse("Group: tuning_sms", describe(value), "the fewest and the most, as (1, 24)")
    return (value[0], value[1])


class Group:
    """R ranks that exchange tokens. All ranks make the same calls in the same order; concurrent
    exchanges take two groups. After a failure every call raises until `regroup`.

    Making a group is collective. The arguments must be the same on all ranks, or creation raises
    `MismatchError` naming the rank and the field that differ.

    Args:
        bootstrap: how the ranks find each other: `threads`, `tcp`, `from_environment`, ...
        experts: in the whole group; contiguous blocks, the first E mod R ranks hold one more.
        deadline: seconds, of every wait. What is late raises `DeadlineExceededError`.
        memory_bytes: registered at creation for receive tensors; grows by agreement.
        fabric: "automatic", "local" (threads), "shm" (processes of one host), "ofi" (any hosts, by
            libfabric; FERRY_HOST names this rank's address there), "sim" (adversarial, for tests).
        backend: "host" or "automatic": tensors in CPU memory. "cuda": on one GPU a rank.
        device: cuda: the GPU of this rank, an ordinal, "cuda:1" or a torch.device; None: torch's
            current one. Ranks may differ in it and may share a GPU.
        sim_seed: of the sim fabric and network.
        domain_size: 0: the ranks of one host are one domain. n: virtual domains: every n
            consecutive ranks share memory, the others are reached as over a network.
        network: what joins the domains. "automatic": copies through `fabric`, as a network makes
            them; "ofi": libfabric; "sim" (threads): adversarial, for tests.
        crossing: what "automatic" means in the calls of this group: "automatic" (by a cost model:
            `Plan.crossing`), "direct" or "hierarchical".
        elastic: under this name a process that starts later finds the group and takes the place of
            a lost rank, with a bootstrap that `joins`; one name for each group of a job. "": nobody
            joins. Needs fabric "shm", and with backend "cuda" one domain.
        arbiter: a directory that all hosts share (NFS 4): when the network is split and half of the
            ranks are left on each side, a file there decides which half `regroup` lets go on. "":
            both halves stop. With `elastic` it is also where processes find the group on whose host
            no rank is left. Needs several domains that libfabric joins.
        tuning: True: try other settings while calls run, and keep what is faster (`tuning`); bits
            do not change. A file of `ferry plan --tuning` or `ferry bench --tune`: the same,
            beginning there. None: the environment variable FERRY_TUNING says ("on", "off" or a
            file), and without it no.
        tuning_sms: on GPUs the fewest and the most SMs of a call that `tuning` may choose; calls
            that give `num_sms` keep to it.

    With a bootstrap that `joins` creation waits until the ranks have called `regroup`; `view` then
    says at which epoch and step this process is in. Raises `RefusedError` when a process that runs
    has its place.

    On GPUs every call takes a place in the order of a CUDA stream: `stream` is a torch.cuda.Stream,
    a cudaStream_t as an integer or a ferry.Stream. None is torch's current stream when the call's
    first tensor is torch's, and nothing blocks the CPU but a dispatch of exact size, which waits
    for the counts; for other arrays it is the default stream, and results are finished. A result
    belongs to the stream that it was made on: before it is used on another one, order the two and
    call the tensor's `record_stream`.

    Use it as a context manager to leave the group at the end of the block. Exchanges are not
    differentiable by themselves: `ferry.torch` is. A torch tensor that requires a gradient is
    refused, but under `torch.no_grad()` or inside a torch.autograd.Function. A group cannot be used
    in a process that was forked after it was made. Waits release the GIL and end with
    KeyboardInterrupt on Ctrl-C.
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
        device: Any = None,
        sim_seed: int = 1,
        domain_size: int = 0,
        network: str = "automatic",
        crossing: str = "automatic",
        elastic: str = "",
        arbiter: str | Path = "",
        tuning: bool | str | Path | None = None,
        tuning_sms: tuple[int, int] = (1, 24),
    ) -> None:
        chosen = choice("Group: backend", backend, BACKENDS)
        if device is not None and chosen != _ferry.Backend.cuda:
            refuse("Group: device", describe(device), 'None, or backend="cuda"')
        gpu = None
        if chosen == _ferry.Backend.cuda:
            gpu = chosen_gpu(device) if _ferry.has_cuda else -1
        file = None
        if tuning is not None and not isinstance(tuning, bool):
            file = path("Group: tuning", tuning, "None, a bool or the name of a file")
        serve_as_environment_says()
        self._raw = _ferry.Group(
            instance("Group: bootstrap", bootstrap, _ferry.Bootstrap, "a ferry.Bootstrap"),
            integer("Group: experts", experts, 1),
            seconds("Group: deadline", deadline),
            integer("Group: memory_bytes", memory_bytes, 0, MOST_MEMORY_BYTES),
            choice("Group: fabric", fabric, FABRICS),
            chosen,
            -1 if gpu is None else gpu,
            integer("Group: sim_seed", sim_seed, 0, UINT64_MAX),
            integer("Group: domain_size", domain_size, 0, INT32_MAX),
            choice("Group: network", network, NETWORKS),
            choice("Group: crossing", crossing, CROSSINGS),
            text("Group: elastic", elastic),
            path("Group: arbiter", arbiter, "a directory"),
            tuning if file is None else True,
            file,
            *(integer("Group: tuning_sms", sms, 1, 1024) for sms in pair(tuning_sms)),
        )
        if gpu == -1:
            gpu = self._raw.empty([1], _ferry.Dtype.u8).gpu
        self._gpu = gpu
        self._streams = Streams(gpu)
        self._routes: RouteFile | None = None
        # Plain attributes: torch.compile reads them without running any code of ours.
        self._local_experts = self._raw.local_experts
        self._handle = register_group(self)

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
        return self._local_experts

    @property
    def device(self) -> str:
        """Where all tensors of this rank lie: "cpu", "cuda:0", ..."""
        return device_name(self._gpu)

    @property
    def handle(self) -> int:
        """Names this group in calls of `torch.ops.ferry`; good while the group exists."""
        return self._handle

    @property
    def fabric_name(self) -> str:
        """By which wire the ranks reach each other: "local", "shm", "sim", "ofi"; of several
        domains with their network: "shm+copies", "local+sim", "shm+ofi"."""
        return self._raw.fabric_name

    @property
    def domains(self) -> int:
        """Number of domains: ranks that share memory are in one."""
        return self._raw.domains

    def domain_of(self, rank: int) -> int:
        """The domain of a rank; domains are numbered by their lowest ranks."""
        return self._raw.domain_of(integer("domain_of: rank", rank, 0, self.size - 1))

    def record_routes(self, file: str | Path | None) -> None:
        """From now on the routes of every `plan` and `dispatch` go to a file whose name is `file`,
        a dot and the rank, for `ferry plan --routes` and `ferry simulate --routes`; an old file is
        overwritten. None: no more. Not collective. Routes on a GPU are copied to the CPU, which
        waits for them and cannot be captured in a graph. `ferry.routes.read_routes` reads a file.
        """
        if self._routes is not None:
            self._routes.close()
        self._routes = None
        if file is not None:
            self._routes = RouteFile(file, self.rank, self.size, self.experts)

    def _record(self, topk_idx: Any) -> None:
        if self._routes is not None and topk_idx is not None:
            self._routes.add(topk_idx)

    @property
    def destroyed(self) -> bool:
        """True after `destroy`."""
        return self._raw.destroyed

    @ranged("ferry.plan")
    def plan(self, topk_idx: Any, *, stream: Any = None, placement_digest: int = 0) -> _ferry.Plan:
        """Collective. Counts and swaps: where every row goes and what arrives.

        topk_idx: i64 or i32 [T, K], values -1 (unused) or 0 to E-1. T may differ between ranks and
        be 0, K may not differ; 1 <= K <= 64. Without a stream on the host engine: returns when the
        counts are known.

        placement_digest: `ExpertPlacement.digest` where `places` made the routes. Ranks that give
        different ones raise MismatchError, all of them, and the group goes on.
        """
        digest = integer("plan: placement_digest", placement_digest, 0, 2**64 - 1)
        place = self._streams.place("plan", stream, topk_idx)
        raw = self._raw.plan(
            view("plan: topk_idx", topk_idx, expected=ROUTE_DTYPES, place=place)[0],
            place.stream,
            digest,
        )
        if place.finish:
            raw.recv_rows()
        self._record(topk_idx)
        return raw

    def _compare(self, name: str, number: int, none: Any) -> None:
        """Collective: a plan of no tokens, whose routes are `none`; nobody records it.
        Raises MismatchError on all ranks where they give different numbers."""
        place = self._streams.place(name, None, none)
        self._raw.plan(view(name, none, place=place)[0], place.stream, number).recv_rows()

    @ranged("ferry.dispatch", sms="num_sms", worst_case_rows="max_recv_rows")
    def dispatch(
        self,
        x: ArrayT,
        plan: _ferry.Plan | None = None,
        *,
        topk_idx: Any = None,
        topk_weights: Any = None,
        scales: Any = None,
        format: str = "as_is",
        scale_format: str = "f32",
        order: str = "rank_major",
        alignment: int = 1,
        row_weights: bool = False,
        max_recv_rows: int = 0,
        out: ArrayT | None = None,
        dtype: Any = None,
        stream: Any = None,
        num_sms: int = 0,
        crossing: str = "automatic",
    ) -> Received[ArrayT]:
        """Collective. Carries every token to the ranks that its route names, one copy a rank.

        Args:
            x: [T, H] dense, f32, bf16, f16, e4m3, e5m2, i32, i64 or u8, row bytes a multiple of 16;
                H and dtype as on all ranks.
            plan: of this group, for the same T.
            topk_idx: instead of a plan, as `plan` takes it: the plan is made on the way and is in
                the result. On GPUs faster than two calls.
            topk_weights: f32 [T, K], carried along.
            scales: f32 [T, C], any strides: one scale for each token and 128 channels of fp8.
            format: "as_is", or "e4m3": x of f32, bf16 or f16 is quantised on the way, H a multiple
                of 16; `scales` of the result has ceil(H/128) columns. Some ranks may do so while
                others bring e4m3 rows and scales.
            scale_format: with "e4m3": "f32", or "f32_pow2", rounded up to powers of two. Every
                rank's own choice.
            order: "rank_major": one row for each (token, this rank). "expert_major": one row for
                each slot, in blocks of ascending local expert.
            alignment: expert-major: every expert's rows padded with zero rows to a multiple.
            row_weights: expert-major: `topk_weights` as `row_weights` of the result, too.
            max_recv_rows: > 0: the output has this many rows whatever arrives, so nothing waits
                for the count. More arrivals raise `ExhaustedError`.
            out: the caller's own output [rows, H] instead of registered memory: one copy more. Of
                the dtype that arrives.
            dtype: of x, where its array cannot say it ("bf16" beside uint16, ...).
            stream: host engine: None: returns finished results; a ferry.Stream: they are valid
                after `event`, and the arrays given are kept until then. GPUs: see above.
            num_sms: on GPUs: how many multiprocessors move the rows, 1 to all; 0: a default.
            crossing: between domains: "direct": a copy for each rank; "hierarchical": one for each
                domain, spread inside; "automatic": `Plan.crossing`. The same on all ranks.
        """
        place = self._streams.place("dispatch", stream, x)
        x_view, like = view(
            "dispatch: x", x, _optional_dtype("dispatch: dtype", dtype), place=place
        )
        if (plan is None) == (topk_idx is None):
            refuse("dispatch: plan", "none" if plan is None else "both", "a plan, or else topk_idx")
        wire = choice("dispatch: format", format, FORMATS)
        arrives = x_view.dtype if wire == _ferry.WireFormat.as_is else _ferry.Dtype.e4m3
        raw = self._raw.dispatch(
            x_view,
            None if plan is None else _plan("dispatch", plan),
            optional_view("dispatch: topk_idx", topk_idx, expected=ROUTE_DTYPES, place=place),
            optional_view("dispatch: topk_weights", topk_weights, expected="f32", place=place),
            optional_view("dispatch: scales", scales, expected="f32", place=place),
            wire,
            choice("dispatch: scale_format", scale_format, SCALE_FORMATS),
            choice("dispatch: order", order, ORDERS),
            integer("dispatch: alignment", alignment, 1),
            flag("dispatch: row_weights", row_weights),
            integer("dispatch: max_recv_rows", max_recv_rows),
            optional_view("dispatch: out", out, arrives, True, place=place),
            place.stream,
            integer("dispatch: num_sms", num_sms, 0, INT32_MAX),
            choice("dispatch: crossing", crossing, CROSSINGS),
        )
        self._record(topk_idx)
        return Received(place.finished(raw), like, out)

    @ranged("ferry.dispatch")
    def _dispatch_checked(
        self,
        x: Any,
        plan: _ferry.Plan | None,
        topk_idx: Any,
        topk_weights: Any,
        scales: Any,
        layout: tuple[_ferry.RowOrder, int, bool, int],
        stream: Any,
        num_sms: int,
    ) -> Received[Any]:
        """`dispatch` for interfaces on top of it, which have checked all but the arrays: numbers
        are in their range. layout: order, alignment, row_weights and max_recv_rows."""
        place = self._streams.place("dispatch", stream, x)
        x_view, like = view("dispatch: x", x, place=place)
        raw = self._raw.dispatch(
            x_view,
            plan,
            optional_view("dispatch: topk_idx", topk_idx, expected=ROUTE_DTYPES, place=place),
            optional_view("dispatch: topk_weights", topk_weights, expected="f32", place=place),
            optional_view("dispatch: scales", scales, expected="f32", place=place),
            _ferry.WireFormat.as_is,
            _ferry.ScaleFormat.f32,
            *layout,
            None,
            place.stream,
            num_sms,
            _ferry.Crossing.automatic,
        )
        self._record(topk_idx)
        return Received(place.finished(raw), like)

    @ranged("ferry.combine", sms="num_sms")
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
        stream: Any = None,
        num_sms: int = 0,
        crossing: str = "automatic",
    ) -> Combined[ArrayT]:
        """Collective. For each own token: the sum over the ranks that it went to, 0 if it went
        nowhere. fp32, from +0 in ascending rank order, one rounding to nearest even at the end.

        Args:
            rows: f32, bf16 or f16, [n, H] rank-major or [M, H] expert-major, dense, in the order
                that the dispatch gave. Rows in registered memory (`empty`, a received `x`) are read
                in place by the peers; others are copied once.
            order, alignment: of `rows`, as given to dispatch. Expert-major rows are first summed on
                each rank in ascending k.
            topk_weights: f32 [n, K], rank-major, or of expert-major rows [M], one for each (as
                `row_weights` of a dispatch): carried back and summed over ranks.
            apply_weights: expert-major only: multiply each slot's row by its weight.
            bias0, bias1: [T, H], dtype of the rows: added in fp32 after the ranks, in this order.
            out: [T, H], the caller's own output.
            dtype: of rows, where its array cannot say it.
            stream, num_sms: as for dispatch.
            crossing: between domains: "direct", or "hierarchical" after a dispatch that was: the
                sum of a domain, rounded to the dtype of the rows, comes back as one row.
                "automatic": as the plan's last dispatch crossed. The same on all ranks.
        """
        place = self._streams.place("combine", stream, rows)
        rows_view, like = view(
            "combine: rows",
            rows,
            _optional_dtype("combine: dtype", dtype),
            expected=SUM_DTYPES,
            place=place,
        )
        raw = self._raw.combine(
            rows_view,
            _plan("combine", plan),
            choice("combine: order", order, ORDERS),
            integer("combine: alignment", alignment, 1),
            optional_view("combine: topk_weights", topk_weights, expected="f32", place=place),
            flag("combine: apply_weights", apply_weights),
            optional_view("combine: bias0", bias0, rows_view.dtype, place=place),
            optional_view("combine: bias1", bias1, rows_view.dtype, place=place),
            optional_view("combine: out", out, rows_view.dtype, True, place=place),
            place.stream,
            integer("combine: num_sms", num_sms, 0, INT32_MAX),
            choice("combine: crossing", crossing, CROSSINGS),
        )
        return Combined(place.finished(raw), like, out)

    def empty(self, shape: tuple[int, ...], dtype: Any = "bf16", like: Any = None) -> Any:
        """A dense array in registered memory, not set to anything. Not collective.

        shape: one to three extents. dtype: "f32", "bf16", ... or a dtype of NumPy or torch. like:
        "numpy", "torch" or an array: what comes back; None: torch for a dtype of torch or on a GPU,
        else NumPy.
        Raises `ExhaustedError` when the free registered memory does not hold it.
        """
        return empty_array(self._raw.empty, shape, dtype, like, self._gpu)

    def is_registered(self, pointer: Any) -> bool:
        """True when an array's first element, or an address, lies in registered memory."""
        if isinstance(pointer, int):
            return self._raw.is_registered(
                integer("is_registered: pointer", pointer, 0, UINT64_MAX)
            )
        carrier = None
        if getattr(getattr(pointer, "dtype", None), "name", None) == "uint16":
            carrier = _ferry.Dtype.bf16
        return self._raw.is_registered(_address("is_registered", pointer, carrier))

    def record_stream(self, pointer: Any, stream: Any = None) -> None:
        """On GPUs: memory of this group is used by work on this stream, too. Once its array is
        dropped, the memory is not used again before what is on the stream now has ended.

        pointer: an array, or an address in it. stream: as for dispatch; None: torch's current one.
        Raises `InvalidArgumentError` for memory that is not the group's. The host engine has
        nothing to do.
        """
        if self._gpu is None:
            return
        if stream is None:
            stream = current_handle(self._gpu) or 0
        if not isinstance(pointer, int):
            pointer = _address("record_stream", pointer, None)
        raw, _ = self._streams.given("record_stream", stream)
        self._raw.record_stream(integer("record_stream: pointer", pointer, 0, UINT64_MAX), raw)

    @ranged("ferry.barrier")
    def barrier(self) -> None:
        """Collective. Returns when every rank has called it."""
        self._raw.barrier()

    def regroup(self) -> _ferry.GroupView:
        """Collective among the ranks that are left, after a call raised because a rank died, left
        or missed the deadline: they agree who they are and go on in this group, in the memory that
        is registered. Plans made before are refused, and so are routes to experts of lost ranks.
        When nothing has failed, calls of the others raise; on CPUs not the collective ones that
        this rank has ended, so ranks that make the same calls and then regroup do not disturb each
        other.

        Waits for each rank that may still come, at most one deadline. Raises `EvictedError` on a
        rank that the others went on without, and `DeadlineExceededError` when ranks are missing
        that may still run and the others are no majority; the group then stays failed. Raises
        `UnsupportedError` unless the ranks, at most 256, share memory (one domain) or libfabric
        joins their domains, and on GPUs in several domains when the group has had a latency
        exchange. Elsewhere latency exchanges with masks go on, and others are made anew. On GPUs it
        waits until the group's kernels have ended; graphs stay valid.
        """
        return self._raw.regroup()

    def commit(self, step: int) -> bool:
        """Collective. Returns when every rank has called it with this step, so that each has what
        it needs to apply it. Steps grow, from 1. A rank whose call raised learns from `regroup`
        whether another one's returned: then `step` of the view says so, and all apply it. True, on
        all ranks alike, while a process waits for the place of a lost rank: `regroup` takes it in.
        """
        return self._raw.commit(integer("commit: step", step, 1, UINT64_MAX))

    def view(self) -> _ferry.GroupView:
        """Who is in the group, as far as this rank knows. Not collective."""
        return self._raw.view()

    def memory(self) -> _ferry.MemoryStats:
        """Bytes that this rank holds, exact."""
        return self._raw.memory()

    @staticmethod
    def memory_hint(
        *,
        experts: int,
        ranks: int,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        fabric: str = "automatic",
        backend: str = "automatic",
    ) -> _ferry.MemoryStats:
        """What `memory` says right after creation with these arguments and number of ranks."""
        return _ferry.Group.memory_hint(
            integer("memory_hint: experts", experts, 1),
            integer("memory_hint: memory_bytes", memory_bytes, 0, MOST_MEMORY_BYTES),
            choice("memory_hint: fabric", fabric, FABRICS),
            choice("memory_hint: backend", backend, BACKENDS),
            integer("memory_hint: ranks", ranks, 1, INT32_MAX),
        )

    def time(self) -> _ferry.TimeStats:
        """Nanoseconds that this rank has spent inside exchanges since creation."""
        return self._raw.time()

    def metrics(self) -> dict[str, Any]:
        """What this rank's calls have done since creation. Not collective, and cheap.

        "calls": for each kind "calls" (of one with a hook, both halves), "failed", "rows" (that
        dispatches received and combines returned), "bytes" of them, "seconds" inside, waits
        included, "wait_seconds". "waits": for each stage "waits" and "seconds". "failures",
        "masked", "growths", "network", "memory", and who is in the group: "rank", "size",
        "ranks", "epoch", "fabric". On GPUs, where calls run beside the CPU, "calls" and "waits"
        are empty.
        """
        return metrics_of(self)

    def metrics_text(self) -> str:
        """The same as Prometheus reads it, with the package prometheus_client; see also
        `ferry.serve_metrics`."""
        return text_of(self)

    def trace(
        self, file: str | Path, *, plot: str | Path | None = None, most_events: int = 1 << 16
    ) -> GroupTrace:
        """Collective, a context manager: the calls and waits of all ranks inside the block, on one
        clock, become a timeline that ui.perfetto.dev shows. Rank 0 (or the lowest that is left)
        writes it at the end; its `summary` then says who came late.

        file: JSON. After an exception each rank writes what it has to FILE.rankN.
        plot: a PNG, SVG or PDF of the first 20,000 calls and waits, drawn by matplotlib.
        most_events: of a rank, 64 bytes each; what finds no room is counted as dropped.
        Raises `UnsupportedError` on GPUs: use torch.profiler there, whose ranges calls have; and
        `InvalidArgumentError` on all ranks at the start where the files cannot be written.
        """
        from importlib.util import find_spec  # `import ferry` does without

        image = "" if plot is None else path("trace: plot", plot, "the name of a file, or None")
        if image and not image.lower().endswith((".png", ".svg", ".pdf")):
            refuse("trace: plot", describe(image), "a name that ends in .png, .svg or .pdf")
        if image and not find_spec("matplotlib"):
            raise UnsupportedError("trace: plot needs matplotlib: pip install 'ferry-moe[plot]'")
        events = integer("trace: most_events", most_events, 1, 1 << 26)
        name = path("trace: file", file, "the name of a file")
        return GroupTrace(self, name, image, events)

    def network(self) -> _ferry.NetworkStats:
        """What this rank has sent to ranks of other domains since creation."""
        return self._raw.network()

    def tuning(self) -> list[_ferry.TunedCall]:
        """The settings of calls, and why: of each kind of dispatch and combine that was made. Empty
        without `tuning`. The same on all ranks. On the host engine there is something to choose in
        groups of several domains: the size of chunks, and, of a dispatch, the crossing; on GPUs the
        number of SMs, in groups of one domain. There, ranks learn what a call took while they make
        later ones, so one may tell of it a few calls before another."""
        return self._raw.tuning()

    def nics(self) -> list[_ferry.NicStats]:
        """The NICs that this rank uses, and why; none without the ofi fabric."""
        return self._raw.nics()

    def destroy(self) -> None:
        """Leaves the group. Not collective, never waits for peers; those that still exchange get
        `PeerLeftError`. Later calls raise `DestroyedError`. Arrays stay valid until they are
        dropped.
        """
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
                words = "" if self._gpu is None else f", {self.device}"
                return (
                    f"<ferry.Group: rank {self.rank} of {self.size}, {self.experts} experts, "
                    f"fabric {self.fabric_name}{words}>"
                )
        except Error:  # in a forked child; or destroyed by another thread meanwhile
            pass
        return "<ferry.Group, not usable>"


def _address(call: str, value: Any, carrier: _ferry.Dtype | None) -> int:
    """Of an array's first element."""
    if isinstance(value, _ferry.Tensor):
        return value.address
    if type(value).__module__.partition(".")[0] == "cupy":
        return int(value.data.ptr)
    return view(f"{call}: pointer", value, carrier, place=None)[0].address


def _plan(call: str, plan: Any) -> _ferry.Plan:
    return instance(f"{call}: plan", plan, _ferry.Plan, "a ferry.Plan, as Group.plan returns it")


def _optional_dtype(name: str, dtype: Any) -> _ferry.Dtype | None:
    return None if dtype is None else dtype_named(name, dtype)


__all__ = ["Group"]
