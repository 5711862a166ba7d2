"""`dispatch` and `combine` of V2 and V2.5, which differ in their arguments alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from ferry._ferry import RowOrder
from torch import Tensor

import ferry.torch
from deep_ep import arguments
from deep_ep.borrowed import tensor_of
from deep_ep.buffers.base import Communicating, Regroups
from deep_ep.call import Call, column_major, with_scales
from deep_ep.ep_handle import EPHandle, exchange_of, worst_rows
from deep_ep.errors import refuse, require, require_flags, require_integer, require_seconds
from deep_ep.gradients import without_gradients
from deep_ep.handles import Exchange
from deep_ep.sizes import MOST_BYTES, SIZE_STEP, buffer_bytes, size_hint, theoretical_sms
from deep_ep.streams import Turn, event_of
from ferry.arguments import INT32_MAX, whole_number

_QPS = {False: 17, True: 129}  # that the original allocates, by allow_hybrid_mode


class When(NamedTuple):
    """A call's place among streams, as the interface has it."""

    previous_event: Any = None
    before_epilogue: Any = None
    async_with_compute_stream: bool = False
    allocate_on_comm_stream: bool = False

    def turn(self, call: str, runtime: Any, device: torch.device) -> Turn:
        require_flags(
            call,
            async_with_compute_stream=self.async_with_compute_stream,
            allocate_on_comm_stream=self.allocate_on_comm_stream,
        )
        previous = event_of(call, self.previous_event)
        if previous is not None:
            good, expected = self.allocate_on_comm_stream, "True beside previous_event"
            require(good, call, "allocate_on_comm_stream", False, expected)
        return Turn(
            call,
            runtime,
            device,
            previous,
            self.async_with_compute_stream,
            also=self.before_epilogue,
        )


AT_ONCE = When()


def when_of(previous: Any, before_epilogue: Any, asynchronous: bool, allocates: bool) -> When:
    """Of a call's arguments; AT_ONCE for most calls."""
    if previous is None and before_epilogue is None and asynchronous is False is allocates:
        return AT_ONCE
    return When(previous, before_epilogue, asynchronous, allocates)


_F32 = torch.float32
_IDS = (torch.int64, torch.int32)
_MOST_KNOWN = 64  # settings that were checked
_MODES = (
    "deterministic",
    "allow_hybrid_mode",
    "allow_multiple_reduction",
    "prefer_overlap_with_compute",
)
_FLAGS = {bool, type(None)}
_PLAIN = {int, *_FLAGS}


class Routes(NamedTuple):
    """Where a dispatch sends, and how what arrives is laid out."""

    topk_idx: Tensor | None
    topk_weights: Tensor | None
    stats: Tensor | None
    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    handle: EPHandle | None
    do_handle_copy: bool
    do_cpu_sync: bool | None
    do_expand: bool
    do_zero_padding: bool
    col_major_scales: bool


def routes_of(*said: Any) -> Routes:
    """As Routes(...), which takes twice as long."""
    return tuple.__new__(Routes, said)


