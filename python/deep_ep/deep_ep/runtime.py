"""`Buffer.runtime`: what the original keeps in its extension, as far as callers look at it."""

from __future__ import annotations

from typing import Any

import torch

import ferry
from deep_ep.config import RANKS_OF_A_HOST, domains_of
from deep_ep.errors import refuse_destroyed, require, require_flags, require_integer


class Runtime:
    """Who this rank is, the stream of the exchanges, and memory that callers may ask for.

    The two buffers exist for callers that want their bytes: Ferry's own memory lies elsewhere, so
    anything may be written into them at any time.
    """

    def __init__(self, everyone: ferry.Group, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self._rank, self._num_ranks = everyone.rank, everyone.size
        self._domains = everyone.domains
        self._bytes = {False: num_nvl_bytes, True: num_rdma_bytes}
        self._buffers: dict[bool, torch.Tensor] = {}
        self._comm_stream: Any = None
        self._available = True

    def is_available(self) -> bool:
        """Until it is destroyed."""
        return self._available

    def get_num_rdma_ranks(self) -> int:
        """Hosts of 8 ranks."""
        return domains_of(self._num_ranks)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Groups of ranks that share memory, and the ranks of one."""
        return self._domains, self._num_ranks // self._domains

    def get_logical_domain_size(self, allow_hybrid_mode: bool = True) -> tuple[int, int]:
        """The same where tokens cross between them once; else all ranks are one."""
        require_flags("get_logical_domain_size", allow_hybrid_mode=allow_hybrid_mode)
        if not allow_hybrid_mode or self._num_ranks % self._domains != 0:
            return 1, self._num_ranks
        return self.get_physical_domain_size()

    def get_rdma_rank(self) -> int:
        """The host of this rank."""
        return self._rank // RANKS_OF_A_HOST if self.get_num_rdma_ranks() > 1 else 0

    def get_root_rdma_rank(self, global_: bool, /) -> int:
        """The rank that the original starts its network from."""
        return self._rank % RANKS_OF_A_HOST if global_ else 0

    def get_local_device_id(self) -> int:
        """Ordinal of the current GPU, which the original puts the buffer on; -1 without one."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def get_local_ipc_handle(self) -> bytearray:
        """Empty: Ferry's ranks exchange their memory by themselves."""
        return bytearray()

    def get_local_nvshmem_unique_id(self) -> bytearray:
        """Empty: there is no NVSHMEM."""
        return bytearray()

    def sync(self, device_ids: Any, ipc_handles: Any, root_unique_id: Any, /) -> None:
        """Nothing is left to do: a buffer that was made is ready."""

    def get_comm_stream(self) -> Any:
        """The torch.cuda.Stream of asynchronous exchanges, made when first asked for."""
        if self._comm_stream is None:
            there = torch.cuda.is_available()
            require(there, "get_comm_stream", "this machine", "no GPU that torch sees", "one")
            self._comm_stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        return self._comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, offset: int = 0, use_rdma_buffer: bool = False, /
    ) -> torch.Tensor:
        """A flat view of a buffer from `offset` bytes on. The memory comes at the first call."""
        call = "get_local_buffer_tensor"
        require_flags(call, use_rdma_buffer=use_rdma_buffer)
        size = self._bytes[bool(use_rdma_buffer)]
        if not self._available:
            refuse_destroyed()
        require(isinstance(dtype, torch.dtype), call, "dtype", dtype, "a torch.dtype")
        offset = require_integer(call, "offset", offset, 0, f"0 to {size} bytes")
        require(offset <= size, call, "offset", offset, f"0 to {size} bytes")
        require(offset % dtype.itemsize == 0, call, "offset", offset, f"elements of {dtype}")
        buffer = self._buffers.get(bool(use_rdma_buffer))
        if buffer is None:
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = "cuda" if on_gpu else "cpu"
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            self._buffers[bool(use_rdma_buffer)] = buffer
        whole = (size - offset) // dtype.itemsize * dtype.itemsize
        return buffer[offset : offset + whole].view(dtype)

    def destroy(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
        self._available = False
