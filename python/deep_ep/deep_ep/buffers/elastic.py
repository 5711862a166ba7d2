"""`ElasticBuffer` of DeepEP V2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deep_ep.engram import EngramCalls
from deep_ep.ep_handle import EPHandle
from deep_ep.errors import require_flags, require_integer
from deep_ep.event import EventOverlap
from deep_ep.experts import Experts, routes_of, when_of
from deep_ep.gathering import Gathering
from deep_ep.pipeline import PipelineCalls

__all__ = ["EPHandle", "ElasticBuffer"]

_SERVICE_LEVEL = 3  # of InfiniBand, by default


class ElasticBuffer(Experts, PipelineCalls, Gathering, EngramCalls):
    """R ranks that exchange tokens with experts, send tensors around a ring, and gather tensors.

    Making one is collective. All ranks make the same calls in the same order. Tensors lie on the
    GPU, or in CPU memory; the first call with a number of experts makes a group of Ferry there.

    Args:
        group: a process group of torch.distributed, of any backend, or a communicator of mpi4py.
            It is used here and not after.
        num_bytes: what to register at first for tensors, a multiple of 2 MiB; Ferry grows it when
            it needs more. None: a little; the attribute is then what `get_buffer_size_hint` says
            for num_max_tokens_per_rank, hidden, num_topk and use_fp8_dispatch.
        num_cpu_bytes: the most that this rank's part of an Engram table may take, in CPU memory.
        num_max_tokens_per_rank: of a dispatch that does not say it.
        deterministic: results are the same in every run with False, too.
        allow_hybrid_mode: False: between domains each token crosses for each of its ranks, never
            once for all of a domain; and `get_logical_domain_size` counts one group of all ranks.
        allow_multiple_reduction: expert-major rows of one rank are added up and rounded there; else
            their sums cross in f32 and are rounded once.
        prefer_overlap_with_compute: use fewer SMs where a call does not say how many.
        sl_idx: a service level of InfiniBand, which is not set: another than the default warns once
            where ranks are of several domains.
        num_allocated_qps: the most that a call may ask for; 0: 129, or 17 without hybrid mode.
            There are no such queues.
        num_cpu_timeout_secs, num_gpu_timeout_secs: the smaller of both bounds every wait, unless
            FERRY_DEADLINE does.
        explicitly_destroy: `destroy` will be called; else the last reference to go does it.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = _SERVICE_LEVEL,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(explicitly_destroy)
        name = "num_cpu_bytes"
        self.num_cpu_bytes = require_integer("ElasticBuffer", name, num_cpu_bytes, 0, "0 or more")
        require_integer("ElasticBuffer", "sl_idx", sl_idx, 0, "0 or more")
        is_default = sl_idx == _SERVICE_LEVEL
        self._open_experts(
            group,
            num_bytes,
            (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch),
            (
                deterministic,
                allow_hybrid_mode,
                allow_multiple_reduction,
                prefer_overlap_with_compute,
            ),
            num_allocated_qps,
            (num_cpu_timeout_secs, num_gpu_timeout_secs),
            None if is_default else sl_idx,
        )

    def _close(self) -> None:
        self._tables = None

    def _reopen(self) -> None:
        self._tables = self._agrs = self._pipeline = None

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Collective. On GPUs the CPU waits for the current stream, with use_comm_stream for the
        communication stream, too, with with_cpu_sync for all of the GPU, and then for the other
        ranks. Ranks of several hosts meet in one step, whatever `sequential` says."""
        require_flags("barrier", use_comm_stream=use_comm_stream, sequential=sequential)
        require_flags("barrier", with_cpu_sync=with_cpu_sync)
        self._barrier(use_comm_stream, with_cpu_sync)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Collective. Sends each token once to every rank that holds one of its experts.

        Args:
            x: [T, H], any dtype, dense, row bytes a multiple of 16; or (x, scales), x of one-byte
                elements and scales f32 or i32 [T, any], any strides.
            topk_idx: i64 or i32 [T, K], -1 = unused; None beside a handle.
            topk_weights: f32 [T, K], carried along.
            cumulative_local_expert_recv_stats: i32 [L], the rows of each local expert are added.
            num_experts: needed without a handle. num_max_tokens_per_rank: at least T, the same on
                all ranks; None: the constructor's.
            expert_alignment: rows of an expert, with padding, are a multiple; None: 1.
            num_sms, num_qps: 0: `get_theoretical_num_sms`, `get_theoretical_num_qps`.
            previous_event: the call waits for it instead of what is on the current stream; needs
                allocate_on_comm_stream. previous_event_before_epilogue: it waits for this, too.
            async_with_compute_stream: the current stream does not wait for the call; the returned
                event is for that.
            handle: of an earlier dispatch, to send the same way again; do_expand as then.
            do_handle_copy: the handle keeps a copy of topk_idx. Its exchange needs neither.
            do_cpu_sync: None: True without a handle. False: results have the rows of the worst
                case, and the CPU waits for nothing; what lies behind the last is undefined,
                topk_idx -1 there.
            do_expand: a row for each slot, in blocks of ascending local expert, weights [rows].
            do_zero_padding: needs do_expand; rows between experts are zero without it, too.
            use_tma_aligned_col_major_sf: scales come column by column, each at 16 bytes.

        Returns recv_x, recv_topk_idx in local ids (None with do_expand), recv_topk_weights or None,
        the handle and the event. Rows come in ascending source rank, then token.
        """
        routes = routes_of(
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        when = when_of(
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )
        found: tuple[Any, ...] = self._dispatch(x, routes, num_sms, num_qps, when)
        return found

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Collective. Brings rows back to their tokens and adds them up, in fp32 and in ascending
        rank; rows of one rank in ascending slot before that.

        Args:
            x: bf16 (f16 or f32, too), the rows in the order of the dispatch.
            topk_weights: f32 [n, K], or [rows] of an expanded dispatch: brought back.
            bias: one or two of [T, H], dtype of x, added last.
            num_sms: 0: as of the dispatch. The others: as of `dispatch`.

        Returns combined_x [T, H], combined_topk_weights f32 [T, K] or None, and the event.
        """
        when = when_of(
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )
        found: tuple[Any, ...] = self._combine(
            x, handle, topk_weights, bias, num_sms, num_qps, when
        )
        return found
