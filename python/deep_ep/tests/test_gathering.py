"""`agrs_*` and `all_gather` of V2, on ranks that are threads of one process."""

from __future__ import annotations

import pytest
import torch
from rank_buffers import ThreadComm, run_ranks
from torch import Tensor

import deep_ep
from deep_ep.errors import EPException

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.int16)


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 7 * rank) % 100).to(dtype).view(shape)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sessions(size: int) -> None:
    """In place and not, one tensor and several, in every session from the beginning."""

    def body(comm: ThreadComm) -> None:
        rank, ranks = comm.Get_rank(), comm.Get_size()
        buffer = deep_ep.ElasticBuffer(comm)
        shapes = [(3, 5), (8,), (2, 2, 4)]
        most = sum(buffer.get_agrs_num_max_session_bytes(comm, shapes, dtype) for dtype in DTYPES)
        assert buffer.get_agrs_buffer_size_hint(comm, most) == 2 << 20
        buffer.agrs_set_config(most, len(DTYPES))
        for again in range(3):
            with buffer.agrs_new_session():
                for dtype in DTYPES:
                    given = [of_rank(rank, shape, dtype) for shape in shapes]
                    if again == 1:
                        placed = buffer.agrs_get_inplace_tensor(shapes, dtype)
                        for place, one in zip(placed, given):
                            place.copy_(one)
                        given = list(placed)
                    *found, handle = buffer.all_gather(given)
                    handle()
                    for whole, shape in zip(found, shapes):
                        expected = [of_rank(r, shape, dtype) for r in range(ranks)]
                        assert torch.equal(whole, torch.stack(expected))
        assert buffer.get_agrs_num_max_session_bytes(comm, (3, 5), torch.float32) == 32 * (
            -(-ranks * 60 // 32)
        )
        buffer.create_agrs_session()
        one = buffer.agrs_get_inplace_tensor((4,), torch.int64)
        assert isinstance(one, Tensor)
        one.fill_(rank)
        gathered, handle = buffer.all_gather(one)
        handle()
        assert gathered[:, 0].tolist() == list(range(ranks))
        buffer.destroy_agrs_session()
        with buffer.agrs_new_session(enabled=False):
            pass
        comm.allgather(None)

    run_ranks(size, body)


def test_what_is_refused() -> None:
    def body(comm: ThreadComm) -> None:
        buffer, x = deep_ep.ElasticBuffer(comm), torch.zeros(4)
        with pytest.raises(EPException, match="agrs_set_config before it"):
            buffer.create_agrs_session()
        with pytest.raises(EPException, match="num_max_session_bytes: got 0"):
            buffer.agrs_set_config(0, 1)
        with pytest.raises(EPException, match="num_max_all_gathers_per_session: got 0"):
            buffer.agrs_set_config(1, 0)
        buffer.agrs_set_config(64, 2)
        for call in (
            buffer.destroy_agrs_session,
            lambda: buffer.all_gather(x),
            lambda: buffer.agrs_get_inplace_tensor((1,), torch.int8),
        ):
            with pytest.raises(EPException, match="session: got none; expected an open one"):
                call()
        with buffer.agrs_new_session():
            with pytest.raises(EPException, match="session: got open; expected one at a time"):
                buffer.create_agrs_session()
            with pytest.raises(EPException, match="64 bytes that are left; expected 80"):
                buffer.all_gather(torch.zeros(20))
            with pytest.raises(EPException, match="t: got a tensor of cpu, strides"):
                buffer.all_gather(x.view(2, 2).t())
            with pytest.raises(EPException, match="session: got 3 calls; expected 2 at most"):
                buffer.all_gather(x)

    run_ranks(1, body)