class Experts(Regroups, Communicating):
    """R ranks that exchange tokens with experts. Ferry sends rows straight to their place in the
    tensor that the caller gets: there is no epilogue of its own, order is always that of ascending
    source rank and token, and rows between experts are always zero."""

    def _open_experts(
        self,
        group: Any,
        num_bytes: int | None,
        sizes: tuple[int, int, int, bool],
        modes: tuple[bool, bool, bool, bool],
        num_allocated_qps: int,
        seconds: tuple[float, float],
        sl_idx: int | None,
    ) -> None:
        """The constructors' share. sizes: num_max_tokens_per_rank, hidden, num_topk,
        use_fp8_dispatch. modes: deterministic, allow_hybrid_mode, allow_multiple_reduction,
        prefer_overlap_with_compute. seconds: the timeouts of CPU and GPU."""
        call = type(self).__name__
        tokens, hidden, topk = (
            _whole(call, name, value, 0)
            for name, value in zip(("num_max_tokens_per_rank", "hidden", "num_topk"), sizes)
        )
        require_flags(call, use_fp8_dispatch=sizes[3], **dict(zip(_MODES, modes)))
        self.num_max_tokens_per_rank = tokens
        self.deterministic, self.allow_hybrid_mode = modes[:2]
        self.allow_multiple_reduction, self.prefer_overlap_with_compute = modes[2:]
        qps = require_integer(call, "num_allocated_qps", num_allocated_qps, 0, "0 or more")
        self.num_allocated_qps = qps or _QPS[bool(self.allow_hybrid_mode)]
        for name, value in zip(("num_cpu_timeout_secs", "num_gpu_timeout_secs"), seconds):
            require_seconds(call, name, value)
        if num_bytes is not None:
            expected = f"a multiple of {SIZE_STEP}, 0 to {MOST_BYTES}"
            num_bytes = require_integer(call, "num_bytes", num_bytes, 0, expected)
            good = num_bytes % SIZE_STEP == 0 and num_bytes <= MOST_BYTES
            require(good, call, "num_bytes", num_bytes, expected)
        self._meet(
            group,
            memory_bytes=num_bytes or 0,
            deadline=min(seconds),
            crossing="automatic" if self.allow_hybrid_mode else "direct",
            sl_idx=sl_idx,
        )
        everyone = self._groups.everyone
        self.rank_idx, self.num_ranks = everyone.rank, everyone.size
        if num_bytes is None:
            num_bytes = buffer_bytes(self.num_ranks, tokens, hidden, topk, fp8=sizes[3])
        self.num_bytes = num_bytes
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(
            self.rank_idx, self.num_scaleup_ranks
        )
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._sms: dict[tuple[int, int], int] = {}
        self._known: dict[Any, dict[str, Any]] = {}
        self._at_once = AT_ONCE.turn(call, self.runtime, torch.device("cpu"))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Groups of ranks that share memory, and the ranks of one."""
        self._require_living()
        found: tuple[int, int] = self.runtime.get_physical_domain_size()
        return found

    def get_logical_domain_size(self) -> tuple[int, int]:
        """The same; without allow_hybrid_mode one group of all ranks."""
        self._require_living()
        found: tuple[int, int] = self.runtime.get_logical_domain_size(self.allow_hybrid_mode)
        return found

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """What the original would use; Ferry has no such queues."""
        sms = require_integer("get_theoretical_num_qps", "num_sms", num_sms, 1, "at least 1")
        wanted = sms * 16 + 1 if self.allow_hybrid_mode else min(sms, 9)
        return min(wanted, self.num_allocated_qps)

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that a dispatch and its combine take at most, a multiple of 2 MiB; f32 sums without
        allow_multiple_reduction. Ferry needs none of them at first."""
        require_flags(
            "get_buffer_size_hint",
            use_fp8_dispatch=use_fp8_dispatch,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )
        return size_hint(
            "get_buffer_size_hint",
            group,
            (num_max_tokens_per_rank, hidden, num_topk),
            use_fp8_dispatch,
            allow_multiple_reduction,
        )

    def _sms_of(self, num_experts: int, num_topk: int) -> int:
        key = (num_experts, num_topk)
        found = self._sms.get(key)
        if found is None:
            found = self._sms[key] = self.get_theoretical_num_sms(*key)
        return found

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """How many SMs a dispatch needs to fill the links: an even number, at least 4.

        num_scaleout_topk: 0. rdma_gbs, nvlink_gbs: GB/s of a rank's links; 0: those of NVLink 4 and
        a NIC of 400 Gb/s. sm_read_gbs, sm_write_gbs: of one SM. Without prefer_overlap_with_compute
        at least 24.
        """
        call = "get_theoretical_num_sms"
        scaleout = whole_number(num_scaleout_topk)
        require(scaleout == 0, call, "num_scaleout_topk", num_scaleout_topk, "0")
        experts = require_integer(call, "num_experts", num_experts, 1, "at least 1")
        topk = require_integer(call, "num_topk", num_topk, 1, f"1 to {experts}")
        require(topk <= experts, call, "num_topk", topk, f"1 to {experts}")
        links = (self.num_scaleout_ranks, self.num_scaleup_ranks, rdma_gbs, nvlink_gbs)
        least = 4 if self.prefer_overlap_with_compute else 24
        return theoretical_sms(call, links, (sm_read_gbs, sm_write_gbs), least)

    @without_gradients
    def _dispatch(self, x: Any, routes: Routes, num_sms: int, num_qps: int, when: When) -> Any:
        call = "dispatch"
        rows, scales = arguments.rows_and_scales(call, x) if isinstance(x, tuple) else (x, None)
        arguments.check_rows(call, "x", rows)
        carried = None if scales is None else arguments.carried_scales(call, rows, scales)
        cached = routes.handle
        if cached is None:
            settings = self._settings(routes, rows, num_sms, num_qps)
        else:
            _check_flags(routes)
            self._check_qps(call, num_qps)
            exchange = exchange_of(call, cached)
            _check_cached(routes, cached, rows)
            settings = cached.__dict__
        weights = routes.topk_weights
        if weights is not None:
            plan = None if cached is None else exchange.plan
            shape = routes.topk_idx.shape if plan is None else (plan.tokens, plan.topk)
            try:
                good = type(weights) is Tensor and weights.dtype == _F32 and weights.shape == shape
            except RuntimeError:  # of a nested tensor
                good = False
            if not good:
                arguments.check_weights(call, weights, *shape)
        turn = self._turn(call, when, rows)
        sent = arguments.carried_rows(rows)
        if cached is None:
            return self._first(turn, sent, routes, settings, (rows.dtype, scales, carried))
        _whole(call, "handle.expert_alignment", settings["expert_alignment"], 1)
        layout = _layout(routes, settings, exchange.max_recv_rows)
        sms = _whole(call, "num_sms", num_sms, 0)
        sms = sms or _whole(call, "handle.num_sms", settings["num_sms"], 0)  # callers may set it
        received = exchange.group._dispatch_checked(
            sent, exchange.plan, None, weights, carried, layout, turn.stream, sms
        )
        x = with_scales(received, rows.dtype, scales)
        return self._received(turn, received, cached, routes, x)

    def _settings(self, routes: Routes, rows: Tensor, num_sms: int, num_qps: int) -> dict[str, Any]:
        """The handle's fields that the arguments say."""
        call, ids = "dispatch", routes.topk_idx
        if type(ids) is not Tensor or ids.dtype not in _IDS or ids.dim() != 2:
            arguments.check_routes(call, ids)
        assert ids is not None
        tokens, (given, topk) = rows.shape[0], ids.shape
        if given != tokens:
            refuse(call, "topk_idx", tuple(ids.shape), f"{tokens} rows, as x")
        most = routes.num_max_tokens_per_rank
        if most is None:
            most = self.num_max_tokens_per_rank
        said = (routes.num_experts, most, routes.expert_alignment, num_sms, num_qps, *routes[7:])
        # True is 1: what is known is so by its types, too.
        key = (said, topk, ids.dtype, *map(type, said))
        try:
            found = self._known.get(key)
        except Exception:  # something that has no hash, or one that raises
            found = None
        if found is None:
            found = self._checked(*said[:4])
            _check_flags(routes)
            self._check_qps(call, num_qps)
            found["do_expand"], found["ids_dtype"] = bool(routes.do_expand), ids.dtype
            found["num_sms"] = found["num_sms"] or self._sms_of(
                found["num_experts"], min(topk, found["num_experts"])
            )
            if _PLAIN.issuperset(map(type, said)):  # the number of a tensor changes
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
        if found["num_max_tokens_per_rank"] < tokens:
            expected = f"at least {tokens}, the tokens of this rank"
            refuse(call, "num_max_tokens_per_rank", most, expected)
        return found.copy()

    @staticmethod
    def _checked(experts: Any, most: Any, alignment: Any, num_sms: Any) -> dict[str, Any]:
        call = "dispatch"
        if experts is None:
            refuse(call, "num_experts", "None", "the number of experts, or a handle")
        step = 1 if alignment is None else alignment
        return {
            "num_experts": _whole(call, "num_experts", experts, 1),
            "num_max_tokens_per_rank": _whole(call, "num_max_tokens_per_rank", most, 0),
            "expert_alignment": _whole(call, "expert_alignment", step, 1),
            "num_sms": _whole(call, "num_sms", num_sms, 0),
        }

    def _first(
        self,
        turn: Turn,
        sent: Tensor,
        routes: Routes,
        settings: dict[str, Any],
        given: tuple[torch.dtype, Tensor | None, Tensor | None],
    ) -> Any:
        """A dispatch of new routes. given: dtype and scales of x, and these as Ferry takes them."""
        ids, exact = routes.topk_idx, routes.do_cpu_sync is None or routes.do_cpu_sync
        assert ids is not None
        group = self._group_for(settings["num_experts"], sent.device)
        worst = 0 if exact else _worst(group, routes, settings, group.local_experts)
        weights, layout = routes.topk_weights, _layout(routes, settings, worst)
        dtype, scales, carried = given
        try:
            received = group._dispatch_checked(
                sent, None, ids, weights, carried, layout, turn.stream, settings["num_sms"]
            )
        except ferry.ExhaustedError as error:
            # A token that names an expert twice has a row for each slot. All ranks come here alike.
            distinct = ids.shape[1] <= group.experts // group.size
            if error.peer is None or exact or not routes.do_expand or distinct:
                raise
            layout = _layout(routes, settings, _worst(group, routes, settings, ids.shape[1]))
            received = group._dispatch_checked(
                sent, None, ids, weights, carried, layout, turn.stream, settings["num_sms"]
            )
        on_gpu, raw = sent.is_cuda, received.raw
        captured = on_gpu and torch.cuda.is_current_stream_capturing()
        x = with_scales(received, dtype, scales)
        rows = (x[0] if isinstance(x, tuple) else x).shape[0]
        exchange = Exchange(group, raw.plan, 0, rows, worst_case=not exact, captured=captured)
        if not routes.do_handle_copy:
            settings["topk_idx"] = ids
        elif on_gpu:  # in CPU memory the plan has them
            with turn.context(ids):
                settings["topk_idx"] = ids.clone()
        handle = EPHandle.of(exchange, settings, raw.origins(on_gpu))
        return self._received(turn, received, handle, routes, x)

    def _received(self, turn: Turn, received: Any, handle: EPHandle, routes: Routes, x: Any) -> Any:
        """What the call returns. x: the rows, with their scales if there are any."""
        raw = received.raw
        weights = found_ids = None
        if routes.topk_weights is not None:
            weights = tensor_of(raw.row_weights if routes.do_expand else raw.topk_weights)
        stats, turns = routes.stats, routes.col_major_scales and isinstance(x, tuple)
        if turn.stream is None and stats is None and not turns:  # as most calls do
            if not routes.do_expand:
                found_ids = _own_ids(raw, handle.__dict__["ids_dtype"])
            return x, found_ids, weights, handle, turn.end()
        with turn.context(stats):
            if not routes.do_expand:
                found_ids = _own_ids(raw, handle.__dict__["ids_dtype"])
            if stats is not None:
                self._count(stats, handle.arrived.topk_idx, handle._exchange)
            if turns:
                x = (x[0], column_major(x[1]))
        if turn.stream is None:
            return x, found_ids, weights, handle, turn.end()
        names = ("x", "scales", "topk_weights", "topk_idx", "source_token", "slot_rows")
        kept = handle.__dict__.get("topk_idx")
        made = (weights, found_ids, kept, x[1] if isinstance(x, tuple) else None)
        event = Call("dispatch", turn, 0, {}).end(handle._exchange.group, received, names, made)
        if routes.handle is None:
            handle.after(event.event)
        return x, found_ids, weights, handle, event

    def _count(self, stats: Tensor, ids: Tensor, exchange: Exchange) -> None:
        local = exchange.group.local_experts
        good = (
            arguments.is_strided(stats) and stats.shape == (local,) and stats.dtype == torch.int32
        )
        name = "cumulative_local_expert_recv_stats"
        require(good, "dispatch", name, arguments.words(stats), f"torch.int32 of shape ({local},)")
        arguments.check_memory("dispatch", **{name: stats})
        good = stats.device == ids.device
        require(good, "dispatch", name, f"a tensor of {stats.device}", f"{ids.device}, as x")
        good = stats.stride(0) != 0 or local == 1
        require(good, "dispatch", name, "one element expanded", "memory for each expert")
        stats.add_(ferry.torch.expert_rows(ids, local))

    @without_gradients
    def _combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Any,
        num_sms: int,
        num_qps: int,
        when: When,
        defer: bool = False,
    ) -> Any:
        """(sums, weights, event); deferred: an event whose wait returns the first two."""
        call = "combine"
        arguments.check_rows(call, "x", x)
        exchange = exchange_of(call, handle)
        if x.shape[0] != exchange.rows:
            refuse(call, "x", f"{x.shape[0]} rows", f"{exchange.rows}, as dispatch gave")
        both = arguments.biases(call, x, bias, exchange.plan)
        self._check_qps(call, num_qps)
        sms = _whole(call, "num_sms", num_sms, 0) or handle.num_sms
        turn = self._turn(call, when, x)
        how: dict[str, Any] = {"stream": turn.stream, "num_sms": sms}
        # Sums that are rounded here cross in f32: those of a rank's experts where only one rounding
        # is allowed, and those whose biases are there when the caller waits.
        apart = handle.do_expand and not self.allow_multiple_reduction
        apart = apart or (defer and both != (None, None))
        if apart:
            arguments.check_memory(call, x=x)
        weights = topk_weights
        with turn.context(x, topk_weights, *(both if apart else ())):
            if handle.do_expand:
                how["order"], how["alignment"] = "expert_major", handle.expert_alignment
                if weights is not None:
                    _check_row_weights(exchange, weights)
            elif weights is not None:
                arguments.check_weights(call, weights, exchange.rows, exchange.plan.topk)
            rows = x.float() if apart else x
        biases: dict[str, Any] = {} if apart else {"bias0": both[0], "bias1": both[1]}
        combined = exchange.group.combine(
            rows, exchange.plan, topk_weights=weights, **biases, **how
        )
        summed = tensor_of(combined.raw.x)
        back = None if weights is None else combined.topk_weights
        names = ("x", "topk_weights")
        if defer:
            event = Call(call, turn, 0, how).end(exchange.group, combined, names)
            event.register_hook_after_wait(
                lambda: (_rounded(summed, both, x.dtype) if apart else summed, back)
            )
            return event
        if apart:
            with turn.context():
                summed = _rounded(summed, both, x.dtype)
        event = Call(call, turn, 0, how).end(exchange.group, combined, names, (summed,))
        return summed, back, event

    def _turn(self, call: str, when: When, rows: Tensor) -> Turn:
        """Calls at once share one."""
        if when is AT_ONCE and self.runtime is not None:
            return self._at_once
        return when.turn(call, self.runtime, rows.device)

    def _check_qps(self, call: str, num_qps: int) -> None:
        most = self.num_allocated_qps
        if type(num_qps) is int and 0 <= num_qps <= most:
            return
        expected = f"0 to {most}, num_allocated_qps"
        qps = require_integer(call, "num_qps", num_qps, 0, expected)
        require(qps <= most, call, "num_qps", qps, expected)


