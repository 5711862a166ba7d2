"""Experts in models that torch's data-parallel wrappers train: DDP and FSDP.

The wrappers take a parameter for one and the same on all ranks: they write rank 0's over the
others, or put pieces of all together, and average the gradients. The experts of an ExpertParallel
are others on every rank of its group, so they must be left out: `ignore_experts`. Where they are
not, it is noticed here before they are used.

DDP and FSDP1 register the model as a part of their own, which torch tells whoever asks. FSDP2
registers nothing. But while it has parameters cut, they are DTensors, and while a module runs, they
are what they were: a layer looks at its experts whenever something walks through the modules of its
model, as FSDP2 does ahead of its first step, and again when it runs itself.

Ranks that hold the same experts, in groups side by side, may be wrapped together.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ferry.arguments import instance, refuse

if TYPE_CHECKING:
    from ferry.group import Group
    from ferry.torch_experts import ExpertParallel

_layers: WeakSet[ExpertParallel] = WeakSet()
_lock = threading.Lock()  # of additions and of walks, which threads may make at once


def ignore_experts(model: nn.Module) -> set[nn.Parameter]:
    """Makes DDP and FSDP leave the experts of every ExpertParallel in `model` alone, and averages
    the experts' gradients as those wrappers do the others. Call it before the model is wrapped::

        ferry.torch.ignore_experts(model)
        model = DistributedDataParallel(model)

        fully_shard(model, ignored_params=ferry.torch.ignore_experts(model))

    The gradient of an expert is the sum over the tokens of all ranks of its group; from here on it
    is divided by the number of these ranks. So where each rank's loss is the mean over its own
    tokens, as many on every rank, all gradients are those of the mean over the tokens of all.

    model: the very module that DDP is given, as it knows parameters by their names in it. Calling
    it again changes nothing. Returns the experts' parameters.
    """
    instance("ignore_experts: model", model, nn.Module, "a torch.nn.Module")
    layers = _inside(model)
    if not layers:
        got = f"a {type(model).__name__} without a ferry.torch.ExpertParallel"
        refuse("ignore_experts: model", got, "the model that has one, before it is wrapped")
    own = _owners(layers)
    names = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, tensor in _named_tensors(model, remove_duplicate=False):
        if id(tensor) in own:
            names |= _spellings(name)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, sorted(names)
    )
    for layer in layers:
        layer._means = True
        _take_means(layer)
    return {parameter for layer in layers for parameter in layer.experts.parameters()}


def places_inside(model: nn.Module) -> str:
    """Whose experts are among the model's parameters, the same words for the same experts."""
    own = _owners(_alive())
    return repr(sorted({own[id(p)]._place for p in model.parameters() if id(p) in own}))


def watch(layer: ExpertParallel) -> None:
    """From here on, whoever wraps the layer's experts is looked at."""
    with _lock:
        _listen()
        _layers.add(layer)


def walked(layer: ExpertParallel) -> None:
    """Something walks through the modules of a model that the layer is part of."""
    if not layer._judged:
        meshes = _meshes(layer)
        layer._cut = meshes if any(mesh is not None for mesh in meshes) else []


def ready(layer: ExpertParallel) -> Group:
    """The layer is about to run, on all ranks of its group, inside or outside compiled code."""
    if layer._cut is None:  # nothing has walked: if something has the experts cut, it is in them
        walked(layer)
    layer._mixed = layer._mixed or (bool(layer._cut) and _mixes(layer))
    if layer._mixed:
        _refuse(
            "ExpertParallel: experts",
            layer,
            "cut by fully_shard and put together with those of other ranks",
            "fully_shard(model, ignored_params=ferry.torch.ignore_experts(model))",
        )
    if layer._means:
        _unshard(layer.experts)
        _take_means(layer)
    return layer.group


