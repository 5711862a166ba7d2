"""Copies of experts on other ranks, as a table of the caller's names them: their weights out, their
gradients back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferry import _ferry
from ferry.arguments import instance, integer, refuse
from ferry.collectives import Collectives
from ferry.errors import MismatchError
from ferry.tensors import storage_of, view
from ferry.torch_reductions import agree

Table = Sequence[Sequence[int]] | Tensor
"""[R][C], the same on all ranks: which expert slot c of rank r is a copy of; -1: of none. Experts
are numbered over the ranks, L on each. With ranks on GPUs also i32 [R, C] on the GPU
(`GpuBalancer.table`): nothing waits for it then, the call can be captured into a CUDA graph, and
what other ranks touch, the replicas, must be a tensor of `Collectives.empty`."""


def copy_experts(
    ranks: Collectives,
    experts: Tensor,
    replicas: Tensor,
    table: Table,
    *,
    stream: _ferry.Stream | None = None,
) -> _ferry.Event:
    """Collective. The slots of `replicas` become the experts that the table names; others keep what
    they hold.

    experts: [L, ...] of this rank, dense, L the same on all ranks. replicas: [C, ...], dense, as
    many bytes an expert, whatever the dtypes. stream: one that the call runs on, so that other work
    goes on until the event that is returned; on CPUs of one domain, elsewhere it is not used.
    """
    source, slots = _bytes("experts", experts), _bytes("replicas", replicas)
    if source.shape[1] != slots.shape[1]:
        got = f"{slots.shape[1]} bytes an expert"
        refuse("copy_experts: replicas", got, f"{source.shape[1]}, as of experts")
    if isinstance(table, Tensor):
        return _on_gpu("copy_experts", ranks, source, slots, table)
    flat = _checked("copy_experts", ranks, len(source), len(slots), table)
    if _by_pointer(ranks):
        comes = any(expert >= 0 for expert in table[ranks.rank])
        return ranks._raw.copy_rows(*_views(source, slots, comes), flat, stream)
    routes = _Routes(ranks, len(source), table)
    came = routes.swap(source[routes.out], slots.new_empty(len(routes.back), slots.shape[1]), 1)
    if routes.back:  # else torch counts a write to tensors that a backward may still need
        slots[routes.back] = came
    return _ferry.Event()


def reduce_experts(
    ranks: Collectives,
    replicas: Tensor,
    experts: Tensor,
    table: Table,
    *,
    stream: _ferry.Stream | None = None,
) -> _ferry.Event:
    """Collective. The other way round: what the slots hold is added to the experts that they are
    copies of, in fp32, in ascending rank, then slot.

    experts: f32 [L, n] of this rank, added to. replicas: f32 [C, n]. stream: as of `copy_experts`.
    """
    for name, tensor in (("experts", experts), ("replicas", replicas)):
        if tensor.dtype != torch.float32 or tensor.dim() != 2 or not tensor.is_contiguous():
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            refuse(f"reduce_experts: {name}", got, "f32 of two dimensions, dense")
        storage_of(f"reduce_experts: {name}", tensor)
    width = experts.shape[1]
    if replicas.shape[1] != width:
        refuse(
            "reduce_experts: replicas", f"{replicas.shape[1]} columns", f"{width}, as of experts"
        )
    if isinstance(table, Tensor):
        return _on_gpu("reduce_experts", ranks, replicas, experts, table)
    flat = _checked("reduce_experts", ranks, len(experts), len(replicas), table)
    if _by_pointer(ranks):
        mine = range(ranks.rank * len(experts), (ranks.rank + 1) * len(experts))
        comes = any(expert in mine for expert in flat)
        return ranks._raw.add_rows(*_views(replicas, experts, comes), flat, stream)
    routes = _Routes(ranks, len(experts), table)
    came = routes.swap(replicas[routes.back], experts.new_empty(len(routes.out), width), -1)
    for row, expert in enumerate(routes.out):  # one after the other: the order is the promise
        experts[expert] += came[row]
    return _ferry.Event()


def _on_gpu(call: str, ranks: Collectives, x: Tensor, out: Tensor, table: Tensor) -> _ferry.Event:
    """By a table that the CPU does not read, on torch's current stream."""
    instance(f"{call}: ranks", ranks, Collectives, "a ferry.Collectives")
    if ranks._gpu is None:
        refuse(f"{call}: table", "a tensor", "lists of experts, as the ranks are on CPUs")
    place = ranks._streams.place(call, None, x)
    ranks._raw.move_rows_on_gpu(
        view(f"{call}: x", x.detach(), place=place)[0],
        view(f"{call}: out", out.detach(), writable=True, place=place)[0],
        view(f"{call}: table", table, expected="i32", place=place)[0],
        call == "reduce_experts",
        place.stream,
        0,
    )
    return _ferry.Event()  # torch's stream orders what comes after it


