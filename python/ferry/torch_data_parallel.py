"""Data-parallel training: copies of a model on several ranks, whose gradients become means."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ferry.arguments import describe, flag, instance, optional, refuse
from ferry.collectives import Collectives
from ferry.errors import DestroyedError
from ferry.tensors import storage_of
from ferry.torch_buckets import GradientBuckets, Named, is_reduced, memory_bytes
from ferry.torch_gradients import DTYPES, MeanOfRanks, check_way, collectives_of
from ferry.torch_wrapped_experts import ignore_experts, places_inside

_OF_TORCH = {
    "device_ids": None,
    "output_device": None,
    "dim": 0,
    "gradient_as_bucket_view": True,
    "static_graph": False,
    "check_reduction": False,
    "mixed_precision": None,
    "device_mesh": None,
}
_PACKED_BYTES = 32 << 20  # of a broadcast of several tensors


class DistributedDataParallel(nn.Module):
    """As torch's class of this name, for models in CPU memory: every rank has a copy of `module`
    and its own batch, and each backward leaves in `grad` the mean of the ranks' gradients. Those
    lie in registered memory, where the ranks of a host reduce them in place::

        model = ferry.torch.DistributedDataParallel(model)

    Collective: made on all ranks, of the same model; parameters and buffers become those of rank 0.
    The mean is taken in fp32, rank by rank, and rounded once: every rank gets the same bits.

    All ranks run forward and backward equally often. A parameter that gets no gradient on a rank
    counts as zeros there. `torch.autograd.grad` exchanges nothing, nor does a backward that reaches
    no parameter. `state_dict` has torch's names, "module." and the parameter's.

    Parameters of experts that differ between ranks (`ExpertParallel`) are left out, as
    `ignore_experts` leaves them out of torch's class. What is added, replaced or frozen after
    wrapping is not averaged: `destroy`, and wrap again.

    Args:
        module: parameters in f32, bf16 or f16 that require gradients now are averaged.
        collectives: what carries them, used by nobody else during a backward. None: made here and
            kept in `collectives`, of the ranks of `process_group`.
        process_group: of torch; None: the default one, or without one, `from_environment`.
        bucket_cap_mb: MiB of gradients that are reduced by one call, beside the backward.
        broadcast_buffers: buffers become those of rank 0 at each forward that a backward follows.
        find_unused_parameters: what no rank has a gradient of keeps none, at the price of a short
            exchange; without it, its gradient is zero.
        format, algorithm: as of `Gradients`.
        of_torch: options of torch's class, accepted where they ask for what is done anyway.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives | None = None,
        *,
        process_group: Any = None,
        bucket_cap_mb: float = 8,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        format: str = "exact",
        algorithm: str = "automatic",
        **of_torch: Any,
    ) -> None:
        super().__init__()
        name = "DistributedDataParallel"
        instance(f"{name}: module", module, nn.Module, "a torch.nn.Module")
        _check_options(of_torch)
        if isinstance(module, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
            refuse(f"{name}: module", "a DistributedDataParallel", "the model in it, its `module`")
        optional(f"{name}: collectives", collectives, Collectives, "a ferry.Collectives")
        way = check_way(name, format, algorithm)
        finds_unused = flag(f"{name}: find_unused_parameters", find_unused_parameters)
        if not isinstance(bucket_cap_mb, (int, float)) or not 0 < bucket_cap_mb < math.inf:
            refuse(f"{name}: bucket_cap_mb", repr(bucket_cap_mb), "a number of MiB above 0")
        self._broadcasts = flag(f"{name}: broadcast_buffers", broadcast_buffers)
        self._owns = collectives is None
        bytes_ = memory_bytes(list(module.named_parameters()))
        self.collectives = collectives or collectives_of(process_group, bytes_)
        if _differ(self.collectives, places_inside(module)):
            ignore_experts(module)
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = {n: p for n, p in module.named_parameters() if n not in ignored}
        self._buffers_of_0 = [b for n, b in module.named_buffers() if n not in ignored]
        trained = [(n, p) for n, p in parameters.items() if p.requires_grad]
        _agree(self.collectives, [*parameters.values(), *self._buffers_of_0], list(parameters))
        _check(trained, chain(parameters.items(), module.named_buffers()))
        self._broadcast([*parameters.values(), *self._buffers_of_0])
        mean = MeanOfRanks(self.collectives, way)
        self._gradients = GradientBuckets(trained, mean, int(bucket_cap_mb * 2**20), finds_unused)
        self.module = module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """That of the module."""
        if self._gradients.stopped:
            raise DestroyedError(
                "DistributedDataParallel: forward: got a call after destroy(); expected one before "
                "it, or of `module`, which goes on without the other ranks"
            )
        recorded = torch.is_grad_enabled()
        if recorded and self._gradients.synchronises and self._broadcasts:
            self._broadcast(self._buffers_of_0)
        began = time.perf_counter()
        outputs = self.module(*args, **keywords)
        if recorded:
            self._gradients.busy_seconds += time.perf_counter() - began
            self._gradients.watch(leaf for leaf in tree_leaves(outputs) if torch.is_tensor(leaf))
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside exchange nothing; gradients add up, until one outside reduces them."""
        before = self._gradients.synchronises
        self._gradients.synchronises = False
        try:
            yield
        finally:
            self._gradients.synchronises = before

    @property
    def busy_seconds(self) -> float:
        """That this rank has spent in forwards and backwards, without waiting for gradients."""
        return self._gradients.busy_seconds

    @property
    def steps(self) -> int:
        """Backwards that have exchanged gradients."""
        return self._gradients.steps

    def destroy(self) -> None:
        """Leaves the gradients alone from here on, and destroys collectives that were made here.
        Not collective. `module` goes on as it is."""
        self._gradients.stop()
        if self._owns:
            self.collectives.destroy()

    @torch.no_grad()
    def _broadcast(self, tensors: list[Tensor]) -> None:
        """Collective. Tensors become those of rank 0."""
        packed: list[Tensor] = []
        size = 0
        for at, tensor in enumerate(tensors):
            storage_of("DistributedDataParallel: module", tensor)
            packed.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size < _PACKED_BYTES and at + 1 < len(tensors):
                continue
            flat = torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in packed])
            self.collectives.broadcast(flat, 0)
            if self.collectives.rank != 0:
                sizes = [one.numel() * one.element_size() for one in packed]
                for one, part in zip(packed, torch.split(flat, sizes)):
                    one.copy_(part.clone().view(one.dtype).view(one.size()))
            packed, size = [], 0


def _check_options(of_torch: dict[str, Any]) -> None:
    """Refuses what torch's class can and this one cannot."""
    for option, value in of_torch.items():
        if option not in _OF_TORCH:
            raise TypeError(f"DistributedDataParallel() has no argument {option!r}")
        if option == "gradient_as_bucket_view":  # they are views in any case
            flag(f"DistributedDataParallel: {option}", value)
        elif value is not None and value != _OF_TORCH[option]:
            refuse(
                f"DistributedDataParallel: {option}",
                describe(value),
                f"{_OF_TORCH[option]}: others are torch's; use torch's class with "
                "ferry.torch.gradient_hook",
            )


def _check(trained: Named, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses what is not averaged here."""
    name = "DistributedDataParallel: module"
    if not trained:
        refuse(name, "no parameter that requires a gradient", "one at least")
    for parameter, tensor in tensors:
        if tensor.device.type != "cpu":
            got = f"{parameter!r} on {tensor.device}"
            refuse(name, got, "CPU memory; for GPUs, torch.nn.parallel.DistributedDataParallel")
    for parameter, tensor in trained:
        if is_reduced(tensor):
            got = f"{parameter!r} of a model that is wrapped already"
            refuse(name, got, "one that is not, or destroy() of its wrapper before")
        if tensor.dtype not in DTYPES:
            got = f"{parameter!r} of dtype {tensor.dtype}"
            refuse(name, got, f"dtype {', '.join(DTYPES.values())}")


def _differ(collectives: Collectives, words: str) -> bool:
    """Collective. Whether these are others on some rank."""
    return _first_other(collectives, words) is not None


def _first_other(collectives: Collectives, words: str) -> int | None:
    """Collective. The first rank whose words are not those of rank 0."""
    digest = hashlib.sha256(words.encode()).digest()[:8]
    mine = torch.tensor([int.from_bytes(digest, "big", signed=True)])
    everyone = torch.empty(collectives.size, dtype=torch.int64)
    collectives.all_gather(mine, everyone)
    others = (everyone != everyone[0]).nonzero().flatten().tolist()
    return others[0] if others else None


def _agree(collectives: Collectives, tensors: list[Tensor], names: list[str]) -> None:
    """Collective. Raises on all ranks where one has another model."""
    shapes = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors]
    other = _first_other(collectives, repr((names, shapes)))
    if other is not None:
        refuse(
            "DistributedDataParallel: module",
            f"on rank {other} other parameters or buffers than on rank 0, by their names, shapes, "
            "dtypes or requires_grad",
            "the same model on all ranks",
        )
