"""Arguments of throughput mode: refused here where the interface says what it wants, by Ferry where
ranks or sizes do not fit."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from deep_ep.config import domains_of
from deep_ep.errors import refuse, require, require_integer
from deep_ep.layout import ranks_of_tokens
from ferry.arguments import shown, tensor_words
from ferry.tensors import storage_of

_ROW_STEP_BYTES = 16
_SCALES = (torch.float32, torch.int32)
_CARRIED = {  # by Ferry as they are
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int32,
    torch.int64,
    torch.uint8,
}


def rows_and_scales(call: str, x: Any) -> tuple[Any, Any]:
    """The two parts of x; None for scales that are not there."""
    if not isinstance(x, tuple):
        return x, None
    require(len(x) == 2, call, "x", f"a tuple of {len(x)}", "rows, or a tuple of rows and scales")
    return x


def is_strided(value: Any) -> TypeGuard[Tensor]:
    """A tensor that is neither sparse nor nested."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def check_memory(call: str, **tensors: Tensor | None) -> None:
    """For what torch reads here: it would read what lies where the memory of a freed tensor was, or
    for a tensor of the meta device anything."""
    for name, tensor in tensors.items():
        if tensor is not None:
            good = is_strided(tensor) and not tensor.is_meta
            if not good:
                expected = "a strided torch.Tensor with memory, or None where it may be"
                refuse(call, name, words(tensor), expected)
            storage_of(f"{call}: {name}", tensor)


def check_dtype(call: str, dtype: Any) -> None:
    got = f"{shown(dtype)}, {words(dtype)}"
    require(isinstance(dtype, torch.dtype), call, "dtype", got, "a torch.dtype")


def shapes_of(call: str, shapes: Any) -> tuple[list[tuple[int, ...]], bool]:
    """Of what callers give as a shape or several; and whether it was more than one."""
    good = isinstance(shapes, (tuple, list))
    several = good and len(shapes) > 0 and isinstance(shapes[0], (tuple, list))
    found = list(shapes) if several else [shapes]
    least = "a shape, numbers of 0 or more, or several"
    for one in found:
        require(isinstance(one, (tuple, list)), call, "shapes", shown(shapes), least)
    made = [tuple(require_integer(call, "shapes", n, 0, least) for n in one) for one in found]
    return made, several


def check_rows(call: str, name: str, x: Any) -> None:
    """Rows that can travel: dense, of whole 16 bytes."""
    try:
        shape = x.shape if isinstance(x, Tensor) else ()
        dense = len(shape) == 2 and x.is_contiguous()
    except RuntimeError:  # of nested or compressed tensors, which every call would be asked for
        shape, dense = (), False
    if len(shape) != 2:
        refuse(call, name, words(x), "a strided torch.Tensor of two dimensions, [rows, hidden]")
    if not dense:
        refuse(call, name, f"strides {x.stride()}", "a contiguous tensor")
    row_bytes = shape[1] * x.element_size()
    if row_bytes == 0 or row_bytes % _ROW_STEP_BYTES != 0:
        refuse(call, name, f"rows of {row_bytes} bytes", "a multiple of 16 bytes")


def carried_rows(x: Tensor) -> Tensor:
    """Rows, or what is flat, as Ferry takes them: of a dtype that it does not know, their bytes."""
    return x if x.dtype in _CARRIED else x.detach().resolve_conj().resolve_neg().view(torch.uint8)


def check_routes(call: str, topk_idx: Any) -> None:
    """Routes of tokens."""
    if not isinstance(topk_idx, Tensor) or topk_idx.dim() != 2:
        refuse(call, "topk_idx", words(topk_idx), "a torch.Tensor of two dimensions, [T, K]")
    good = topk_idx.dtype in (torch.int64, torch.int32)
    require(good, call, "topk_idx", topk_idx.dtype, "torch.int64 or torch.int32")