def _by_pointer(ranks: Collectives) -> bool:
    """Whether ranks read rows of each other: CPUs of one domain."""
    return ranks.domains == 1 and ranks._gpu is None


def _views(x: Tensor, out: Tensor, comes: bool) -> tuple[_ferry.View, _ferry.View]:
    """comes: something is written to `out`. Else torch counts no write: a backward may still need
    it."""
    written = out.detach() if comes else out.data
    return view("x", x.detach())[0], view("out", written, writable=True)[0]


def _checked(call: str, ranks: Collectives, experts: int, slots: int, table: Table) -> list[int]:
    """The table, flat."""
    instance(f"{call}: ranks", ranks, Collectives, "a ferry.Collectives")
    if len(table) != ranks.size or any(len(row) != slots for row in table):
        shape = f"{len(table)} rows of {sorted({len(row) for row in table})}"
        wrong = f"a table of {shape}, {slots} slots"
        try:  # else the others, whose table fits, would wait for this rank
            agree(ranks, call, wrong)
        except MismatchError as error:
            raise MismatchError(
                f"rank {ranks.rank}: {call}: table: got {wrong}; expected as many slots on all "
                f"ranks, and the same table ({error})",
                rank=ranks.rank,
                peer=error.peer,
                stage=call,
            ) from None
        refuse(f"{call}: table", shape, f"{ranks.size} rows of {slots}, the slots of a rank")
    most = ranks.size * experts - 1
    return [integer(f"{call}: table", one, -1, most) for row in table for one in row]


class _Routes:
    """Which rows go to which rank, and where those that come belong.

    out: experts of this rank, once for each slot that copies one, in ascending rank and slot. back:
    slots of this rank, in ascending owner and slot.
    """

    def __init__(self, ranks: Collectives, experts: int, table: Table) -> None:
        self._ranks = ranks
        size, rank = ranks.size, ranks.rank
        named = [(r, c, e) for r, row in enumerate(table) for c, e in enumerate(row) if e >= 0]
        self.out = [e % experts for r, c, e in named if e // experts == rank]
        self._sent = [sum(e // experts == rank for s, _, e in named if s == r) for r in range(size)]
        mine = sorted((e // experts, c) for r, c, e in named if r == rank)
        self.back = [c for _, c in mine]
        self._came = [sum(owner == r for owner, _ in mine) for r in range(size)]

    def swap(self, rows: Tensor, out: Tensor, way: int) -> Tensor:
        """Rows of `out` to the slots (way 1), or of `back` to the experts (-1)."""
        width = out.shape[1]
        counts = [[n * width for n in these] for these in (self._sent, self._came)][::way]
        flat = rows.contiguous().view(-1), out.view(-1)
        self._ranks.all_to_all(*flat, send_counts=counts[0], recv_counts=counts[1])
        return out


def _bytes(name: str, tensor: Tensor) -> Tensor:
    """u8 [n, bytes of one]."""
    instance(f"copy_experts: {name}", tensor, Tensor, "a torch.Tensor")
    if tensor.dim() == 0 or not tensor.is_contiguous():
        refuse(f"copy_experts: {name}", f"strides {tensor.stride()}", "a dense tensor, [n, ...]")
    if tensor.numel() == 0:
        refuse(f"copy_experts: {name}", f"shape {tuple(tensor.shape)}", "experts of some elements")
    storage_of(f"copy_experts: {name}", tensor)
    return tensor.view(len(tensor), -1).view(torch.uint8)
