"""Which stream an exchange runs on, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import ferry
from deep_ep.errors import refuse, refuse_destroyed, require, require_flags
from deep_ep.event import EventHandle, EventOverlap
from deep_ep.runtime import Runtime
from ferry.arguments import shown

_HERE: AbstractContextManager[Any] = nullcontext()


class Turn:
    """One exchange among the streams of its GPU. In CPU memory there are none: calls return
    finished results.

    A plain call stands on the current stream, like any operator. With `async_finish` or
    `previous_event` it stands on the communication stream, which first waits for that event alone,
    or else for the current stream.

    runtime: None of a Buffer that was destroyed, which is refused. also: a further event that the
    call waits for.
    """

    def __init__(
        self,
        call: str,
        runtime: Runtime | None,
        device: torch.device,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        also: EventOverlap | EventHandle | None = None,
    ) -> None:
        if runtime is None:
            refuse_destroyed()
        if type(async_finish) is not bool or type(allocate_on_comm_stream) is not bool:
            flags = {"allocate_on_comm_stream": allocate_on_comm_stream}
            require_flags(call, async_finish=async_finish, **flags)
        previous = event_of(call, previous_event)
        if allocate_on_comm_stream:
            require(
                previous is not None and async_finish,
                call,
                "allocate_on_comm_stream",
                True,
                "previous_event= with an event, and async_finish=True beside it",
            )
        self._async_finish = async_finish
        self.stream: Any = None
        """The torch.cuda.Stream for Ferry's `stream=`; None: the current one, or none at all."""
        further = event_of(call, also)
        if device.type != "cuda":
            return
        if not async_finish and previous is None:
            if further is not None:
                further.current_stream_wait()
            return
        self._current = torch.cuda.current_stream(device)
        self.stream = runtime.get_comm_stream()
        if previous is None:
            self.stream.wait_stream(self._current)
        else:
            previous.stream_wait(self.stream)
        if further is not None:
            further.stream_wait(self.stream)

    def context(self, *read: torch.Tensor | None) -> AbstractContextManager[Any]:
        """Around torch's own work of the call, which reads these tensors of the caller's."""
        if self.stream is None:
            return _HERE
        for tensor in read:
            if tensor is not None:
                tensor.record_stream(self.stream)
        return torch.cuda.stream(self.stream)

    def end(
        self,
        group: ferry.Group | None = None,
        results: tuple[torch.Tensor | None, ...] = (),
    ) -> EventOverlap:
        """What the call returns. results: of the group, or of torch in `context`; where `stream` is
        None they may be left out."""
        if self.stream is not None:
            for tensor in results:
                if tensor is not None and tensor.numel() > 0:
                    _record(group, tensor, self._current)
            if not self._async_finish:
                self._current.wait_stream(self.stream)
        return EventOverlap(EventHandle(self.stream) if self._async_finish else None)


def event_of(call: str, given: Any) -> EventHandle | None:
    """Of what callers pass as an event: an EventHandle, or an EventOverlap with one."""
    if given is None or isinstance(given, EventHandle):
        return given
    found = given.event if isinstance(given, EventOverlap) else given
    if found is not None and not isinstance(found, EventHandle):
        refuse(call, "previous_event", shown(given), "one of a call or of capture(), or None")
    return found


def hook_of(
    receive: Callable[[], None],
    device: torch.device,
    group: ferry.Group,
    results: tuple[torch.Tensor | None, ...],
) -> Callable[[], None]:
    """What a call's hook does first. Ferry receives on the stream of the call; the stream that is
    current when the hook is called, which may be another, waits for that and uses the results."""
    if device.type != "cuda":
        return receive
    began = torch.cuda.current_stream(device)

    def hook() -> None:
        receive()
        current = torch.cuda.current_stream(device)
        if current != began:
            current.wait_stream(began)
            for tensor in results:
                if tensor is not None and tensor.numel() > 0:
                    _record(group, tensor, current)

    return hook


def _record(group: ferry.Group | None, tensor: torch.Tensor, stream: Any) -> None:
    """This stream uses it, too, whether its memory is the group's or torch's."""
    if group is not None:
        try:
            group.record_stream(tensor, stream)
            return
        except (ferry.InvalidArgumentError, ferry.DestroyedError):
            pass
    tensor.record_stream(stream)
