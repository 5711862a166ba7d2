"""What the ranks of test_data_parallel.py do: a model with experts over ranks, wrapped by DDP or
FSDP, against one whose experts and tokens are all here. Values are whole numbers, steps and numbers
of ranks and tokens powers of two, so every sum is exact, in whatever order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_parallel_bodies import HIDDEN, TOPK, Experts, dense
from rank_processes import DEADLINE, exchange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_meeting import process_group

import ferry
import ferry.torch as ft

TOKENS, STEPS, RATE = 4, 2, 0.25
CONFIG = {"memory_bytes": 1 << 22}


def with_process_group(boot: Any, where: Any, body: Any, arguments: Any, config: Any) -> Any:
    """`exchange` while there is a process group of torch, whose ranks meet at a file."""
    meeting, *rest = arguments
    with process_group("gloo", meeting, boot, DEADLINE):
        return exchange(boot, where, body, rest, CONFIG | config)


class Model(nn.Module):
    """Every rank's own scale of the channels, and the experts."""

    def __init__(self, group: ferry.Group, idle: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(start())
        self.moe = ft.ExpertParallel(group, Experts(part(tables(group.experts), group)))
        if idle:
            self.idle = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = x * self.scale
        y: Tensor = x + self.moe(x, ids, weights)
        return y


def start() -> Tensor:
    return torch.arange(HIDDEN).remainder(3).float()


def tables(experts: int) -> Tensor:
    make = torch.Generator().manual_seed(5)
    return torch.randint(-2, 3, (experts, HIDDEN), generator=make).float()


def part(tables: Tensor, group: ferry.Group) -> Tensor:
    """Those of this rank's experts."""
    return tables.tensor_split(group.size)[group.rank]


def batch(step: int, rank: int, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, routes, weights, and what their results are multiplied by in the loss."""
    make = torch.Generator().manual_seed(100 * step + rank)
    x, target = torch.randint(-2, 3, (2, TOKENS, HIDDEN), generator=make).float()
    ids = torch.randint(-1, experts, (TOKENS, TOPK), generator=make)
    weights = torch.randint(1, 3, (TOKENS, TOPK), generator=make).float()
    return x, ids, weights, target


def loss_of(made: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens, in a dtype that holds it."""
    return (made.double() * target).sum() / TOKENS


def on_one_rank(ranks: int, experts: int, rounds: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Losses of the steps, scale and tables after them. rounds: batches whose gradients add up."""
    scale, every = (of.requires_grad_() for of in (start(), tables(experts)))
    optimizer = torch.optim.SGD([scale, every], lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for one in range(rounds):
            for rank in range(ranks):
                x, ids, weights, target = batch(rounds * step + one, rank, experts)
                x = x * scale
                total = total + loss_of(x + dense(x, ids, weights, every), target) / ranks
        total.backward()
        losses.append(total.detach())
        optimizer.step()
    return losses, scale.detach(), every.detach()


def train(
    model: Model,
    run: Callable[..., Tensor],
    rounds: int = 1,
    not_yet: Callable[[], Any] = nullcontext,
) -> None:
    """Losses and parameters are those of one rank, to the bit. run: the model, wrapped. not_yet:
    around all but the last of the batches whose gradients add up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), model.moe.group
    losses, scale, every = on_one_rank(ranks, group.experts, rounds)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for one in range(rounds):
            *given, target = batch(rounds * step + one, rank, group.experts)
            with not_yet() if one < rounds - 1 else nullcontext():
                loss = loss_of(run(*given), target)
                loss.backward()
            total += loss.detach() / ranks
        dist.all_reduce(total)
        assert torch.equal(total, losses[step])
        optimizer.step()
    (own,) = model.moe.experts.parameters()
    assert torch.equal(whole(model.scale), scale)
    assert torch.equal(whole(own), part(every, group))


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


# DDP


def ddp(group: ferry.Group, options: dict[str, Any]) -> None:
    model = Model(group, idle="find_unused_parameters" in options)
    assert ft.ignore_experts(model) == {model.moe.experts.tables}
    assert ft.ignore_experts(model) == {model.moe.experts.tables}
    train(model, DistributedDataParallel(model, **options))


def ddp_of_a_model_that_is_moved(group: ferry.Group) -> None:
    """To another dtype and back, and as a deep copy."""
    model = Model(group)
    ft.ignore_experts(model)
    model = copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)
    train(model, DistributedDataParallel(model))


def ddp_that_adds_batches_up(group: ferry.Group) -> None:
    model = Model(group)
    ft.ignore_experts(model)
    wrapped = DistributedDataParallel(model)
    train(model, wrapped, 2, wrapped.no_sync)


def refuses_ddp(group: ferry.Group, name: str) -> None:
    """Before anything is overwritten, and it says what to do, which then helps."""
    model = Model(group)
    before = copy.deepcopy(model)
    refused(DDP_MISTAKES[name], model)
    for now, then in zip(model.parameters(), before.parameters()):
        assert torch.equal(now, then)
    model = Model(group)
    ft.ignore_experts(model)
    train(model, DistributedDataParallel(model))


def refused(wrap: Callable[[Model], object], model: Model) -> None:
    rank, size = model.moe.group.rank, model.moe.group.size
    with pytest.raises(ferry.InvalidArgumentError) as caught:
        wrap(model)
    message = str(caught.value)
    assert f"experts that rank {rank} of {size} alone has" in message, message
    assert "ferry.torch.ignore_experts(mod" in message.partition("expected")[2], message


def _ignored_under_other_names(model: Model) -> None:
    ft.ignore_experts(model)
    DistributedDataParallel(nn.Sequential(model))


def _averaged_later(model: Model) -> None:
    ft.ignore_experts(model)
    delayed = [("moe.experts.tables", model.moe.experts.tables)]
    DistributedDataParallel(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.scale
    )


def _ignored_by_one_of_its_names(model: Model) -> None:
    """DDP broadcasts parameters of the model itself by one name, and averages them by another."""
    both = nn.ParameterDict({"scale": model.scale, "tables": model.moe.experts.tables})
    both._ddp_params_and_buffers_to_ignore = ["tables"]
    DistributedDataParallel(both)


DDP_MISTAKES: dict[str, Callable[[Model], object]] = {
    "the model": DistributedDataParallel,
    "the layer": lambda model: DistributedDataParallel(model.moe),
    "the experts": lambda model: DistributedDataParallel(model.moe.experts),
    "their parameters": lambda model: DistributedDataParallel(nn.ParameterList(model.parameters())),
    "unused parameters": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "no broadcast": lambda model: DistributedDataParallel(model, init_sync=False),
    "other names": _ignored_under_other_names,
    "one of two names": _ignored_by_one_of_its_names,
    "averaged later": _averaged_later,
}


def _runs(run: Callable[..., Tensor], experts: int) -> None:
    for step in range(STEPS):
        *given, target = batch(step, dist.get_rank(), experts)
        loss_of(run(*given), target).backward()


def ddp_that_is_right_without_help(group: ferry.Group) -> None:
    """One rank; experts that are left out by hand, also from all that DDP does with buffers; and
    ranks that each have all experts."""
    alone = [dist.new_group([rank]) for rank in range(group.size)][group.rank]
    _runs(DistributedDataParallel(Model(group), process_group=alone), group.experts)

    model = Model(group)
    model.moe.experts.register_buffer("seen", torch.tensor([group.rank]))
    model._ddp_params_and_buffers_to_ignore = ["moe.experts.tables"]
    _runs(DistributedDataParallel(model), group.experts)
    assert model.moe.experts.seen == group.rank
    assert torch.equal(model.moe.experts.tables, part(tables(group.experts), group))

    with ferry.Group(ferry.threads(1)[0], experts=group.experts) as whole_group:
        model = Model(whole_group)
        train(model, DistributedDataParallel(model))


# FSDP


def mesh_of(ranks: Any, name: str = "ranks") -> DeviceMesh:
    return DeviceMesh.from_group(ranks, "cpu", mesh_dim_names=(name,))


def fsdp(group: ferry.Group) -> None:
    model = Model(group)
    mesh = mesh_of(dist.group.WORLD)
    fully_shard(model, mesh=mesh, ignored_params=ft.ignore_experts(model))
    assert isinstance(model.scale, DTensor)
    train(model, model)


def fsdp_of_a_model_without_memory(group: ferry.Group) -> None:
    """Memory comes when it is wrapped, and with it new parameters."""
    model = Model(group).to("meta")
    mesh = mesh_of(dist.group.WORLD)
    fully_shard(model, mesh=mesh, ignored_params=ft.ignore_experts(model))
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.scale.copy_(distribute_tensor(start(), mesh, [Shard(0)]))
        model.moe.experts.tables.copy_(part(tables(group.experts), group))
    train(model, model)


def refuses_fsdp(group: ferry.Group, name: str) -> None:
    """When it is first run, before tokens meet the experts, and whenever it is tried again."""
    model = Model(group)
    FSDP_MISTAKES[name](model)
    *given, _ = batch(0, group.rank, group.experts)
    for _ in range(2):
        refused(lambda model: model(*given), model)
        list(model.parameters())


def _one_expert(model: Model) -> None:
    """A part of the experts, as experts that are modules each."""
    inner = model.moe.experts
    model.moe.experts = nn.Sequential(inner)
    model.moe.experts.forward = inner.__call__
    fully_shard(inner, mesh=mesh_of(dist.group.WORLD))


FSDP_MISTAKES: dict[str, Callable[[Model], object]] = {
    "the model": lambda model: fully_shard(model, mesh=mesh_of(dist.group.WORLD)),
    "the layer": lambda model: fully_shard(model.moe, mesh=mesh_of(dist.group.WORLD)),
    "the experts": lambda model: fully_shard(model.moe.experts, mesh=mesh_of(dist.group.WORLD)),
    "a part of the experts": _one_expert,
    "two meshes": lambda model: fully_shard(
        model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    ),
}


def compiled(group: ferry.Group) -> None:
    """Compiled code alone sees the experts of a deep copy, which is nobody's before it runs."""
    model = Model(group)
    ft.ignore_experts(model)
    model = copy.deepcopy(model)
    model.compile(backend="aot_eager", fullgraph=True)
    train(model, DistributedDataParallel(model))

    model = Model(group)
    model.compile(backend="aot_eager", fullgraph=True)
    fully_shard(model, mesh=mesh_of(dist.group.WORLD))
    *given, _ = batch(0, group.rank, group.experts)
    refused(lambda model: model(*given), model)


def refuses_decode_with_fsdp(group: ferry.Group) -> None:
    model = Model(group)
    layer = ft.ExpertParallel(group, model.moe.experts, decode_tokens=TOKENS)
    fully_shard(layer.experts, mesh=mesh_of(dist.group.WORLD))
    *given, _ = batch(0, group.rank, group.experts)
    refused(lambda model: layer.decode(*given), model)


def refuses_fsdp1(group: ferry.Group, use_orig_params: bool) -> None:
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    refused(lambda model: FullyShardedDataParallel(model, **options), Model(group))
    model = Model(group)
    FullyShardedDataParallel(model, ignored_states=ft.ignore_experts(model), **options)


class DTensorExperts(Experts):
    """Experts that are one tensor of all ranks, of which each uses its own part."""

    def __init__(self, tables: Tensor, mesh: DeviceMesh) -> None:
        super().__init__(tables)
        self.tables = nn.Parameter(DTensor.from_local(tables.clone(), mesh, [Shard(0)]))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        place = torch.arange(rows.shape[0])
        expert = torch.searchsorted(offsets[1:], place, right=True)
        return rows * self.tables.to_local()[expert]


def fsdp_that_is_right_without_help(group: ferry.Group) -> None:
    """One rank; and experts that are DTensors by themselves, left alone or wrapped with those of
    other groups."""
    alone = [dist.new_group([rank]) for rank in range(group.size)][group.rank]
    model = Model(group)
    fully_shard(model, mesh=mesh_of(alone))
    _runs(model, group.experts)

    for wrapped in (False, True):
        world = mesh_of(dist.group.WORLD)
        model = Model(group)
        own = part(tables(group.experts), group)
        layer = ft.ExpertParallel(group, DTensorExperts(own, world))
        model.moe = layer
        if wrapped:
            fully_shard(model, mesh=world, ignored_params=set(layer.experts.parameters()))
        list(model.parameters())
        _runs(model, group.experts)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    boot = ft.from_process_group(mesh.get_group("parts"))
    with ferry.Group(boot, experts=group.experts) as pair:
        experts = DTensorExperts(part(tables(pair.experts), pair), mesh["parts"])
        model = Model(group)
        model.moe = ft.ExpertParallel(pair, experts)
        fully_shard(experts, mesh=mesh["copies"])
        _runs(model, group.experts)
        pair.barrier()


# Experts on several ranks each: groups side by side


def side_by_side(group: ferry.Group, wrapper: str) -> None:
    """Two groups of two ranks: of each expert there are two copies, whose gradients are averaged by
    a wrapper of their own. Four ranks train what one would."""
    size = dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    copies = [dist.new_group([first, first + 2]) for first in (0, 1)]
    rank = dist.get_rank()
    own, others = pairs[rank // 2], copies[rank % 2]
    with ferry.Group(ft.from_process_group(own), experts=group.experts) as pair:
        model = Model(pair)
        if wrapper == "ddp":
            model.moe.experts = DistributedDataParallel(model.moe.experts, process_group=others)
            ft.ignore_experts(model)
            train(model, DistributedDataParallel(model))
        else:
            fully_shard(model.moe.experts, mesh=mesh_of(others))
            ft.ignore_experts(model)
            fully_shard(model, mesh=mesh_of(dist.group.WORLD))
            train(model, model)
        pair.barrier()
