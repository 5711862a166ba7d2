"""Small arithmetic of DeepEP's callers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 128  # channels of a scale
_MOST_E4M3 = 448.0
_LEAST_AMAX = 1e-4


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """x, rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """a / b; 0 of 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def calc_diff(x: Tensor, y: Tensor) -> float:
    """How far two tensors are from each other: 0 where they are the same, by the angle between x +
    1 and y + 1."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [T, H], and f32 [T, ceil(H / 128)]: the scale of each 128 channels, with which a value
    is to be multiplied."""
    assert x.dim() == 2, f"x: got {x.dim()} dimensions; expected 2"
    blocks = _blocks(x.float())
    amax = blocks.abs().amax(2).clamp(min=_LEAST_AMAX)
    values = (blocks * (_MOST_E4M3 / amax)[:, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(1)[:, : x.shape[1]].contiguous(), amax / _MOST_E4M3


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """bf16 [T, H] of the other way round; scales f32, or i32 of four exponents each."""
    if x_scales.dtype == torch.int32:
        exponents = x_scales.contiguous().view(torch.uint8).int()
        x_scales = (exponents << 23).view(torch.float32)
    blocks = _blocks(x_fp8.float())
    scales = x_scales.reshape(x_fp8.shape[0], -1)[:, : blocks.shape[1]]
    return (blocks * scales[:, :, None]).flatten(1)[:, : x_fp8.shape[1]].bfloat16().contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Each row becomes its distinct values below num_slots, descending, and -1 behind them."""
    assert x.dim() == 2, f"x: got {x.dim()} dimensions; expected 2"
    named = torch.zeros(x.shape[0], num_slots + 1, dtype=torch.bool, device=x.device)
    named.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    values = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    distinct = torch.where(named[:, :-1], values, -1).sort(1, descending=True).values
    x.fill_(-1)
    most = min(num_slots, x.shape[1])
    x[:, :most] = distinct[:, :most]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """scores [T, E], 0 in the groups of experts that group_idx [T, any] does not name."""
    chosen = torch.zeros(scores.shape[0], num_groups, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    each = chosen.repeat_interleave(scores.shape[1] // num_groups, 1)
    return torch.where(each, scores, 0)


def hash_tensor(t: Tensor) -> int:
    """The sum of its bytes, taken as i32."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """The exclusive or of all of them; of tuples and lists, too."""
    value = 0
    for one in _flat(tensors):
        value ^= hash_tensor(one)
    return value


def count_bytes(*tensors: Any) -> int:
    """Of all of them; of tuples and lists, too."""
    return sum(one.numel() * one.element_size() for one in _flat(tensors))


def _blocks(x: Tensor) -> Tensor:
    """[T, blocks, 128], zeros behind the last channel."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % _BLOCK))
    return padded.view(x.shape[0], -1, _BLOCK)


def _flat(tensors: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for one in tensors:
        if isinstance(one, (tuple, list)):
            found += _flat(one)
        elif isinstance(one, Tensor):
            found.append(one)
    return found
