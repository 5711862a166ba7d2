"""The ranks of a process group of torch, as a bootstrap of Ferry."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ferry._ferry import Bootstrap
from ferry.arguments import refuse
from ferry.bootstrap import address_towards, from_all_gather


def from_process_group(pg: Any = None) -> Bootstrap:
    """The ranks of a torch.distributed process group (None: the default one), any backend.

    An NCCL group gathers through the GPU that it is bound to (`init_process_group(device_id=...)`)
    or else the current one, which must differ between its ranks (`torch.cuda.set_device`).
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        refuse(
            "from_process_group: pg",
            "no initialised process group",
            "torch.distributed.init_process_group to be called first",
        )
    if dist.get_rank(pg) < 0:
        refuse("from_process_group: pg", "a group without this rank", "one that this rank is in")
    bound = getattr(pg if pg is not None else dist.group.WORLD, "bound_device_id", None)
    on_gpu = isinstance(bound, torch.device) and bound.type == "cuda"

    def all_gather(mine: bytes) -> list[bytes]:
        everyone: list[Any] = [None] * dist.get_world_size(pg)
        with torch.cuda.device(bound) if on_gpu else nullcontext():
            dist.all_gather_object(everyone, mine, group=pg)
        return everyone

    store = dist.distributed_c10d._get_default_store()
    return from_all_gather(
        dist.get_rank(pg), dist.get_world_size(pg), all_gather, address_towards(store)
    )
