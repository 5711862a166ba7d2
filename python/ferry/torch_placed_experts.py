"""Experts of `ExpertParallel` in the places that a `ferry.ExpertPlacement` names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ferry.arguments import instance, refuse
from ferry.experts import ExpertPlacement
from ferry.group import Group
from ferry.tensors import storage_of

MOST_COPIES = 64  # slots of a route
_ROW = 4096  # f32 of a message
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def checked(placement: ExpertPlacement, group: Group) -> ExpertPlacement:
    """One that fits the group."""
    call = "ExpertParallel: placement"
    instance(call, placement, ExpertPlacement, "a ferry.ExpertPlacement, or None")
    ranks, slots = placement.ranks, placement.slots
    if (ranks, ranks * slots) != (group.size, group.experts):
        expected = f"ranks={group.size} and {group.experts} places in all, as the group has experts"
        refuse(call, f"{ranks} ranks of {slots} slots", expected)
    most = max(len(places) for places in _places(placement).values())
    if most > MOST_COPIES:
        refuse(call, f"{most} copies of an expert", f"at most {MOST_COPIES}")
    return placement


def held(
    placement: ExpertPlacement, rank: int, slots: nn.Module, tensors: Iterable[Tensor]
) -> dict[int, list[Tensor]]:
    """Of each expert that the rank holds its part of each tensor; of no tensors: of parameters."""
    given = list(tensors) or list(slots.parameters())
    for i, tensor in enumerate(given):
        _check(f"held: tensor {i}", tensor, placement.slots)
    mine = enumerate(placement.held_by(rank))
    return {expert: [each.detach()[slot] for each in given] for slot, expert in mine if expert >= 0}


@torch.no_grad()
def sum_copies(group: Group, placement: ExpertPlacement, experts: nn.Module) -> None:
    """Collective. Every copy sends its gradients to all copies of the expert, which add them up in
    fp32, in ascending rank and slot, so that all get the same bits."""
    copies = {e: places for e, places in _places(placement).items() if len(places) > 1}
    most = max(map(len, copies.values()), default=1)
    mine = placement.held_by(group.rank)
    busy = [slot for slot, expert in enumerate(mine) if expert in copies]
    routes = torch.full((len(busy), most), -1, dtype=torch.int64)
    for i, slot in enumerate(busy):
        places = copies[mine[slot]]
        routes[i, : len(places)] = torch.tensor(places)
    routes = routes.to(group.device)
    # Before anything is refused, so that ranks which differ all learn of it. By rows of a copy.
    plans = {1: group.plan(routes, placement_digest=_digest(placement, experts))}
    plans[1].recv_rows()
    if not copies:
        return
    for name, parameter in experts.named_parameters():
        _check(f"sum_copies: {name}", parameter, placement.slots)
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in _SUMMED:
            expected = "torch.float32, bfloat16 or float16: sums are made in fp32"
            refuse(f"sum_copies: {name}", str(parameter.dtype), expected)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        width = parameter[0].numel()
        rows = -(-width // _ROW)
        sent = torch.zeros(len(busy), rows * _ROW, device=group.device)
        storage_of(f"sum_copies: gradient of {name}", parameter.grad)
        sent[:, :width] = parameter.grad[busy].reshape(len(busy), width)
        if rows not in plans:
            plans[rows] = group.plan(routes.repeat_interleave(rows, 0))
        got = group.dispatch(sent.view(-1, _ROW), plans[rows], order="expert_major")
        assert got.expert_offsets is not None
        ends = got.expert_offsets.tolist()
        for slot in busy:
            # By ascending source rank, then token: what a copy sent lies together.
            parts = got.x[ends[slot] : ends[slot + 1]].view(-1, rows * _ROW)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            parameter.grad[slot] = total[:width].view(parameter.shape[1:])


def _digest(placement: ExpertPlacement, experts: nn.Module) -> int:
    """Of what all ranks must have alike to add up gradients."""
    said = [str(placement.digest)]
    for name, each in experts.named_parameters():
        said.append(f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}")
    text = "\n".join(said).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _check(name: str, tensor: Tensor, slots: int) -> None:
    instance(name, tensor, Tensor, "a torch.Tensor")
    if tensor.dim() == 0 or len(tensor) != slots or tensor.numel() == 0:
        expected = f"[{slots}, ...]: an entry for each slot, not empty"
        refuse(name, f"shape {tuple(tensor.shape)}", expected)


def _places(placement: ExpertPlacement) -> dict[int, list[int]]:
    """The places of each expert, ascending."""
    found: dict[int, list[int]] = {}
    for rank in range(placement.ranks):
        for slot, expert in enumerate(placement.held_by(rank)):
            if expert >= 0:
                found.setdefault(expert, []).append(rank * placement.slots + slot)
    return found
