"""Copies of busy experts, batch by batch, for `ExpertParallel`: `ferry.BatchBalancer` plans them.
Weights and gradients move on a stream of their own, beside the calls of the group.

Weights begin to move before the tokens go out, and are awaited when the rank's own experts are
done. In a backward autograd runs what was made last first: the gradients of copies begin to move
(`_Copied`) before the own experts and the dispatch go backward, and are awaited after that
(`_Owned`, made before the dispatch). `_Joined` ties the copies to the result on every rank, so that
none leaves the reduction out: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ferry import _ferry
from ferry.arguments import instance, integer, refuse
from ferry.collectives import Collectives
from ferry.errors import MismatchError
from ferry.experts import BatchBalancer
from ferry.group import Group
from ferry.streams import device_name
from ferry.tensors import dense
from ferry.torch_changes import Seen, count_steps
from ferry.torch_reductions import agree
from ferry.torch_replicas import copy_experts, reduce_experts

_WITH_SLOTS = 1  # placement_digest of the first plan with balance; without it is 0

COPY_ROWS = 16
"""Of `ExpertParallel`, by default."""

_streams: weakref.WeakKeyDictionary[Collectives, _ferry.Stream] = weakref.WeakKeyDictionary()


class Copies:
    """The slots of this rank, and what is in them."""

    def __init__(
        self,
        group: Group,
        slots: int,
        collectives: Collectives | None,
        copy_rows: int,
        layout: dict[str, Any],
    ) -> None:
        count_steps()
        call = "ExpertParallel"
        expected = "with balance a ferry.Collectives of the ranks of the group, to move copies"
        ranks = instance(f"{call}: collectives", collectives, Collectives, expected)
        if (ranks.rank, ranks.size) != (group.rank, group.size):
            got = f"rank {ranks.rank} of {ranks.size}"
            expected = f"rank {group.rank} of {group.size}, as of the group"
            refuse(f"{call}: collectives", got, expected)
        device = device_name(ranks._gpu)
        if group.device != device:
            refuse(f"{call}: collectives", f"some on {device}", f"{group.device}, as of the group")
        self.slots = integer(f"{call}: balance", slots, 1)
        self.local, rest = divmod(group.experts, group.size)
        self.local -= slots
        if rest != 0 or self.local < 1:
            got = f"a group of {group.experts} experts on {group.size} ranks"
            expected = f"experts=n * {group.size}, n - {slots} experts of the layer on each rank"
            refuse(f"{call}: balance", got, expected)
        self.group, self.ranks, self.device = group, ranks, device
        if ranks not in _streams:
            _streams[ranks] = _ferry.Stream()
        self.stream = _streams[ranks]
        self._balancing = {
            "experts": self.local * group.size,
            "ranks": group.size,
            "slots": slots,
            "domain_size": -(-group.size // group.domains),
            "copy_rows": integer(f"{call}: copy_rows", copy_rows, 0),
            "max_rows": 0,
        }
        self._fixed = layout["max_recv_rows"]
        if self._fixed > 0:
            # Every expert's block may end with rows of padding.
            padding = (self.local + slots) * (layout["alignment"] - 1)
            if self._fixed <= padding:
                refuse(
                    f"{call}: max_recv_rows", self._fixed, f"more than {padding} rows of padding"
                )
            self._balancing["max_rows"] = self._fixed - padding
        self.most = self._balancing["max_rows"]
        self._empty()

    def _empty(self) -> None:
        """Nothing was planned and nothing is copied yet.

        torch.compile leaves `places`, `run` and `checked` as they are. Said for each object,
        because it imports what compiles, which takes a second."""
        self.balancer = self._new_balancer()
        self._agreed = False
        self._seen: list[Seen] = []
        self._tensors: dict[str, Tensor] = {}
        self._coming: _Coming | None = None
        self._batch: tuple[_Batch, Tensor] | None = None
        self.places = torch.compiler.disable(self._places)  # type: ignore[no-untyped-call]
        self.run = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]
        self.checked = torch.compiler.disable(self._checked)  # type: ignore[no-untyped-call]

    def _new_balancer(self) -> Any:
        return BatchBalancer(**self._balancing)

    def invalidate(self) -> None:
        """The experts of this rank have changed though torch did not see it."""
        self._seen = []

    def _places(self, experts: nn.Module, topk_idx: Tensor, most: int = 0) -> Tensor:
        """Collective. Plans a batch, begins to fetch the copies that it needs, and returns its
        routes. most: > 0: rows of a rank."""
        instance("ExpertParallel: topk_idx", topk_idx, Tensor, "a tensor")
        self._agree(topk_idx)
        self._arrive()  # of a forward that ended in an exception, here or on another rank
        parameters = self._parameters(experts)
        said = [_said(name, tensor) for name, tensor in parameters.items()]
        with torch.no_grad():
            topk_idx = dense("ExpertParallel: topk_idx", topk_idx)
            self._plan(parameters, said, topk_idx)
            if 0 < most < max(self.balancer.load):
                self._refuse_load(most)
            self._fetch(parameters)
            places = torch.as_tensor(self.balancer.places(topk_idx, self.ranks.rank))
        table = self.balancer.table
        self._batch = None
        if _some(table):
            batch = _Batch(self, table, parameters)
            handle = _Owned.apply(batch, *parameters.values())  # type: ignore[no-untyped-call]
            self._batch = batch, handle
        return places

    def _agree(self, topk_idx: Tensor) -> None:
        """Collective, in the first batch: before a rank alone refuses experts that do not fit its
        slots, and the others wait for it."""
        if self._agreed:
            return
        none = topk_idx.detach()[:0].contiguous()  # a rank without slots plans its batch now
        self.group._compare("ExpertParallel: topk_idx", _WITH_SLOTS, none)
        settings = {
            "balance": self.slots,
            "copy_rows": self._balancing["copy_rows"],
            "max_recv_rows (less padding)": self.most,
            "domain_size": self._balancing["domain_size"],
        }
        for name, value in settings.items():
            agree(self.ranks, "ExpertParallel", f"{name}={value}")
        self._agreed = True

    def _plan(self, parameters: dict[str, Tensor], said: list[str], topk_idx: Tensor) -> None:
        balancer, size = self.balancer, self.ranks.size
        counts = balancer.counts(topk_idx)
        message = counts.new_empty(balancer.experts + 2)
        message[:-2] = counts
        message[-2] = self._changed(parameters)  # said once, so nothing may be refused before
        message[-1] = zlib.crc32("\n".join(said).encode()) >> 1
        every = message.new_empty(size, len(message))
        self.ranks.all_gather(message, every)
        every = every.cpu()
        for rank in every[:, -2].nonzero().flatten().tolist():
            balancer.invalidate(rank)
        if (every[:, -1] != every[0, -1]).any():
            self._refuse_parameters(said)
        balancer.plan(every[:, :-2].contiguous(), again=_is_again())

    def _changed(self, parameters: dict[str, Tensor]) -> bool:
        """Since this was asked before."""
        seen, self._seen = self._seen, [Seen(tensor) for tensor in parameters.values()]
        return len(seen) != len(parameters) or not all(
            each.is_still(tensor) for each, tensor in zip(seen, parameters.values())
        )

    def _refuse_load(self, most: int) -> None:
        """All ranks know it, and nothing has moved."""
        load = self.balancer.load
        heaviest = max(load)
        refuse(
            "ExpertParallel: max_recv_rows",
            f"{self._fixed}, {self._fixed - most} of them for padding",
            f"at least {heaviest + self._fixed - most}: rank {load.index(heaviest)} has {heaviest} "
            "rows with all copies that help; give more rows, more slots for copies (balance), or "
            "fewer tokens",
        )

    def _agree_on_parameters(self, said: list[str]) -> None:
        """Collective. MismatchError on all ranks, of the first parameter that differs."""
        agree(self.ranks, "ExpertParallel", f"{len(said)} parameters of experts")
        for each in said:
            agree(self.ranks, "ExpertParallel", each)

    def _refuse_parameters(self, said: list[str]) -> None:
        """Collective."""
        self._agree_on_parameters(said)
        call, rank = "ExpertParallel", self.ranks.rank
        message = f"rank {rank}: {call}: names of parameters of experts differ between ranks"
        raise MismatchError(message, rank=rank, peer=-1, stage=call)

    def _run(self, experts: nn.Module, rows: Tensor, offsets: Tensor) -> Tensor:
        """What the experts make of rows for themselves and for the copies on this rank."""
        own = offsets[: self.local + 1]
        if self._batch is None:
            alone: Tensor = experts(rows, own)
            return alone
        (batch, handle), self._batch = self._batch, None
        parts = (_FixedParts if self._fixed > 0 else _Parts)(rows, offsets, self.local)
        made: Tensor = experts(*parts.own())
        self._arrive()
        slots = [self._tensors[name] for name in batch.names]
        copies = _Copied.apply(batch, slots, handle)  # type: ignore[no-untyped-call]
        given = parts.of_copies()
        if given is not None:
            of_copies = functional_call(experts, dict(zip(batch.names, copies)), given)
            made = parts.joined(made, of_copies)
        joined: Tensor = _Joined.apply(made, *copies)  # type: ignore[no-untyped-call]
        return joined

    def _checked(self, y: Tensor) -> Tensor:
        """The result as it is. Its backward, before any other of the layer, refuses what was
        computed again with another plan."""
        checked: Tensor = _Planned.apply(y, self.balancer.plan_id)  # type: ignore[no-untyped-call]
        return checked

    @torch.inference_mode(False)
    def _fetch(self, parameters: dict[str, Tensor]) -> None:
        """New tensors where something comes: a backward may still need what the old ones hold."""
        balancer, fetches = self.balancer, self.balancer.fetches
        self._coming = None
        if not _some(fetches):
            balancer.fetched()
            return
        mine = fetches[self.ranks.rank]
        coming = _Coming(dict(self._tensors))
        for name, parameter in parameters.items():
            old = coming.tensors.get(name)
            if old is not None and (old.dtype, old.shape[1:]) != (
                parameter.dtype,
                parameter.shape[1:],
            ):
                old = None  # of before the layer was converted
            if old is None or any(expert >= 0 for expert in mine):
                made = coming.tensors[name] = parameter.new_empty(self.slots, *parameter.shape[1:])
                for slot, expert in enumerate(mine):
                    if expert < 0:
                        made[slot] = 0 if old is None else old[slot]
            given = dense(f"ExpertParallel: {name}", parameter.detach()), coming.tensors[name]
            coming.events.append(copy_experts(self.ranks, *given, fetches, stream=self.stream))
        balancer.fetching()
        self._coming = coming

    def _arrive(self) -> None:
        """Waits for the weights. They take the place of the old ones once all are there."""
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        for event in coming.events:
            event.wait()
        self._tensors = coming.tensors
        self.balancer.fetched()

    def _parameters(self, experts: nn.Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(experts.named_parameters())
        if not found:
            refuse("ExpertParallel: experts", "a module without parameters", "some to copy")
        for name, tensor in experts.named_buffers():
            if tensor.dim() > 0 and len(tensor) == self.local:
                got = f"a buffer {name} with an entry for each expert"
                refuse("ExpertParallel: experts", got, "parameters: buffers do not go with copies")
        for name, tensor in found.items():
            if tensor.dim() == 0 or len(tensor) != self.local or tensor.numel() == 0:
                got = f"{name} of shape {tuple(tensor.shape)}"
                expected = (
                    f"[{self.local}, ...], not empty: an entry for each expert of the rank; a "
                    f"group of {self.group.experts} experts on {self.group.size} ranks has room "
                    f"for {self.local} and balance={self.slots} copies on each: make it with "
                    f"experts=n + {self.group.size * self.slots} for n experts of the layer"
                )
                refuse("ExpertParallel: experts", got, expected)
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                expected = "float32, bfloat16 or float16"
                refuse("ExpertParallel: experts", f"{name} of {tensor.dtype}", expected)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        """Of the same ranks; its slots are its own, and empty."""
        made = Copies.__new__(Copies)
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        made._empty()
        return made


class _Parts:
    """The rows of a rank's own experts, which come first, and those of copies."""

    def __init__(self, rows: Tensor, offsets: Tensor, local: int) -> None:
        self._rows, self._cut = rows, int(offsets[local])
        self._offsets = offsets[: local + 1], offsets[local:] - self._cut

    def own(self) -> tuple[Tensor, Tensor]:
        return self._rows[: self._cut], self._offsets[0]

    def of_copies(self) -> tuple[Tensor, Tensor] | None:
        """None: there are none."""
        if len(self._rows) == self._cut:
            return None
        return self._rows[self._cut :], self._offsets[1]

    def joined(self, own: Tensor, of_copies: Tensor) -> Tensor:
        return torch.cat([own, of_copies])


