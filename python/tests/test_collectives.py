"""Collectives from Python: arrays of every kind in and out, streams, and what is refused. The
arithmetic is tested in C++."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from rank_threads import DEADLINE

import ferry
from ferry.arguments import choice

RANKS = 3


def on_ranks(body: Callable[[ferry.Collectives], Any], **config: Any) -> list[Any]:
    """`body(collectives)` on ranks that are threads."""
    bootstraps = ferry.threads(RANKS)

    def one(rank: int) -> Any:
        config.setdefault("memory_bytes", 1 << 20)
        with ferry.Collectives(bootstraps[rank], deadline=DEADLINE, **config) as ranks:
            result = body(ranks)
            ranks.barrier()
            return result

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


@pytest.mark.parametrize("domain_size", [0, 2])
def test_arrays_of_every_kind_are_reduced_in_place(domain_size: int) -> None:
    def body(ranks: ferry.Collectives) -> None:
        total = sum(range(1, RANKS + 1))
        mine = ranks.rank + 1
        arrays = [
            np.full((2, 3, 2, 2), mine, np.float32),
            np.full(5, mine, np.int64),
            np.full((3, 1), mine, ml_dtypes.bfloat16),
            torch.full((2, 3, 2, 2), mine, dtype=torch.bfloat16),
            torch.tensor(mine, dtype=torch.float32),
            ranks.empty((4, 8), "f16"),
            ranks.empty((4, 8), torch.float32),
        ]
        for array in arrays:
            array[...] = mine
            assert ranks.all_reduce(array).ready()
            assert (array == total).all()
        tagged = np.full(4, 0x3F80, np.uint16)  # 1.0 as bf16
        ranks.all_reduce(tagged, dtype="bf16")
        assert tagged.view(ml_dtypes.bfloat16).tolist() == [RANKS] * 4

    on_ranks(body, domain_size=domain_size)


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_module_that_another_thread_imports_is_in_nobodys_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ModuleType(name)
    half.__spec__ = ModuleSpec(name, None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    x: Any = np.ones(3, np.float32) if name == "torch" else torch.ones(3)

    def body(ranks: ferry.Collectives) -> None:
        ranks.all_reduce(mine := x + 0)
        assert mine.tolist() == [RANKS] * 3
        with pytest.raises(ferry.InvalidArgumentError, match="x: got"):
            ranks.all_reduce("x")

    monkeypatch.setitem(sys.modules, name, half)
    on_ranks(body)


def test_blocks_go_where_they_belong() -> None:
    def body(ranks: ferry.Collectives) -> None:
        stream = ferry.Stream()
        x = torch.arange(6.0) + 10 * ranks.rank
        gathered = torch.empty(RANKS, 6)
        ranks.all_gather(x, gathered, stream=stream).wait()
        assert torch.equal(gathered, torch.arange(6.0) + 10 * torch.arange(3.0)[:, None])
        part = torch.empty(2)
        ranks.reduce_scatter(x, part, op="max", stream=stream)
        stream.synchronize()
        assert torch.equal(part, torch.arange(6.0)[2 * ranks.rank :][:2] + 20)
        ranks.broadcast(x, 1)
        assert torch.equal(x, torch.arange(6.0) + 10)
        sent = torch.tensor([ranks.rank] * 3)
        got = torch.empty(3, dtype=torch.int64)
        ranks.all_to_all(sent, got)
        assert got.tolist() == [0, 1, 2]
        lengths = [1, 0, 2]
        many = torch.empty(3 * lengths[ranks.rank], dtype=torch.int64)
        counts = [lengths[ranks.rank]] * 3
        ranks.all_to_all(sent, many, send_counts=lengths, recv_counts=counts)
        assert many.tolist() == [r for r in range(3) for _ in range(lengths[ranks.rank])]

    on_ranks(body)


@pytest.mark.parametrize("format", ["bf16", "f16", "e4m3", "automatic"])
def test_sums_cross_between_domains_in_codes(format: str) -> None:
    def body(ranks: ferry.Collectives) -> tuple[bytes, int]:
        exact = np.random.default_rng(ranks.rank).standard_normal(60_000, np.float32)
        coded, block = exact.copy(), np.empty(20_000, np.float32)
        ranks.reduce_scatter(exact, block, op="mean", format=format)
        ranks.all_reduce(coded, op="mean", format=format)
        ranks.all_reduce(exact, op="mean")
        error = np.linalg.norm(coded - exact) / np.linalg.norm(exact)
        assert 0 < error < 0.05
        assert np.linalg.norm(block - exact[ranks.rank * 20_000 :][:20_000]) < 0.05 * 141
        coded[7] = np.nan
        stats = ranks.compression()
        assert stats.fallen_back == 0
        ranks.all_reduce(coded, format=format)
        assert np.isnan(coded[7])
        assert not np.isnan(coded[8:]).any()
        assert stats.calls == 2
        assert stats.wire_bytes < 0.55 * stats.exact_bytes
        return coded.tobytes(), ranks.compression().nonfinite

    results = on_ranks(body, domain_size=2)
    assert len({bits for bits, _ in results}) == 1
    assert sum(chunks for _, chunks in results) >= 1


def test_what_to_do_with_other_dtypes_is_said() -> None:
    def body(ranks: ferry.Collectives) -> None:
        x, out = np.ones(2), np.empty((RANKS, 2))
        with pytest.raises(ferry.InvalidArgumentError, match=r"float64; .* its bytes: \.view"):
            ranks.all_gather(x, out)
        ranks.all_gather(x.view(np.uint8), out.view(np.uint8))
        assert (out == 1).all()

    on_ranks(body)


def test_a_gradient_that_the_call_would_drop_is_refused() -> None:
    def body(ranks: ferry.Collectives) -> None:
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(ferry.InvalidArgumentError, match="requires a gradient"):
            ranks.all_reduce(x)
        with torch.no_grad():
            ranks.all_reduce(x)
        assert x.tolist() == [RANKS] * 3

    on_ranks(body)


def test_tensors_of_torch_that_are_not_plain() -> None:
    """Most are taken by their address; the others must come out the same."""

    def body(ranks: ferry.Collectives) -> None:
        mine = float(ranks.rank + 1)
        whole = torch.zeros(2, 4, dtype=torch.bfloat16)
        for x in (whole[1], whole[1:, :2], torch.tensor(0.0), torch.empty(0), torch.zeros(0, 3)):
            x.fill_(mine)
            ranks.all_reduce(x)
            assert (x == 6.0).all()
        assert (whole[0] == 0).all()
        with torch.inference_mode():
            x = torch.full((3,), mine)
            ranks.all_reduce(x)
        assert x.tolist() == [6.0] * 3
        negative = torch.complex(torch.zeros(3), torch.full((3,), -mine)).conj().imag
        assert negative.is_neg()
        gathered = torch.empty(RANKS, 3)
        ranks.all_gather(negative.contiguous(), gathered)
        assert gathered[:, 0].tolist() == [1.0, 2.0, 3.0]
        with pytest.raises(ferry.InvalidArgumentError, match="f32, bf16, f16, i32"):
            ranks.all_reduce(torch.zeros(3, dtype=torch.float64))

    on_ranks(body)


def test_autograd_hears_that_a_saved_tensor_was_overwritten() -> None:
    def body(ranks: ferry.Collectives) -> None:
        x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        product = (x * weight).sum()
        ranks.broadcast(x, 0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    on_ranks(body)


def test_auto_and_automatic_are_one_word() -> None:
    assert choice("x", "auto", {"automatic": 1}) == choice("x", "automatic", {"auto": 1}) == 1
    assert choice("x", "auto", {"auto": 1, "automatic": 2}) == 1
    with pytest.raises(ferry.InvalidArgumentError, match="got 'auto'; expected one of \"a\""):
        choice("x", "auto", {"a": 1})

    def body(ranks: ferry.Collectives) -> None:
        x = np.ones(6, np.float32)
        ranks.all_reduce(x, algorithm="auto", format="auto")
        assert (x == ranks.size).all()

    on_ranks(body)


def test_what_cannot_be_is_refused_with_words() -> None:
    def body(ranks: ferry.Collectives) -> None:
        x, out = np.ones(6, np.float32), np.ones(6, np.float32)

        def counted(counts: Any) -> Callable[[], Any]:
            return lambda: ranks.all_to_all(x, out, send_counts=counts, recv_counts=[2, 2, 2])

        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("all_reduce: x: got an array with strides", lambda: ranks.all_reduce(x[::2])),
            (
                "all_reduce: x: got a tensor with strides",
                lambda: ranks.all_reduce(torch.ones(4, 4).T),
            ),
            ("all_reduce: x: got 3", lambda: ranks.all_reduce(3)),
            ("all_reduce: op: got 'median'", lambda: ranks.all_reduce(x, op="median")),
            ("all_reduce: format: got 'int4'", lambda: ranks.all_reduce(x, format="int4")),
            (
                "format: got e4m3 for the max of f32",
                lambda: ranks.all_reduce(x, op="max", format="e4m3"),
            ),
            ("all_reduce: x: got dtype", lambda: ranks.all_reduce(np.ones(3))),
            ("broadcast: root: got 3", lambda: ranks.broadcast(x, 3)),
            ("all_gather: out: got 6 elements", lambda: ranks.all_gather(x, out)),
            ("reduce_scatter: x: got 6 elements", lambda: ranks.reduce_scatter(x, out)),
            ("recv_counts: got one of the two", lambda: ranks.all_to_all(x, out, send_counts=[6])),
            (
                "all_to_all: send_counts: got 2 counts",
                lambda: ranks.all_to_all(x, out, send_counts=[3, 3], recv_counts=[2, 2, 2]),
            ),
            ("all_to_all: send_counts: got 6 (int); expected a sequence", counted(6)),
            ("shares: got 5 (int); expected a sequence", lambda: ranks.all_reduce(x, shares=5)),
            (
                "all_reduce: shares: got some with algorithm ring; expected none",
                lambda: ranks.all_reduce(x, algorithm="ring", shares=[1]),
            ),
            ("any_order: got 'yes'", lambda: ranks.all_reduce(x, any_order="yes")),
            ("choice: any_order: got 1 (int)", lambda: ranks.choice(6, any_order=1)),
            ("all_to_all: stream: got 1", lambda: ranks.all_to_all(x, out, stream=1)),
        ]
        for words, call in wrong:
            with pytest.raises(ferry.InvalidArgumentError) as caught:
                call()
            assert words in str(caught.value), caught.value

    on_ranks(body)


def test_calls_that_differ_are_named_and_the_next_one_works() -> None:
    def body(ranks: ferry.Collectives) -> None:
        with pytest.raises(ferry.MismatchError, match="the number of elements is"):
            ranks.all_reduce(np.ones(3 + (ranks.rank == 1), np.float32))
        x = np.ones(3, np.float32)
        ranks.all_reduce(x)
        assert x.tolist() == [RANKS] * 3

    on_ranks(body)


def test_it_ends_with_its_block() -> None:
    def body(ranks: ferry.Collectives) -> ferry.Collectives:
        assert repr(ranks) == f"<ferry.Collectives: rank {ranks.rank} of 3, fabric local>"
        assert ranks.memory().arena_bytes >= 1 << 20
        return ranks

    for ranks in on_ranks(body):
        assert ranks.destroyed
        assert repr(ranks) == "<ferry.Collectives, not usable>"
        with pytest.raises(ferry.DestroyedError):
            ranks.all_reduce(np.ones(3, np.float32))


@pytest.mark.parametrize("elements", [2, 40_000])
@pytest.mark.parametrize("domain_size", [0, 1])
def test_equal_blocks_meet_counts_that_are_equal(elements: int, domain_size: int) -> None:
    """The messages of the one say one number, those of the other begin with all counts."""

    def body(ranks: ferry.Collectives) -> None:
        x = np.repeat(np.arange(RANKS) + 10 * ranks.rank, elements)
        out = np.empty_like(x)
        counts = [elements] * RANKS
        given = {"send_counts": counts, "recv_counts": counts} if ranks.rank == 1 else {}
        ranks.all_to_all(x, out, **given)
        assert out.tolist() == np.repeat(10 * np.arange(RANKS) + ranks.rank, elements).tolist()
        if ranks.rank == 1:
            given["send_counts"] = [elements + 1, elements - 1, elements]
        expected = f"rank 1 sends {elements + 1} elements to rank 0, which expects {elements}"
        with pytest.raises(ferry.MismatchError, match=expected):
            ranks.all_to_all(x, out, **given)
        longer = ranks.rank == 2
        with pytest.raises(ferry.MismatchError, match="which expects"):
            ranks.all_to_all(x[: RANKS * (elements - longer)], out[: RANKS * (elements - longer)])
        ranks.barrier()

    on_ranks(body, domain_size=domain_size)


def test_plain_arrays_of_numpy_take_the_short_way() -> None:
    read_only = np.ones(3, np.float32)
    read_only.flags.writeable = False

    def body(ranks: ferry.Collectives) -> None:
        short = ranks._raw.all_reduce_plain
        total = ferry.collectives.OPS["sum"]
        whole = np.ones((2, 3), np.float16)
        plain = [
            np.ones((2, 2, 2, 2), np.float32),
            whole[1],
            np.array(1, np.int32),
            np.ones(3, np.longlong),
            np.ones(3, np.int64),
            np.ones(0, np.uint8),
        ]
        for x in plain:
            assert short(x, total)
            assert (x == RANKS).all()
        assert (whole[0] == 1).all()
        odd = [
            np.ones(3),
            np.ones((4, 4), np.float32)[:, :2],
            np.ones(3, ">f4"),
            np.ones(3, np.bool_),
            np.ones(3, np.uint32),
            np.zeros(3, [("a", np.float32)])["a"].astype("datetime64[s]"),
            np.ones(3, np.float32).view(np.recarray),
            read_only,
        ]
        for x in odd:
            assert not short(x, total)
        x, out = np.full(RANKS, ranks.rank, np.int64), np.empty(RANKS, np.int64)
        assert ranks._raw.all_to_all_plain(x, out) and out.tolist() == [0, 1, 2]
        assert not ranks._raw.all_to_all_plain(x, read_only)
        assert ranks._raw.all_gather_plain(x[:1], out) and out.tolist() == [0, 1, 2]
        assert ranks._raw.reduce_scatter_plain(out, x[:1], total) and x[0] == RANKS * ranks.rank
        assert ranks._raw.broadcast_plain(x, 1) and x.tolist() == [3, 1, 1]

    on_ranks(body)


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
def test_plain_tensors_take_the_short_way() -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no DLPack exchange table")

    def body(ranks: ferry.Collectives) -> None:
        short = ranks._raw.all_reduce_plain
        total = ferry.collectives.OPS["sum"]
        plain = [
            torch.ones(2, 3),
            torch.ones(3, dtype=torch.bfloat16),
            torch.ones(6, dtype=torch.int64)[2:4],
            torch.tensor(1.0),
            torch.ones(4, 1)[:, :1],
        ]
        for x in plain:
            before = x._version
            assert short(x, total)
            assert (x == RANKS).all() and x._version > before
        odd = [
            torch.ones(3, requires_grad=True),
            torch.ones(4, 4)[:, :2],
            torch.ones(3, dtype=torch.complex64).conj().imag,
            torch.ones(3).to_sparse(),
            torch.ones(3, 3).to_sparse_csr(),
            torch.ones(3).to_mkldnn(),
            torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
            torch.nn.Parameter(torch.ones(3), requires_grad=False),
            torch.ones(3, device="meta"),
            torch.ones(3, dtype=torch.bool),
            None,
            3,
        ]
        for x in odd:
            assert not short(x, total)
        out = torch.empty(RANKS)
        assert ranks._raw.all_to_all_plain(torch.full((RANKS,), float(ranks.rank)), out)
        assert out.tolist() == [0, 1, 2]
        assert not ranks._raw.all_to_all_plain(torch.ones(RANKS, dtype=torch.bool), out)
        with torch.inference_mode():
            x = torch.ones(3)
            assert short(x, total) and (x == RANKS).all()

    on_ranks(body)
