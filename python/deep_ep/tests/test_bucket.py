"""`BucketBuffer` of V2.5, on ranks that are threads of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_buffers import ThreadComm, run_ranks
from torch import Tensor

import deep_ep
from deep_ep.errors import EPException

SIZES = (1, 2, 4, 8)


def of_rank(rank: int, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def summed(ranks: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """In ascending rank."""
    total = torch.zeros(shape)
    for rank in range(ranks):
        total += of_rank(rank, shape, seed)
    return total


def every_call(comm: ThreadComm, device: str) -> None:
    """One tensor and lists, with and without a scale, in place."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    plan = deep_ep.BufferAllocator()
    shapes = [(ranks, 16), (3 * ranks, 8)]
    tensors = [plan.allocate(shape, torch.float32) for shape in shapes]
    half = plan.allocate((ranks, 5), torch.bfloat16)
    buffer = deep_ep.BucketBuffer(comm, plan, explicitly_destroy=True)
    for scale in (1.0, 0.25, 3.0):
        for seed, (tensor, shape) in enumerate(zip(tensors, shapes), 1):
            expected = summed(ranks, shape, seed)
            expected = expected if scale == 1 else expected * scale
            tensor.copy_(of_rank(rank, shape, seed))
            made = buffer.all_reduce(tensor, scale).wait()
            assert torch.equal(made, expected) and torch.equal(tensor, expected)
            tensor.copy_(of_rank(rank, shape, seed))
            event = buffer.reduce_scatter(tensor, scale=scale)
            part = event.wait()
            assert torch.equal(part, expected.view(ranks, -1)[rank]) and event.wait() is None
            assert part.data_ptr() == tensor.view(ranks, -1)[rank].data_ptr()
        for seed, tensor in enumerate(tensors, 1):
            tensor.copy_(of_rank(rank, tuple(tensor.shape), seed))
        both = buffer.all_reduce(srcs=tensors, scale=scale, num_sms=0).wait()
        for seed, (made, shape) in enumerate(zip(both, shapes), 1):
            expected = summed(ranks, shape, seed)
            assert torch.equal(made, expected if scale == 1 else expected * scale)
    tensors[0].zero_()
    tensors[0][rank].copy_(of_rank(rank, (16,), 5))
    half[rank].fill_(rank)
    gathered, halves = buffer.all_gather([tensors[0][rank], half[rank]]).wait()
    assert torch.equal(gathered, torch.cat([of_rank(r, (16,), 5) for r in range(ranks)]))
    assert halves.tolist() == [r for r in range(ranks) for _ in range(5)]
    assert gathered.data_ptr() == tensors[0].data_ptr()
    elsewhere = of_rank(rank, (16,), 6).to(device)
    assert torch.equal(
        buffer.all_gather(elsewhere, tensors[0], num_sms=0).wait(),
        torch.cat([of_rank(r, (16,), 6) for r in range(ranks)]),
    )
    assert [buffer.get_theoretical_num_sms(op) for op in ("all_gather", "all_reduce")] == [0, 0]
    buffer.barrier()
    comm.allgather(None)
    buffer.destroy()
    assert buffer.storage is None and buffer.runtime is None


