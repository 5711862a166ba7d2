"""Tables of entries that lie in parts on all ranks, which each rank reads by itself: for
`EngramBuffer` and `ElasticBuffer.engram_*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_ep.agreement import require_same
from deep_ep.arguments import check_dtype, check_memory, words
from deep_ep.call import column_major
from deep_ep.errors import refuse, require, require_flags, require_integer
from deep_ep.gradients import without_gradients
from deep_ep.groups import Groups
from deep_ep.sizes import SIZE_STEP, round_up

_PACKS = (torch.float32, torch.int32)


class Entries(NamedTuple):
    """The form of one table: entries of each rank, and scaling factors of an entry, four bytes
    each; 0: none."""

    entries: int
    hidden: int
    dtype: torch.dtype
    num_sf_packs: int

    @property
    def row_bytes(self) -> int:
        """Of an entry."""
        return self.hidden * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Of a rank's part."""
        return self.entries * self.row_bytes


class Tables:
    """Made collectively: this rank's parts of tables of these forms, in CPU memory that the other
    ranks read. The forms are the same on all ranks."""

    def __init__(self, groups: Groups, forms: list[Entries]) -> None:
        self.forms = forms
        self.written = False
        """Whether the last write came to its end: else ranks may hold parts of different ones."""
        self._groups = groups
        self._factors: list[Tensor | None] = [None] * len(forms)
        self._ranks, self._windows = groups.windows([
            (form.entries, form.row_bytes) for form in forms
        ])

    def write(self, call: str, storages: list[Tensor], factors: list[Tensor | None]) -> None:
        """Collective: fetches before it see what was there, those behind it these. factors: of the
        entries of all ranks, kept where they are."""
        for form, storage, factor in zip(self.forms, storages, factors):
            check_written(call, form, storage, factor, self._groups.everyone.size)
        self.written = False
        self._groups.everyone.barrier()
        for window, form, storage in zip(self._windows, self.forms, storages):
            window.rows.view(form.dtype).copy_(storage)
        self._factors = factors
        self._groups.everyone.barrier()
        self.written = True

    def fetch(
        self, call: str, table: int, numbers: Tensor, col_major: bool, joined: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Not collective. numbers: i32 [T, n] in the numbering of all ranks' entries. The entries
        [T * n, hidden], joined [T, n * hidden], and their factors [T, n * packs]."""
        form, factor = self.forms[table], self._factors[table]
        tokens = numbers.shape[0]
        flat = numbers.reshape(-1)
        rows = torch.empty(flat.numel(), form.row_bytes, dtype=torch.uint8, device="cpu")
        wanted = flat.contiguous().cpu()
        name = f"indices[{table}]" if joined else "indices"
        _check_range(call, name, wanted, numbers.shape, self._groups.everyone.size * form.entries)
        self._windows[table].get(wanted, rows)
        found = rows.to(numbers.device).view(form.dtype)
        if joined:
            found = found.view(tokens, numbers.shape[1] * form.hidden)
        gathered = None
        if factor is not None:
            check_memory(call, sf=factor)
            width = numbers.shape[1] * form.num_sf_packs
            gathered = factor[flat.long().to(factor.device)].view(tokens, width)
            if col_major:
                gathered = column_major(gathered)
        return found, gathered


class EngramCalls:
    """`engram_*` of an ElasticBuffer, whose table lies in CPU memory."""

    _groups: Groups
    _tables: Tables | None = None
    num_cpu_bytes: int
    num_ranks: int

    def _require_living(self) -> None:
        raise NotImplementedError

    def _check_qps(self, call: str, num_qps: int) -> None:
        raise NotImplementedError

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> int:
        """num_cpu_bytes for that many entries of a rank. What is fetched needs none."""
        call, least = "get_engram_storage_size_hint", "0 or more"
        entries = require_integer(call, "num_entries", num_entries, 0, least)
        width = require_integer(call, "hidden", hidden, 0, least)
        name = "num_max_tokens_per_rank"
        require_integer(call, name, num_max_tokens_per_rank, 0, least)
        check_dtype(call, dtype)
        return round_up(entries * width * dtype.itemsize, SIZE_STEP)

    @without_gradients
    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Collective. This rank's part of the table, [n, hidden], n as on all ranks; sf: scaling
        factors of the entries of all ranks, [R * n, packs] f32 or i32, for entries of one byte.
        Where another form was written before, that memory goes."""
        self._require_living()
        call = "engram_write"
        if not isinstance(storage, Tensor) or storage.dim() != 2:
            refuse(call, "storage", words(storage), "a tensor of two dimensions, [entries, hidden]")
        packs = 0 if sf is None else _packs_of(call, "sf", sf)
        form = Entries(storage.shape[0], storage.shape[1], storage.dtype, packs)
        most = self.num_cpu_bytes
        expected = f"at most {most}, num_cpu_bytes (see get_engram_storage_size_hint)"
        require(form.bytes <= most, call, "storage", f"{form.bytes} bytes", expected)
        check_written(call, form, storage, sf, self.num_ranks)
        packs_of_all = f"{packs} packs of an entry"
        # Who has come here reads the old table no more.
        require_same(self._groups, call, {"storage": words(storage), "sf": packs_of_all})
        if self._tables is None or self._tables.forms != [form]:
            self._tables = None
            self._tables = Tables(self._groups, [form])
        self._tables.write(call, [storage], [sf])

    @without_gradients
    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Not collective. indices: i32 [T, n] or [T], entry i of rank r is r * entries + i. Returns
        what returns the entries [T * n, hidden] and their factors [T, n * packs], or None."""
        self._require_living()
        call = "engram_fetch"
        self._check_qps(call, num_qps)
        require_flags(call, use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf)
        if self._tables is None or not self._tables.written:
            refuse(call, "indices", "no table", "engram_write before it, without an error")
        numbers = _numbers(call, indices, (1, 2))
        if numbers.dim() == 1:
            numbers = numbers[:, None]
        found = self._tables.fetch(call, 0, numbers, use_tma_aligned_col_major_sf, joined=False)
        return lambda: found


def _check_range(call: str, name: str, flat: Tensor, shape: torch.Size, entries: int) -> None:
    """flat: the numbers of a tensor of that shape, in CPU memory; entries: of all ranks."""
    wrong = ((flat < 0) | (flat >= entries)).nonzero()
    if wrong.numel() > 0:
        first = int(wrong[0])
        got = f"{int(flat[first])} at [{first // shape[1]}, {first % shape[1]}]"
        refuse(call, name, got, f"at least 0 and below {entries}, the entries of all ranks")


def _numbers(call: str, indices: Any, dims: tuple[int, ...]) -> Tensor:
    good = isinstance(indices, Tensor) and indices.dtype == torch.int32 and indices.dim() in dims
    expected = f"torch.int32 of {' or '.join(map(str, dims))} dimensions"
    require(good, call, "indices", words(indices), expected)
    check_memory(call, indices=indices)
    found: Tensor = indices
    return found


def layer_numbers(call: str, indices: Any, layers: int) -> Tensor:
    """i32 [L, T, n]."""
    found = _numbers(call, indices, (3,))
    good = found.shape[0] == layers
    require(good, call, "indices", f"{found.shape[0]} layers", f"{layers}, as set_config says")
    return found


def _packs_of(call: str, name: str, factor: Any) -> int:
    good = isinstance(factor, Tensor) and factor.dim() == 2 and factor.dtype in _PACKS
    expected = "torch.float32 or torch.int32 of two dimensions, [all entries, packs]"
    require(good, call, name, words(factor), expected)
    packs: int = factor.shape[1]
    require(packs > 0, call, name, "no packs", "at least one for each entry")
    return packs


def check_written(
    call: str, form: Entries, storage: Any, factor: Tensor | None, ranks: int
) -> None:
    """What a rank writes, by itself."""
    good = isinstance(storage, Tensor) and storage.dtype == form.dtype
    good = good and tuple(storage.shape) == (form.entries, form.hidden)
    expected = f"{form.dtype} of shape ({form.entries}, {form.hidden})"
    require(good, call, "storage", words(storage), expected)
    check_memory(call, storage=storage)
    one_byte = form.dtype.itemsize == 1
    given = f"{'no' if factor is None else 'some'} beside entries of {form.dtype}"
    expected = "scaling factors for entries of one byte, and for no others"
    require(one_byte == (factor is not None), call, "sf", given, expected)
    if factor is not None:
        good = _packs_of(call, "sf", factor) == form.num_sf_packs
        good = good and factor.shape[0] == ranks * form.entries
        expected = f"shape ({ranks * form.entries}, {form.num_sf_packs}), all ranks' entries"
        require(good, call, "sf", words(factor), expected)
