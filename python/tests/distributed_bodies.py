"""What the ranks of test_distributed_data_parallel.py do that need a process group of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ferry
import ferry.torch as ft


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def beside_gloo(group: ferry.Group) -> None:
    """Ferry's class and torch's with Ferry's hook, bit for bit the same; and torch's over Gloo,
    whose sums of R numbers come in another order: each of R - 1 additions may round by 2^-24 of the
    sum of the absolute values, in either."""
    with ferry.Collectives(ft.from_process_group(), memory_bytes=1 << 20) as ranks:
        mine, hooked, plain = model(), model(), model()
        ours = ft.DistributedDataParallel(mine, ranks, bucket_cap_mb=0.001)
        theirs = DistributedDataParallel(hooked, bucket_cap_mb=1)
        theirs.register_comm_hook(ft.Gradients(format="exact"), ft.gradient_hook)
        gloo = DistributedDataParallel(plain)
        models = {ours: mine, theirs: hooked, gloo: plain}
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in models]
        for step in range(3):
            x = batch(group.rank, step)
            plain.load_state_dict(mine.state_dict())
            alone = copy.deepcopy(mine)
            alone(x).pow(2).sum().backward()
            for wrapped, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                wrapped(x).pow(2).sum().backward()
            for a, b, c, own in zip(*(m.parameters() for m in (mine, hooked, plain, alone))):
                assert torch.equal(a.grad, b.grad)
                absolute = own.grad.abs()
                dist.all_reduce(absolute)
                bound = 2 * (group.size - 1) * 2.0**-24 * absolute * 1.01 / group.size + 1e-38
                assert ((a.grad - c.grad).abs() <= bound).all()
            for optimizer in optimizers:
                optimizer.step()
            for a, b in zip(mine.parameters(), hooked.parameters()):
                assert torch.equal(a, b)


def hook_after_a_failure(group: ferry.Group) -> None:
    """Buckets that torch gave before the backward failed are not waited for by the next one."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=1)
    state = ft.Gradients(format="exact")
    ddp.register_comm_hook(state, ft.gradient_hook)

    class Bucket:
        """The first of two of a backward that failed."""

        def buffer(self) -> Tensor:
            return torch.full((4,), float(group.rank))

        def index(self) -> int:
            return 0

        def is_last(self) -> bool:
            return False

    state.start(Bucket())
    ddp(batch(group.rank, 0)).sum().backward()
    assert not state._under_way

    class Doubles(Bucket):
        def buffer(self) -> Tensor:
            return super().buffer().double()

    with pytest.raises(ferry.InvalidArgumentError, match=r"dtype torch\.float64; .* f32, bf16"):
        ft.gradient_hook(state, Doubles())
    nothing: Any = None
    with pytest.raises(ferry.InvalidArgumentError, match="state: got None"):
        ft.gradient_hook(nothing, Bucket())
    with pytest.raises(ferry.InvalidArgumentError, match="Gradients: format: got 'e3m4'"):
        ft.Gradients(format="e3m4")
    with pytest.raises(ferry.InvalidArgumentError, match='"bf16" with algorithm "tree"'):
        ft.Gradients(format="bf16", algorithm="tree")


def collectives_of_its_own(group: ferry.Group) -> None:
    ddp: Any = ft.DistributedDataParallel(model())
    ddp(batch(group.rank, 0)).sum().backward()
    assert (ddp.collectives.rank, ddp.collectives.size) == (group.rank, group.size)
    gradients = [p.grad.clone() for p in ddp.parameters()]
    dist.barrier()
    ddp.destroy()
    assert ddp.collectives.destroyed
    for p, gradient in zip(ddp.parameters(), gradients):
        assert torch.equal(p.grad, gradient)  # their memory is theirs
    ddp.module(batch(group.rank, 1)).sum().backward()
