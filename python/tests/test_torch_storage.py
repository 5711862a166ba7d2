"""Results as torch's own memory: freed by `untyped_storage().resize_(0)`, and `record_stream`."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_threads import run_ranks

import ferry
import ferry.torch as ft
from ferry import torch_process_group, torch_reductions, torch_storage, torch_streams

TOKENS, HIDDEN, EXPERTS = 24, 64, 4


def exchanged(group: ferry.Group) -> tuple[Any, Any]:
    """A dispatch whose every token comes back to this very rank, and its combine."""
    x = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN)
    ids = torch.full((TOKENS, 1), group.rank * EXPERTS // group.size)
    received = group.dispatch(x, topk_idx=ids, topk_weights=torch.ones(TOKENS, 1))
    return received, group.combine(received.x, received.plan)


@pytest.mark.parametrize("kind", ["x", "view", "e4m3", "combined"])
def test_results_are_freed_by_resizing(kind: str) -> None:
    def body(group: ferry.Group) -> None:
        before = group.memory().arena_used_bytes
        received, combined = exchanged(group)
        tensor = combined.x if kind == "combined" else received.x
        if kind == "view":
            tensor = tensor[3:].view(-1, 2)
        if kind == "e4m3":
            ids = torch.full((TOKENS, 1), group.rank * EXPERTS // group.size)
            x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
            tensor = group.dispatch(x, topk_idx=ids, format="e4m3").x
            assert tensor.dtype == torch.float8_e4m3fn
        del received, combined
        held = group.memory().arena_used_bytes
        storage = tensor.untyped_storage()
        assert type(tensor) is torch.Tensor and storage.resizable() and storage.nbytes() > 0
        size = storage.nbytes()
        storage.resize_(0)
        assert storage.nbytes() == 0 and tensor.untyped_storage().data_ptr() == 0
        after = group.memory().arena_used_bytes
        assert after == before and (kind == "combined" or after < held)
        storage.resize_(size)  # torch's memory from now on
        assert not group.is_registered(tensor.data_ptr())
        assert (tensor.fill_(1).float() == 1).all()

    run_ranks(2, body, experts=EXPERTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["whole", "rows behind others", "columns", "shrunk"])
def test_freed_tensors_are_refused(kind: str, dtype: torch.dtype) -> None:
    whole = torch.ones(2 * TOKENS, HIDDEN).to(dtype)
    x = {
        "whole": whole,
        "rows behind others": whole[TOKENS:],
        "columns": whole.T[:HIDDEN],
        "shrunk": whole,
    }[kind]
    left = TOKENS if kind == "shrunk" else 0
    whole.untyped_storage().resize_(left)
    words = f"got a tensor whose storage was resized to {left} bytes; expected at least"

    def body(group: ferry.Group) -> None:
        plan = group.plan(torch.zeros(len(x), 1, dtype=torch.int64))
        with pytest.raises(ferry.InvalidArgumentError, match=f"dispatch: x: {words}"):
            group.dispatch(x, plan)
        group.dispatch(torch.ones(x.shape), plan)

    run_ranks(1, body, experts=EXPERTS)
    if kind != "columns":
        with pytest.raises(ferry.InvalidArgumentError, match=words):
            ferry.Collectives(ferry.threads(1)[0]).all_reduce(x)


def freed_view(*shape: int) -> torch.Tensor:
    """Not contiguous, so that torch reads it before Ferry does."""
    view = torch.ones(*shape, 2)[..., 0]
    view.untyped_storage().resize_(0)
    return view


def freed_negative() -> torch.Tensor:
    x = torch._neg_view(torch.ones(TOKENS, HIDDEN))  # type: ignore[attr-defined]
    x.untyped_storage().resize_(0)
    return x


ON_GROUP: dict[str, Callable[[ferry.Group], object]] = {
    "negative": lambda g: g.dispatch(freed_negative(), plan_of(g)),
    "dispatch": lambda g: ft.dispatch(g, plan_of(g), freed_view(TOKENS, HIDDEN)),
    "weights": lambda g: ft.dispatch(
        g, plan_of(g), torch.ones(TOKENS, HIDDEN), freed_view(TOKENS, 1)
    ),
    "combine": lambda g: ft.combine(g, plan_of(g), freed_view(TOKENS, HIDDEN)),
    "operator": lambda g: ft.dispatch(g, ft.plan(g, IDS), freed_view(TOKENS, HIDDEN)),
    "operator of sums": lambda g: ft.combine(g, ft.plan(g, IDS), freed_view(TOKENS, HIDDEN)),
    "decode": lambda g: ft.ExpertParallel(g, torch.nn.Identity(), decode_tokens=TOKENS).decode(
        freed_view(TOKENS, HIDDEN), IDS, torch.ones(TOKENS, 1)
    ),
}
IDS = torch.zeros(TOKENS, 1, dtype=torch.int64)


def plan_of(group: ferry.Group) -> Any:
    return group.plan(IDS)


@pytest.mark.parametrize("call", ON_GROUP)
def test_freed_views_are_refused_before_torch_reads_them(call: str) -> None:
    def body(group: ferry.Group) -> None:
        with pytest.raises(ferry.InvalidArgumentError, match="storage was resized to 0 bytes"):
            ON_GROUP[call](group)

    run_ranks(1, body, experts=EXPERTS)


@pytest.mark.parametrize("reads", ["reduced", "bytes", "written", "unpacked"])
def test_process_groups_refuse_freed_views(reads: str) -> None:
    x = freed_view(TOKENS)
    with ferry.Collectives(ferry.threads(1)[0]) as ranks:
        calls: dict[str, Callable[[], object]] = {
            "reduced": lambda: torch_reductions.all_reduce(ranks, x, dist.ReduceOp.SUM),
            "bytes": lambda: torch_process_group._bytes_of(x),
            "written": lambda: torch_process_group._Bytes(x),
            "unpacked": lambda: torch_process_group._unpack(torch.zeros(4 * TOKENS).byte(), [x]),
        }
        with pytest.raises(ferry.InvalidArgumentError, match="storage was resized to 0 bytes"):
            calls[reads]()


class Block(bytearray):
    """Memory that can be watched."""


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "set_": lambda x: x.set_(),
    ".data": lambda x: setattr(x, "data", torch.zeros(1)),
    "swap_tensors": lambda x: torch.utils.swap_tensors(x, torch.zeros(1)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_on_a_stream_keeps_the_memory_that_it_reads(change: str) -> None:
    changed = threading.Event()

    def body(group: ferry.Group) -> None:
        ids = torch.full((TOKENS, 1), (1 - group.rank) * EXPERTS // 2)
        plan, stream = group.plan(ids), ferry.Stream()
        if group.rank == 1:
            assert changed.wait(30)
        block = Block(TOKENS * HIDDEN * 4)
        kept = weakref.ref(block)
        x = torch.frombuffer(block, dtype=torch.float32).view(TOKENS, HIDDEN).fill_(group.rank)
        received = group.dispatch(x, plan, stream=stream)
        if group.rank == 0:
            CHANGES[change](x)
            del block
            gc.collect()
            alive = kept() is not None  # rank 1 has not come: nothing has been read
            changed.set()
            assert alive
        stream.synchronize()
        assert (received.x == 1 - group.rank).all()

    run_ranks(2, body, experts=EXPERTS)


def test_a_storage_of_another_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written where the fields were not found for certain."""
    seen = torch_storage._seen
    monkeypatch.setattr(torch_storage, "_seen", lambda storage: seen(storage)[:40] + bytes(40))
    monkeypatch.setattr(torch_storage, "set_storage", None)
    torch_storage._places.cache_clear()
    try:
        assert torch_storage._places() is None
        with pytest.raises(RuntimeError, match="not resizable"):
            run_ranks(1, lambda group: exchanged(group)[0].x.untyped_storage().resize_(0))
    finally:
        torch_storage._places.cache_clear()


