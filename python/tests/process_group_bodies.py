"""What the ranks of test_torch_process_group.py do on `init_process_group("ferry")`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from rank_processes import DEADLINE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_meeting import process_group

import ferry
import ferry.torch
from ferry import torch_process_group

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def with_ferry(boot: Any, where: Any, body: Any, arguments: Any, config: Any) -> Any:
    """A body while there is the default process group."""
    meeting, *rest = arguments
    with process_group("ferry", meeting, boot, config.get("deadline", DEADLINE)):
        result = body(*rest)
        if config.get("ends", True):
            dist.barrier()
        return result


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def values(rank: int, dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """Small whole numbers, exact in every dtype."""
    return (torch.arange(count) % 3 + rank % 2 + 1).to(dtype)


def reductions() -> None:
    rank, size = world()
    by_op = {
        dist.ReduceOp.SUM: lambda rows: rows.sum(0),
        dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
        dist.ReduceOp.MIN: lambda rows: rows.amin(0),
        dist.ReduceOp.MAX: lambda rows: rows.amax(0),
        dist.ReduceOp.AVG: lambda rows: rows.mean(0),
    }
    for dtype in (*FLOATS, *INTEGERS):
        # Beyond what every rank gathers whole, too.
        for count in (4 * size, 1000 * size):
            rows = torch.stack([values(r, dtype, count) for r in range(size)])
            for op, reduce in by_op.items():
                if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                    continue
                expected = reduce(rows.double()).to(dtype)
                x = values(rank, dtype, count)
                dist.all_reduce(x, op)
                assert torch.equal(x, expected), (op, dtype)
                block = torch.empty(count // size, dtype=dtype)
                dist.reduce_scatter_tensor(block, values(rank, dtype, count), op)
                assert torch.equal(block, expected.chunk(size)[rank]), (op, dtype)
                y = values(rank, dtype, count)
                dist.reduce(y, size - 1, op)
                assert torch.equal(y, expected if rank == size - 1 else values(rank, dtype, count))
    odd = torch.tensor([rank % 2 == 1, rank == 0, False, True])
    dist.all_reduce(odd)
    assert odd.tolist() == [True, True, False, True]
    dist.all_reduce(odd, dist.ReduceOp.PRODUCT)
    for op, expected in (("BAND", 0), ("BOR", 2**size - 1), ("BXOR", 2**size - 1)):
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, getattr(dist.ReduceOp, op))
        assert bits.item() == expected, op
    z = torch.tensor([1 + 2j]) * (rank + 1)
    dist.all_reduce(z)
    assert z.item() == (1 + 2j) * size * (size + 1) / 2
    strided = torch.full((4, 6), 1.0)[:, ::2]
    dist.all_reduce(strided)
    assert (strided == size).all()


def refusals() -> None:
    x = torch.ones(4)
    with pytest.raises(ferry.InvalidArgumentError, match="PREMUL_SUM"):
        dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
    with pytest.raises(ferry.InvalidArgumentError, match=r"AVG of torch\.int64"):
        dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG)
    with pytest.raises(ferry.InvalidArgumentError, match="layout"):
        dist.all_reduce(torch.eye(3).to_sparse())
    with pytest.raises(ferry.InvalidArgumentError, match="float8"):
        dist.all_reduce(x.to(torch.float8_e4m3fn))
    with pytest.raises(ferry.InvalidArgumentError, match="recv: src"):
        dist.recv(x)
    rank, size = world()
    short = [torch.ones(2 + r) for r in range(size - 1)]
    with pytest.raises(ferry.InvalidArgumentError, match=f"input_list: got {size - 1} tensors"):
        dist.reduce_scatter(torch.ones(2 + rank), short)
    with pytest.raises(ferry.InvalidArgumentError, match=rf"input_list\[{rank}\]: got 3 elements"):
        dist.reduce_scatter(x, [torch.ones(3)] * size)
    for wrong in (torch.ones(size), torch.ones(4 * size, dtype=torch.float64)):
        with pytest.raises(ferry.InvalidArgumentError, match=r"reduce_scatter: input: got \d+ el"):
            dist.reduce_scatter_tensor(x, wrong)
    one, two = [1] * size, [2] * size
    for out, mine, from_, to in (
        (torch.ones(0, 2), torch.ones(size, 2), one, one),
        (torch.ones(size), torch.ones(size), one, two),
        (torch.tensor(1.0), torch.ones(size), None, None),
    ):
        with pytest.raises(ferry.InvalidArgumentError, match=r"all_to_all: (in|out)put"):
            dist.all_to_all_single(out, mine, from_, to)
    # The same as what other backends of torch raise.
    with pytest.raises(dist.DistBackendError, match="the number of elements is") as caught:
        dist.all_reduce(torch.ones(4 + dist.get_rank()))
    assert isinstance(caught.value, ferry.MismatchError)
    assert "torch's" not in str(caught.value)
    # What travels by another call, or as bytes, is named as the program knows it.
    doubles = r"all_reduce: rank \d calls it with SUM of \d elements of torch\.float64"
    with pytest.raises(ferry.MismatchError, match=doubles):
        dist.all_reduce(torch.ones(4 + dist.get_rank(), dtype=torch.float64))
    with pytest.raises(ferry.MismatchError, match=r"torch's reduce of float32 is .* all_reduce\)$"):
        dist.reduce(torch.ones(4 + dist.get_rank()), 0)
    with pytest.raises(ferry.MismatchError, match=r"torch's broadcast of float32 is .*bytes"):
        dist.broadcast(torch.ones(4 + dist.get_rank()), 0)


def disagreements() -> None:
    """Of what Ferry does not see in the calls that carry it; the group goes on."""
    rank, size = world()
    odd = rank == size - 1
    most = dist.ReduceOp.MAX
    for dtype, count in ((torch.int16, 6), (torch.float64, 6), (torch.float64, 60_000)):
        x = values(rank, dtype, count)
        with pytest.raises(ferry.MismatchError, match=f"(MAX|SUM) of {count} elements"):
            dist.all_reduce(x, op=most if odd else dist.ReduceOp.SUM)
    x = torch.ones(1 if odd else 4, dtype=torch.float64 if odd else torch.int16)
    with pytest.raises(ferry.MismatchError, match=r"torch\.(float64|int16)"):
        dist.all_reduce(x)
    with pytest.raises(ferry.MismatchError, match="dst="):
        dist.reduce(torch.ones(4), dst=int(odd))
    dist.all_reduce(x := torch.ones(2, dtype=torch.float64))
    assert x.tolist() == [size] * 2


def moves() -> None:
    rank, size = world()
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn):
        mine = values(rank, torch.float32, 4).to(dtype).view(2, 2)
        others = [values(r, torch.float32, 4).to(dtype).view(2, 2) for r in range(size)]

        def same(a: torch.Tensor, b: torch.Tensor) -> bool:
            return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

        every = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(every, mine)
        assert all(same(a, b) for a, b in zip(every, others))
        whole = torch.empty(2 * size, 2, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        assert same(whole, torch.cat(others))
        x = mine.clone()
        dist.broadcast(x, 1)
        assert same(x, others[1])
        got = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else None
        dist.gather(mine, got, dst=1)
        assert got is None or all(same(a, b) for a, b in zip(got, others))
        out = torch.empty_like(mine)
        dist.scatter(out, others if rank == 0 else None, src=0)
        assert same(out, mine)
    # Of several sizes, and of rows that are not contiguous.
    counts = [[(s + t) % 3 for t in range(size)] for s in range(size)]
    sent = torch.full((sum(counts[rank]), 3), rank)
    came = torch.empty(sum(row[rank] for row in counts), 3, dtype=torch.int64)
    dist.all_to_all_single(came, sent, [row[rank] for row in counts], counts[rank])
    assert came[:, 0].tolist() == [s for s in range(size) for _ in range(counts[s][rank])]
    outs = [torch.empty(r + 1) for r in range(size)]
    dist.all_to_all(outs, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
    assert all((out == r).all() for r, out in enumerate(outs))
    wide = torch.zeros(3, 8)[:, ::2]
    dist.broadcast(wide if rank else wide.fill_(5), 0)
    assert (wide == 5).all()
    blocks = [torch.full((r + 1,), 1.0) for r in range(size)]
    mine = torch.empty(rank + 1)
    dist.reduce_scatter(mine, blocks)
    assert (mine == size).all()


def objects_and_groups() -> None:
    rank, size = world()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 100 * rank})
    assert [one["rank"] for one in objects] == list(range(size))
    things = [f"from {rank}"]
    dist.broadcast_object_list(things, 2)
    assert things == ["from 2"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list("abcdefgh"[:size]) if rank == 0 else None, 0)
    assert mine == ["abcdefgh"[rank]]
    ends = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        x = torch.ones(3)
        dist.all_reduce(x, group=ends)
        assert (x == 2).all()
    else:
        with pytest.raises(ferry.InvalidArgumentError, match="pg: got a group without this rank"):
            ferry.torch.from_process_group(ends)
    pairs, _ = dist.new_subgroups(2)
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, group=pairs)
    assert x[0] == 2 * (rank // 2 * 2) + 1
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(x, group=mesh["b"].get_group())
    dist.destroy_process_group(pairs)


def asynchronous() -> None:
    rank, size = world()
    xs = [torch.full((1000 * i + 1,), float(rank)) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    futures = [work.get_future() for work in works]
    total = float(sum(range(size)))
    chained = futures[3].then(lambda done: done.value()[0] * 2)
    assert chained.wait()[0] == 2 * total
    for work, future, x in zip(works, futures, xs):
        work.wait()
        assert future.wait()[0].data_ptr() == x.data_ptr()
        assert (x == total).all() and work.is_completed()

    # What follows a call may make another one, and wait for it.
    def again(done: Any) -> torch.Tensor:
        inner = dist.all_reduce(done.value()[0], async_op=True).get_future().wait()
        return inner[0]

    y = torch.ones(4)
    assert dist.all_reduce(y, async_op=True).get_future().then(again).wait()[0] == size * size
    with torch.inference_mode():
        z = torch.ones(4, 4)[:, ::2]
        work = dist.all_reduce(z, async_op=True)
        work.wait()
        assert (z == size).all()
    with dist._coalescing_manager(async_ops=True) as together:
        a, b = torch.ones(3), torch.ones(5)
        dist.all_reduce(a)
        dist.all_reduce(b)
    together.wait()
    assert (a == size).all() and (b == size).all()


def forks() -> None:
    """A child that makes a call of its parent's group learns at once that it cannot."""
    dist.barrier()
    pid = os.fork()
    if pid == 0:
        kinds = set()
        for waits in (False, True):
            try:
                work = dist.all_reduce(torch.ones(3), async_op=waits)
                kinds.add("done" if work is None else str(work.wait(timedelta(seconds=1))))
            except ferry.Error as error:
                kinds.add(type(error).__name__)
        os._exit(0 if kinds == {"UnsupportedError"} else 1)
    assert os.waitpid(pid, 0)[1] == 0


