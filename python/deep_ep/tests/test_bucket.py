"""`BucketBuffer` of V2.5, on ranks that are threads of one process."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import bucket_bodies as bodies
import pytest
import torch
from rank_buffers import ThreadComm, run_buffers, run_ranks

import deep_ep
import ferry
from deep_ep.errors import EPException

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", bodies.ALL, ids=lambda body: body.__name__)
def test_on_cpu(body: Any, size: int) -> None:
    run_buffers(size, lambda buffer: body(buffer, "cpu"))


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


@pytest.mark.parametrize("size", SIZES)
def test_several_groups_share_the_storage(size: int) -> None:
    """All ranks, and the halves."""
    half = max(size // 2, 1)

    def body(comm: ThreadComm) -> None:
        rank = comm.Get_rank()
        members = list(range(rank // half * half, (rank // half + 1) * half))
        pair = Part(comm, members)
        buffer = deep_ep.BucketBuffer([comm, pair], 1 << 14, 3, num_gpu_timeout_secs=20)
        x = buffer.storage[:64].view(torch.float32)
        x.fill_(rank + 1)
        assert buffer.all_reduce(x, group=pair).wait()[0] == sum(members) + half
        total = half * (size * (size + 1) // 2)
        assert buffer.all_reduce(x, group=comm).wait()[0] == total
        block = buffer.reduce_scatter(x, "fp32", group=pair, num_sms=2).wait()
        assert block.tolist() == [float(half * total)] * (16 // half)
        whole = x.view(half, -1)
        whole[pair.Get_rank()].fill_(rank)
        gathered = buffer.all_gather(whole[pair.Get_rank()], group=pair).wait()
        assert gathered.view(half, -1)[:, 0].tolist() == members
        assert buffer.get_theoretical_num_sms("reduce_scatter", group=pair) == 0
        buffer.print_memory_usage()
        buffer.barrier(False, True, False, pair)
        assert [buffer.get_context_idx(one) for one in (comm, pair)] == [0, 1]
        assert buffer.all_reduce(x.fill_(rank), 0.5, pair, 0).wait()[0] == sum(members) / 2
        assert buffer.reduce_scatter(x, scale=2.0, group=pair).wait()[0] == half * sum(members)
        mine = torch.full((3,), rank)
        into = buffer.storage[64 : 64 + 24 * half].view(torch.int64)
        gathered = buffer.all_gather(mine, into, pair, 0).wait()
        assert gathered.view(half, 3)[:, 2].tolist() == members
        domains = buffer.runtime.get_physical_domain_size()
        assert [one.get_physical_domain_size() for one in buffer.contexts] == [domains, (1, half)]
        with pytest.raises(EPException, match="group: got None; expected one of the groups"):
            buffer.all_reduce(x)
        with pytest.raises(EPException, match="one of another buffer"):
            buffer.barrier(group=object())
        with buffer.session():
            buffer.all_reduce(x, group=pair)
            session = buffer._session
            assert session is not None and session.allocate((2,), torch.int64, pair).shape == (2,)
            with pytest.raises(EPException, match="group: got group 0; expected 1"):
                buffer.all_reduce(x, group=comm)
        buffer.barrier(group=comm)

    run_ranks(size, body)


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


def test_any_dtype_is_gathered_and_nothing_freed_is_written() -> None:
    def body(buffer: Any) -> None:
        with buffer.session():
            for dtype in (torch.complex64, torch.bool, torch.float64, torch.int16):
                given = torch.arange(6).to(dtype)
                assert torch.equal(buffer.all_gather(given).wait(), given)
            into = torch.zeros(4, requires_grad=True)
            assert buffer.all_gather(torch.ones(4), dsts=into).wait() is into
            assert into.tolist() == [1] * 4
            event = buffer.all_gather(torch.ones(4), dsts=(gone := torch.zeros(4)))
            gone.untyped_storage().resize_(0)
            with pytest.raises(ferry.Error, match="dsts: got a tensor whose storage was resized"):
                event.wait()
        with pytest.raises(EPException, match="dsts: got byte 1 of the storage; expected a mult"):
            buffer.all_gather(torch.ones(2), dsts=buffer.storage[1:9])
        part = buffer.storage[:8].view(torch.float32)
        for scale in (Fraction(1, 2), 10**30):
            part.fill_(1)
            found = buffer.all_reduce(part, scale=scale).wait()
            assert found.tolist() == [pytest.approx(scale)] * 2

    run_buffers(1, body, deep_ep.BucketBuffer, allocation_plan_or_num_bytes=1 << 10)


def test_a_session_gives_no_room_for_what_is_no_shape() -> None:
    """Else it would give all of the storage, and the next tensors would lie in each other."""

    def body(buffer: Any) -> None:
        session = buffer.session()
        with session:
            first = session.allocate((8,))
            for wrong in (5, None, (-1,), "x", (1.5,), [(2,), 5], (torch.ones(3),)):
                with pytest.raises(EPException, match="allocate: shapes: got"):
                    session.allocate(wrong)
            with pytest.raises(EPException, match="allocate: dtype: got 'x'"):
                session.allocate((2,), "x")
            assert session.allocate((8,)).data_ptr() == first.data_ptr() + 32
        for ended in (session, buffer.session()):
            with pytest.raises(EPException, match="one that is not open"):
                ended.allocate((2,))
        buffer.explicitly_destroy = True
        buffer.destroy()
        with pytest.raises(EPException, match="this Buffer is destroyed"):
            session.__enter__()

    run_buffers(1, body, deep_ep.BucketBuffer, allocation_plan_or_num_bytes=1 << 10)
