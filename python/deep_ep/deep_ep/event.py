"""Points of a stream that later work can wait for."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from deep_ep.errors import require_flags


class EventHandle:
    """The point that the current CUDA stream has reached now. Without CUDA everything before it is
    done already."""

    def __init__(self, stream: Any = None) -> None:
        self._event: Any = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream if stream is not None else torch.cuda.current_stream())

    def current_stream_wait(self) -> None:
        """What comes on the current stream from now on runs after this point."""
        self.stream_wait(None)

    def stream_wait(self, stream: Any) -> None:
        """The same for any stream; None: the current one."""
        if self._event is not None:
            (stream if stream is not None else torch.cuda.current_stream()).wait_event(self._event)


class EventOverlap:
    """An event, or none, and tensors that are kept as long as this object.

    As a context manager it waits at the end of the block: what stands in the block overlaps with
    the communication.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Let the current stream wait for the event, which must be there; what the hook of a call
        returned, if there is one: it runs once, behind the first wait.

        release_handle: drop the event, and with it what it keeps.
        """
        if type(release_handle) is not bool:
            require_flags("current_stream_wait", release_handle=release_handle)
        assert self.event is not None, (
            "EventOverlap: there is no event; expected one of a call with async_finish=True or "
            "async_with_compute_stream=True, or of Buffer.capture()"
        )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """`current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Call it behind the next wait, which returns what it returns."""
        assert self.hook_after_wait is None, (
            "EventOverlap: there is a hook already; expected one for each wait"
        )
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For a `with` block, which then waits with this release_handle."""
        require_flags("EventOverlap", release_handle=release_handle)
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)
