"""Copies of busy experts for `ExpertParallel` on GPUs, where nothing waits for the CPU: a kernel
plans (`GpuBalancer`), and its table, which no CPU reads, moves weights and gradients.

So the CPU does not know whether a batch has copies. Slots are tensors of `Collectives.empty`, other
ones in every forward, as a backward may still need those before; what a slot holds already is
copied there on the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ferry.arguments import instance
from ferry.collectives import Collectives
from ferry.errors import ExhaustedError
from ferry.tensors import dense
from ferry.torch_balance import Batch, Copies, Owned
from ferry.torch_gpu_balancer import GpuBalancer
from ferry.torch_replicas import copy_experts, reduce_experts


class _Buffers:
    """Tensors of `Collectives.empty`, [n, width], used again in the order of their stream: `empty`
    waits on the CPU until no work uses the memory any more."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._made: dict[tuple[int, int, int, torch.dtype], list[tuple[Tensor, int]]] = {}

    def take(self, n: int, width: int, dtype: torch.dtype) -> Tensor:
        made: Tensor
        if torch.cuda.is_current_stream_capturing():  # the graph's for ever
            made = self._ranks.empty((n, width), dtype)
            return made
        key = (torch.cuda.current_stream(self._ranks._gpu).cuda_stream, n, width, dtype)
        for made, alone in self._made.setdefault(key, []):
            if self._uses(made) == alone:
                return made.detach()
        try:
            made = self._ranks.empty((n, width), dtype)
        except ExhaustedError:  # without those of other shapes and streams
            self._made = {key: self._made[key]}
            made = self._ranks.empty((n, width), dtype)
        self._made[key].append((made, self._uses(made)))
        return made.detach()

    @staticmethod
    def _uses(tensor: Tensor) -> int:
        """Tensors on this memory, those that autograd has saved among them."""
        count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
        return count


class GpuCopies(Copies):
    """The slots of this rank, and what is in them."""

    def _empty(self) -> None:
        super()._empty()
        self.buffers = _Buffers(self.ranks)
        self._told: list[str] = []

    def _new_balancer(self) -> GpuBalancer:
        return GpuBalancer(**self._balancing, device=self.device)

    def _places(self, experts: nn.Module, topk_idx: Tensor, most: int = 0) -> Tensor:
        """Collective. As of `Copies`; a rank with more rows than `most` is refused by the group."""
        instance("ExpertParallel: topk_idx", topk_idx, Tensor, "a tensor")
        self._agree(topk_idx)
        parameters = self._parameters(experts)
        said = self._said_of(parameters)
        if said != self._told:  # once, not in every batch: it waits
            self._compare_parameters(said)
            self._told = said
        with torch.no_grad():
            topk_idx = dense("ExpertParallel: topk_idx", topk_idx)
            self._plan(parameters, said, topk_idx)
            self._fetch(parameters)
            places: Tensor = self.balancer.places(topk_idx, self.ranks.rank)
        batch = _GpuBatch(self, self.balancer.table.clone(), parameters)
        handle = Owned.apply(batch, *parameters.values())  # type: ignore[no-untyped-call]
        self._batch = batch, handle
        return places

    def _plan(self, parameters: dict[str, Tensor], said: list[str], topk_idx: Tensor) -> None:
        # Nobody knows what happens to weights between two replays of a graph.
        changed = self._changed(parameters) or torch.cuda.is_current_stream_capturing()
        experts = self.balancer.experts
        message = torch.empty(experts + 1, dtype=torch.int32, device=self.device)
        self.balancer.counts(topk_idx, out=message[:experts])
        message[experts:].fill_(int(changed))
        every = message.new_empty(self.ranks.size, experts + 1)
        self.ranks.all_gather(message, every)
        again = torch._C._current_graph_task_id() >= 0
        self.balancer.plan(every, again=again)

    @torch.inference_mode(False)
    def _fetch(self, parameters: dict[str, Tensor]) -> None:
        made = {}
        for name, parameter in parameters.items():
            shape = (self.slots, *parameter.shape[1:])
            slots = self.buffers.take(self.slots, parameter[0].numel(), parameter.dtype)
            old = self._tensors.get(name)
            if old is None or (old.dtype, old.shape) != (parameter.dtype, shape):
                slots.zero_()
            else:
                slots.view(shape).copy_(old)
            given = dense(f"ExpertParallel: {name}", parameter.detach())
            copy_experts(self.ranks, given, slots, self.balancer.fetches)
            made[name] = slots.view(shape)
        self._tensors = made
        self.balancer.fetched()

    def _checked(self, y: Tensor) -> Tensor:
        """The result as it is. Its backward gives NaN where the forward was computed again with
        another plan."""
        plan_id = self.balancer.plan_id.clone()
        checked: Tensor = _Planned.apply(y, plan_id)  # type: ignore[no-untyped-call]
        return checked


class _GpuBatch(Batch):
    """Copies of one forward, and the gradients that they are owed."""

    _copies: GpuCopies

    def _find_copied(self) -> bool:
        return True  # maybe

    def begin_sums(self, grads: tuple[Tensor | None, ...]) -> None:
        """Collective. As of `Batch`."""
        copies = self._copies
        self._sums = []
        for grad, (shape, _), trained in zip(grads, self._of, self.trained):
            if not trained:
                self._sums.append(None)
                continue
            width = shape[1:].numel()
            held = copies.buffers.take(copies.slots, width, torch.float32)
            if grad is None:
                held.zero_()
            else:
                held.copy_(grad.reshape(-1, width))
            sums = torch.zeros(copies.local, width, device=self.device)
            self._sums.append((sums, reduce_experts(copies.ranks, held, sums, self._table)))


class _Planned(torch.autograd.Function):
    """As the one of `Copies`, but for the CPU, which does not look."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, plan_id: Tensor) -> Tensor:
        ctx.plan_id = plan_id
        ctx.save_for_backward(plan_id)
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (plan_id,) = ctx.saved_tensors
        return torch.where(plan_id == ctx.plan_id, grad, torch.nan), None