def _check_flags(routes: Routes) -> None:
    if not _FLAGS.issuperset(map(type, routes[7:])):
        require_flags("dispatch", **dict(zip(Routes._fields[7:], routes[7:])))
    if routes.do_zero_padding and not routes.do_expand:
        refuse("dispatch", "do_zero_padding", True, "do_expand=True beside it")


def _check_cached(routes: Routes, handle: EPHandle, rows: Tensor) -> None:
    """What is given beside a handle says the same."""
    call, known, then = "dispatch", handle.__dict__, ", as of the handle"
    if routes.topk_idx is not None:
        refuse(call, "topk_idx", "a tensor", "None beside a handle")
    if routes.do_cpu_sync:
        refuse(call, "do_cpu_sync", True, "None or False beside a handle")
    ids, most, step = routes[3:6]
    said = ids is not None or most is not None or step is not None
    if said or bool(routes.do_expand) != known["do_expand"]:
        wanted = known["do_expand"]
        given = bool(routes.do_expand)
        require(given == wanted, call, "do_expand", given, f"{wanted}{then}")
        for name in ("num_experts", "num_max_tokens_per_rank", "expert_alignment"):
            given = getattr(routes, name)
            if given is not None and whole_number(given) != known[name]:
                refuse(call, name, given, f"{known[name]}{then}")
    tokens = known["_exchange"].plan.tokens
    if rows.shape[0] != tokens:
        refuse(call, "x", f"{rows.shape[0]} rows", f"{tokens}, as of the handle")


