"""`deep_ep.utils` and the other modules that V2 and V2.5 have, beside loops and by hand."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from rank_buffers import ThreadComm, run_ranks

import deep_ep
import deep_ep._C
import deep_ep.buffers.elastic
import deep_ep.buffers.legacy
import deep_ep.comm
import deep_ep.utils.envs as envs
import deep_ep.utils.math as maths
import deep_ep.utils.semantic as semantic
import ferry
from deep_ep.errors import EPException


def test_integers() -> None:
    assert [maths.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [maths.align(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert maths.safe_div(0, 0) == 0 and maths.safe_div(3, 2) == 1.5
    with pytest.raises(ZeroDivisionError):
        maths.safe_div(1, 0)


def test_differences_and_hashes() -> None:
    x = torch.tensor([1.0, 2.0, -3.0])
    assert maths.calc_diff(x, x) == pytest.approx(0)
    a, b = [2.0, 3.0, -2.0], [3.0, 3.0, -2.0]  # x + 1 and y + 1
    expected = 1 - 2 * sum(p * q for p, q in zip(a, b)) / sum(p * p + q * q for p, q in zip(a, b))
    assert maths.calc_diff(x, torch.tensor([2.0, 2.0, -3.0])) == pytest.approx(expected)
    words = torch.tensor([3, 4], dtype=torch.int32)
    assert maths.hash_tensor(words.view(torch.uint8)) == 7
    assert maths.hash_tensors(words, (words[:1], None), [words]) == 7 ^ 3 ^ 7
    assert maths.count_bytes(x, (words, [None, x.double()])) == 12 + 8 + 24


@pytest.mark.parametrize("hidden", [64, 128, 300])
def test_casts(hidden: int) -> None:
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[2] = 0
    values, scales = maths.per_token_cast_to_fp8(x)
    assert values.shape == x.shape and scales.shape == (5, math.ceil(hidden / 128))
    for token in range(5):
        for block in range(scales.shape[1]):
            part = x[token, block * 128 :][:128].float()
            amax = max(1e-4, float(part.abs().max()))
            assert float(scales[token, block]) == pytest.approx(amax / 448)
            wanted = (part * (448 / torch.tensor(amax))).to(torch.float8_e4m3fn).float()
            assert torch.equal(values[token, block * 128 :][:128].float(), wanted)
    back = maths.per_token_cast_back(values, scales)
    assert back.dtype == torch.bfloat16 and back.shape == x.shape
    assert torch.allclose(back.float(), x.float(), rtol=0.07, atol=1e-2)


def test_casts_of_packed_exponents() -> None:
    values = torch.ones(2, 512).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128, 126, 130], [127, 127, 127, 120]], dtype=torch.uint8)
    back = maths.per_token_cast_back(values, exponents.view(torch.int32))
    assert back[:, ::128].tolist() == [[1, 2, 0.5, 8], [1, 1, 1, 2**-7]]


def test_routes() -> None:
    ids = torch.tensor([[3, 1, 3, -1], [-1, -1, -1, -1], [0, 2, 1, 3]])
    maths.inplace_unique(ids, 4)
    assert ids.tolist() == [[3, 1, -1, -1], [-1] * 4, [3, 2, 1, 0]]
    wide = torch.tensor([[1, 1, 0]])
    maths.inplace_unique(wide, 2)
    assert wide.tolist() == [[1, 0, -1]]
    scores = torch.arange(1.0, 9).view(2, 4)
    kept = maths.create_grouped_scores(scores, torch.tensor([[1], [0]]), 2)
    assert kept.tolist() == [[0, 0, 3, 4], [5, 6, 0, 0]]


def test_defaults_and_caches() -> None:
    assert semantic.value_or(None, 3) == 3 and semantic.value_or(0, 3) == 0

    class Counter:
        calls = 0

        @semantic.weak_lru(maxsize=None)
        def square(self, x: int) -> int:
            self.calls += 1
            return x * x

    one = Counter()
    assert (one.square(3), one.square(3), one.square(4)) == (9, 9, 16) and one.calls == 2
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_what_is_asked_of_a_group(size: int) -> None:
    def body(comm: ThreadComm) -> None:
        for ask in (envs.get_physical_domain_size, deep_ep.get_logical_domain_size):
            assert ask(comm) == (1, size)
        assert deep_ep.get_logical_domain_size(comm, allow_hybrid_mode=False) == (1, size)
        buffer = deep_ep.ElasticBuffer(comm)
        assert deep_ep.get_physical_domain_size(buffer) == (1, size)
        comm.allgather(None)

    run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_functions_on_buffers(size: int) -> None:
    def body(comm: ThreadComm) -> None:
        bucket = deep_ep.BucketBuffer(comm, 64)
        elastic = deep_ep.ElasticBuffer(comm, allow_hybrid_mode=False)
        for buffer, contexts in ((bucket, "None or 0 to 0"), (elastic, "None or 0")):
            deep_ep.comm.barrier(buffer)
            deep_ep.comm.barrier(buffer, False, True, False, context_idx=0)
            assert deep_ep.comm.get_physical_domain_size(buffer) == (1, size)
            assert deep_ep.comm.get_logical_domain_size(buffer, True) == (1, size)
            with pytest.raises(EPException, match=f"context_idx: got 1; expected {contexts}"):
                deep_ep.comm.barrier(buffer, context_idx=1)
        assert deep_ep.comm.get_logical_domain_size(comm) == (1, size)
        if not torch.cuda.is_available():
            with pytest.raises(EPException, match="get_comm_stream: this machine: got no GPU"):
                deep_ep.comm.get_comm_stream(elastic)
        comm.allgather(None)

    run_ranks(size, body)


def test_deterministic_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    envs.check_torch_deterministic()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(AssertionError, match="fill_uninitialized_memory"):
        envs.check_torch_deterministic()


def test_names() -> None:
    extension: Any = deep_ep._C
    assert extension.topk_idx_t == deep_ep.topk_idx_t and extension.Config is deep_ep.Config
    assert extension.get_elastic_buffer_alignment() == extension.get_num_allocation_alignment()
    assert deep_ep.get_num_tma_alignment() == extension.get_num_rdma_alignment() == 32
    assert deep_ep.buffers.legacy.Buffer is deep_ep.Buffer
    assert deep_ep.buffers.elastic.ElasticBuffer is deep_ep.ElasticBuffer


def test_functions_on_what_is_no_buffer() -> None:
    comm = ThreadComm(ferry.threads(1)[0])
    gone = deep_ep.BucketBuffer(comm, 64, explicitly_destroy=True)
    gone.destroy()
    for call in (deep_ep.comm.barrier, deep_ep.comm.get_comm_stream):
        for wrong in (5, None, "x", deep_ep.BucketBuffer):
            with pytest.raises(EPException, match=r"buffer: got .*; expected a buffer"):
                call(wrong)
    for call in (
        deep_ep.comm.barrier,
        deep_ep.comm.get_comm_stream,
        deep_ep.comm.get_physical_domain_size,
        deep_ep.get_logical_domain_size,
    ):
        with pytest.raises(EPException, match="this Buffer is destroyed"):
            call(gone)
    for wrong in (5, None, "x", torch.ones(2)):
        for hint in (
            lambda group: deep_ep.EPBuffer.get_buffer_size_hint(group, 8, 64),
            lambda group: deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes(
                group, (2,), torch.int8
            ),
        ):
            with pytest.raises(EPException, match=r"group: got .*; expected a process group"):
                hint(wrong)


def test_sizes_of_small_integers() -> None:
    """A product of such numbers of NumPy wraps, or does not exist."""
    small, one = np.int8(100), np.int32(1 << 20)
    engram = deep_ep.EngramBuffer
    assert engram.get_theoretical_config(None, small, small, small) == (62500, 16, False)
    sizes = (2, [one], one, one, small)
    assert engram.get_storage_size_hint(*sizes) == (one.item() ** 2 * 200, 1 << 41)
    low = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert low(small, np.int16(7168), np.int8(8), np.int8(64)) == low(100, 7168, 8, 64)
    config = deep_ep.Config(20)
    for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
        assert hint(np.int16(14336), np.int8(16)) == hint(14336, 16)
        for wrong in (("x", 16), (64, "x"), (-1, 16), (64, 0)):
            with pytest.raises(EPException, match=r"got .*; expected"):
                hint(*wrong)
    for name in ("num_max_tokens", "num_entries_per_token"):
        given = {"num_entries_per_layer": [1], "hidden": 8, "num_max_tokens": 1}
        given |= {"num_entries_per_token": 1, name: "x"}
        with pytest.raises(EPException, match=f"{name}: got 'x'"):
            engram.get_storage_size_hint(None, **given)
