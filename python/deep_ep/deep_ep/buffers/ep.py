"""`EPBuffer` of DeepEP V2.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.balancing import Balancing
from deep_ep.buffers.allocator import BufferAllocator, planned_bytes
from deep_ep.ep_handle import EPHandle
from deep_ep.errors import require, require_flags, require_only_context
from deep_ep.event import EventOverlap
from deep_ep.experts import Experts, routes_of, when_of
from deep_ep.sizes import SIZE_STEP

__all__ = ["EPBuffer", "EPHandle"]


class EPBuffer(Experts, Balancing):
    """R ranks that exchange tokens with experts, and copies of experts with each other.

    As an `ElasticBuffer`, without num_cpu_bytes, and:

    Args:
        lb_allocation_plan_or_num_bytes: the region of tensors that hold copies of experts: a plan,
            whose tensors become views of it, or a multiple of 2 MiB; 0: there is none. It lies on
            the GPU once torch has used one, else in CPU memory.
        sl_idx: None, or a service level: as there.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(explicitly_destroy)
        name = "lb_allocation_plan_or_num_bytes"
        plan, region = planned_bytes("EPBuffer", name, lb_allocation_plan_or_num_bytes)
        require(region % SIZE_STEP == 0, "EPBuffer", name, region, f"a multiple of {SIZE_STEP}")
        self.num_lb_bytes = region
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
            sl_idx,
        )
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device("cuda" if on_gpu else "cpu")
        self._lb_storage = torch.zeros(region, dtype=torch.uint8, device=device)
        if plan is not None:
            plan.materialize(self._lb_storage)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """As of an `ElasticBuffer`; sm_read_gbs, sm_write_gbs 0: 200 and 50."""
        sm_read, sm_write = (
            default if isinstance(given, (int, float)) and given == 0 else given
            for given, default in ((sm_read_gbs, 200), (sm_write_gbs, 50))
        )
        traffic = (num_experts, num_topk, num_scaleout_topk, rdma_gbs, nvlink_gbs)
        return super().get_theoretical_num_sms(*traffic, sm_read, sm_write)

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Collective, as of an `ElasticBuffer`. context_idx: None or 0, the only group."""
        require_flags("barrier", wait_comm_stream=wait_comm_stream, sequential=sequential)
        require_flags("barrier", with_cpu_sync=with_cpu_sync)
        require_only_context("barrier", context_idx)
        self._barrier(wait_comm_stream, with_cpu_sync)

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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Collective, as of an `ElasticBuffer`, but for:

        do_handle_copy: False. The handle shows the caller's topk_idx; its exchange needs it no
        more. defer_epilogue: needs async_with_compute_stream; returns the event alone, whose
        `wait()` returns the first four results. Tokens leave in the call, and with do_cpu_sync it
        waits for the counts.
        """
        call = "dispatch"
        if do_handle_copy is not False:
            require_flags(call, do_handle_copy=do_handle_copy)
            require(not do_handle_copy, call, "do_handle_copy", True, "False: nothing is copied")
        if defer_epilogue is not False:
            _check_deferred(call, defer_epilogue, async_with_compute_stream)
        routes = routes_of(
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            handle,
            False,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        when = when_of(previous_event, None, async_with_compute_stream, allocate_on_comm_stream)
        made = self._dispatch(x, routes, num_sms, num_qps, when)
        if not defer_epilogue:
            return made
        *found, event = made
        event.register_hook_after_wait(lambda: tuple(found))
        return event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | EventOverlap:
        """Collective, as of an `ElasticBuffer`, but for:

        defer_epilogue: needs async_with_compute_stream; returns the event alone, whose `wait()`
        returns the first two results. A bias is read then; the sums cross in f32 for that.
        """
        if defer_epilogue is not False:
            _check_deferred("combine", defer_epilogue, async_with_compute_stream)
        when = when_of(previous_event, None, async_with_compute_stream, allocate_on_comm_stream)
        found: Any = self._combine(
            x, handle, topk_weights, bias, num_sms, num_qps, when, defer_epilogue
        )
        return found  # type: ignore[no-any-return]

    def _ranks(self, device: torch.device) -> ferry.Collectives:
        self._require_living()
        return self._groups.collectives(device)


def _check_deferred(call: str, deferred: bool, asynchronous: bool) -> None:
    require_flags(call, defer_epilogue=deferred, async_with_compute_stream=asynchronous)
    expected = "async_with_compute_stream=True beside it"
    require(asynchronous or not deferred, call, "defer_epilogue", True, expected)
