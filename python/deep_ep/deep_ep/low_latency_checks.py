"""What is refused before a low-latency call does anything."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_ep.arguments import check_memory, is_strided, words
from deep_ep.errors import refuse, require, require_integer

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_ROUTES = (torch.int64, torch.int32)


class Wire(NamedTuple):
    """How rows cross: Ferry's arguments of these names."""

    format: str = "as_is"
    scale_format: str = "f32"
    global_scale: float = 1.0


# (use_fp8, round_scale, use_ue8m0). Without fp8 the others say nothing.
_WIRES = {
    (True, False, False): Wire("e4m3", "f32"),
    (True, True, False): Wire("e4m3", "f32_pow2"),
    (True, True, True): Wire("e4m3", "ue8m0_packed"),
    **{(False, rounded, packed): Wire() for rounded in (False, True) for packed in (False, True)},
}


class Shape(NamedTuple):
    """What a LatencyExchange is made for. `again`: one beside, for dispatches that only repeat the
    routes of another."""

    capacity: int
    hidden: int
    experts: int
    topk: int
    dtype: torch.dtype
    device: torch.device
    again: bool = False


def check_sizes(call: str, **sizes: Any) -> None:
    """Positive integers."""
    for name, size in sizes.items():
        require_integer(call, name, size, 1, "a positive integer")


def nvfp4_of(
    call: str, use_fp8: bool, scales_of_fp8: bool, ue8m0_for_sf: bool, global_scale: Any
) -> Wire:
    """The same with use_nvfp4. global_scale: f32 of no dimension."""
    require(not use_fp8, call, "use_fp8", True, "False beside use_nvfp4=True")
    expected = "False beside use_nvfp4=True, whose scales are e4m3"
    require(not scales_of_fp8, call, "round_scale, use_ue8m0", True, expected)
    require(not ue8m0_for_sf, call, "use_ue8m0_for_sf", True, "False: scales are e4m3")
    check_tensor(call, "x_global_scale", global_scale, (torch.float32,), ())
    scale = float(global_scale)
    good = 2.0**-100 <= scale <= 2.0**100
    require(good, call, "x_global_scale", scale, "2^-100 to 2^100")
    return Wire("nvfp4", global_scale=scale)


def wire_of(call: str, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Wire:
    """Ferry's arguments for how rows cross."""
    found = _WIRES.get((bool(use_fp8), bool(round_scale), bool(use_ue8m0)))
    if found is None:
        refuse(call, "use_ue8m0", "True", "round_scale=True beside it: exponents say no more")
    return found


def check_tensor(
    call: str,
    name: str,
    tensor: Any,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    dense: bool = True,
) -> None:
    """A tensor of one of these dtypes and this shape; None: any extent."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    extents = ["any" if extent is None else extent for extent in shape]
    expected = f"{wanted} {extents}".replace("'", "")
    if not is_strided(tensor):
        layout = f", {tensor.layout}" if isinstance(tensor, Tensor) else ""
        refuse(call, name, words(tensor) + layout, expected)
    fits = len(tensor.shape) == len(shape) and all(
        extent is None or extent == own for own, extent in zip(tensor.shape, shape)
    )
    got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    require(fits and tensor.dtype in dtypes, call, name, got, expected)
    require(
        not dense or tensor.is_contiguous(),
        call,
        name,
        f"strides {list(tensor.stride())}",
        f"a contiguous tensor; call {name}.contiguous() first",
    )
    check_memory(call, **{name: tensor})


def check_tokens(call: str, x: Any, topk_idx: Any) -> None:
    """The inputs of a dispatch."""
    if (
        isinstance(x, Tensor)
        and isinstance(topk_idx, Tensor)
        and x.dim() == 2 == topk_idx.dim()
        and x.dtype in _FLOATS
        and topk_idx.dtype in _ROUTES
        and x.shape[0] == topk_idx.shape[0]
        and x.is_contiguous()
    ):
        return
    check_tensor(call, "x", x, _FLOATS, (None, None))
    check_tensor(call, "topk_idx", topk_idx, _ROUTES, (x.shape[0], None), dense=False)


def check_stats(call: str, name: str, stats: Any, dtype: torch.dtype, extent: int) -> None:
    """Statistics that a call adds to."""
    check_tensor(call, name, stats, (dtype,), (extent,))


def check_mode(call: str, low_latency: bool, async_finish: bool, return_recv_hook: bool) -> None:
    """The Buffer is made for these calls; one ends later by its event or by its hook."""
    if not low_latency:
        mode = "low_latency_mode="
        refuse(call, "this Buffer", f"{mode}False", f"Buffer(..., {mode}True)")
    if async_finish and return_recv_hook:
        refuse(call, "async_finish", "True together with return_recv_hook", "one of the two")


def same_routes(x: Any, rows: int, topk_idx: Any, topk_weights: Any, out: Any) -> bool:
    """Whether the inputs of a combine need no check before the call: all that Ferry, which gets no
    topk_idx, does not see. The rest it checks itself, before anything moves."""
    try:
        return (
            isinstance(x, Tensor)
            and isinstance(topk_idx, Tensor)
            and isinstance(topk_weights, Tensor)
            and topk_idx.dtype in _ROUTES
            and topk_idx.shape == topk_weights.shape
            and (out is None or isinstance(out, Tensor))
        )
    except RuntimeError:  # of a nested tensor's shape
        return False


def check_combine(
    call: str, shape: Shape, x: Any, rows: int, topk_idx: Any, topk_weights: Any, out: Any
) -> None:
    """The inputs of a combine whose rows are [local experts, `rows`, H]."""
    check_tensor(call, "topk_idx", topk_idx, _ROUTES, (None, shape.topk), dense=False)
    tokens = topk_idx.shape[0]
    check_tensor(call, "x", x, (shape.dtype,), (None, rows, shape.hidden), dense=False)
    check_tensor(call, "topk_weights", topk_weights, (torch.float32,), (tokens, shape.topk))
    if out is not None:
        check_tensor(call, "out", out, (shape.dtype,), (tokens, shape.hidden))


def unpacked(call: str, handle: Any) -> tuple[Tensor, Tensor, int, int, int]:
    """The five parts of a low-latency handle."""
    good = isinstance(handle, (tuple, list)) and len(handle) == 5
    expected = "the handle that low_latency_dispatch returned"
    require(good, call, "handle", f"an object of type {type(handle).__name__}", expected)
    source_token, ranges, capacity, hidden, experts = handle
    check_sizes(f"{call}: handle", capacity=capacity, hidden=hidden, num_experts=experts)
    check_tensor(f"{call}: handle", "source tokens", source_token, (torch.int32,), (None, None))
    check_tensor(f"{call}: handle", "layout", ranges, (torch.int64,), (None, None))
    return source_token, ranges, capacity, hidden, experts
