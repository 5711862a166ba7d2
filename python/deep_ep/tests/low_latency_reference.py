"""What low-latency mode must bring, written from its definition in plain torch, on one process that
knows what every rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128  # channels that share a scale


class Batch:
    """Tokens, routes and weights of all ranks, the same on whoever asks for the same seed."""

    def __init__(
        self,
        seed: int,
        tokens: Sequence[int],
        experts: int,
        topk: int,
        hidden: int,
        whole: bool = True,
    ) -> None:
        """whole: small whole numbers and eighths, so that every sum is exact in fp32."""
        make = torch.Generator().manual_seed(seed)
        self.ranks, self.experts, self.topk, self.hidden = len(tokens), experts, topk, hidden
        self.x, self.topk_idx, self.weights = [], [], []
        for rows in tokens:
            if whole:
                x = torch.randint(-8, 9, (rows, hidden), generator=make).float()
                weights = torch.randint(1, 9, (rows, topk), generator=make) / 8
            else:
                x = torch.randn(rows, hidden, generator=make) * 3
                weights = torch.rand(rows, topk, generator=make)
            self.x.append(x.bfloat16())
            self.weights.append(weights)
            order = torch.rand(rows, experts, generator=make).argsort(1)[:, :topk]
            unused = torch.rand(order.shape, generator=make) < 0.15
            self.topk_idx.append(order.masked_fill(unused, -1))

    def local(self, rank: int) -> range:
        """The experts of a rank: contiguous, the first ranks hold one more."""
        each, more = divmod(self.experts, self.ranks)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def arrivals(self, rank: int) -> list[list[tuple[int, int]]]:
        """For each local expert the (source rank, token) of its rows, in order."""
        return [
            [
                (source, token)
                for source in range(self.ranks)
                for token in (self.topk_idx[source] == expert).any(1).nonzero().flatten().tolist()
            ]
            for expert in self.local(rank)
        ]

    def combined(self, rank: int, row: Sequence[Tensor] | None = None) -> Tensor:
        """What comes back when expert e multiplies by `factor(e)`: fp32, ascending slot, rounded
        once. row: what arrived of each token, instead of x."""
        x = (self.x if row is None else row)[rank]
        result = torch.zeros(x.shape)
        for slot in range(self.topk):
            ids = self.topk_idx[rank][:, slot]
            rows = (x.float() * factor(ids)[:, None]).bfloat16().double()
            term = self.weights[rank][:, slot, None].double() * rows
            summed = (result.double() + term).float()  # one rounding, as of a fused multiply-add
            result = torch.where((ids >= 0)[:, None], summed, result)
        return result.bfloat16()


def factor(experts: Tensor) -> Tensor:
    """What an expert of these tests does to its rows."""
    return (experts % 3 + 1).float()


def quantised(x: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 codes [T, H] and f32 scales [T, ceil(H/128)]."""
    blocks = -(-x.shape[1] // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - x.shape[1]))
    cut = padded.view(-1, blocks, BLOCK)
    amax = cut.abs().amax(2).clamp(min=1e-4)
    top = torch.full_like(amax, 448)
    scale, inverse = amax / top, top / amax  # with a scalar torch multiplies by a reciprocal
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
        inverse = 1 / scale
    codes = (cut * inverse[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:, : x.shape[1]], scale


def restored(codes: Tensor, scales: Tensor) -> Tensor:
    """bf16 rows of codes [.., H] and scales, f32 [.., ceil(H/128)] or exponents packed in i32."""
    if scales.dtype == torch.int32:
        shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=scales.device)
        exponents = (scales[..., None] >> shifts) & 0xFF
        scales = torch.exp2(exponents.flatten(-2).float() - 127)
    wide = scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    return (codes.float() * wide).bfloat16()


LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of e2m1, by code


def nvfp4(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 codes [T, H] with their sign in bit 3, and e4m3 scales [T, H/16]: the nearest level, of
    two the one with the even code."""
    cut = x.float().view(len(x), x.shape[1] // 16, 16)
    amax = cut.abs().amax(2)
    scales = (g * (amax / torch.full_like(amax, 6))).to(torch.float8_e4m3fn)
    wide = scales.float()[:, :, None]
    scaled = torch.where(wide == 0, 0.0, cut * (g / wide))
    apart = (scaled.abs()[..., None] - LEVELS).abs()
    code = apart.argmin(-1)
    above = (code + 1).clamp(max=7)
    tie = apart.gather(-1, code[..., None]) == apart.gather(-1, above[..., None])
    code = torch.where(tie[..., 0] & (code % 2 == 1), above, code)
    return (code + 8 * scaled.signbit()).view(x.shape), scales


def nvfp4_values(codes: Tensor, scales: Tensor, g: Tensor) -> Tensor:
    """bf16 rows of codes [.., H] and scales [.., H/16]."""
    values = torch.where(codes >= 8, -1.0, 1.0) * LEVELS[codes & 7]
    return (values * scales.float().repeat_interleave(16, -1) / g).bfloat16()
