"""Which stream waits for what, as far as it shows without a GPU: stand-ins write down what is asked
of streams and events."""

from __future__ import annotations

from typing import Any

import torch

import ferry
from deep_ep import streams


class Memory(torch.Tensor):
    """A tensor that says which streams it was told of."""

    told: list[Any]

    def record_stream(self, stream: Any) -> None:
        self.told.append(stream)


class DestroyedGroup:
    def record_stream(self, *_: Any) -> None:
        raise ferry.Destroyed("a test's")


def test_results_of_a_destroyed_group_are_recorded_with_torch() -> None:
    stream: Any = object()
    memory: Any = torch.ones(1).as_subclass(Memory)
    memory.told = []
    group: Any = DestroyedGroup()
    streams._record(group, memory, stream)
    assert memory.told == [stream]
