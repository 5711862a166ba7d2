"""Which stream waits for what, as far as it shows without a GPU: stand-ins write down what is asked
of streams and events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_buffers import run_buffers
from reference import make_job
from throughput_calls import dispatched

import ferry
from deep_ep import handles, streams
from deep_ep.errors import EPException


class Memory(torch.Tensor):
    """A tensor that says which streams it was told of."""

    told: list[Any]

    def record_stream(self, stream: Any) -> None:
        self.told.append(stream)


class DestroyedGroup:
    def record_stream(self, *_: Any) -> None:
        raise ferry.DestroyedError("a test's")


def test_results_of_a_destroyed_group_are_recorded_with_torch() -> None:
    stream: Any = object()
    memory: Any = torch.ones(1).as_subclass(Memory)
    memory.told = []
    group: Any = DestroyedGroup()
    streams._record(group, memory, stream)
    assert memory.told == [stream]


class Event:
    def __init__(self) -> None:
        self.waits = 0

    def stream_wait(self, stream: Any) -> None:
        assert stream is None  # the current one
        self.waits += 1


@pytest.mark.parametrize("size", [2, 16])
def test_a_handle_waits_for_its_call(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Before it computes an element, and once; then its parts are used by the current stream."""

    def body(buffer: Any) -> None:
        job = make_job(buffer.group_size)
        handle = dispatched(buffer, "cpu", job, job.x[buffer.rank])[4]
        event: Any = Event()
        handle.after(event)
        assert handle[0] is not None and event.waits == 0  # it was there from the beginning
        before = len(told)
        parts = {id(part) for part in handle._parts()}
        assert len(parts) >= 3 and [*handle] and handle[1] is not None
        assert event.waits == 1
        assert size > 2 or len(told) >= before + len(parts)

    told: list[Any] = []
    monkeypatch.setattr(handles, "record_stream", told.append)
    run_buffers(size, body)
    assert told


def test_a_destroyed_buffer_has_no_stream() -> None:
    """Calls that would run on the communication stream of a GPU are refused as all others are."""
    with pytest.raises(EPException, match="this Buffer is destroyed"):
        streams.Turn("combine", None, torch.device("cuda", 0), None, True)


class Stream:
    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


def test_a_hook_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """That stream waits for the one that the rows come on, after they were asked for."""
    began, other = Stream(), Stream()
    current = [began]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    received: list[int] = []
    memory: Any = torch.ones(1).as_subclass(Memory)
    memory.told = []
    group: Any = DestroyedGroup()

    def receive() -> None:
        received.append(len(other.waited))

    hook = streams.hook_of(receive, torch.device("cuda", 0), group, (memory, None))
    hook()
    assert received == [0] and not began.waited and not memory.told
    current[0] = other
    hook()
    assert received == [0, 0] and other.waited == [began] and memory.told == [other]
    assert streams.hook_of(receive, torch.device("cpu"), group, ()) is receive
