"""The order of streams of ferry.torch_gpu_copies: streams that write down what they are told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ferry import torch_gpu_copies
from ferry.torch_gpu_copies import _beside, _GpuBatch


class Stream:
    def __init__(self, device: int = 0, priority: int = 0) -> None:
        self.device, self.waits = device, list[Any]()

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)

    def record_event(self) -> tuple[str, Stream]:
        return "end", self

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class Sums:
    def __init__(self) -> None:
        self.streams = list[Stream]()

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


class Ranks:
    _gpu = 1


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Torch's current stream of each GPU; 0 is its current GPU."""
    made = [Stream(0), Stream(1)]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=0: made[device])
    return made


def test_the_gpu_of_the_ranks_waits_for_the_end_of_moves(current: list[Stream]) -> None:
    ranks: Any = Ranks()
    end = _beside(ranks, lambda: None)
    side: Any = torch_gpu_copies._streams[ranks]
    assert side.waits == [current[1]]
    end.wait()
    assert current[1].waits == [("end", side)]
    assert not current[0].waits


def test_moves_that_fail_are_awaited(current: list[Stream]) -> None:
    ranks: Any = Ranks()

    def moves() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        _beside(ranks, moves)
    assert current[1].waits == [torch_gpu_copies._streams[ranks]]


def test_sums_that_nobody_awaits_are_held_until_they_are_made(current: list[Stream]) -> None:
    ranks: Any = Ranks()
    batch, sums = _GpuBatch.__new__(_GpuBatch), Sums()
    its: Any = [None, (sums, _beside(ranks, lambda: None))]
    batch._sums = its
    del batch
    assert sums.streams == [torch_gpu_copies._streams[ranks]]
