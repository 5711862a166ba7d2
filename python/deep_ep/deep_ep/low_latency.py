"""Low-latency mode: the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.arguments import check_memory
from deep_ep.block_signals import Blocks, signals_of
from deep_ep.errors import refuse, require, require_flags, require_integer
from deep_ep.event import EventOverlap
from deep_ep.gradients import without_gradients
from deep_ep.groups import Groups
from deep_ep.low_latency_checks import (
    Shape,
    Wire,
    check_combine,
    check_mode,
    check_sizes,
    check_stats,
    check_tokens,
    nvfp4_of,
    same_routes,
    unpacked,
    wire_of,
)
from deep_ep.low_latency_masks import Masks
from deep_ep.rounds import Round, Rounds
from deep_ep.runtime import Runtime
from deep_ep.streams import Turn, hook_of
from deep_ep.survivors import Members, moved

Handle = tuple[Tensor, Tensor, int, int, int]
Hook = Callable[[], None]
_FLAGS = {bool, type(None)}
_OF_DISPATCH = ("use_fp8", "round_scale", "use_ue8m0", "use_nvfp4", "use_ue8m0_for_sf")
_OF_COMBINE = ("use_logfmt", "zero_copy", "overlap")
_ENDS = ("async_finish", "return_recv_hook")


class LowLatency(Masks):
    """The low-latency half of a Buffer. The other half provides what is declared here.

    Each (num_max_dispatch_tokens_per_rank, hidden, num_experts, top-k, dtype) has buffers of its
    own, made collectively by the first dispatch with it. Results of the last two dispatches may be
    used; older tensors see what later dispatches write.
    """

    low_latency_mode: bool
    runtime: Runtime
    _groups: Groups

    def _group_for(self, num_experts: int, device: torch.device) -> ferry.Group:
        raise NotImplementedError

    def _open_low_latency(self) -> None:
        """Called at the end of the constructor, on all ranks: prepares this class's own state."""
        self._latency_rounds: dict[tuple[Any, ...], Rounds] = {}
        self._latency_among: dict[tuple[Shape, tuple[int, ...]], Rounds] = {}
        shrinks = self.enable_shrink and self.low_latency_mode
        self._open_masks(self._groups.everyone if shrinks else None)

    def _close_low_latency(self) -> None:
        """Called by `destroy`, before the groups are left: drops what holds their memory."""
        self._latency_rounds.clear()
        self._latency_among.clear()
        self._survivors = None

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """There is nothing to clean, whatever ran before: Ferry's flags are numbers that only grow
        and lie outside what callers can write. Waits for nobody, but with `enable_shrink` for all
        ranks that are left: who left before, or does not come, is masked."""
        call = "clean_low_latency_buffer"
        check_mode(call, self.low_latency_mode, False, False)
        self._require_living()
        check_sizes(
            call,
            num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            hidden=hidden,
            num_experts=num_experts,
        )
        if self._survivors is not None:
            self._agree()

    @without_gradients
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        x_global_scale: Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Handle, EventOverlap, Hook | None]:
        """Collective. Sends every token to the experts that it names.

        Args:
            x: [T, H] bf16 (or f16, f32), T at most `num_max_dispatch_tokens_per_rank`.
            topk_idx: i64 or i32 [T, K], -1 = unused.
            cumulative_local_expert_recv_stats: i32 [L], the rows received are added.
            dispatch_wait_recv_cost_stats: i64 [R], the nanoseconds that this call waited for each
                source are added.
            use_fp8: rows arrive as e4m3 with a scale for each 128 channels.
            round_scale: scales are powers of two. use_ue8m0: as exponents, four in an i32.
            return_recv_hook: only send; the hook receives.
            use_nvfp4: of a fork, in CPU memory; needs use_fp8=False. Rows arrive as u8 [R*C, H/2,
                L], two e2m1 values a byte, the first in the low bits, and e4m3 scales
                [32, 4, ceil(R*C/128), 4, ceil(H/64), L] for each 16 channels. x_global_scale: f32
                of no dimension, the same on all ranks; a value is code * scale / x_global_scale.
                use_ue8m0_for_sf: False.

        Returns, with L local experts, R ranks and C = `num_max_dispatch_tokens_per_rank`: the rows
        [L, R*C, H], with fp8 a pair with their scales; the number of valid rows, i32 [L]; the
        handle: (source tokens i32 [L, R*C], layout i64 [L, R]: first row << 32 | rows, C, H,
        num_experts); the event; the hook or None.
        """
        call = "low_latency_dispatch"
        wire_flags = (use_fp8, round_scale, use_ue8m0, use_nvfp4, use_ue8m0_for_sf)
        given = (*wire_flags, async_finish, return_recv_hook)
        if not _FLAGS.issuperset(map(type, given)):
            require_flags(call, **dict(zip(_OF_DISPATCH + _ENDS, given)))
        check_mode(call, self.low_latency_mode, async_finish, return_recv_hook)
        check_tokens(call, x, topk_idx)
        if use_nvfp4:
            of_fp8 = round_scale or use_ue8m0
            wire = nvfp4_of(call, use_fp8, of_fp8, use_ue8m0_for_sf, x_global_scale)
        else:
            wire = wire_of(call, use_fp8, round_scale, use_ue8m0)
            if x_global_scale is not None or use_ue8m0_for_sf:
                name = "x_global_scale, use_ue8m0_for_sf"
                refuse(call, name, "one of them", "use_nvfp4=True beside it")
        capacity, experts = num_max_dispatch_tokens_per_rank, num_experts
        tokens, hidden = x.shape
        if type(capacity) is not int or type(experts) is not int:  # as a key True is 1
            name = "num_max_dispatch_tokens_per_rank"
            capacity = require_integer(call, name, capacity, 1, "a positive integer")
            experts = require_integer(call, "num_experts", experts, 1, "a positive integer")
        key = (capacity, hidden, experts, topk_idx.shape[1], x.dtype, x.device, False)
        rounds = self._latency_rounds.get(key)
        if rounds is None:
            check_sizes(call, num_max_dispatch_tokens_per_rank=capacity, num_experts=experts)
        if tokens > capacity:
            most = f"at most num_max_dispatch_tokens_per_rank = {capacity}"
            refuse(call, "x", f"{tokens} tokens", most)
        if rounds is None:
            rounds = self._rounds_for(call, Shape(*key))
        options: dict[str, Any] = {"hook": bool(return_recv_hook)}
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            name = "cumulative_local_expert_recv_stats"
            check_stats(call, name, stats, torch.int32, rounds.local_experts)
        if dispatch_wait_recv_cost_stats is not None:
            name = "dispatch_wait_recv_cost_stats"
            options |= self._waits(call, name, dispatch_wait_recv_cost_stats)
        turn = Turn(call, self.runtime, x.device, None, True) if async_finish else None
        if turn is not None:
            options["stream"] = turn.stream
        made = rounds.dispatch(x, topk_idx, wire, **options)

        hook: Hook | None = None
        if return_recv_hook:
            parts = (made.scales, made.counts, made.source_token, made.ranges)
            first = hook_of(made.receive, x.device, rounds.group, parts)

            def hook() -> None:
                first()
                if stats is not None:
                    stats.add_(made.counts)

        elif stats is not None:
            with nullcontext() if turn is None else turn.context():
                stats.add_(made.counts)
        rows = made.x if made.scales is None else (made.x, made.scales)
        return (
            tiled(*rows) if use_nvfp4 else rows,
            made.counts,
            (made.source_token, made.ranges, capacity, hidden, experts),
            _end(turn, x, topk_idx),
            hook,
        )

    @without_gradients
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 0,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Collective. Brings rows back to the owners of their tokens and sums them there: in fp32,
        in ascending slot, with one rounding. With enable_shrink the rank of the experts sums its
        slots and rounds, and the owner adds the ranks.

        Args:
            x: [L, R*C, H], the dtype that was dispatched.
            topk_idx: [T, K], those of the dispatch.
            topk_weights: f32 [T, K].
            use_logfmt: rows cross in 10 bits a channel.
            zero_copy: the rows are what was written to `get_next_low_latency_combine_buffer`.
            return_recv_hook: only send; the hook sums. With enable_shrink sending waits for the
                weights of all ranks.
            out: [T, H], the caller's own output.
            combine_wait_recv_cost_stats: i64 [R], as for the dispatch.
            overlap: rows are made while the call runs, in CPU memory; needs return_recv_hook and a
                handle's first combine. num_sms: 0: CPU memory takes no SMs.
            packed_recv_count: i32 [L], the counts of the dispatch. comp_signal: i32 or u32, L times
                ceil(R*C / block_m): that block of an expert's rows is read once its signal is
                `threshold` or more.
            src_signals: instead: u32 or i32 [L]: an expert's rows are read once its signal is
                src_signal_expect_value or more.

        Returns [T, H], the event, the hook or None. A handle may serve again, and after two later
        dispatches; Ferry, which has forgotten its routes by then, sends them once more.
        """
        call = "low_latency_combine"
        flags = (use_logfmt, zero_copy, overlap, async_finish, return_recv_hook)
        if not _FLAGS.issuperset(map(type, flags)):
            require_flags(call, **dict(zip(_OF_COMBINE + _ENDS, flags)))
        check_mode(call, self.low_latency_mode, async_finish, return_recv_hook)
        if use_logfmt and zero_copy:
            one = "one of the two: rows of zero_copy cross as they are"
            refuse(call, "use_logfmt", "True together with zero_copy", one)
        rounds, made = self._found(call, handle, topk_idx, getattr(x, "dtype", None))
        shape = rounds.shape
        given = (x, handle[0].shape[1], topk_idx, topk_weights, out)
        served = made is not None and made.received is not None
        if zero_copy or not served or not same_routes(*given):
            check_combine(call, shape, *given)
        options: dict[str, Any] = {"hook": bool(return_recv_hook), "out": out}
        if self.enable_shrink:
            options["path"] = "per_rank"  # the one that ranks may be missing from
        if use_logfmt:
            options["format"] = "logfmt10"
        if overlap or comp_signal is not None or src_signals is not None:
            blocks = Blocks(packed_recv_count, comp_signal, block_m, threshold)
            whole = Blocks(None, src_signals, handle[0].shape[1], src_signal_expect_value)
            require(overlap, call, "overlap", False, "True beside signals")
            require(
                return_recv_hook, call, "overlap", "True without a hook", "return_recv_hook=True"
            )
            require(served, call, "handle", "one that has to be sent anew", "its first combine")
            options |= signals_of(call, blocks, whole, made, num_sms)
        if combine_wait_recv_cost_stats is not None:
            name = "combine_wait_recv_cost_stats"
            options |= self._waits(call, name, combine_wait_recv_cost_stats)
        rows = _rows(call, rounds, made) if zero_copy else x
        turn = Turn(call, self.runtime, x.device, None, True) if async_finish else None
        if turn is not None:
            options["stream"] = turn.stream
        if not served:
            rounds, made, rows = self._again(call, shape, topk_idx, turn, rows, handle[1])
        assert made is not None
        try:
            combined, receive = made.combine(rounds, rows, topk_weights, options)
        except ferry.InvalidArgumentError:  # before anything moved
            check_combine(call, shape, *given)  # in the interface's own kind of error
            raise
        event = _end(turn, rows, topk_weights, group=rounds.group, made=combined)
        if not return_recv_hook:
            return combined, event, None
        return combined, event, hook_of(receive, x.device, rounds.group, (combined,))

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> Tensor:
        """Memory for the rows of this handle's combine with `zero_copy`: [L, R*C, H], the dtype
        that was dispatched. What it holds is undefined."""
        call = "get_next_low_latency_combine_buffer"
        check_mode(call, self.low_latency_mode, False, False)
        rounds, made = self._found(call, handle, None)
        return _rows(call, rounds, made)

    def _rounds_for(self, call: str, shape: Shape) -> Rounds:
        """Collective when they are new, of all ranks; with `enable_shrink` of those that are
        left."""
        found = self._latency_rounds.get(shape)
        if found is None:
            self._require_living()
            left = self._groups.left if self._survivors is None else self._agree()
            found = self._latency_among.get((shape, left))
            if found is None:
                found = self._latency_among[shape, left] = self._made_among(shape, left)
            self._latency_rounds[shape] = found
        return found

    def _made_among(self, shape: Shape, left: tuple[int, ...]) -> Rounds:
        members = None
        if len(left) < self.group_size:
            said = self._survivors
            members = Members(left, self.group_size, shape.experts, refuses=said is None)
            gather = None if said is None else partial(said.all_gather, ranks=left)
            group = self._groups.among(left, members.experts, shape.device, gather)
        else:
            group = self._group_for(shape.experts, shape.device)
        exchange = ferry.LatencyExchange(
            group,
            capacity=shape.capacity,
            hidden=shape.hidden,
            topk=shape.topk,
            dtype=shape.dtype,
            masks=self.enable_shrink,
        )
        made = Rounds(group, exchange, shape, members, own_ranges=self.enable_shrink)
        self._begin_masks(made)
        return made

    def _latency_exchanges(self) -> Iterable[Rounds | ferry.LatencyExchange]:
        found: list[Rounds | ferry.LatencyExchange] = [*self._latency_rounds.values()]
        return found if self._survivors is None else [self._survivors.exchange, *found]

    def _take_back(self, rank: int) -> None:
        for shape, rounds in list(self._latency_rounds.items()):
            if rounds.members is not None and rank not in rounds.members.ranks:
                del self._latency_rounds[shape]

    def _found(
        self, call: str, handle: Any, topk_idx: Tensor | None, dtype: torch.dtype | None = None
    ) -> tuple[Rounds, Round | None]:
        """What a handle belongs to; None for the round when its buffer serves another by now."""
        if isinstance(handle, tuple) and len(handle) == 5:
            for rounds in self._latency_rounds.values():
                made = rounds.find(handle[0])
                if made is not None:
                    return rounds, made
        source_token, _, *numbers = unpacked(call, handle)
        alike = [
            rounds
            for rounds in self._latency_rounds.values()
            if (*rounds.shape[:3], rounds.shape.device) == (*numbers, source_token.device)
        ]
        if not alike:
            self._require_living()
            refuse(
                call,
                "handle",
                "one of another Buffer, or from before regroup",
                "one that this Buffer has returned since",
            )
        # A handle tells neither top-k nor dtype. Where nothing fits, the caller's check says what.
        topk = getattr(topk_idx, "shape", (None,))[-1:]

        def fit(rounds: Rounds) -> tuple[bool, bool]:
            return (rounds.shape.topk,) == topk, rounds.shape.dtype == dtype

        return max(alike, key=fit), None

    def _again(
        self,
        call: str,
        shape: Shape,
        topk_idx: Tensor,
        turn: Turn | None,
        rows: Tensor,
        ranges: Tensor,
    ) -> tuple[Rounds, Round, Tensor]:
        """Collective: a dispatch that repeats only routes, and the rows as they answer it: where
        they lay, unless ranks are gone since."""
        rounds = self._rounds_for(call, shape._replace(again=True))
        if not self.enable_shrink and rows.shape[1] != rounds.rows_of_expert:
            refuse(call, "handle", "one from before regroup", "one of a later dispatch")
        with nullcontext() if turn is None else turn.context():
            tokens = (topk_idx.shape[0], shape.hidden)
            x = torch.zeros(tokens, dtype=shape.dtype, device=shape.device)
        options = {} if turn is None else {"stream": turn.stream}
        made = rounds.dispatch(x, topk_idx, Wire(), hook=False, **options)
        if self.enable_shrink or rounds.members is not None:
            check_memory(call, x=rows)
            with nullcontext() if turn is None else turn.context(rows, ranges):
                rows = moved(rows, ranges, made.ranges, rounds.rows_of_expert)
        return rounds, made, rows

    def _waits(self, call: str, name: str, stats: Tensor) -> dict[str, Any]:
        check_stats(call, name, stats, torch.int64, self.group_size)
        return {"wait_ns": stats}


def tiled(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 as the fork's grouped GEMM takes it: dimensions in another order."""
    experts, tiles = scales.shape[:2]
    whole = scales.view(experts, tiles, -1, 32, 4, 4)
    return rows.permute(1, 2, 0), whole.permute(3, 4, 1, 5, 2, 0)


def _rows(call: str, rounds: Rounds, made: Round | None) -> Tensor:
    """Where the caller writes the rows of a combine with zero_copy."""
    if made is None:
        refuse(call, "handle", "one of a dispatch before the last two", "a later one")
    return rounds.rows(made)


def _end(
    turn: Turn | None, *inputs: Tensor, group: Any = None, made: Tensor | None = None
) -> EventOverlap:
    """The event of a call, which keeps what the call reads. made: a result with memory of its
    own; that of a dispatch stays where it is as long as the exchange."""
    if turn is None:
        return EventOverlap()
    overlap = turn.end(group, (made,))
    overlap.extra_tensors = inputs
    return overlap
