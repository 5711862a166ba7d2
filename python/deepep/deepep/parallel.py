"""Models whose gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepep.config import get_config
from ferry.arguments import instance
from ferry.torch import DistributedDataParallel as OnCpu


class DistributedDataParallel(OnCpu):
    """Wraps a model with the settings of `set_config`.

    A model in CPU memory becomes a `ferry.torch.DistributedDataParallel`, whose options may be
    given. A model on a GPU becomes torch's own DistributedDataParallel over the default process
    group, or that given, whose options may be given: NCCL carries its gradients and chooses the
    topology; with compression they cross as bf16, by torch's hook, whichever format is set.

    device_ids: the GPU of a model on one, as of torch's class; of no use for others.
    """

    def __new__(
        cls, module: nn.Module, device_ids: Sequence[Any] | None = None, **options: Any
    ) -> Any:
        instance("DistributedDataParallel: module", module, nn.Module, "a torch.nn.Module")
        if any(parameter.device.type == "cuda" for parameter in module.parameters()):
            return _on_gpu(module, device_ids, options)
        return super().__new__(cls)

    def __init__(
        self, module: nn.Module, device_ids: Sequence[Any] | None = None, **options: Any
    ) -> None:
        config = get_config()
        super().__init__(
            module, **({"format": config.format, "algorithm": config.algorithm} | options)
        )


def _on_gpu(module: nn.Module, device_ids: Sequence[Any] | None, options: dict[str, Any]) -> Any:
    ddp = torch.nn.parallel.DistributedDataParallel(module, device_ids, **options)
    if get_config().format != "exact":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(options.get("process_group"), default_hooks.bf16_compress_hook)
    return ddp
