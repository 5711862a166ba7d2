"""Copies of busy experts, batch by batch, for `ExpertParallel`: `ferry.BatchBalancer` plans them,
weights go out before the tokens do, gradients come back in the backward.

Two kinds of collective calls meet in a backward: those of the group and those of the collectives.
All ranks make them in the same order: autograd runs what was made last first, so the gradients of
copies are reduced after the backward of the combine and before that of the dispatch. `_Joined` ties
the copies to the result on every rank, so that none leaves the reduction out.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ferry.arguments import instance, integer, refuse
from ferry.collectives import Collectives
from ferry.experts import BatchBalancer
from ferry.group import Group
from ferry.torch_replicas import copy_experts, reduce_experts


class _Seen:
    """A parameter as it was when its copies were made."""

    def __init__(self, tensor: Tensor) -> None:
        # Another tensor may get the address of one that is gone, and begins at the same version.
        self._tensor = weakref.ref(tensor)
        self._state = self._of(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        return self._tensor() is tensor and self._state == self._of(tensor)

    @staticmethod
    def _of(tensor: Tensor) -> tuple[int, int]:
        return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


class Copies:
    """The slots of this rank, and what is in them."""

    def __init__(self, group: Group, slots: int, collectives: Collectives | None) -> None:
        call = "ExpertParallel"
        ranks = instance(f"{call}: collectives", collectives, Collectives, "a ferry.Collectives")
        if (ranks.rank, ranks.size) != (group.rank, group.size):
            got = f"rank {ranks.rank} of {ranks.size}"
            expected = f"rank {group.rank} of {group.size}, as of the group"
            refuse(f"{call}: collectives", got, expected)
        if group.device != "cpu":
            refuse(f"{call}: balance", f"a group on {group.device}", "one on CPUs, so far")
        self.slots = integer(f"{call}: balance", slots, 1)
        self.local, rest = divmod(group.experts, group.size)
        self.local -= slots
        if rest != 0 or self.local < 1:
            got = f"a group of {group.experts} experts on {group.size} ranks"
            expected = f"experts=n * {group.size}, n - {slots} experts of the layer on each rank"
            refuse(f"{call}: balance", got, expected)
        self.ranks = ranks
        self.balancer = BatchBalancer(
            experts=self.local * group.size, ranks=group.size, slots=slots
        )
        self._seen: list[_Seen] = []
        self._tensors: dict[str, Tensor] = {}
        self._stay_eager()

    def invalidate(self) -> None:
        """The experts of this rank have changed though torch did not see it."""
        self._seen = []

    def _stay_eager(self) -> None:
        """torch.compile leaves these two as they are. Said for each object, because it imports what
        compiles, which takes a second."""
        self.places = torch.compiler.disable(self._places)  # type: ignore[no-untyped-call]
        self.run = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _places(self, experts: nn.Module, topk_idx: Tensor) -> Tensor:
        """Collective. Plans a batch, fetches the copies that it needs, and returns its routes."""
        instance("ExpertParallel: topk_idx", topk_idx, Tensor, "a tensor")
        parameters = self._parameters(experts)
        changed = len(parameters) != len(self._seen) or not all(
            seen.is_still(tensor) for seen, tensor in zip(self._seen, parameters.values())
        )
        balancer, size = self.balancer, self.ranks.size
        message = torch.empty(balancer.experts + 1, dtype=torch.int32)
        message[:-1] = balancer.counts(topk_idx.contiguous())
        message[-1] = changed
        every = torch.empty(size, len(message), dtype=torch.int32)
        self.ranks.all_gather(message, every)
        for rank in every[:, -1].nonzero().flatten().tolist():
            balancer.invalidate(rank)
        self._seen = [_Seen(tensor) for tensor in parameters.values()]
        balancer.plan(every[:, :-1].contiguous())
        self._fetch(parameters)
        return torch.as_tensor(balancer.places(topk_idx.contiguous(), self.ranks.rank))

    def _run(self, experts: nn.Module, rows: Tensor, offsets: Tensor) -> Tensor:
        """What the experts make of rows for themselves and for the copies on this rank."""
        table = self.balancer.table
        own = offsets[: self.local + 1]
        if all(expert < 0 for row in table for expert in row):
            made: Tensor = experts(rows, own)
            return made
        names, parameters = zip(*self._parameters(experts).items())
        slots = [self._tensors[name] for name in names]
        copies = _Copied.apply(self, table, slots, *parameters)  # type: ignore[no-untyped-call]
        cut = int(own[-1])
        made = experts(rows[:cut], own)
        if len(rows) > cut:
            given = rows[cut:], offsets[self.local :] - cut
            of_copies = functional_call(experts, dict(zip(names, copies)), given)
            made = torch.cat([made, of_copies])
        joined: Tensor = _Joined.apply(made, *copies)  # type: ignore[no-untyped-call]
        return joined

    @torch.inference_mode(False)
    def _fetch(self, parameters: dict[str, Tensor]) -> None:
        """New tensors where something comes: a backward may still need what the old ones hold. They
        take their place once all weights are there."""
        balancer = self.balancer
        fetches = balancer.fetches
        if any(expert >= 0 for row in fetches for expert in row):
            mine = fetches[self.ranks.rank]
            made = dict(self._tensors)
            for name, parameter in parameters.items():
                old = made.get(name)
                if old is not None and (old.dtype, old.shape[1:]) != (
                    parameter.dtype,
                    parameter.shape[1:],
                ):
                    old = None  # of before the layer was converted
                if old is None or any(expert >= 0 for expert in mine):
                    made[name] = parameter.new_zeros(self.slots, *parameter.shape[1:])
                    for slot, expert in enumerate(mine):
                        if old is not None and expert < 0:
                            made[name][slot] = old[slot]
                copy_experts(self.ranks, parameter.contiguous(), made[name], fetches)
            self._tensors = made
        balancer.fetched()

    def _parameters(self, experts: nn.Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(experts.named_parameters())
        if not found:
            refuse("ExpertParallel: experts", "a module without parameters", "some to copy")
        for name, tensor in experts.named_buffers():
            if tensor.dim() > 0 and len(tensor) == self.local:
                got = f"a buffer {name} with an entry for each expert"
                refuse("ExpertParallel: experts", got, "parameters: buffers do not go with copies")
        for name, tensor in found.items():
            if tensor.dim() == 0 or len(tensor) != self.local:
                got = f"{name} of shape {tuple(tensor.shape)}"
                refuse("ExpertParallel: experts", got, f"[{self.local}, ...]: an entry an expert")
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                expected = "float32, bfloat16 or float16"
                refuse("ExpertParallel: experts", f"{name} of {tensor.dtype}", expected)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        """Of the same ranks; its slots are its own, and empty."""
        made = Copies.__new__(Copies)
        memo[id(self)] = made
        made.__dict__.update(self.__dict__, _seen=[], _tensors={})
        made.balancer = BatchBalancer(
            experts=self.balancer.experts, ranks=self.ranks.size, slots=self.slots
        )
        made._stay_eager()
        return made


class _Copied(torch.autograd.Function):
    """From parameters of this rank to the copies in its slots, [slots, ...] each."""

    @staticmethod
    def forward(
        ctx: Any,
        copies: Copies,
        table: list[list[int]],
        slots: list[Tensor],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.copies, ctx.table = copies, table
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in parameters]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        made: list[Tensor | None] = []
        for grad, (shape, dtype), wanted in zip(grads, ctx.shapes, ctx.needs_input_grad[3:]):
            made.append(_reduced(ctx.copies, ctx.table, grad, shape, dtype) if wanted else None)
        return None, None, None, *made


class _Joined(torch.autograd.Function):
    """The result as it is. Its backward reaches that of the copies on every rank."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *copies: Tensor) -> Tensor:
        ctx.copies = len(copies)
        return made.view_as(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, *[None] * ctx.copies


def _reduced(
    copies: Copies, table: list[list[int]], grad: Tensor | None, shape: Any, dtype: torch.dtype
) -> Tensor | None:
    """Collective. What copies on other ranks add to the gradient of this rank's experts: fp32 sums
    in ascending rank and slot, rounded once."""
    width = shape[1:].numel()
    slots = torch.zeros(copies.slots, width) if grad is None else grad.reshape(-1, width).float()
    sums = torch.zeros(copies.local, width)
    reduce_experts(copies.ranks, slots.contiguous(), sums, table)
    first = copies.ranks.rank * copies.local
    mine = range(first, first + copies.local)
    if not any(expert in mine for row in table for expert in row):
        return None
    return sums.view(shape).to(dtype)