def check_layout(
    call: str,
    x: Tensor,
    per_rank: Any,
    per_domain: Any,
    in_rank: Any,
    per_expert: Any,
    num_ranks: int,
) -> None:
    """What get_dispatch_layout returned, for these rows and ranks."""
    if per_rank is None or in_rank is None or per_expert is None:
        refuse(
            call,
            "num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert",
            "None for one of them",
            "those of get_dispatch_layout, or a handle",
        )
    if not is_strided(per_rank) or per_rank.shape != (num_ranks,):
        refuse(call, "num_tokens_per_rank", words(per_rank), f"shape {(num_ranks,)}")
    if per_domain is not None and domains_of(num_ranks) > 1:  # else the original has none, either
        hosts = (domains_of(num_ranks),)
        if not is_strided(per_domain) or per_domain.shape != hosts:
            refuse(call, "num_tokens_per_rdma_rank", words(per_domain), f"shape {hosts}")
    wanted = (x.shape[0], num_ranks)
    if not is_strided(in_rank) or in_rank.shape != wanted or in_rank.dtype != torch.bool:
        refuse(call, "is_token_in_rank", words(in_rank), f"torch.bool of shape {wanted}")
    if not isinstance(per_expert, Tensor) or per_expert.dim() != 1 or per_expert.numel() == 0:
        refuse(call, "num_tokens_per_expert", words(per_expert), "one dimension, [experts]")
    check_memory(call, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)


def check_sent(call: str, in_rank: Tensor, topk_idx: Tensor, num_experts: int) -> None:
    """is_token_in_rank marks the ranks that the routes sent each token to. In CPU memory alone: on
    a GPU the CPU would wait for it."""
    if in_rank.is_cuda or topk_idx.is_cuda:
        return
    sent = ranks_of_tokens(topk_idx, num_experts, in_rank.shape[1])
    if torch.equal(in_rank, sent):
        return
    token = int((in_rank != sent).any(1).nonzero()[0])
    got, ranks = (one[token].nonzero().flatten().tolist() for one in (in_rank, sent))
    expected = f"{ranks}, as topk_idx says: that of get_dispatch_layout for it"
    refuse(call, "is_token_in_rank", f"ranks {got} for token {token}", expected)


def check_weights(call: str, topk_weights: Any, rows: int, slots: int | None) -> None:
    """f32 weights of rows; slots None: any number."""
    good = is_strided(topk_weights) and topk_weights.dtype == torch.float32
    shape = topk_weights.shape if good else ()
    if len(shape) != 2 or shape[0] != rows or slots not in (None, shape[1]):
        wanted = f"torch.float32 of shape ({rows}, {'K' if slots is None else slots})"
        refuse(call, "topk_weights", words(topk_weights), wanted)


def carried_scales(call: str, x: Tensor, scales: Any) -> Tensor:
    """Scales as Ferry takes them: four bytes each, whatever they mean; four of one byte as one."""
    require(x.element_size() == 1, call, "x", x.dtype, "elements of one byte beside scales")
    good = isinstance(scales, Tensor) and scales.dim() == 2 and scales.shape[0] == x.shape[0]
    good = good and (scales.dtype in _SCALES or scales.element_size() == 1)
    wanted = f"torch.float32, torch.int32 or of one byte, of shape ({x.shape[0]}, any)"
    require(good, call, "x[1], the scales", words(scales), wanted)
    carried: Tensor = scales
    if carried.element_size() == 1:
        good = carried.is_contiguous() and carried.shape[1] % 4 == 0
        got = f"{words(carried)} and strides {carried.stride()}"
        require(good, call, "x[1], the scales", got, "dense rows of a multiple of 4 bytes")
    return carried if carried.dtype == torch.float32 else carried.view(torch.float32)


def biases(call: str, x: Tensor, bias: Any, plan: Any) -> tuple[Tensor | None, Tensor | None]:
    """The two that combine adds to the sums of the plan's tokens."""
    if bias is None:
        return None, None
    both = bias if isinstance(bias, tuple) else (bias, None)
    good = len(both) == 2 and all(one is None or is_strided(one) for one in both)
    require(good, call, "bias", words(bias), "a strided tensor or a tuple of two")
    shape = (plan.tokens, x.shape[1])
    for one in both:
        if one is None:
            continue
        good = one.shape == shape and one.dtype == x.dtype and one.is_contiguous()
        require(good, call, "bias", words(one), f"a contiguous tensor of {x.dtype}, shape {shape}")
        require(one.device == x.device, call, "bias", str(one.device), f"{x.device}, as x")
        check_memory(call, bias=one)
    return both


def words(value: object) -> str:
    """What it is, for messages."""
    return tensor_words(value) or f"an object of type {type(value).__name__}"
