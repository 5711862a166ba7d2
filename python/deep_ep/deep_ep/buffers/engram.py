"""`EngramBuffer` of DeepEP V2.5."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_ep.agreement import require_same
from deep_ep.arguments import check_dtype, words
from deep_ep.buffers.base import Communicating
from deep_ep.engram import Entries, Tables, layer_numbers
from deep_ep.errors import (
    refuse,
    require,
    require_flags,
    require_integer,
    require_only_context,
    require_seconds,
)
from deep_ep.gradients import without_gradients
from deep_ep.sizes import SIZE_STEP, round_up
from deep_ep.utils.envs import domain_sizes


class EngramBuffer(Communicating):
    """Tables of entries, one for each layer, that lie in parts in CPU memory of all ranks, which
    read them by themselves. On GPUs the CPU waits for the indices and copies the entries.

    Args:
        group: a process group of torch.distributed, or a communicator of mpi4py; ranks of one host.
        num_gpu_bytes: for what is fetched; torch makes those tensors, so none is needed.
        num_rdma_storage_bytes: the most that this rank's parts may take.
        use_cpu_rdma_storage: True: tables lie in CPU memory.
        num_allocated_qps, qp_depth, restrict_rd_atomic: of queues, which there are none of. The
            first is the most that a fetch may ask for.
        allow_hybrid_mode: what `get_logical_domain_size` counts.
        sl_idx: None, or a service level, which is not set: as of an `ElasticBuffer`.
        num_gpu_timeout_secs: bounds every wait, unless FERRY_DEADLINE does.
    """

    num_gpu_bytes: int
    num_rdma_storage_bytes: int
    num_allocated_qps: int
    qp_depth: int

    def __init__(
        self,
        group: Any,
        num_gpu_bytes: int,
        num_rdma_storage_bytes: int,
        use_cpu_rdma_storage: bool,
        num_allocated_qps: int,
        qp_depth: int,
        restrict_rd_atomic: bool = False,
        allow_hybrid_mode: bool = True,
        sl_idx: int | None = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(explicitly_destroy)
        call = "EngramBuffer"
        for name, value, least in (
            ("num_gpu_bytes", num_gpu_bytes, 0),
            ("num_rdma_storage_bytes", num_rdma_storage_bytes, 0),
            ("num_allocated_qps", num_allocated_qps, 1),
            ("qp_depth", qp_depth, 1),
        ):
            number = require_integer(call, name, value, least, f"{least} or more")
            setattr(self, name, number)
        require_flags(
            call,
            use_cpu_rdma_storage=use_cpu_rdma_storage,
            restrict_rd_atomic=restrict_rd_atomic,
            allow_hybrid_mode=allow_hybrid_mode,
        )
        expected = "True: no rank reads the GPU memory of another one by itself"
        require(bool(use_cpu_rdma_storage), call, "use_cpu_rdma_storage", False, expected)
        seconds = num_gpu_timeout_secs
        require_seconds(call, "num_gpu_timeout_secs", seconds)
        self.use_cpu_rdma_storage, self.allow_hybrid_mode = True, allow_hybrid_mode
        self.restrict_rd_atomic = restrict_rd_atomic
        self._meet(group, deadline=seconds, sl_idx=sl_idx)
        self.rank_idx, self.num_ranks = self._groups.everyone.rank, self._groups.everyone.size
        self._tables: Tables | None = None

    @staticmethod
    def get_storage_size_hint(
        group: Any,
        num_entries_per_layer: Sequence[int],
        hidden: int,
        num_max_tokens: int,
        num_entries_per_token: int,
        dtype: torch.dtype = torch.bfloat16,
        num_sf_packs: int = 0,
    ) -> tuple[int, int]:
        """Bytes of what a fetch of all layers brings, and of this rank's parts of the tables."""
        call = "get_storage_size_hint"
        forms = _forms(call, num_entries_per_layer, hidden, dtype, num_sf_packs)
        name, least = "num_max_tokens", "0 or more"
        tokens = require_integer(call, name, num_max_tokens, 0, least)
        name = "num_entries_per_token"
        entries = require_integer(call, name, num_entries_per_token, 0, least)
        fetched = sum(form.row_bytes + 4 * form.num_sf_packs for form in forms) * tokens * entries
        return round_up(fetched, SIZE_STEP), round_up(sum(one.bytes for one in forms), SIZE_STEP)

    @staticmethod
    def get_theoretical_config(
        group: Any,
        num_layers: int,
        num_max_tokens: int,
        num_entries_per_token: int,
        num_max_read_requests_per_qp: int = 16,
    ) -> tuple[int, int, bool]:
        """(num_allocated_qps, qp_depth, restrict_rd_atomic) that the constructor takes: queues of
        the depth asked for, for all entries of a fetch. Ferry has none."""
        call = "get_theoretical_config"
        sizes = {
            "num_layers": num_layers,
            "num_max_tokens": num_max_tokens,
            "num_entries_per_token": num_entries_per_token,
            "num_max_read_requests_per_qp": num_max_read_requests_per_qp,
        }
        *counts, depth = (
            require_integer(call, name, value, 1, "at least 1") for name, value in sizes.items()
        )
        reads = math.prod(counts)
        return -(-reads // depth), depth, False

    def set_config(
        self,
        num_entries_per_layer: Sequence[int],
        hidden: int,
        num_max_tokens: int,
        num_entries_per_token: int,
        dtype: torch.dtype = torch.bfloat16,
        num_sf_packs: int = 0,
    ) -> None:
        """Collective. The tables: entries of each rank, a number for each layer. What was written
        before goes. num_max_tokens, num_entries_per_token: the most of a fetch."""
        self._require_living()
        call = "set_config"
        forms = _forms(call, num_entries_per_layer, hidden, dtype, num_sf_packs)
        tokens = require_integer(call, "num_max_tokens", num_max_tokens, 0, "0 or more")
        name = "num_entries_per_token"
        entries = require_integer(call, name, num_entries_per_token, 1, "at least 1")
        bytes_of_all, most = sum(form.bytes for form in forms), self.num_rdma_storage_bytes
        expected = f"at most {most} bytes, num_rdma_storage_bytes"
        require(
            bytes_of_all <= most, call, "num_entries_per_layer", f"{bytes_of_all} bytes", expected
        )
        # Who has come here reads the old tables no more.
        require_same(
            self._groups,
            call,
            {
                "num_entries_per_layer": str([form.entries for form in forms]),
                "hidden": str(forms[0].hidden),
                "dtype": str(dtype),
                "num_sf_packs": str(forms[0].num_sf_packs),
            },
        )
        self._tables = None
        self._most = (tokens, entries)
        self._tables = Tables(self._groups, forms)

    @without_gradients
    def write(self, storages: Sequence[Tensor], sfs: Sequence[Tensor] | None = None) -> None:
        """Collective. This rank's parts, [entries, hidden] of each layer. sfs: of each layer the
        scaling factors of all ranks' entries, f32 or i32 [R * entries, packs]."""
        tables, call = self._configured("write"), "write"
        layers = len(tables.forms)
        factors: list[Tensor | None] = [None] * layers
        if sfs is not None:
            factors = _listed(call, "sfs", sfs, "None or a list of tensors")
        parts = _listed(call, "storages", storages, "a list of tensors, one for each layer")
        for name, given in (("storages", parts), ("sfs", factors)):
            require(len(given) == layers, call, name, f"{len(given)} tensors", f"{layers}")
        tables.write(call, parts, factors)

    @without_gradients
    def fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = True
    ) -> list[Callable[[], Any]]:
        """Not collective. indices: i32 [layers, T, n]; entry i of rank r is r * entries + i.

        Returns a hook for each layer, which returns [T, n * hidden]; with scaling factors a pair
        of these and of [T, n * packs].
        """
        tables, call = self._configured("fetch"), "fetch"
        require_flags(call, use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf)
        expected = "write before it, without an error"
        require(tables.written, call, "indices", "tables that are not written", expected)
        qps = require_integer(call, "num_qps", num_qps, 0, f"0 to {self.num_allocated_qps}")
        good = qps <= self.num_allocated_qps
        require(good, call, "num_qps", qps, f"0 to {self.num_allocated_qps}, num_allocated_qps")
        numbers = layer_numbers(call, indices, len(tables.forms))
        tokens, entries = self._most
        good = numbers.shape[1] <= tokens and numbers.shape[2] <= entries
        expected = f"at most {tokens} tokens of {entries} entries, as set_config says"
        require(good, call, "indices", tuple(numbers.shape), expected)

        def hook(table: int) -> Callable[[], Any]:
            col_major = use_tma_aligned_col_major_sf
            entries, factors = tables.fetch(call, table, numbers[table], col_major, joined=True)
            return lambda: entries if factors is None else (entries, factors)

        return [hook(table) for table in range(len(tables.forms))]

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Collective, as of an `EPBuffer`."""
        require_flags("barrier", wait_comm_stream=wait_comm_stream, sequential=sequential)
        require_flags("barrier", with_cpu_sync=with_cpu_sync)
        require_only_context("barrier", context_idx)
        self._barrier(wait_comm_stream, with_cpu_sync)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Groups of ranks that share memory, and the ranks of one."""
        self._require_living()
        return domain_sizes(self, True)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """The same; without allow_hybrid_mode one group of all ranks."""
        self._require_living()
        return domain_sizes(self, self.allow_hybrid_mode)

    def _configured(self, call: str) -> Tables:
        self._require_living()
        if self._tables is None:
            refuse(call, "sizes", "none", "set_config before it")
        return self._tables

    def _close(self) -> None:
        self._tables = None


def _listed(call: str, name: str, value: Any, expected: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        refuse(call, name, words(value), expected)


def _forms(
    call: str, counts: Sequence[int], hidden: int, dtype: torch.dtype, packs: int
) -> list[Entries]:
    width = require_integer(call, "hidden", hidden, 1, "at least 1")
    num_sf_packs = require_integer(call, "num_sf_packs", packs, 0, "0 or more")
    check_dtype(call, dtype)
    good = (dtype.itemsize == 1) == (num_sf_packs > 0)
    expected = "at least 1 for entries of one byte, else 0"
    require(good, call, "num_sf_packs", f"{num_sf_packs} beside {dtype}", expected)
    name = "num_entries_per_layer"
    least = "numbers of 0 or more, one for each layer"
    listed = _listed(call, name, counts, least)
    counted = [require_integer(call, name, one, 0, least) for one in listed]
    require(len(counted) > 0, call, name, "no layers", "at least one")
    return [Entries(one, width, dtype, num_sf_packs) for one in counted]
