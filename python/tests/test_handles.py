"""Groups that `ferry.torch.record_stream` looks for, while other threads make and drop things."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import numpy as np
import pytest

import ferry
import ferry.torch_streams
from ferry import handles


class Other:
    """Some thing with a number."""


def test_threads_make_things_meanwhile() -> None:
    stop, made = threading.Event(), threading.Event()

    def make() -> None:
        kept: list[Any] = []
        while not stop.is_set():
            kept.append(Other())
            handles.register_group(kept[-1])
            made.set()
            if len(kept) > 200:
                kept.clear()

    before = sys.getswitchinterval()
    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        assert made.wait(20)
        for _ in range(20000):
            handles.groups()
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()


def test_groups_alone_are_known_and_not_kept() -> None:
    gc.collect()
    before = len(handles.groups())
    with ferry.Group(ferry.threads(1)[0], experts=2) as group:
        plan = group.plan(np.zeros((4, 1), np.int64))
        number = handles.register(plan)
        assert handles.find("test", number, "plan", "") is plan
        assert len(handles.groups()) == before + 1 and group in handles.groups()
    del group, plan
    gc.collect()
    assert len(handles.groups()) == before


class OnGpu:
    """What is asked of a group on a GPU."""

    device = "cuda:0"

    def __init__(self, error: type[Exception] | None) -> None:
        self.error = error
        self.told: list[tuple[int, Any]] = []

    def record_stream(self, address: int, stream: Any) -> None:
        if self.error is not None:
            raise self.error("not mine")
        self.told.append((address, stream))


def test_destroyed_groups_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = OnGpu(None)
    others = [OnGpu(ferry.DestroyedError), OnGpu(ferry.InvalidArgumentError)]
    stream: Any = object()
    monkeypatch.setattr(ferry.torch_streams, "groups", lambda: [*others, owner])
    assert ferry.torch_streams.record_with_group(64, "cuda:0", stream)
    assert owner.told == [(64, stream)]
    assert not ferry.torch_streams.record_with_group(64, "cuda:1", stream)
    monkeypatch.setattr(ferry.torch_streams, "groups", lambda: others)
    assert not ferry.torch_streams.record_with_group(64, "cuda:0", stream)
