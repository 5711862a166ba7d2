"""The order of streams of ferry.torch_gpu_copies, with streams that write down what they are told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ferry import torch_gpu_copies
from ferry.torch_gpu_copies import _beside


class Stream:
    def __init__(self, device: int = 0, priority: int = 0) -> None:
        self.device, self.waits = device, list[Any]()

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)

    def record_event(self) -> tuple[str, Stream]:
        return "end", self

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


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
