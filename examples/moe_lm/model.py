"""A small byte-level language model whose feed-forward layers are sharded experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import ferry
import ferry.torch as ft
from data import BYTES
from settings import Settings


def by_share(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of shares `[S, ...]`. On a GPU one share after the other: kernels there are chosen
    by shape, and a share must give the same bits whatever other shares its rank has."""
    return torch.cat([function(part) for part in x.split(1)]) if x.is_cuda else function(x)


class Dense(nn.Module):
    """A parameter that every rank holds, whose gradient is the same on any number of ranks.

    It is kept in fp64, and each share of the batch computes with its own fp32 copy. The gradient
    is then a sum of a few fp32 values in fp64: exact in practice, so no order of summing, over
    shares in a rank or over ranks, changes a bit of it.
    """

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(start.double())

    def forward(self, shares: int) -> torch.Tensor:
        """fp32 copies `[shares, ...]`."""
        return self.value.expand(shares, *self.value.shape).float()


class Mixer(nn.Module):
    """Causal attention over a short causal filter: the filter gives each byte its neighbours."""

    def __init__(self, settings: Settings, generator: torch.Generator) -> None:
        super().__init__()
        width = settings.width
        self.heads, self.context = settings.heads, settings.context
        taps = 0.2 * torch.randn(settings.filter_taps, width, generator=generator)
        taps[0] += 1.0
        self.taps = Dense(taps)
        self.qkv = Dense(_random(generator, width, 3 * width))
        self.out = Dense(_random(generator, width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shares of tokens `[S, T, H]`, whole sequences one after the other → `[S, T, H]`."""
        shares, tokens, width = x.shape
        sequences = x.view(shares, -1, self.context, width)
        taps = self.taps(shares)[:, :, None, None, :]
        filtered = taps[:, 0] * sequences
        for back in range(1, taps.shape[1]):
            earlier = F.pad(sequences[:, :, :-back], (0, 0, back, 0))
            filtered = torch.addcmul(filtered, taps[:, back], earlier)
        qkv = filtered.view(shares, tokens, width) @ self.qkv(shares)
        qkv = qkv.view(-1, self.context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(shares, tokens, width) @ self.out(shares)


class Router(nn.Module):
    """Chooses `top_k` experts for each token; weights are a softmax over the chosen ones.

    Balance without a loss term: `bias` shifts the choice alone and moves against the load, which
    is a sum of integers over all ranks and so the same on any number of them.
    """

    bias: torch.Tensor

    def __init__(self, settings: Settings, generator: torch.Generator) -> None:
        super().__init__()
        self.top_k = settings.top_k
        self.gate = Dense(_random(generator, settings.width, settings.experts))
        self.register_buffer("bias", torch.zeros(settings.experts))
        self.load = torch.zeros(settings.experts, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares of tokens `[S, T, H]` → experts (int64 `[S·T, K]`) and weights (`[S·T, K]`)."""
        logits = by_share(lambda part: part @ self.gate(len(part)), x).flatten(0, 1)
        chosen = (logits.detach() + self.bias).topk(self.top_k, dim=1).indices
        self.load = torch.bincount(chosen.flatten(), minlength=len(self.bias)).double()
        return chosen, logits.gather(1, chosen).softmax(dim=1)

    def rebalance(self, load: torch.Tensor, rate: float) -> None:
        """Move the bias against `load`, the tokens of each expert over all ranks."""
        self.bias -= (rate * (load / load.mean() - 1)).to(self.bias)


class Experts(nn.Module):
    """This rank's block of experts, each a two-layer perceptron over the rows routed to it."""

    def __init__(self, settings: Settings, local: range, generator: torch.Generator) -> None:
        super().__init__()
        count, width, inner = settings.experts, settings.width, settings.expert_width
        block = slice(local.start, local.stop)
        # All experts are drawn, then this rank's kept: the same values on any number of ranks.
        self.up = nn.Parameter(_random(generator, count, width, inner)[block].clone())
        self.down = nn.Parameter(_random(generator, count, inner, width)[block].clone())

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows `[N, H]` with local experts `[N, K]` (-1: not here) → weighted sums `[N, H]`."""
        expert_of_slot = topk_idx.flatten()
        slots = expert_of_slot.argsort(stable=True)
        slots = slots[int((expert_of_slot < 0).sum()) :]
        counts = torch.bincount(expert_of_slot[slots], minlength=len(self.up)).tolist()
        rows = slots // topk_idx.shape[1]
        expert_major = x.index_select(0, rows).split(counts)
        outputs = [
            F.silu(part @ up) @ down
            for part, up, down in zip(expert_major, self.up.unbind(), self.down.unbind())
        ]
        weights = topk_weights.flatten().index_select(0, slots)
        weighted = torch.cat(outputs) * weights[:, None]
        return torch.zeros_like(x).index_add(0, rows, weighted)


class MoeLayer(nn.Module):
    """Route, carry the tokens to their experts, compute, carry the results back."""

    def __init__(
        self, settings: Settings, group: ferry.Group, local: range, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.group = group
        self.router = Router(settings, generator)
        self.experts = Experts(settings, local, generator)
        self.zeroed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shares of tokens `[S, T, H]` → the same shape; zeros instead while `zeroed`."""
        if self.zeroed:
            return torch.zeros_like(x)
        topk_idx, topk_weights = self.router(x)
        plan = self.group.plan(topk_idx)
        received = ft.dispatch(self.group, plan, x.flatten(0, 1), topk_weights=topk_weights)
        rows = self.experts(received.x, received.topk_idx, received.topk_weights)
        return ft.combine(self.group, plan, rows).view_as(x)


class Block(nn.Module):
    """One layer: mix along the sequence, then the experts, each over a residual stream."""

    def __init__(
        self, settings: Settings, group: ferry.Group, local: range, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.mixer = Mixer(settings, generator)
        self.moe = MoeLayer(settings, group, local, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + by_share(self.mixer, _normalised(x))
        return x + self.moe(_normalised(x))


class MoeLanguageModel(nn.Module):
    """Shares of bytes `[S, B, C]` → logits `[S, B·C, 256]`; `local`: the experts held here."""

    def __init__(self, settings: Settings, group: ferry.Group, local: range) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(settings.seed)
        width = settings.width
        self.byte = Dense(torch.randn(BYTES, width, generator=generator))
        self.place = Dense(0.1 * torch.randn(settings.context, width, generator=generator))
        self.blocks = nn.ModuleList(
            Block(settings, group, local, generator) for _ in range(settings.layers)
        )
        self.head = Dense(_random(generator, width, BYTES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = by_share(self._embedded, tokens)
        for block in self.blocks:
            x = block(x)
        return by_share(lambda part: part @ self.head(len(part)), _normalised(x))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        shares = len(tokens)
        entry = tokens + BYTES * torch.arange(shares, device=tokens.device)[:, None, None]
        x = F.embedding(entry, self.byte(shares).flatten(0, 1)) + self.place(shares)[:, None]
        return x.flatten(1, 2)

    def moe_layers(self) -> list[MoeLayer]:
        """The layers that hold experts, first to last."""
        return [block.moe for block in self.blocks]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Parameters that every rank holds; the others are its own experts'."""
        return [part.value for part in self.modules() if isinstance(part, Dense)]


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal values scaled for an input of `shape[-2]` channels."""
    return torch.randn(*shape, generator=generator) * shape[-2] ** -0.5