class _Mean:
    """A hook of a parameter: its gradient, a sum over ranks, as a mean."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient / self._ranks


def _take_means(layer: ExpertParallel) -> None:
    """Of parameters that are new, too, as after `to_empty` or in a deep copy."""
    ranks = layer._place[1]
    for parameter in layer.experts.parameters() if ranks > 1 else ():
        hooks: Any = parameter._backward_hooks or {}
        if parameter.requires_grad and not any(isinstance(h, _Mean) for h in hooks.values()):
            parameter.register_hook(_Mean(ranks))  # type: ignore[no-untyped-call]


@cache
def _listen() -> None:
    register_module_module_registration_hook(_registered)


def _registered(wrapper: nn.Module, name: str, module: Any) -> None:
    """torch's hook: `wrapper.name = module`. DDP does so before it sends anything; FSDP1 when it
    has cut its parameters."""
    if name == "module" and isinstance(wrapper, DistributedDataParallel):
        _ddp_wraps(wrapper, module)
    elif name == "_fsdp_wrapped_module":
        _fsdp1_wraps(wrapper)


def _ddp_wraps(ddp: Any, module: nn.Module) -> None:
    ignored = ddp.parameters_to_ignore  # with names of parameters that are averaged, but later
    delayed = {id(parameter) for parameter in getattr(ddp, "_delay_all_reduce_params", ())}
    own = _owners(_alive())
    taken = {
        name: tensor
        for name, tensor in _named_tensors(module)
        if id(tensor) in own and (id(tensor) in delayed or not _spellings(name) <= ignored)
    }
    owners = [own[id(tensor)] for tensor in taken.values()]
    devices = [tensor.device for tensor in taken.values()]
    if not taken or _same_places([ddp.process_group], owners, devices[0]):
        return
    for name, tensor in taken.items():
        if isinstance(tensor, nn.Parameter):
            _refuse(
                "DistributedDataParallel: module",
                own[id(tensor)],
                "which DDP would overwrite with those of its rank 0",
                "ferry.torch.ignore_experts(module) before DDP is given that very module",
                f"{name.removeprefix('.')!r}, ",
            )
    for name in taken:  # buffers: left out, as DDP could do nothing else that is right
        ignored |= _spellings(name)


def _fsdp1_wraps(fsdp: Any) -> None:
    parts = vars(fsdp)  # FSDP1 asks the module, which it does not have yet, for what it lacks
    flat = getattr(parts.get("_handle"), "flat_param", None)
    cut = {id(info.module) for info in getattr(flat, "_param_infos", ())}
    owners = [
        layer for layer in _alive() if any(id(part) in cut for part in layer.experts.modules())
    ]
    groups = [parts[name] for name in ("process_group", "_inter_node_pg") if name in parts]
    if owners and not _same_places(groups, owners, fsdp.compute_device):
        _refuse(
            "FullyShardedDataParallel: module",
            owners[0],
            "which FSDP would put together with those of other ranks",
            "FullyShardedDataParallel(model, ignored_states=ferry.torch.ignore_experts(model))",
        )


def _mixes(layer: ExpertParallel) -> bool:
    """Whether FSDP2 cuts the experts and puts them together with others: whether the meshes of the
    parameters, as the last walk saw them, are not those that they have when the layer runs."""
    before: Any = layer._cut
    _unshard(layer.experts)
    groups: dict[Any, None] = {}
    for cut, now in zip(before, _meshes(layer)):
        if cut is None or cut == now:
            continue
        own = getattr(now, "mesh_dim_names", None) or ()  # the caller's, whose DTensors they were
        names = cut.mesh_dim_names or [None] * cut.ndim
        groups |= {cut.get_group(at): None for at, name in enumerate(names) if name not in own}
    if not groups:
        return False
    device = next(layer.experts.parameters()).device
    layer._judged = _same_places(groups, [layer], device)
    layer._cut = []
    return not layer._judged


def _refuse(
    name: str, layer: ExpertParallel, fate: str, instead: str, parameter: str = ""
) -> NoReturn:
    rank, size, _ = layer._place
    got = f"{parameter}experts that rank {rank} of {size} alone has, {fate}"
    refuse(name, got, instead)


def _same_places(groups: Iterable[Any], owners: list[ExpertParallel], device: Any) -> bool:
    """Collective in these process groups. Whether all their ranks would wrap the same experts."""
    places = repr(sorted({layer._place for layer in owners}))
    digest = hashlib.sha256(places.encode()).digest()[:8]
    mine = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    same = True
    for group in groups:
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(everyone, mine, group=group)
        same &= all(bool(torch.equal(one, mine)) for one in everyone)
    return same


def _meshes(layer: ExpertParallel) -> list[Any]:
    """Of each parameter: the mesh that it is spread over as a DTensor, or None."""
    return [getattr(parameter, "device_mesh", None) for parameter in layer.experts.parameters()]


def _unshard(experts: nn.Module) -> None:
    """What fully_shard has inside the experts is put together, as it will be when they run."""
    homes = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")  # that before 2.6
    kinds = tuple(getattr(sys.modules.get(home), "FSDPModule", nn.Identity) for home in homes)
    for module in experts.modules():
        unshard: Any = getattr(module, "unshard", None)
        if isinstance(module, kinds) and unshard is not None:
            unshard()


def _alive() -> list[ExpertParallel]:
    with _lock:
        return list(_layers)


def _inside(model: nn.Module) -> list[ExpertParallel]:
    layers = {id(layer): layer for layer in _alive()}
    return [layers[id(module)] for module in model.modules() if id(module) in layers]


def _owners(layers: list[ExpertParallel]) -> dict[int, ExpertParallel]:
    """By the ids of parameters and buffers of the experts."""
    return {
        id(tensor): layer
        for layer in layers
        for tensor in chain(layer.experts.parameters(), layer.experts.buffers())
    }


def _named_tensors(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by the names that DDP's reducer has for them."""
    once = {"recurse": False, "remove_duplicate": remove_duplicate}
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, tensor in chain(module.named_parameters(**once), module.named_buffers(**once)):
            yield f"{prefix}.{name}", tensor


def _spellings(name: str) -> set[str]:
    """Those of the model itself have two names in DDP, one with a dot ahead."""
    return {name, name.removeprefix(".")}
