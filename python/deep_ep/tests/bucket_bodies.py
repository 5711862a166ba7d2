"""Bodies of tests of `BucketBuffer`: `body(first, device)` on every rank, whose first buffer knows
the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep
from deep_ep.errors import EPException


def of_rank(device: str, rank: int, shape: tuple[int, ...], seed: int) -> Tensor:
    seeded = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=seeded).to(device)


def summed(device: str, ranks: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """In ascending rank."""
    total = torch.zeros(shape, device=device)
    for rank in range(ranks):
        total += of_rank(device, rank, shape, seed)
    return total


def every_call(first: Any, device: str) -> None:
    """One tensor and lists, with and without a scale, in place."""
    torch.zeros(1, device=device)  # the storage lies where torch has worked
    comm = first.group
    ranks, rank = comm.Get_size(), comm.Get_rank()
    plan = deep_ep.BufferAllocator()
    shapes = [(ranks, 16), (3 * ranks, 8)]
    tensors = [plan.allocate(shape, torch.float32) for shape in shapes]
    half = plan.allocate((ranks, 5), torch.bfloat16)
    buffer = deep_ep.BucketBuffer(comm, plan, explicitly_destroy=True)
    for scale in (1.0, 0.25, 3.0):
        for seed, (tensor, shape) in enumerate(zip(tensors, shapes), 1):
            expected = summed(device, ranks, shape, seed)
            expected = expected if scale == 1 else expected * scale
            tensor.copy_(of_rank(device, rank, shape, seed))
            made = buffer.all_reduce(tensor, scale).wait()
            assert torch.equal(made, expected) and torch.equal(tensor, expected)
            tensor.copy_(of_rank(device, rank, shape, seed))
            event = buffer.reduce_scatter(tensor, scale=scale)
            part = event.wait()
            assert torch.equal(part, expected.view(ranks, -1)[rank]) and event.wait() is None
            assert part.data_ptr() == tensor.view(ranks, -1)[rank].data_ptr()
        for seed, tensor in enumerate(tensors, 1):
            tensor.copy_(of_rank(device, rank, tuple(tensor.shape), seed))
        both = buffer.all_reduce(srcs=tensors, scale=scale, num_sms=0).wait()
        for seed, (made, shape) in enumerate(zip(both, shapes), 1):
            expected = summed(device, ranks, shape, seed)
            assert torch.equal(made, expected if scale == 1 else expected * scale)
    tensors[0].zero_()
    tensors[0][rank].copy_(of_rank(device, rank, (16,), 5))
    half[rank].fill_(rank)
    gathered, halves = buffer.all_gather([tensors[0][rank], half[rank]]).wait()
    assert torch.equal(gathered, torch.cat([of_rank(device, r, (16,), 5) for r in range(ranks)]))
    assert halves.tolist() == [r for r in range(ranks) for _ in range(5)]
    assert gathered.data_ptr() == tensors[0].data_ptr()
    elsewhere = of_rank(device, rank, (16,), 6)
    assert torch.equal(
        buffer.all_gather(elsewhere, tensors[0], num_sms=0).wait(),
        torch.cat([of_rank(device, r, (16,), 6) for r in range(ranks)]),
    )
    assert [buffer.get_theoretical_num_sms(op) for op in ("all_gather", "all_reduce")] == [0, 0]
    buffer.barrier()
    comm.allgather(None)
    buffer.destroy()
    assert buffer.storage is None and buffer.runtime is None


def sessions(first: Any, device: str) -> None:
    """Tensors of elsewhere keep what they hold; results lie in the storage, or where dsts say."""
    torch.zeros(1, device=device)
    comm = first.group
    ranks, rank = comm.Get_size(), comm.Get_rank()
    buffer = deep_ep.BucketBuffer(comm, 1 << 16)
    session = buffer.session()
    shape = (ranks, 12)
    for _ in range(2):
        with session as same:
            assert same is buffer
            mine = of_rank(device, rank, shape, 1)
            made = buffer.all_reduce(mine).wait()
            assert torch.equal(made, summed(device, ranks, shape, 1))
            assert torch.equal(mine, of_rank(device, rank, shape, 1))
            strided = of_rank(device, rank, shape, 2).t().contiguous().t()
            part = buffer.reduce_scatter(strided, scale=2.0).wait()
            assert torch.equal(part, summed(device, ranks, shape, 2)[rank] * 2)
            own = session.allocate((4,), torch.int64)
            both = session.allocate([(2, 2), (ranks, 3)])
            assert isinstance(own, Tensor) and [tuple(one.shape) for one in both] == [
                (2, 2),
                (ranks, 3),
            ]
            both[1][rank].fill_(rank)
            assert buffer.all_gather(both[1][rank]).wait().view(ranks, 3)[:, 0].tolist() == list(
                range(ranks)
            )
            out = torch.zeros(ranks, 4, dtype=torch.int64, device=device)
            given = torch.full((4,), rank, device=device)
            found = buffer.all_gather([given], [out]).wait()[0]
            assert found is out and out[:, 0].tolist() == list(range(ranks))
            flat = buffer.all_gather(given).wait()
            assert flat.tolist() == [r for r in range(ranks) for _ in range(4)]
    with pytest.raises(EPException, match="lies elsewhere; expected one of the storage"):
        buffer.all_reduce(of_rank(device, rank, shape, 1))
    comm.allgather(None)


ALL = [every_call, sessions]
"""For every device."""