def transfers() -> None:
    rank, size = world()
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 1000, 300_000):
        x, y = torch.full((count,), float(rank)), torch.empty(count)
        send = dist.isend(x, after, tag=3)
        recv = dist.irecv(y, before, tag=3)
        recv.wait()
        send.wait()
        assert (y == before).all() and recv.is_completed()
        z = torch.empty(2, count)[:, : count // 2 + 1]
        ops = [
            dist.P2POp(dist.isend, x[: count // 2 + 1].repeat(2), after),
            dist.P2POp(dist.irecv, z, before),
        ]
        for work in dist.batch_isend_irecv(ops if rank % 2 else ops[::-1]):
            work.wait()
        assert (z == before).all()
    # Who only asks whether it is over has what was received, too.
    z = torch.zeros(5, 2)[:, 0]
    recv, send = dist.irecv(z, before), dist.isend(torch.ones(5), after)
    while not recv.is_completed():
        time.sleep(1e-4)
    assert (z == 1).all()
    send.wait()
    if rank == 0:
        dist.send(torch.arange(5), 1)
        dist.send_object_list([{"a": 1}], 1)
    if rank == 1:
        got = torch.empty(5, dtype=torch.int64)
        assert dist.recv(got, 0) == 0
        assert got.tolist() == [0, 1, 2, 3, 4]
        things: list[Any] = [None]
        dist.recv_object_list(things, 0)
        assert things == [{"a": 1}]
    work = dist.irecv(torch.empty(2 if rank == 1 else 1), 0) if rank == 1 else None
    if rank == 0:
        with pytest.raises(ferry.MismatchError, match="rank 0 sends 4 bytes to rank 1"):
            dist.send(torch.empty(1), 1)
    if work is not None:
        with pytest.raises(dist.DistBackendError, match="expects 8 bytes"):
            work.wait()


def data_parallel() -> None:
    rank, size = world()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    x = torch.randn(4 * size, 8, dtype=torch.float64)
    for _ in range(3):
        alone.zero_grad()
        alone(x).pow(2).mean().backward()
        ddp.zero_grad()
        ddp(x.chunk(size)[rank]).pow(2).mean().backward()
        for p, q in zip(alone.parameters(), model.parameters()):
            torch.testing.assert_close(p.grad, q.grad)


def fully_sharded(folder: str) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    rank, size = world()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    x = torch.randn(4 * size, 8)
    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        model(x.chunk(size)[rank]).pow(2).mean().backward()
        alone(x).pow(2).mean().backward()
        optimizer.step()
        reference.step()
    for p, q in zip(alone.parameters(), model.parameters()):
        torch.testing.assert_close(q.full_tensor(), p)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=str(Path(folder) / "saved"))
    before = [p.full_tensor() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=str(Path(folder) / "saved"))
    set_model_state_dict(model, state)
    for p, q in zip(before, model.parameters()):
        assert torch.equal(q.full_tensor(), p)


def functional(compiled: bool) -> None:
    rank, size = world()
    group = dist.group.WORLD

    def calls(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y + rank, 0, group)
        return funcol.reduce_scatter_tensor(z, "sum", 0, group)

    call = torch.compile(calls, backend="aot_eager", fullgraph=True) if compiled else calls
    x = torch.full((4,), float(rank + 1))
    total = size * (size + 1) / 2
    for _ in range(2):
        got = call(x)
        assert torch.equal(got + 0, torch.full((4,), size * (2 * total + rank))), got
    out = funcol.all_to_all_single(torch.arange(size) + 10 * rank, None, None, group)
    assert (out + 0).tolist() == [10 * r + rank for r in range(size)]


def other_devices() -> None:
    """Every call goes to the group of the device, by a name that torch's backends have."""
    backend: Any = torch._C._distributed_c10d.Backend  # type: ignore[attr-defined]
    calls: list[str] = []

    class Work:
        def wait(self, *args: Any) -> bool:
            return True

    class Other:
        def __getattr__(self, name: str) -> Any:
            getattr(backend, name)  # raises AttributeError where NCCL's group has no such call

            def call(*args: Any, **kwargs: Any) -> Work:
                calls.append(name)
                return Work()

            return call

    made: list[Any] = []
    torch_process_group.delegates["meta"] = lambda *a: made.append(a) or Other()
    rank, size = world()
    x = torch.empty(size, 2, device="meta")
    rows = list(torch.empty(size, size, 2, device="meta").unbind())
    root = rows if rank == 0 else None
    whole = torch.empty(size * size, 2, device="meta")
    every: list[tuple[str, Callable[[], object]]] = [
        ("allreduce", lambda: dist.all_reduce(x)),
        ("broadcast", lambda: dist.broadcast(x, 0)),
        ("reduce", lambda: dist.reduce(x, 0)),
        ("allgather", lambda: dist.all_gather(rows, x)),
        ("all_gather_single", lambda: dist.all_gather_into_tensor(whole, x)),
        ("reduce_scatter", lambda: dist.reduce_scatter(x, rows)),
        ("reduce_scatter_single", lambda: dist.reduce_scatter_tensor(x, whole)),
        ("all_to_all_single", lambda: dist.all_to_all_single(torch.empty_like(x), x)),
        ("alltoall", lambda: dist.all_to_all(rows, [torch.empty_like(x) for _ in rows])),
        ("gather", lambda: dist.gather(x, root, dst=0)),
        ("scatter", lambda: dist.scatter(x, root, src=0)),
        ("send", lambda: dist.send(x, (rank + 1) % size)),
        ("recv", lambda: dist.recv(x, (rank - 1) % size)),
    ]
    older = {
        "all_gather_single": "_allgather_base",
        "reduce_scatter_single": "_reduce_scatter_base",
        "all_to_all_single": "alltoall_base",
    }
    for name, call in every:
        calls.clear()
        call()
        assert calls in ([name], [older.get(name)]), (name, calls)
    calls.clear()
    with dist._coalescing_manager(device=x.device):
        dist.all_reduce(x)
        dist.all_reduce(x)
    assert calls in (
        ["allreduce_coalesced"],
        ["_start_coalescing", "allreduce_coalesced", "_end_coalescing"],
    ), calls
    assert len(made) == 1 and made[0][1:3] == world()
    del torch_process_group.delegates["meta"]


def a_rank_that_leaves() -> None:
    rank, _ = world()
    dist.barrier()
    if rank == 1:
        return
    with pytest.raises(ferry.PeerLeftError) as caught:
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
    assert caught.value.peer == 1
    assert isinstance(caught.value, dist.DistBackendError)
    with contextlib.suppress(ferry.Error):
        dist.barrier()


def a_rank_that_leaves_a_backward() -> None:
    """torch's DDP waits in C++, which shows an error by its words."""
    rank, _ = world()
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    if rank == 1:
        return
    with pytest.raises(RuntimeError, match=r"PeerLeftError: .*rank 1"):
        loss.backward()
