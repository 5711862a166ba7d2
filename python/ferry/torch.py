"""Ferry for torch: dispatch and combine that autograd goes through, torch.compile, streams, torch's
process groups and its data-parallel wrappers.

The gradient of a dispatch is a combine and the other way round, so backward is collective, too.
Every rank must reach the backward of every exchange that it went through forward, in the same
order: requires_grad must be the same on all ranks, and a rank that received no rows must still use
the empty result in its loss. Gradients that autograd leaves out are sent as zeros.

With a plan of `plan` here, a `TorchPlan`, the exchanges are operators of `torch.ops.ferry` that
torch.compile takes in whole (`fullgraph=True`); with one of `Group.plan` they are plain Python. On
GPUs both run on torch's current stream, and so does the backward.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ferry._ferry import Bootstrap
from ferry.arguments import refuse
from ferry.bootstrap import from_all_gather
from ferry.torch_data_parallel import ignore_experts
from ferry.torch_exchange import TorchPlan, TorchReceived, combine, dispatch, plan
from ferry.torch_experts import ExpertParallel
from ferry.torch_process_group import register as _register
from ferry.torch_streams import record_stream


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
    bound = getattr(pg if pg is not None else dist.group.WORLD, "bound_device_id", None)
    on_gpu = isinstance(bound, torch.device) and bound.type == "cuda"

    def all_gather(mine: bytes) -> list[bytes]:
        everyone: list[Any] = [None] * dist.get_world_size(pg)
        with torch.cuda.device(bound) if on_gpu else nullcontext():
            dist.all_gather_object(everyone, mine, group=pg)
        return everyone

    return from_all_gather(dist.get_rank(pg), dist.get_world_size(pg), all_gather)


_register()

__all__ = [
    "ExpertParallel",
    "TorchPlan",
    "TorchReceived",
    "combine",
    "dispatch",
    "from_process_group",
    "ignore_experts",
    "plan",
    "record_stream",
]
