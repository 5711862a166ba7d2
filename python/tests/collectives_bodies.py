"""What the ranks of test_collectives_gpu.py do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferry


def with_collectives(
    boot: Any, where: dict[str, Any], body: Any, arguments: Any, config: Any
) -> Any:
    """For RankProcesses: one body on this rank, with collectives instead of a group."""
    config = {"deadline": 30.0, "memory_bytes": 16 << 20} | config
    with ferry.Collectives(boot, **where, **config) as all_:
        device = f"cuda:{where['device']}" if where["backend"] == "cuda" else "cpu"
        result = body(all_, device, *arguments)
        all_.barrier()
        return result


def inputs(
    all_: ferry.Collectives, count: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """What every rank brings; on the CPU."""
    made = []
    for rank in range(all_.size):
        random = torch.Generator().manual_seed(seed + rank)
        made.append(torch.randn(count, generator=random).to(dtype))
    return made


def summed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In fp32, ascending ranks, one rounding."""
    total = torch.zeros(tensors[0].shape)
    for tensor in tensors:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


def everything(all_: ferry.Collectives, device: str) -> None:
    """Every call, small and large, ordinary and registered memory."""
    rank, size = all_.rank, all_.size
    for dtype in (torch.float32, torch.bfloat16):
        for count in (24, 240_000):
            brought = inputs(all_, count, dtype, count)
            own = brought[rank].to(device)
            expected = summed(brought)
            registered = all_.empty((count,), dtype, like="torch")
            assert str(registered.device) == device
            for x in (own.clone(), registered.copy_(own)):
                all_.all_reduce(x)
                assert torch.equal(x.cpu(), expected)
            mean = own.clone()
            all_.all_reduce(mean, op="mean")
            part = torch.empty(count // size, dtype=dtype, device=device)
            all_.reduce_scatter(own, part)
            mine = slice(rank * (count // size), (rank + 1) * (count // size))
            assert torch.equal(part.cpu(), expected[mine])
            gathered = torch.empty(size, count, dtype=dtype, device=device)
            all_.all_gather(own, gathered)
            assert torch.equal(gathered.cpu(), torch.stack(brought))
            spread = own.clone()
            all_.broadcast(spread, size - 1)
            assert torch.equal(spread.cpu(), brought[size - 1])
            out = torch.empty_like(own)
            all_.all_to_all(own, out)
            blocks = torch.cat([other[mine] for other in brought])
            assert torch.equal(out.cpu(), blocks)
            counts = [count // size] * size
            all_.all_to_all(own, out.zero_(), send_counts=counts, recv_counts=counts)
            assert torch.equal(out.cpu(), blocks)


def options(all_: ferry.Collectives, device: str) -> None:
    """Numbers of SMs and algorithms change nothing but the time."""
    for count in (24, 60_000):
        brought = inputs(all_, count, torch.float32, count)
        expected = summed(brought)
        for keywords in ({"num_sms": 1}, {"algorithm": "direct"}, {"algorithm": "one_shot"}):
            x = brought[all_.rank].to(device)
            all_.all_reduce(x, **keywords)
            assert torch.equal(x.cpu(), expected)
        whole = torch.empty(all_.size * count, device=device)
        all_.all_gather(brought[all_.rank].to(device), whole, num_sms=2)
        assert torch.equal(whole.cpu(), torch.cat(brought))
    x = torch.ones(24, device=device)
    for name, keywords in {
        "num_sms": {"num_sms": 100_000},
        "algorithm": {"algorithm": "ring"},
        "shares": {"shares": [1]},
    }.items():
        try:
            all_.all_reduce(x, **keywords)
        except ferry.InvalidArgumentError as error:
            assert f"all_reduce: {name}: got" in str(error)
        else:
            raise AssertionError(f"{name} was taken")


def on_streams(all_: ferry.Collectives, device: str) -> None:
    """A call runs on torch's current stream, or on the one that is given; without waiting."""
    x = torch.ones(300_000, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.mul_(2)
            all_.all_reduce(x)
    event = all_.all_reduce(x, stream=side)
    event.wait()
    assert torch.equal(x.cpu(), torch.full((300_000,), 8.0 * all_.size**4))


def in_a_graph(all_: ferry.Collectives, device: str) -> None:
    """Captured by torch.cuda.graph."""
    x = torch.ones(5000, device=device)
    y = all_.empty((300_000,), torch.float32)
    y.fill_(1)
    graph = torch.cuda.CUDAGraph()
    all_.barrier()
    with torch.cuda.graph(graph):
        all_.all_reduce(x)
        all_.all_reduce(y)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for tensor in (x, y):
        assert torch.equal(tensor.cpu(), torch.full_like(tensor.cpu(), float(all_.size**3)))


def refusals(all_: ferry.Collectives, device: str) -> None:
    """Arguments are refused, disagreement is told on all ranks; the collectives go on."""
    for call in (lambda: all_.all_reduce(torch.ones(3)), lambda: all_.all_reduce([1.0])):
        try:
            call()
        except ferry.InvalidArgumentError as error:
            assert "x: got" in str(error)
        else:
            raise AssertionError("a tensor in CPU memory was taken")
    if all_.size > 1:
        x = torch.ones(100 + (all_.rank == 0), device=device)
        try:
            all_.all_reduce(x).wait()
        except ferry.MismatchError as error:
            assert "number of elements" in str(error)
        else:
            raise AssertionError("other sizes were taken")
    everything(all_, device)


def transfers(all_: ferry.Collectives, device: str) -> None:
    """From rank to rank, in ordinary and registered memory, beside a call of all ranks."""
    rank, size = all_.rank, all_.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 3, 100_000):
        registered = all_.empty((max(1, count),), torch.int64, like="torch")[:count]
        for x in (torch.empty(count, dtype=torch.int64, device=device), registered):
            x.fill_(rank)
            got = torch.full_like(x, -1)
            if rank % 2 == 0:
                all_.send(x, after, tag=count)
                x.fill_(-1)  # behind it on the stream
            all_.recv(got, before, tag=count)
            if rank % 2 != 0:
                all_.send(x, after, tag=count)
            assert (got == before).all()
            total = torch.ones(5, device=device)
            all_.all_reduce(total)
            assert (total == size).all()
    if rank < 2:
        words = r"rank 0 sends 20 bytes to rank 1 \(tag 4\), which expects 16 bytes"
        with pytest.raises(ferry.MismatchError, match=words):
            wrong = torch.ones(5 - rank, device=device)
            event = all_.send(wrong, 1, 4) if rank == 0 else all_.recv(wrong, 0, 4)
            event.wait()


ALL = (everything, options, on_streams, in_a_graph, refusals)
