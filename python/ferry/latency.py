"""Latency mode: small batches, fixed-capacity output, hooks."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

from ferry import _ferry
from ferry.arguments import INT32_MAX, UINT32_MAX, choice, flag, instance, integer, number
from ferry.group import FORMATS, ORDERS, ROUTE_DTYPES, SCALE_FORMATS, Group
from ferry.results import Result
from ferry.streams import Place
from ferry.tensors import Like, dtype_named, optional_view, view
from ferry.trace import ranged

ArrayT = TypeVar("ArrayT")

_FORMATS = FORMATS | {"nvfp4": _ferry.WireFormat.nvfp4}
PATHS = {"per_slot": _ferry.CombinePath.per_slot, "per_rank": _ferry.CombinePath.per_rank}
COMBINE_FORMATS = {
    "as_is": _ferry.CombineFormat.as_is,
    "e4m3": _ferry.CombineFormat.e4m3,
    "logfmt10": _ferry.CombineFormat.logfmt10,
}


class LatencyReceived(Result[ArrayT]):
    """What a latency dispatch brings. L: local experts, R: ranks, C: capacity, K: the configured
    topk. With `order="rank_major"` shapes begin with [R, C] instead of [L, R*C].

    At most two are alive at a time; dropping this object and its arrays gives the buffer back.
    """

    _shown = ("x", "scales")
    _raw: _ferry.LatencyReceived

    @cached_property
    def x(self) -> ArrayT:
        """[L, R*C, H], e4m3 or the input's dtype, or of nvfp4 u8 [L, R*C, H/2], the first value of
        a byte in its low bits. The first counts[e] rows of expert e are valid:
        ascending source rank, token, slot. Rank-major [R, C, H], one row for each token: the first
        counts[s] rows of source s, ascending token."""
        return self._array(self._raw.x)

    @cached_property
    def scales(self) -> ArrayT | None:
        """Of e4m3: f32 [L, R*C, ceil(H/128)], or i32 [L, R*C, ceil(H/512)] packed; stride 1 along
        the rows. Of nvfp4: e4m3 [L, ceil(R*C/128), ceil(H/64) * 512], tiles as tensor cores read
        them: reshaped [.., ceil(H/64), 32, 4, 4], that of row t and channels 16j to 16j + 15 is at
        [t // 128, j // 4, t % 32, t % 128 // 32, j % 4]."""
        return self._array(self._raw.scales)

    @cached_property
    def counts(self) -> ArrayT:
        """i32 [L]: valid rows of each expert; rank-major [R], of each source."""
        return self._array(self._raw.counts)

    @cached_property
    def source_token(self) -> ArrayT:
        """i32 [L, R*C]: index of the token at its owner."""
        return self._array(self._raw.source_token)

    @cached_property
    def ranges(self) -> ArrayT:
        """i64 [L, R]: (first row << 32) | rows. Rank-major: None."""
        return self._array(self._raw.ranges)

    @cached_property
    def topk_idx(self) -> ArrayT | None:
        """Rank-major only: i32 [R, C, K], local expert ids; -1 for a slot that is not on this rank
        and in rows that are not valid."""
        return self._array(self._raw.topk_idx)

    @cached_property
    def topk_weights(self) -> ArrayT | None:
        """Rank-major only, if the dispatch was given weights: f32 [R, C, K], 0 where `topk_idx` is
        -1."""
        return self._array(self._raw.topk_weights)

    @property
    def raw(self) -> _ferry.LatencyReceived:
        """Ferry's own tensors by the same names, which speak DLPack and are made at each access."""
        return self._raw

    @ranged("ferry.latency_dispatch.receive")
    def receive(self) -> None:
        """With `hook=True`: receives; blocks, without a stream, until all rows arrived. Nothing is
        written before, but rank-major rows. A second call raises `InvalidArgumentError`."""
        self._raw.receive()


class LatencyCombined(Result[ArrayT]):
    """What a latency combine brings."""

    _raw: _ferry.LatencyCombined

    @cached_property
    def x(self) -> ArrayT:
        """[T, H]: the sum over slots of weight times row: fp32 fma in ascending k from +0, one
        rounding; `path="per_rank"` and rank-major rows: the sum over ranks, in ascending order."""
        return self._array(self._raw.x) if self._out is None else self._out

    @property
    def raw(self) -> _ferry.LatencyCombined:
        """As of `LatencyReceived`."""
        return self._raw

    @ranged("ferry.latency_combine.receive")
    def receive(self) -> None:
        """With `hook=True`: receives, as for `LatencyReceived`."""
        self._raw.receive()


class LatencyExchange:
    """Fixed buffers of latency mode inside a group. Making one is collective; the arguments must be
    the same on all ranks. The buffers stay with the group when the exchange goes, for a rank that
    was masked may still write there: make one for each configuration and keep it. There are no
    gradients: tensors that require one are refused, as by `Group`.

    Args:
        group: the group whose ranks exchange.
        capacity: most tokens that a rank sends in one dispatch.
        hidden: channels of a token; row bytes a multiple of 16.
        topk: most slots of a route.
        dtype: of tokens and of combined rows: "bf16", "f16" or "f32".
        order: of results. "expert_major": dispatches may ask for either. "rank_major": for that
            alone, and no memory is taken to fan out.
        masks: a rank that misses the deadline of a call is masked, and the others go on without it;
            see `masked`. Without, the group fails. Expert-major combines then take
            `path="per_rank"`.
    """

    def __init__(
        self,
        group: Group,
        *,
        capacity: int,
        hidden: int,
        topk: int,
        dtype: Any = "bf16",
        order: str = "expert_major",
        masks: bool = False,
    ) -> None:
        self._dtype = dtype_named("LatencyExchange: dtype", dtype)
        self._group = instance("LatencyExchange: group", group, Group, "a ferry.Group")
        self._streams = self._group._streams
        self._raw = _ferry.LatencyExchange(
            group._raw,
            integer("LatencyExchange: capacity", capacity, 1),
            integer("LatencyExchange: hidden", hidden, 1),
            integer("LatencyExchange: topk", topk, 1, INT32_MAX),
            self._dtype,
            choice("LatencyExchange: order", order, ORDERS),
            flag("LatencyExchange: masks", masks),
        )
        self._words = f"capacity {capacity}, hidden {hidden}, top-{topk}, {self._dtype.name}"

    def __repr__(self) -> str:
        return f"<ferry.LatencyExchange: {self._words}>"

    @ranged("ferry.latency_dispatch", waits="wait_ns")
    def dispatch(
        self,
        x: ArrayT,
        topk_idx: Any,
        *,
        topk_weights: Any = None,
        format: str = "as_is",
        scale_format: str = "f32",
        global_scale: float = 1.0,
        order: str = "expert_major",
        wait_ns: Any = None,
        hook: bool = False,
        stream: Any = None,
    ) -> LatencyReceived[ArrayT]:
        """Collective. Carries tokens to their experts; a token crosses once for each rank and,
        expert-major, fans out there.

        Args:
            x: [T, H] dense, T <= capacity, the configured dtype (or uint16 that carries it).
            topk_idx: i64 or i32 [T, K], -1 = unused.
            topk_weights: f32 [T, K], carried to the ranks of the experts; all ranks or none. A
                combine then takes none.
            format: "as_is", or quantised in flight: "e4m3", one scale for each 128 channels; in CPU
                memory "nvfp4", e2m1 with an e4m3 scale for each 16, H a multiple of 16.
            scale_format: of e4m3: "f32", "f32_pow2" (rounded up to a power of two) or
                "ue8m0_packed".
            global_scale: of nvfp4, the same on all ranks, 2^-100 to 2^100: a value is code * scale
                / global_scale. 448 * 6 / (largest magnitude of all ranks) uses the whole range.
            order: "expert_major", or "rank_major": one row for each token, where it was written.
                An exchange that was made "rank_major" takes that alone.
            wait_ns: i64 [R]: how many nanoseconds the receive waited for each source, or until it
                was masked, is added there.
            hook: only send; `receive()` of the result does the rest.
            stream: as for `Group.dispatch`; host engine: None: returns finished (or sent) results.

        A third result alive raises `ExhaustedError` before anything moves.
        """
        name = "latency dispatch"
        place = self._streams.place(name, stream, x)
        x_view, like = self._view(f"{name}: x", x, place)
        raw = self._raw.dispatch(
            x_view,
            view(f"{name}: topk_idx", topk_idx, expected=ROUTE_DTYPES, place=place)[0],
            optional_view(f"{name}: topk_weights", topk_weights, expected="f32", place=place),
            choice(f"{name}: format", format, _FORMATS),
            choice(f"{name}: scale_format", scale_format, SCALE_FORMATS),
            number(f"{name}: global_scale", global_scale),
            choice(f"{name}: order", order, ORDERS),
            optional_view(f"{name}: wait_ns", wait_ns, writable=True, expected="i64", place=place),
            flag(f"{name}: hook", hook),
            place.stream,
        )
        self._group._record(topk_idx)
        return LatencyReceived(place.finished(raw), like)

    @ranged("ferry.latency_combine", waits="wait_ns")
    def combine(
        self,
        rows: ArrayT,
        received: LatencyReceived[Any],
        topk_weights: Any = None,
        *,
        path: str = "per_slot",
        format: str = "as_is",
        wait_ns: Any = None,
        hook: bool = False,
        out: ArrayT | None = None,
        signals: Any = None,
        block_rows: int = 64,
        threshold: int = 1,
        stream: Any = None,
    ) -> LatencyCombined[ArrayT]:
        """Collective. Brings rows back to the owners of their tokens and sums them.

        Args:
            rows: in the configured dtype and in the order of `received.x`: [L, R*C, H]; rank-major
                [R, C, H], each the caller's own weighted sum.
            received: of the dispatch that this answers.
            topk_weights: f32 [T, K] of this rank's own tokens. None with rank-major rows, or if
                they came with the dispatch.
            path: of expert-major rows. "per_slot": one row for each slot crosses and the owner of
                the token sums. "per_rank": the rank of the experts sums its slots and rounds, one
                row for each rank crosses.
            format: of rows in flight: "as_is", "e4m3" (one scale for each 128 channels) or
                "logfmt10" (10 bits a channel).
            wait_ns: i64 [R], as in `dispatch`: for each source's announcement, and for its rows
                once all that are awaited had announced. In CPU memory also what the sending half
                waited for weights that are given here.
            hook: only send; `receive()` of the result does the rest. With "per_rank" and weights
                given here the sending waits for those of the other ranks.
            out: [T, H], the caller's own output. It may not overlap `rows`.
            signals: of expert-major rows in CPU memory that others make while the call runs: i32
                or u32 [L, ceil(R*C / block_rows)]; block b of an expert is read once its signal,
                which its maker stores last, is `threshold` or more. What is not made within the
                deadline raises `DeadlineExceededError`.
            stream: as for the dispatch.
        """
        name = "latency combine"
        place = self._streams.place(name, stream, rows)
        rows_view, like = self._view(f"{name}: rows", rows, place)
        expected = "a ferry.LatencyReceived, as dispatch returns it"
        unsigned = _dtype_of(signals) == "uint32"
        least, most = (0, UINT32_MAX) if unsigned else (-INT32_MAX - 1, INT32_MAX)
        words = _ferry.Dtype.i32 if unsigned else None
        raw = self._raw.combine(
            rows_view,
            instance(f"{name}: received", received, LatencyReceived, expected)._raw,
            optional_view(f"{name}: topk_weights", topk_weights, expected="f32", place=place),
            choice(f"{name}: path", path, PATHS),
            choice(f"{name}: format", format, COMBINE_FORMATS),
            optional_view(f"{name}: wait_ns", wait_ns, writable=True, expected="i64", place=place),
            flag(f"{name}: hook", hook),
            optional_view(f"{name}: out", out, self._carried(out), True, place=place),
            optional_view(f"{name}: signals", signals, words, expected="i32 or u32", place=place),
            integer(f"{name}: block_rows", block_rows, 1),
            integer(f"{name}: threshold", threshold, least, most),
            unsigned,
            place.stream,
        )
        return LatencyCombined(place.finished(raw), like, out)

    def masked(self) -> list[bool]:
        """Of each rank, whether this rank goes on without it: nothing is sent to it, nothing waits
        for it, and what it holds of a token is zero. Each rank decides for itself: by a missed
        deadline, the end of a process or of a rank's group, and by `set_mask`.

        A rank that was masked by a peer that it has not masked itself gets `EvictedError` from its
        calls. Without `masks=True` this and what follows raises `InvalidArgumentError`.
        """
        return self._raw.masked()

    def set_mask(self, rank: int, masked: bool = True) -> None:
        """Masks a peer, or takes its mask back, for calls that begin later. Mask it on all ranks
        that go on, before the same call: the others wait a deadline for it. Without `rejoin` a mask
        may be taken back only from a rank that made as many dispatches as this one."""
        self._raw.set_mask(
            integer("set_mask: rank", rank, 0, INT32_MAX), flag("set_mask: masked", masked)
        )

    def clear_masks(self) -> None:
        """Takes all masks back, as `set_mask`."""
        self._raw.clear_masks()

    @property
    def mask_count(self) -> int:
        """How many times this rank masked another by itself, not by `set_mask`. Cheap to ask: a
        word in host memory."""
        return self._raw.mask_count()

    def rejoin(self) -> None:
        """Collective of all ranks, those that go on and those that come back. Clears the masks, but
        of ranks whose process has ended or that destroyed their group.

        A rank that does not come within the deadline, or a second one where it was held up in its
        last call: `DeadlineExceededError` that names it, and `EvictedError` from every other call
        until a rejoin succeeds. Results that are alive may still be read, but neither received nor
        combined. `Group.regroup` does the same for all exchanges of its group, with the ranks of
        the view; ranks that were lost stay masked for good, also where another process has their
        place.
        """
        self._raw.rejoin()

    @staticmethod
    def memory_hint(
        *,
        capacity: int,
        hidden: int,
        topk: int,
        experts: int,
        ranks: int,
        dtype: Any = "bf16",
        order: str = "expert_major",
        masks: bool = False,
        domains: int = 1,
        device: str = "cpu",
    ) -> int:
        """Registered bytes of one rank's latency buffers.

        Args:
            domains: of the group (`Group.domains`); with several there is room for what comes from
                the others.
            device: on which the group's tensors lie, "cpu" or "cuda"; no GPU is asked.
        """
        return _ferry.LatencyExchange.memory_hint(
            integer("memory_hint: capacity", capacity, 1),
            integer("memory_hint: hidden", hidden, 1),
            integer("memory_hint: topk", topk, 1, INT32_MAX),
            dtype_named("memory_hint: dtype", dtype),
            integer("memory_hint: experts", experts, 1),
            integer("memory_hint: ranks", ranks, 1, INT32_MAX),
            choice("memory_hint: order", order, ORDERS),
            flag("memory_hint: masks", masks),
            integer("memory_hint: domains", domains, 1, INT32_MAX),
            choice("memory_hint: device", device, {"cpu": False, "cuda": True}),
        )

    def _view(self, name: str, value: Any, place: Place) -> tuple[_ferry.View, Like]:
        return view(name, value, self._carried(value), place=place)

    def _carried(self, value: Any) -> _ferry.Dtype | None:
        """The configured dtype for a uint16 array, which cannot say it."""
        return self._dtype if _dtype_of(value) == "uint16" else None


def _dtype_of(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


__all__ = ["LatencyCombined", "LatencyExchange", "LatencyReceived"]
