"""`Copies` on GPUs whose CPU never learns what was planned: `GpuBalancer` plans, tables stay in GPU
memory, and the slots and gradients that peers touch lie in registered memory. Nothing waits for the
GPU but the first batch, so that forward and backward can be captured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ferry.arguments import instance
from ferry.collectives import Collectives
from ferry.group import Group
from ferry.tensors import dense
from ferry.torch_balance import Copies, _Batch, _Coming, _is_again, _Owned, _said
from ferry.torch_gpu_balancer import GpuBalancer
from ferry.torch_replicas import copy_experts, reduce_experts

MOST_RANKS = 64

_streams: weakref.WeakKeyDictionary[Collectives, torch.cuda.Stream] = weakref.WeakKeyDictionary()


def plans_on_gpu(group: Group, collectives: Collectives | None, max_recv_rows: int) -> bool:
    """Whether copies need no CPU: else experts are called with as many rows as came, and for that
    the CPU must know the counts. The same on all ranks."""
    return (
        max_recv_rows > 0
        and isinstance(collectives, Collectives)
        and collectives._gpu is not None
        and max(collectives.domains, group.domains) == 1
        and group.size <= MOST_RANKS
    )


class GpuCopies(Copies):
    """Every batch is taken to have copies on all ranks."""

    def _empty(self) -> None:
        super()._empty()
        self._same: set[tuple[str, ...]] = set()
        self._captured = False
        self._registered: dict[tuple[str, torch.dtype], Tensor] = {}

    def _new_balancer(self) -> Any:
        return GpuBalancer(**self._balancing, device=self.ranks._gpu)

    def _places(self, experts: nn.Module, topk_idx: Tensor, most: int = 0) -> Tensor:
        """Collective, as of `Copies`. `Group.plan` refuses the places of a batch that is to be
        computed again and is forgotten, and more rows than a rank may have."""
        instance("ExpertParallel: topk_idx", topk_idx, Tensor, "a tensor")
        self._agree(topk_idx)
        self._arrive()  # as there
        parameters = self._parameters(experts)
        said = tuple(_said(name, tensor) for name, tensor in parameters.items())
        if said not in self._same:  # later batches are not compared: that would wait
            self._agree_on_parameters(list(said))
            self._same.add(said)
        with torch.no_grad():
            topk_idx = dense("ExpertParallel: topk_idx", topk_idx)
            self._plan_on_gpu(parameters, topk_idx)
            self._fetch(parameters)
            places: Tensor = self.balancer.places(topk_idx, self.ranks.rank)
        batch = _GpuBatch(self, self.balancer.table.clone(), parameters)
        handle = _Owned.apply(batch, *parameters.values())  # type: ignore[no-untyped-call]
        self._batch = batch, handle
        return places

    def _plan_on_gpu(self, parameters: dict[str, Tensor], topk_idx: Tensor) -> None:
        """In a graph nobody sees whether experts have changed before a replay: they have. Nor, from
        then on, whether they have since one: its steps of optimizers are not counted."""
        self._captured = self._captured or _capturing()
        balancer = self.balancer
        message = torch.empty(balancer.experts + 1, dtype=torch.int32, device=topk_idx.device)
        balancer.counts(topk_idx, out=message[:-1])
        # No copy: that is not captured.
        message[-1:].fill_(self._changed(parameters) or self._captured)
        every = message.new_empty(self.ranks.size, len(message))
        self.ranks.all_gather(message, every)
        balancer.plan(every, again=_is_again())

    def _fetch(self, parameters: dict[str, Tensor]) -> None:
        given = [
            (
                dense(f"ExpertParallel: {name}", parameter.detach()),
                self.registered(name, (self.slots, *parameter.shape[1:]), parameter.dtype),
            )
            for name, parameter in parameters.items()
        ]

        def moves() -> None:
            for source, slots in given:
                copy_experts(self.ranks, source, slots, self.balancer.fetches)

        coming = _Coming({name: slots for name, (_, slots) in zip(parameters, given)})
        coming.events.append(_beside(self.ranks, moves))
        coming.sources = [source for source, _ in given]
        self.balancer.fetching()
        self._coming = coming

    def _arrive(self) -> None:
        comes = self._coming is not None
        super()._arrive()
        if comes and torch.is_grad_enabled():
            # The next batch fetches into the slots, and a backward may be to come.
            self._tensors = {name: slots.clone() for name, slots in self._tensors.items()}

    @torch.inference_mode(False)
    def registered(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that stays, where peers write slots and read their gradients. Zeros at first."""
        found = self._registered.get((name, dtype))
        if found is None or found.shape != shape:
            self._registered.pop((name, dtype), None)
            found = self._registered[name, dtype] = self.ranks.empty(shape, dtype)
            found.zero_()
        return found

    def _checked(self, y: Tensor) -> Tensor:
        """As of `Copies`, but that gradients of another plan are NaN, as nobody waits for it."""
        plan_id = self.balancer.plan_id.clone()
        checked: Tensor = _Planned.apply(y, plan_id)  # type: ignore[no-untyped-call]
        return checked


class _End:
    """Of moves on a stream beside torch's current one of that GPU, which may not be torch's current
    GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._event = stream, stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def hold(self, tensor: Tensor) -> None:
        """If nobody waits: torch does not use its memory again before the end."""
        tensor.record_stream(self._stream)


def _beside(ranks: Collectives, moves: Callable[[], None]) -> Any:
    """Has `moves` run behind what torch's current stream has so far, and beside what it gets from
    now on: on a stream of these `ranks`. Returns its end; in a graph, too."""
    stream = _streams.get(ranks)
    if stream is None:
        # Before the blocks of other kernels: all ranks wait for the one whose weights come last.
        stream = _streams[ranks] = torch.cuda.Stream(ranks._gpu, priority=-1)  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            moves()
    except BaseException:
        # The caller drops the tensors, and torch gives their memory away in the order of `current`.
        current.wait_stream(stream)
        raise
    return _End(stream)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _GpuBatch(_Batch):
    """Its table is a tensor, and any expert may have been copied."""

    def __init__(self, copies: GpuCopies, table: Tensor, parameters: dict[str, Tensor]) -> None:
        super().__init__(copies, [], parameters)
        self._where, self._on = copies, table
        self._copied = True

    def begin_sums(self, grads: tuple[Tensor | None, ...]) -> None:
        copies = self._where
        moved: list[tuple[Tensor, Tensor] | None] = []
        for name, grad, (shape, _), trained in zip(self.names, grads, self._of, self.trained):
            if not trained:
                moved.append(None)
                continue
            width = shape[1:].numel()
            given = copies.registered(f"gradient of {name}", (copies.slots, width), torch.float32)
            if grad is None:
                given.zero_()
            else:
                given.copy_(grad.reshape(-1, width))
            moved.append((given, torch.zeros(copies.local, width, device=self.device)))

        def moves() -> None:
            for each in moved:
                if each is not None:
                    reduce_experts(copies.ranks, *each, self._on)

        end = _beside(copies.ranks, moves)
        self._sums = [None if each is None else (each[1], end) for each in moved]

    def __del__(self) -> None:
        """An exception may have ended the backward while sums are under way."""
        for sums, end in filter(None, self._sums):
            end.hold(sums)


class _Planned(torch.autograd.Function):
    """As that of torch_balance: a checkpoint replaces only what is saved."""

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