class _FixedParts:
    """The same, each as long as all rows, so that nobody waits for where the cut is. Behind
    rows of its own each part has zeros, and no gradient comes from there."""

    def __init__(self, rows: Tensor, offsets: Tensor, local: int) -> None:
        self._rows, self._at = rows, torch.arange(len(rows), device=rows.device)
        self._cut, self._end = offsets[local], offsets[-1]
        self._offsets = offsets[: local + 1], offsets[local:] - self._cut

    def own(self) -> tuple[Tensor, Tensor]:
        return self._first(self._rows, self._cut), self._offsets[0]

    def of_copies(self) -> tuple[Tensor, Tensor]:
        turned = self._rows[(self._at + self._cut) % len(self._at)]
        return self._first(turned, self._end - self._cut), self._offsets[1]

    def joined(self, own: Tensor, of_copies: Tensor) -> Tensor:
        back = of_copies[(self._at - self._cut) % len(self._at)]
        made = torch.where((self._at < self._cut)[:, None], own, back)
        return self._first(made, self._end)

    def _first(self, rows: Tensor, count: Tensor) -> Tensor:
        return torch.where((self._at < count)[:, None], rows, 0)


class _Coming:
    """Copies that are being fetched."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.events: list[Any] = []
        self.sources: list[Tensor] = []
        """Not given back while they are read."""


class _Batch:
    """Copies of one forward, and the gradients that they are owed."""

    def __init__(
        self, copies: Copies, table: list[list[int]], parameters: dict[str, Tensor]
    ) -> None:
        self.names = list(parameters)
        self.trained = [tensor.requires_grad for tensor in parameters.values()]
        self._copies, self._table, self.device = copies, table, copies.device
        self._of = [(tensor.shape, tensor.dtype) for tensor in parameters.values()]
        self._sums: list[tuple[Tensor, Any] | None] = []
        first = copies.ranks.rank * copies.local
        mine = range(first, first + copies.local)
        self._copied = any(expert in mine for row in table for expert in row)

    def begin_sums(self, grads: tuple[Tensor | None, ...]) -> None:
        """Collective. What the slots hold goes to the experts that they are copies of: fp32 sums in
        ascending rank and slot."""
        copies = self._copies
        self._sums = []
        for grad, (shape, _), trained in zip(grads, self._of, self.trained):
            if not trained:
                self._sums.append(None)
                continue
            width = shape[1:].numel()
            if grad is None:
                grad = torch.zeros(copies.slots, width, device=self.device)
            sums = (torch.zeros if self._copied else torch.empty)(
                copies.local, width, device=self.device
            )
            given = grad.reshape(-1, width).float().contiguous(), sums, self._table
            self._sums.append((sums, reduce_experts(copies.ranks, *given, stream=copies.stream)))

    def end_sums(self) -> list[Tensor | None]:
        """Rounded once."""
        made: list[Tensor | None] = []
        for each, (shape, dtype) in zip(self._sums, self._of):
            if each is not None:
                each[1].wait()
            made.append(each[0].view(shape).to(dtype) if each and self._copied else None)
        self._sums = []
        return made


class _Owned(torch.autograd.Function):
    """From parameters of this rank to a handle of their copies. Its backward comes after those of
    the own experts and of the dispatch."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, *parameters: Tensor) -> Tensor:
        ctx.batch = batch
        # On the device of all others: autograd runs each device in a thread of its own, and the
        # order of collective calls would be any.
        return torch.empty(0, device=batch.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.batch.end_sums()


class _Copied(torch.autograd.Function):
    """From the handle to the copies in the slots of this rank, [slots, ...] each."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, slots: list[Tensor], handle: Tensor) -> tuple[Tensor, ...]:
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        made = tuple(tensor.detach() for tensor in slots)
        ctx.mark_non_differentiable(*(t for t, trains in zip(made, batch.trained) if not trains))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.batch.begin_sums(grads)
        return None, None, torch.empty(0, device=ctx.batch.device)


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


class _Planned(torch.autograd.Function):
    """The plan's id goes two ways: `ctx.plan_id` stays that of the forward, the tensor is replaced
    where a checkpoint computes the forward again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, plan_id: int) -> Tensor:
        ctx.plan_id = plan_id
        ctx.save_for_backward(torch.tensor([plan_id]))
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (plan_id,) = ctx.saved_tensors
        if int(plan_id) != ctx.plan_id:
            refuse(
                "ExpertParallel: backward",
                f"a forward computed again with the copies of plan {int(plan_id)}",
                f"those of its own, plan {ctx.plan_id}: a batch that is computed again soon; "
                "recompute (checkpoint) fewer forwards at once",
            )
        return grad, None


def _said(name: str, tensor: Tensor) -> str:
    """What all ranks must have alike. A rank that needs no gradients is not in the backward."""
    trained = tensor.requires_grad and torch.is_grad_enabled()
    how = "with" if trained else "without"
    return f"{tensor.dtype} {tuple(tensor.shape)}, {how} gradients: {name}"


def _is_again() -> bool:
    """Checkpoints compute a forward again inside a backward."""
    return torch._C._current_graph_task_id() >= 0


def _some(table: list[list[int]]) -> bool:
    return any(expert >= 0 for row in table for expert in row)