def _own_ids(raw: Any, dtype: torch.dtype) -> Tensor:
    """recv_topk_idx, which the caller may write to: in CPU memory every dispatch makes it anew."""
    made = tensor_of(raw.topk_idx)
    if made.dtype != dtype:
        return made.to(dtype)
    return made.clone() if made.is_cuda else made


def _check_row_weights(exchange: Exchange, weights: Any) -> None:
    good = arguments.is_strided(weights) and weights.shape == (exchange.rows,)
    good = good and weights.dtype == torch.float32
    wanted = f"torch.float32 of shape ({exchange.rows},), one for each row"
    require(good, "combine", "topk_weights", arguments.words(weights), wanted)


@without_gradients
def _rounded(sums: Tensor, both: tuple[Tensor | None, Tensor | None], dtype: torch.dtype) -> Tensor:
    """With the biases, in order; of a deferred call, whose memory may be gone meanwhile."""
    for one in both:
        if one is not None:
            arguments.check_memory("combine", bias=one)
            sums = sums + one.float()
    return sums.to(dtype)


def _worst(group: ferry.Group, routes: Routes, settings: dict[str, Any], experts: int) -> int:
    """The rows of a result that does not wait for the counts, where a token has slots of at most so
    many experts of this rank."""
    most = settings["num_max_tokens_per_rank"]
    rows: int = group.size * most
    if routes.do_expand:
        assert routes.topk_idx is not None
        slots = min(routes.topk_idx.shape[1], experts)
        rows = worst_rows(rows * slots, group.local_experts, settings["expert_alignment"])
    return max(rows, 1)


def _layout(routes: Routes, settings: dict[str, Any], max_recv_rows: int) -> tuple[Any, ...]:
    """As `Group` takes it."""
    if not routes.do_expand:
        return RowOrder.rank_major, 1, False, max_recv_rows
    weighted = routes.topk_weights is not None
    return RowOrder.expert_major, settings["expert_alignment"], weighted, max_recv_rows


def _whole(call: str, name: str, value: Any, least: int) -> int:
    """An integer of at least that and of 31 bits; the words are made where it is none."""
    if type(value) is int and least <= value <= INT32_MAX:
        return value
    number = require_integer(call, name, value, least, f"{least} or more")
    require(number <= INT32_MAX, call, name, value, f"{least} to {INT32_MAX}")
    return number
