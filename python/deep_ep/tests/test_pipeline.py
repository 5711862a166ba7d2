"""`PPBuffer` of V2.5 and the pipeline of V2, on ranks that are threads of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_buffers import ThreadComm, run_ranks

import deep_ep
from deep_ep.errors import EPException


def of_rank(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(3 + step % 2, 8, generator=random).to(dtype)


def ways(comm: ThreadComm, most: int, inflight: int) -> list[tuple[Any, Any, Any]]:
    """(the buffer, its send, its recv) of both releases."""
    later = deep_ep.PPBuffer(
        comm, most, inflight, num_gpu_timeout_secs=30, explicitly_destroy=True, sl_idx=3
    )
    later.print_memory_usage()
    elastic = deep_ep.ElasticBuffer(comm)
    elastic.pp_set_config(most, inflight)
    return [(later, later.send, later.recv), (elastic, elastic.pp_send, elastic.pp_recv)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_around_the_ring(size: int) -> None:
    """All ranks send before they receive, several times, in both directions."""

    def body(comm: ThreadComm) -> None:
        rank = comm.Get_rank()
        for buffer, send, recv in ways(comm, 4 * 8 * 4, 6):
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                for way in (1, -1):
                    for step in range(3):
                        x = of_rank(rank, step, dtype)
                        send(x, (rank + way) % size, 0)
                        x.zero_()  # it is copied
                    for step in range(3):
                        source = (rank - way) % size
                        wanted = of_rank(source, step, dtype)
                        got = torch.empty_like(wanted)
                        recv(got, source, 0)
                        assert torch.equal(got, wanted)
            comm.allgather(None)
            if buffer.explicitly_destroy:
                buffer.destroy()
            del buffer

    run_ranks(size, body)


def test_a_full_pipeline_waits_for_the_oldest() -> None:
    """Rank 0 sends more than may be on their way; rank 1 receives them all, in order."""

    def body(comm: ThreadComm) -> None:
        for _, send, recv in ways(comm, 64, 2):
            for step in range(20):
                x = torch.full((16,), float(step))
                if comm.Get_rank() == 0:
                    send(x, 1, 0)
                else:
                    got = torch.empty(16)
                    recv(got, 0, 0)
                    assert torch.equal(got, x)
            comm.allgather(None)

    run_ranks(2, body)


def test_what_is_refused() -> None:
    def body(comm: ThreadComm) -> None:
        rank, x = comm.Get_rank(), torch.zeros(4)
        for _, send, recv in ways(comm, 32, 1):
            for given, words in (
                ((torch.zeros(9), (rank + 1) % 4), "x: got 36 bytes; expected 1 to 32"),
                ((x[:0], (rank + 1) % 4), "x: got 0 bytes"),
                ((x.view(2, 2).t(), (rank + 1) % 4), "x: got a tensor of cpu"),
                ((x.to("meta"), (rank + 1) % 4), "x: got a tensor of meta"),
                ((x, (rank + 2) % 4), "a neighbour in the ring"),
                ((x, (rank + 1) % 4, 3), "num_sms: got 3"),
            ):
                for call in (send, recv):
                    with pytest.raises(EPException, match=words):
                        call(*given)
        elastic = deep_ep.ElasticBuffer(comm)
        with pytest.raises(EPException, match="pp_set_config"):
            elastic.pp_send(x, 0)
        for sizes in ((0, 1), (1, 0)):
            with pytest.raises(EPException, match="num_max"):
                deep_ep.PPBuffer(comm, *sizes)
        comm.allgather(None)

    run_ranks(4, body)

    def alone(comm: ThreadComm) -> None:
        buffer = deep_ep.PPBuffer(comm, 32, 1, None, 50, True)
        with pytest.raises(EPException, match="nothing was sent"):
            buffer.recv(torch.zeros(1), 0)
        buffer.send(torch.zeros(1), 0)
        with pytest.raises(EPException, match="no room"):
            buffer.send(torch.zeros(1), 0)
        buffer.destroy()
        with pytest.raises(EPException, match="destroyed"):
            buffer.send(torch.zeros(1), 0)

    run_ranks(1, alone)


def test_a_tensor_to_oneself_of_another_size_stays() -> None:
    def body(comm: ThreadComm) -> None:
        for _, send, recv in ways(comm, 64, 2):
            send(torch.arange(4), 0)
            with pytest.raises(EPException, match="x: got 24 bytes; expected 32, as of the next"):
                recv(torch.zeros(3, dtype=torch.int64), 0)
            into = torch.zeros(8, dtype=torch.int32)
            recv(into, 0)
            assert into.view(torch.int64).tolist() == [0, 1, 2, 3]

    run_ranks(1, body)


def test_size_hints() -> None:
    hint = deep_ep.ElasticBuffer.get_pp_buffer_size_hint
    assert hint(100, 3) == 2 << 20 and hint(1 << 20, 4) == 4 * 4 << 20


def test_a_rank_that_is_a_tensor_is_the_same_neighbour() -> None:
    """Its sends stay in order, and only so many are on their way."""

    def body(comm: ThreadComm) -> None:
        rank, size = comm.Get_rank(), comm.Get_size()
        buffer = deep_ep.PPBuffer(comm, 4000, 2)
        for step in range(40):
            buffer.send(torch.full((1000,), float(step)), torch.tensor((rank + 1) % size))  # type: ignore[arg-type]
            if step > 0:
                buffer.recv(got := torch.empty(1000), torch.tensor((rank - 1) % size))  # type: ignore[arg-type]
                assert (got == step - 1).all()
        buffer.recv(torch.empty(1000), (rank - 1) % size)
        assert len(buffer._pipeline._streams) == 1
        with pytest.raises(EPException, match="a lazy view, negated or conjugated"):
            buffer.recv(torch._neg_view(torch.ones(4)), (rank - 1) % size)  # type: ignore[attr-defined]
        comm.allgather(None)

    run_ranks(3, body)
