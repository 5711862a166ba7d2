"""What can be set for a training before it begins."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ferry.arguments import describe, refuse

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Optimized:
    """What `optimize` has done."""

    threads: int  # of torch in this rank
    backend: str | None  # of the default process group; None: there is none
    hints: tuple[str, ...]  # what only the user can change

    def __str__(self) -> str:
        lines = [f"torch threads: {self.threads}", f"process group: {self.backend or 'none'}"]
        return "\n".join(lines + [f"hint: {hint}" for hint in self.hints])


def optimize() -> Optimized:
    """Prepares this process for training beside the other ranks of its host:

    - Torch gets the cores of this process divided by the ranks of the host (`LOCAL_WORLD_SIZE`) as
      its number of threads, unless `OMP_NUM_THREADS` is set.
    - `torch.distributed` is started with Ferry as its backend, if a launcher (torchrun, `ferry
      run`) has set `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, and nobody has started
      it. This is collective. Tensors on GPUs go to NCCL there.

    It changes no model, optimizer or arithmetic, and chooses nothing that `set_config` sets.
    Calling it again changes nothing.
    """
    cores = len(os.sched_getaffinity(0))
    local = _local_ranks()
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, cores // local))
    if not dist.is_initialized() and all(os.environ.get(name) for name in _LAUNCHED):
        dist.init_process_group("ferry")
    backend = dist.get_backend() if dist.is_initialized() else None
    return Optimized(torch.get_num_threads(), backend, tuple(_hints(cores, local, backend)))


def _local_ranks() -> int:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        said = os.environ.get(name)
        if said:
            if not said.isdecimal() or int(said) == 0:
                refuse(f"optimize: {name}", describe(said), "the number of ranks, 1 or more")
            return int(said)
    return 1


def _hints(cores: int, local: int, backend: str | None) -> list[str]:
    hints = []
    if local > cores:
        hints.append(f"{local} ranks share {cores} cores: start at most {cores} on this host")
    threads = torch.get_num_threads() * local
    if local <= cores < threads:
        hints.append(f"{threads} threads share {cores} cores: unset OMP_NUM_THREADS or lower it")
    if backend == "gloo":
        hints.append('init_process_group("ferry") instead of "gloo" carries CPU tensors faster')
    if backend is None:
        hints.append("no process group: start the program with torchrun or ferry run")
    return hints
