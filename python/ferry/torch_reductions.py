"""How torch's reductions are made of Ferry's: which operation, in which dtype, and what is left to
torch's own arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ferry.arguments import refuse
from ferry.collectives import Collectives
from ferry.errors import MismatchError
from ferry.streams import device_name
from ferry.tensors import storage_of

_OPS = {"SUM": "sum", "AVG": "mean", "PRODUCT": "product", "MIN": "min", "MAX": "max"}
_NATIVE = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
# By torch, where the dtype or the operation is none of Ferry's: of two tensors.
_BY_TORCH: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_MOVED = (torch.float64, torch.int8, torch.int16)
_SMALL = 8 << 10  # bytes that every rank gathers and reduces
_SAID = 128  # bytes in which a rank says what it calls


def all_reduce(ranks: Collectives, tensor: torch.Tensor, op: Any) -> None:
    """In place; of any layout in memory."""
    name = _name(op)
    real = _real(name, tensor)
    dense = real.contiguous()
    known = _of_ferry(name, dense)
    if known is not None:
        ranks.all_reduce(known[0], op=known[1])
    else:
        agree(ranks, "all_reduce", f"{name} of {dense.numel()} elements of {tensor.dtype}")
        dense = _all_moved(ranks, dense.view(-1), name).view(real.shape)
    if dense.data_ptr() != real.data_ptr():
        real.copy_(dense)


def reduce_scatter(ranks: Collectives, out: torch.Tensor, whole: torch.Tensor, op: Any) -> None:
    """`out` takes block `rank` of the reduction of `whole`."""
    name = _name(op)
    if whole.dtype != out.dtype or whole.numel() != ranks.size * out.numel():
        refuse(
            "reduce_scatter: input",
            f"{whole.numel()} elements of {whole.dtype}",
            f"{ranks.size} times the {out.numel()} of output, of {out.dtype}",
        )
    real, blocks = _real(name, out), _real(name, whole).contiguous()
    dense = real.contiguous()
    known = _of_ferry(name, blocks)
    if known is not None:
        ranks.reduce_scatter(known[0], dense.view(known[0].dtype), op=known[1])
    else:
        agree(ranks, "reduce_scatter", f"{name} of {blocks.numel()} elements of {whole.dtype}")
        dense = _block_moved(ranks, blocks.view(-1), name).view(real.shape)
    if dense.data_ptr() != real.data_ptr():
        real.copy_(dense)


def agree(ranks: Collectives, call: str, what: str) -> None:
    """Collective. Raises MismatchError on all ranks unless all say the same: of what Ferry itself
    does not see in the calls that carry it."""
    device = device_name(ranks._gpu)
    said = torch.zeros((ranks.size, _SAID), dtype=torch.uint8, device=device)
    mine = torch.frombuffer(bytearray(what.encode()[:_SAID].ljust(_SAID)), dtype=torch.uint8)
    ranks.all_gather(mine.to(device), said.view(-1))
    for rank, theirs in enumerate(said.cpu()):
        if not torch.equal(theirs, mine):
            text = bytes(theirs.tolist()).decode(errors="replace").strip()
            raise MismatchError(
                f"rank {ranks.rank}: {call}: rank {rank} calls it with {text}, this rank with "
                f"{what}; all ranks must make the same call",
                rank=ranks.rank,
                peer=rank,
                stage=call,
            )


def _name(op: Any) -> str:
    for name in _BY_TORCH:
        if op == getattr(dist.ReduceOp, name):
            return name
    premul = op == getattr(dist.ReduceOp, "PREMUL_SUM", None)
    return refuse(
        "ferry process group: op",
        "PREMUL_SUM" if premul else str(op),
        "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR",
    )


def _real(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, of real elements."""
    if tensor.layout != torch.strided:
        refuse("ferry process group: tensor", f"layout {tensor.layout}", "a dense one")
    storage_of("ferry process group: tensor", tensor)
    if not tensor.is_complex():
        return tensor
    if name not in ("SUM", "AVG"):
        refuse("ferry process group: op", f"{name} of {tensor.dtype}", "SUM or AVG")
    return torch.view_as_real(tensor)


def _of_ferry(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, str] | None:
    """The tensor as Ferry reduces it, and how; None: torch does the arithmetic."""
    dtype = tensor.dtype
    if name == "AVG" and not dtype.is_floating_point:
        refuse("ferry process group: op", f"AVG of {dtype}", "a floating-point dtype, or SUM")
    if dtype == torch.bool and name in _OPS:  # a sum is "any", a product is "all"
        return tensor.view(torch.uint8), "max" if name in ("SUM", "MAX") else "min"
    if dtype in _NATIVE and name in _OPS:
        return tensor, _OPS[name]
    if dtype not in (*_NATIVE, *_MOVED, torch.bool):
        refuse(
            "ferry process group: dtype",
            str(dtype),
            "f32, bf16, f16, f64, i8, i16, i32, i64, u8, bool or complex",
        )
    return None


def _reduced(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Over the rows in ascending order."""
    result = functools.reduce(_BY_TORCH[name], rows.unbind(0))
    return result / len(rows) if name == "AVG" else result


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _block_moved(ranks: Collectives, blocks: torch.Tensor, name: str) -> torch.Tensor:
    rows = torch.empty_like(blocks)
    ranks.all_to_all(_bytes(blocks), _bytes(rows))
    return _reduced(rows.view(ranks.size, -1), name)


def _all_moved(ranks: Collectives, flat: torch.Tensor, name: str) -> torch.Tensor:
    if flat.nbytes <= _SMALL:
        rows = flat.new_empty((ranks.size, flat.numel()))
        ranks.all_gather(_bytes(flat), _bytes(rows))
        return _reduced(rows, name)
    each = -(-flat.numel() // ranks.size)
    padded = flat.new_zeros(ranks.size * each)
    padded[: flat.numel()] = flat
    block = _block_moved(ranks, padded, name)
    ranks.all_gather(_bytes(block), _bytes(padded))
    return padded[: flat.numel()]
