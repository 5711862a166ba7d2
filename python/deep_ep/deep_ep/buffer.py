"""`Buffer`: what frameworks make once and exchange tokens through."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep.buffers.base import Regroups
from deep_ep.config import Config, combine_config, dispatch_config
from deep_ep.environment import qp_depth
from deep_ep.errors import refuse, require, require_flags, require_integer, warn_once
from deep_ep.event import EventHandle, EventOverlap
from deep_ep.low_latency import LowLatency
from deep_ep.sizes import MOST_BYTES
from deep_ep.throughput import Throughput


class Buffer(Regroups, Throughput, LowLatency):
    """R ranks that exchange tokens, in throughput mode and in low-latency mode.

    Making one is collective. All ranks make the same calls in the same order. Tensors lie on the
    GPU, or in CPU memory; the first call with a number of experts makes a group of Ferry there.

    Args:
        group: a process group of torch.distributed, of any backend. It is used here and not after.
        num_nvl_bytes: what to register at first for tensors; Ferry grows it when it needs more. A
            multiple of 128, as the next one.
        num_rdma_bytes: only the size of `get_local_buffer_tensor(use_rdma_buffer=True)`.
        low_latency_mode: whether the low_latency methods may be called.
        explicitly_destroy: `destroy` will be called; else the last reference to go does it.
        enable_shrink: ranks that do not answer are masked in low-latency mode.
        comm: instead of group: a communicator of mpi4py, or what has Get_rank, Get_size and
            allgather as it has.
        num_qps_per_rank, allow_mnnvl, use_fabric: without effect; docs/deep_ep_names.md says why.
        allow_nvlink_for_low_latency_mode: False warns once: ranks of one host use it all the same.
        allow_nvlink_for_normal_mode: of a fork: True, as ranks of one host share memory. Where GPUs
            have no NVLink, that goes over PCIe.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        allow_nvlink_for_normal_mode: bool = True,
    ) -> None:
        super().__init__(explicitly_destroy)
        require_flags(
            "Buffer",
            low_latency_mode=low_latency_mode,
            allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
            allow_mnnvl=allow_mnnvl,
            use_fabric=use_fabric,
            enable_shrink=enable_shrink,
            allow_nvlink_for_normal_mode=allow_nvlink_for_normal_mode,
        )
        if not allow_nvlink_for_normal_mode:
            expected = "True: ranks of one host share memory, over PCIe where there is no NVLink"
            refuse("Buffer", "allow_nvlink_for_normal_mode", allow_nvlink_for_normal_mode, expected)
        if not allow_nvlink_for_low_latency_mode:
            name = "allow_nvlink_for_low_latency_mode"
            warn_once("Buffer", name, False, "ranks of one host use NVLink where there is one")
        require_integer("Buffer", "num_qps_per_rank", num_qps_per_rank, 0, "0 or more")
        num_nvl_bytes = _size("num_nvl_bytes", num_nvl_bytes)
        num_rdma_bytes = _size("num_rdma_bytes", num_rdma_bytes)
        self._meet(
            group,
            comm,
            memory_bytes=num_nvl_bytes,
            nvl_bytes=num_nvl_bytes,
            rdma_bytes=num_rdma_bytes,
        )
        self.rank: int = self._groups.everyone.rank
        self.group_size: int = self._groups.everyone.size
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = bool(low_latency_mode)
        self.enable_shrink = bool(enable_shrink)
        self.nvshmem_qp_depth = qp_depth()
        self._open_low_latency()

    def _close(self) -> None:
        self._close_low_latency()

    def _reopen(self) -> None:
        self._close_low_latency()
        self._open_low_latency()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether low-latency and fp8 kernels for Hopper are there: they always are."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """How many SMs calls without a config use from now on. An even number."""
        expected = "an even number, 0 or more"
        sms = require_integer("set_num_sms", "new_num_sms", new_num_sms, 0, expected)
        require(sms % 2 == 0, "set_num_sms", "new_num_sms", sms, expected)
        Buffer.num_sms = sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event at this point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The defaults of dispatch for this many ranks, 1 to 160."""
        return dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The defaults of combine for this many ranks, 1 to 160."""
        return combine_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that the original registers for low-latency mode. Ferry needs none of them."""
        call = "get_low_latency_rdma_size_hint"
        capacity, hidden, _, num_experts = (
            require_integer(call, name, value, least, f"an integer, at least {least}")
            for name, value, least in (
                ("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0),
                ("hidden", hidden, 0),
                ("num_ranks", num_ranks, 1),
                ("num_experts", num_experts, 1),
            )
        )
        scales = 4 * (hidden // 128)
        to_expert = 16 + max(2 * hidden, hidden + scales)
        back = scales + 2 * hidden
        send = max(capacity * to_expert, num_experts * capacity * back)
        recv = num_experts * capacity * max(to_expert, back)
        signals = -(-num_experts * 4 // 128) * 128
        return (2 * (send + recv + signals) + 128) // 128 * 128

    def get_comm_stream(self) -> Any:
        """The torch.cuda.Stream that asynchronous exchanges run on."""
        self._require_living()
        return self.runtime.get_comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """A flat view of num_nvl_bytes (or num_rdma_bytes) of memory from `offset` bytes on, or its
        first elements as `size`. It is the caller's: no exchange touches it."""
        self._require_living()
        tensor: torch.Tensor = self.runtime.get_local_buffer_tensor(dtype, offset, use_rdma_buffer)
        if size is None:
            return tensor
        most, wanted = tensor.numel(), _elements(size)
        good = wanted is not None and wanted <= most
        require(good, "get_local_buffer_tensor", "size", size, f"at most {most} elements")
        return tensor[:wanted].view(size)


def _size(name: str, value: Any) -> int:
    expected = f"a multiple of 128, 0 to {MOST_BYTES}"
    size = require_integer("Buffer", name, value, 0, expected)
    require(size % 128 == 0 and size <= MOST_BYTES, "Buffer", name, size, expected)
    return size


def _elements(size: Any) -> int | None:
    """Of a tensor of this shape; None: it is none."""
    try:
        return torch.Size(size).numel()
    except TypeError:
        return None
