"""`EngramBuffer` of V2.5 and `engram_*` of V2, on ranks that are threads of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_buffers import ThreadComm, run_buffers, run_ranks
from torch import Tensor

import deep_ep
import ferry
from deep_ep.errors import EPException

SIZES = (1, 2, 4, 8)
COUNTS, HIDDEN, TOKENS, EACH, PACKS = (5, 9), 32, 6, 3, 2
MIB = 1 << 20


def part(rank: int, layer: int, step: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + layer)
    return torch.randn(COUNTS[layer], HIDDEN, generator=random).to(dtype)


def factors(ranks: int, layer: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(layer)
    size = (ranks * COUNTS[layer], PACKS)
    return torch.randint(0, 1 << 20, size, generator=random, dtype=torch.int32).view(dtype)


def indices(rank: int, ranks: int, layers: tuple[int, ...], tokens: int) -> Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.stack([
        torch.randint(0, ranks * COUNTS[layer], (tokens, EACH), generator=random)
        for layer in layers
    ]).int()


def same(got: Tensor, wanted: Tensor) -> bool:
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape) or got.numel() == 0:
        return (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    return torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def made(comm: ThreadComm, dtype: torch.dtype) -> deep_ep.EngramBuffer:
    packs = PACKS if dtype.itemsize == 1 else 0
    sizes = (COUNTS, HIDDEN, TOKENS, EACH, dtype, packs)
    gpu, storage = deep_ep.EngramBuffer.get_storage_size_hint(comm, *sizes)
    assert gpu % (2 * MIB) == 0 and storage >= sum(COUNTS) * HIDDEN * dtype.itemsize
    config = deep_ep.EngramBuffer.get_theoretical_config(comm, len(COUNTS), TOKENS, EACH)
    buffer = deep_ep.EngramBuffer(comm, gpu, storage, True, *config, sl_idx=1)
    buffer.set_config(*sizes)
    return buffer


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_layers(size: int, dtype: torch.dtype) -> None:
    """Every rank fetches as often as it likes; hooks in either order; then other entries."""

    def body(comm: ThreadComm) -> None:
        rank = comm.Get_rank()
        buffer = made(comm, dtype)
        for step, col_major in enumerate((True, False)):
            tables = [
                torch.cat([part(r, layer, step, dtype).view(torch.uint8) for r in range(size)])
                for layer in range(len(COUNTS))
            ]
            sfs = None
            if dtype.itemsize == 1:
                of = torch.int32 if step == 0 else torch.float32
                sfs = [factors(size, layer, of) for layer in range(len(COUNTS))]
            buffer.write([part(rank, layer, step, dtype) for layer in range(len(COUNTS))], sfs)
            for again in range(rank + 1 if step == 0 else 1):
                tokens = 0 if rank == 1 else TOKENS
                numbers = indices(rank + again, size, (0, 1), tokens)
                hooks = buffer.fetch(numbers, 1, use_tma_aligned_col_major_sf=col_major)
                for layer in (0, 1) if again % 2 else (1, 0):
                    found = hooks[layer]()
                    data, sf = found if sfs is not None else (found, None)
                    flat = numbers[layer].flatten().long()
                    wanted = tables[layer][flat].view(dtype).view(tokens, EACH * HIDDEN)
                    assert same(data, wanted)
                    if sfs is not None:
                        whole = sfs[layer][flat].view(tokens, EACH * PACKS)
                        assert same(sf.contiguous(), whole)
                        assert not col_major or sf.stride() == (1, -(-tokens // 4) * 4)
        buffer.barrier()
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, size)

    run_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_of_an_elastic_buffer(size: int) -> None:
    """One table, of one form and then of another, beside an exchange of tokens."""
    most = deep_ep.ElasticBuffer.get_engram_storage_size_hint(9, HIDDEN, TOKENS, torch.float32)

    def body(buffer: Any) -> None:
        rank = buffer.rank_idx
        for step, (layer, dtype) in enumerate([
            (0, torch.bfloat16),
            (0, torch.bfloat16),
            (1, torch.float32),
            (0, torch.float8_e4m3fn),
        ]):
            sf = factors(size, layer, torch.float32) if dtype.itemsize == 1 else None
            buffer.engram_write(part(rank, layer, step, dtype), sf)
            table = torch.cat([part(r, layer, step, dtype).view(torch.uint8) for r in range(size)])
            numbers = indices(rank, size, (layer,), TOKENS)[0]
            for given in (numbers, numbers[:, 0], numbers[:0]):
                data, got = buffer.engram_fetch(
                    given, num_qps=step, use_tma_aligned_col_major_sf=given.dim() == 1
                )()
                flat = given.flatten().long()
                assert same(data, table[flat].view(dtype))
                assert (got is None) == (sf is None)
                if sf is not None:
                    each = EACH if given.dim() == 2 else 1
                    assert given.dim() == 2 or got.stride() == (1, -(-len(given) // 4) * 4)
                    assert same(got.contiguous(), sf[flat].view(len(given), each * PACKS))

    run_buffers(size, body, kind=deep_ep.ElasticBuffer, num_cpu_bytes=most)


@pytest.mark.parametrize("size", SIZES)
def test_every_argument(size: int) -> None:
    def body(comm: ThreadComm) -> None:
        how = {"num_layers": 1, "num_max_tokens": 5, "num_entries_per_token": 2}
        config = deep_ep.EngramBuffer.get_theoretical_config(
            comm, **how, num_max_read_requests_per_qp=4
        )
        assert config == (3, 4, False)
        buffer = deep_ep.EngramBuffer(
            comm,
            num_gpu_bytes=MIB,
            num_rdma_storage_bytes=MIB,
            use_cpu_rdma_storage=True,
            num_allocated_qps=3,
            qp_depth=4,
            restrict_rd_atomic=True,
            allow_hybrid_mode=False,
            sl_idx=2,
            num_gpu_timeout_secs=30,
            explicitly_destroy=True,
        )
        kept = (buffer.num_gpu_bytes, buffer.num_rdma_storage_bytes, buffer.num_allocated_qps)
        assert kept == (MIB, MIB, 3) and buffer.qp_depth == 4 and buffer.restrict_rd_atomic
        assert (buffer.rank_idx, buffer.num_ranks) == (comm.Get_rank(), size)
        buffer.set_config([COUNTS[0]], HIDDEN, 5, 2, torch.float32)
        buffer.write([part(buffer.rank_idx, 0, 0, torch.float32)])
        last = size - 1
        numbers = torch.tensor([[[0, last * COUNTS[0]]]], dtype=torch.int32)
        wanted = torch.cat([part(rank, 0, 0, torch.float32)[0] for rank in (0, last)])
        assert torch.equal(buffer.fetch(numbers, num_qps=3)[0]()[0], wanted)
        buffer.barrier(False, True, False, 0)
        assert buffer.get_logical_domain_size() == (1, size)
        buffer.capture().current_stream_wait()
        buffer.print_memory_usage()
        comm.allgather(None)
        buffer.destroy()
        with pytest.raises(EPException, match="destroyed"):
            buffer.fetch(numbers)

    run_ranks(size, body)


def test_what_is_refused() -> None:
    def body(comm: ThreadComm) -> None:
        good = (comm, 0, MIB, True, 1, 1)
        for place, value, words in (
            (3, False, "use_cpu_rdma_storage"),
            (4, 0, "num_allocated_qps"),
            (5, 0, "qp_depth"),
            (2, -1, "num_rdma_storage_bytes"),
        ):
            with pytest.raises(EPException, match=f"EngramBuffer: {words}: got"):
                deep_ep.EngramBuffer(*good[:place], value, *good[place + 1 :])
        buffer = deep_ep.EngramBuffer(*good, explicitly_destroy=True)
        with pytest.raises(EPException, match="set_config before it"):
            buffer.fetch(torch.zeros(1, 1, 1, dtype=torch.int32))
        with pytest.raises(EPException, match="num_entries_per_layer: got 2097152 bytes"):
            buffer.set_config([1 << 16], 16, 1, 1)
        with pytest.raises(EPException, match=r"num_sf_packs: got 0 beside torch\.float8"):
            buffer.set_config([4], 16, 1, 1, torch.float8_e4m3fn)
        with pytest.raises(EPException, match="num_entries_per_layer: got an object of type int"):
            buffer.set_config(4, 16, 1, 1)
        for dtype in ("bf16", None):
            with pytest.raises(EPException, match=f"dtype: got {dtype!r}, an object"):
                buffer.set_config([4], 16, 1, 1, dtype)
        buffer.set_config([4], 16, 2, 1)
        with pytest.raises(EPException, match="tables that are not written; expected write before"):
            buffer.fetch(torch.zeros(1, 1, 1, dtype=torch.int32))
        bf16 = torch.zeros(4, 16, dtype=torch.bfloat16)
        for storages, sfs, words in (
            (None, None, "storages: got an object of type NoneType"),
            ([bf16], 1, "sfs: got an object of type int"),
            ([bf16, bf16], None, "storages: got 2 tensors"),
            ([bf16[:3]], None, "storage: got torch.bfloat16 of shape"),
            ([bf16], [torch.zeros(4, 1)], "sf: got some beside"),
        ):
            with pytest.raises(EPException, match=words):
                buffer.write(storages, sfs)
        buffer.write([bf16])
        for numbers, words in (
            (torch.zeros(1, 1, 1), "torch.int32 of 3 dimensions"),
            (torch.zeros(2, 1, 1, dtype=torch.int32), "2 layers"),
            (torch.zeros(1, 3, 1, dtype=torch.int32), "at most 2 tokens of 1 entries"),
        ):
            with pytest.raises(EPException, match=words):
                buffer.fetch(numbers)
        with pytest.raises(EPException, match="num_qps: got 2"):
            buffer.fetch(torch.zeros(1, 1, 1, dtype=torch.int32), num_qps=2)
        for number in (4, -1):
            match = (
                rf"fetch: indices\[0\]: got {number} at \[1, 0\]; expected at least 0 and below 4"
            )
            with pytest.raises(EPException, match=match):
                buffer.fetch(torch.tensor([[[0], [number]]], dtype=torch.int32))
        buffer.destroy()

        elastic = deep_ep.ElasticBuffer(comm, num_cpu_bytes=64)
        with pytest.raises(EPException, match="engram_write before it"):
            elastic.engram_fetch(torch.zeros(1, 1, dtype=torch.int32))
        with pytest.raises(EPException, match=r"128 bytes; expected at most 64, .*_size_hint"):
            elastic.engram_write(bf16)
        elastic.engram_write(torch.ones(2, 16, dtype=torch.bfloat16))
        fp8 = torch.zeros(3, 16, dtype=torch.float8_e4m3fn)
        for wrong, sf in (
            (bf16[:1], torch.ones(1, 1)),
            (fp8, None),
            (fp8, torch.ones(2, 1)),
        ):
            with pytest.raises(EPException, match="engram_write: sf: got"):
                elastic.engram_write(wrong, sf)
            data, _ = elastic.engram_fetch(torch.tensor([1], dtype=torch.int32))()
            assert torch.equal(data, torch.ones(1, 16, dtype=torch.bfloat16))
        with pytest.raises(EPException, match=r"engram_fetch: indices: got 2 at \[0, 0\]"):
            elastic.engram_fetch(torch.tensor([2], dtype=torch.int32))

    run_ranks(1, body)


def test_forms_that_differ() -> None:
    """All ranks raise the same, and what was written before stays."""
    good: tuple[Any, ...] = ([4], 16, 2, 1, torch.bfloat16)

    def body(comm: ThreadComm) -> list[str]:
        rank, said = comm.Get_rank(), []
        buffer = deep_ep.EngramBuffer(comm, 0, MIB, True, 1, 1, explicitly_destroy=True)
        buffer.set_config(*good)
        one = torch.full((4, 16), rank + 1, dtype=torch.bfloat16)
        buffer.write([one])
        for place, value in ((0, [6]), (0, [4, 4]), (1, 8), (4, torch.float16)):
            mine = (*good[:place], value, *good[place + 1 :]) if rank == 1 else good
            with pytest.raises(EPException) as caught:
                buffer.set_config(*mine)
            said.append(str(caught.value))
        (hook,) = buffer.fetch(torch.tensor([[[4]]], dtype=torch.int32))
        assert hook()[0, 0] == 2
        buffer.destroy()

        elastic = deep_ep.ElasticBuffer(comm, num_cpu_bytes=MIB, explicitly_destroy=True)
        elastic.engram_write(one)
        for part_of in (
            one[: 4 - rank],
            one[:, : 16 - rank],
            one.to((torch.half, torch.int16)[rank]),
        ):
            with pytest.raises(EPException) as caught:
                elastic.engram_write(part_of)
            said.append(str(caught.value))
        assert elastic.engram_fetch(torch.tensor([4], dtype=torch.int32))()[0][0, 0] == 2
        elastic.destroy()
        return said

    first, second = run_ranks(2, body)
    assert first == second
    assert first[:2] == [
        f"set_config: num_entries_per_layer: got {got} on rank 1; expected [4], as on rank 0"
        for got in ("[6]", "[4, 4]")
    ]
    shapes = ("torch.bfloat16 of shape (3, 16)", "torch.bfloat16 of shape (4, 16)")
    assert (
        first[4]
        == f"engram_write: storage: got {shapes[0]} on rank 1; expected {shapes[1]}, as on rank 0"
    )


def test_a_write_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that another one left alone in it has entries of either write."""
    monkeypatch.setenv("FERRY_DEADLINE", "0.5")

    def body(comm: ThreadComm) -> None:
        buffer = deep_ep.EngramBuffer(comm, 0, MIB, True, 1, 1, explicitly_destroy=True)
        buffer.set_config([4], 16, 2, 1)
        one = torch.ones(4, 16, dtype=torch.bfloat16)
        buffer.write([one])
        rank = comm.Get_rank()
        with pytest.raises(EPException if rank == 1 else ferry.Error):
            buffer.write([one[: 4 - rank]])
        if rank == 0:
            with pytest.raises(EPException, match="tables that are not written"):
                buffer.fetch(torch.zeros(1, 1, 1, dtype=torch.int32))
        comm.allgather(None)
        buffer.destroy()

    run_ranks(2, body)