def sessions(comm: ThreadComm, device: str) -> None:
    """Tensors of elsewhere keep what they hold; results lie in the storage, or where dsts say."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    buffer = deep_ep.BucketBuffer(comm, 1 << 16)
    session = buffer.session()
    shape = (ranks, 12)
    for _ in range(2):
        with session as same:
            assert same is buffer
            mine = of_rank(rank, shape, 1)
            made = buffer.all_reduce(mine).wait()
            assert torch.equal(made, summed(ranks, shape, 1))
            assert torch.equal(mine, of_rank(rank, shape, 1))
            strided = of_rank(rank, shape, 2).t().contiguous().t()
            part = buffer.reduce_scatter(strided, scale=2.0).wait()
            assert torch.equal(part, summed(ranks, shape, 2)[rank] * 2)
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
            out = torch.zeros(ranks, 4, dtype=torch.int64)
            given = torch.full((4,), rank)
            found = buffer.all_gather([given], [out]).wait()[0]
            assert found is out and out[:, 0].tolist() == list(range(ranks))
            flat = buffer.all_gather(given).wait()
            assert flat.tolist() == [r for r in range(ranks) for _ in range(4)]
    with pytest.raises(EPException, match="lies elsewhere; expected one of the storage"):
        buffer.all_reduce(of_rank(rank, shape, 1))
    comm.allgather(None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", [every_call, sessions], ids=lambda body: body.__name__)
def test_on_cpu(body: Any, size: int) -> None:
    run_ranks(size, lambda comm: body(comm, "cpu"))


class Part:
    """Some ranks of a communicator of threads."""

    def __init__(self, comm: ThreadComm, members: list[int]) -> None:
        self.comm, self.members = comm, members

    def Get_rank(self) -> int:  # noqa: N802
        return self.members.index(self.comm.Get_rank())

    def Get_size(self) -> int:  # noqa: N802
        return len(self.members)

    def allgather(self, thing: Any) -> list[Any]:
        whole = self.comm.allgather(thing)
        return [whole[member] for member in self.members]


def test_several_groups_share_the_storage() -> None:
    def body(comm: ThreadComm) -> None:
        rank = comm.Get_rank()
        pair = Part(comm, [0, 1] if rank < 2 else [2, 3])
        buffer = deep_ep.BucketBuffer([comm, pair], 1 << 12, num_gpu_timeout_secs=20)
        x = buffer.storage[:64].view(torch.float32)
        x.fill_(rank + 1)
        assert buffer.all_reduce(x, group=pair).wait()[0] == (3 if rank < 2 else 7)
        assert buffer.all_reduce(x, group=comm).wait()[0] == 20
        assert [buffer.get_context_idx(one) for one in (comm, pair)] == [0, 1]
        assert [one.get_physical_domain_size() for one in buffer.contexts] == [(1, 4), (1, 2)]
        with pytest.raises(EPException, match="group: got None; expected one of the groups"):
            buffer.all_reduce(x)
        with pytest.raises(EPException, match="one of another buffer"):
            buffer.barrier(group=object())
        with buffer.session():
            buffer.all_reduce(x, group=pair)
            with pytest.raises(EPException, match="group: got group 0; expected 1"):
                buffer.all_reduce(x, group=comm)
        buffer.barrier(group=comm)

    run_ranks(4, body)


def test_what_is_refused() -> None:
    def body(comm: ThreadComm) -> None:
        buffer = deep_ep.BucketBuffer(comm, 256)
        x = buffer.storage[:128].view(torch.float32)
        edge = buffer.storage[:8] if comm.Get_rank() == 1 else buffer.storage[-8:]
        for call, words in (
            (lambda: buffer.reduce_scatter(x, "bf16"), "'bf16' on one host"),
            (lambda: buffer.reduce_scatter(x, "fp16"), "comm_precision: got 'fp16'"),
            (lambda: buffer.all_reduce(x.view(torch.int32)), r"srcs: got torch\.int32"),
            (lambda: buffer.all_reduce(x[:0]), "srcs: got an empty tensor"),
            (lambda: buffer.all_reduce(x.view(4, 8).t()), "srcs: got strides"),
            (lambda: buffer.all_reduce(x.to("meta")), "srcs: got a tensor of meta"),
            (
                lambda: buffer.reduce_scatter(x[:3]),
                "srcs: got 3 elements; expected a multiple of 2",
            ),
            (lambda: buffer.all_gather(x, num_sms=4), "num_sms: got 4"),
            (lambda: buffer.all_gather(edge), "a tensor without room beside it"),
            (lambda: buffer.all_gather([x], [x, x]), "dsts: got 2 tensors; expected 1"),
            (lambda: buffer.all_gather(x, x), "dsts: got 128 bytes"),
            (lambda: buffer.get_theoretical_num_sms("send"), "op: got 'send'"),
        ):
            with pytest.raises(EPException, match=words):
                call()
        with buffer.session() as same:
            with pytest.raises(EPException, match="one session at a time"), same.session():
                pass
            with pytest.raises(EPException, match="storage: got 256 bytes that are left"):
                buffer.all_reduce(torch.zeros(100))
        comm.allgather(None)

    run_ranks(2, body)
    for wrong in (0, -1, None):
        with pytest.raises(EPException, match="allocation_plan_or_num_bytes: got"):
            run_ranks(1, lambda comm, wrong=wrong: deep_ep.BucketBuffer(comm, wrong))
