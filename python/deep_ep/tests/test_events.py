"""Events of V2 and V2.5: hooks behind a wait, and what a wait lets go."""

from __future__ import annotations

import pytest
import torch

import deep_ep
import deep_ep.utils.event


def test_a_wait_runs_the_hook_once_and_returns_its_result() -> None:
    event = deep_ep.EventOverlap(deep_ep.EventHandle())
    assert event.wait() is None
    calls = []
    event.register_hook_after_wait(lambda: calls.append(1) or "made")
    with pytest.raises(AssertionError, match="there is a hook already"):
        event.register_hook_after_wait(lambda: None)
    assert event.current_stream_wait() == "made" and calls == [1]
    assert event.wait() is None and calls == [1]
    event.register_hook_after_wait(lambda: "next")
    assert event.wait() == "next"


def test_a_hook_may_register_another() -> None:
    event = deep_ep.EventOverlap(deep_ep.EventHandle())
    event.register_hook_after_wait(lambda: event.register_hook_after_wait(lambda: 2) or 1)
    assert (event.wait(), event.wait()) == (1, 2)


@pytest.mark.parametrize("release", [False, True])
def test_a_wait_may_let_the_event_go(release: bool) -> None:
    event = deep_ep.EventOverlap(deep_ep.EventHandle(), (torch.zeros(1),))
    event.current_stream_wait(release_handle=release)
    assert (event.event is None) == release
    if release:
        with pytest.raises(AssertionError, match="there is no event"):
            event.wait()


def test_blocks() -> None:
    """A block waits at its end, in the way that the call before it said, and once."""
    calls = []
    event = deep_ep.EventOverlap(deep_ep.EventHandle())
    event.register_hook_after_wait(lambda: calls.append(1))
    with event(release_handle=False) as same:
        assert same is event and not calls
    assert calls == [1] and event.event is not None
    with event(release_handle=True):
        pass
    assert event.event is None
    with event:  # there is nothing left to wait for
        pass
    event.event = deep_ep.EventHandle()
    with event:
        pass
    assert event.event is not None


def test_names() -> None:
    assert deep_ep.utils.event.EventOverlap is deep_ep.EventOverlap
    assert deep_ep.utils.event.EventHandle is deep_ep.utils.EventHandle is deep_ep.EventHandle
