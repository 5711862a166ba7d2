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

from ferry.torch_bootstrap import from_process_group
from ferry.torch_data_parallel import DistributedDataParallel
from ferry.torch_exchange import TorchPlan, TorchReceived, combine, dispatch, plan
from ferry.torch_experts import ExpertParallel
from ferry.torch_gpu_balancer import GpuBalancer
from ferry.torch_gradients import Gradients, gradient_hook
from ferry.torch_process_group import register as _register
from ferry.torch_replicas import copy_experts, reduce_experts
from ferry.torch_rows import (
    expert_rows,
    probs_of_routes,
    routes_of_map,
    row_weights,
    slot_weights,
)
from ferry.torch_sampler import BalancedSampler
from ferry.torch_streams import record_stream
from ferry.torch_wrapped_experts import ignore_experts

_register()

__all__ = [
    "BalancedSampler",
    "DistributedDataParallel",
    "ExpertParallel",
    "GpuBalancer",
    "Gradients",
    "TorchPlan",
    "TorchReceived",
    "combine",
    "copy_experts",
    "dispatch",
    "expert_rows",
    "from_process_group",
    "gradient_hook",
    "ignore_experts",
    "plan",
    "probs_of_routes",
    "record_stream",
    "reduce_experts",
    "routes_of_map",
    "row_weights",
    "slot_weights",
]