class OnGpu:
    """What is asked of a group on a GPU."""

    device = "cpu"  # where the tensors of this test lie

    def __init__(self, first: int) -> None:
        self.first = first
        self.told: list[Any] = []

    def record_stream(self, address: int, stream: Any) -> None:
        if address < self.first:
            raise ferry.InvalidArgumentError("not mine")
        self.told.append(stream)


def test_streams_are_recorded_with_whose_memory_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs: list[Any] = []
    own, other = torch.ones(4), torch.ones(4)
    stream: Any = object()
    group = OnGpu(own.data_ptr())
    monkeypatch.setattr(torch_streams, "groups", lambda: [group])
    monkeypatch.setattr(torch_storage, "_of_group", lambda tensor: tensor is not other)
    monkeypatch.setattr(torch_storage, "_record_with_torch", lambda *given: torchs.append(given))
    monkeypatch.setattr(torch.Tensor, "record_stream", torch_storage._record_stream)
    own.record_stream(stream)
    own[2:].record_stream(stream)
    assert group.told == [stream, stream] and not torchs
    other.record_stream(stream)  # torch's, whose addresses no group is asked about
    group.first = own.data_ptr() + 64
    own.record_stream(stream)  # nobody's
    assert torchs == [(other, stream), (own, stream)] and len(group.told) == 2


def test_memory_of_the_cpu_is_no_groups() -> None:
    for tensor in (torch.ones(2), torch.ones(2).as_subclass(torch.nn.Parameter)):
        assert not torch_storage._of_group(tensor)
