"""Tests of vaults, for ranks on either device. Each is called with a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ferry


def state(group: ferry.Group, rank: int, step: int) -> list[Any]:
    """A tensor of every kind that an optimizer has, on the rank's device and beside it."""
    device = group.device
    value = 10.0 * rank + step
    return [
        np.full((3, 5), value, np.float64),
        np.array(step, np.int16),
        np.zeros((0, 4), np.float32),
        torch.full((2, 2, 2, 2), value, dtype=torch.bfloat16, device=device),
        torch.nn.Parameter(torch.full((7,), value, device=device)),
        torch.tensor([True, False, True], device=device),
        torch.zeros(0, 3, device=device),
        torch.full((300, 1000), value, device=device),
        torch.full((3,), value),
    ]


def a_rank_leaves(group: ferry.Group) -> None:
    """Rank 1; what it put is there for the others."""
    rank = group.rank
    vault = ferry.Vault(group, ferry.Vault.bytes_of({rank: state(group, rank, 0)}))
    assert vault.recover() is None
    assert vault.keys() == []
    vault.put(0, {rank: state(group, rank, 0)})
    group.commit(1)
    vault.put(1, {rank: state(group, rank, 1)})
    group.barrier()
    if rank == 1:
        group.destroy()
        return
    with pytest.raises(
        (ferry.PeerLeftError, ferry.PeerFailedError), match=r"rank 1|called regroup"
    ):
        group.barrier()
    group.regroup()
    assert vault.recover() == 1
    assert vault.keys() == list(range(group.size))
    for key in range(group.size):
        out = state(group, 7, 7)
        vault.get(key, out)
        for i, (got, put) in enumerate(zip(out, state(group, key, 1), strict=True)):
            assert (got == put).all(), f"key {key}, tensor {i}: {got}"
    with pytest.raises(ferry.InvalidArgumentError, match=r"tensor 0: got float32.*float64"):
        vault.get(0, [np.empty((3, 5), np.float32), *out[1:]])
    group.barrier()


def on_other_streams(group: ferry.Group) -> None:
    """On GPUs: what is on the stream is put, and what comes later is not."""
    device = torch.device(group.device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    x = torch.empty(3 << 20, device=device)  # more than one piece of a copy
    big = torch.ones(2048, 2048, device=device)
    vault = ferry.Vault(group, ferry.Vault.bytes_of({0: x}))
    vault.recover()
    torch.cuda.synchronize(device)
    for step, given in enumerate((None, stream)):
        if step:
            group.commit(step)
        with torch.cuda.stream(stream):
            for _ in range(50):
                big = big @ big / 2048
            x.fill_(step + 3)
            vault.put(step, {group.rank: x}, stream=given)
            x.fill_(-1)
        assert vault.recover() == step
        out = torch.zeros_like(x)
        vault.get((group.rank + 1) % group.size, out)
        assert (out == step + 3).all(), (step, out[:4], out[-4:])
    with pytest.raises(ferry.InvalidArgumentError, match=r"put: key 0, tensor 0: .*meta"):
        vault.put(1, {0: torch.empty(3, device="meta")})
    group.barrier()
