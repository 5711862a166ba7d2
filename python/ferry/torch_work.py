"""What a call on a process group returns: torch's Work, over a call of Ferry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ferry import _ferry
from ferry.errors import DeadlineExceededError, Error

_both: dict[type, type] = {}


def for_torch(error: Error, call: str = "", tensors: Sequence[torch.Tensor] = ()) -> Error:
    """The same error, also of the class that torch's backends raise. `call`: that of torch, of such
    tensors, which the message names where Ferry carried it by another or as bytes."""
    kind = type(error)
    if kind not in _both:
        members = {
            "__module__": "ferry",
            "__reduce__": lambda same: (for_torch, (_copy(kind, same),)),
        }
        _both[kind] = type(kind.__name__, (kind, dist.DistBackendError), members)
    words = _carried(call, tensors, error.stage.partition(":")[0]) if call else ""
    return _copy(_both[kind], error, words).with_traceback(error.__traceback__)


def _carried(call: str, tensors: Sequence[torch.Tensor], by: str) -> str:
    reduces = by in ("all_reduce", "reduce_scatter")
    if not by or (by == call and (reduces or not tensors)):
        return ""
    dtype = f" of {str(tensors[0].dtype).removeprefix('torch.')}" if tensors else ""
    return f" (torch's {call}{dtype} is carried as {by}{'' if reduces else ' of bytes'})"


def _copy(kind: type[Error], error: Error, words: str = "") -> Error:
    same = kind(f"{error}{words}")
    same.__dict__.update(error.__dict__)
    return same


def guarded(run: Callable[[], None], call: str = "", tensors: Sequence[torch.Tensor] = ()) -> None:
    """Runs it; what it raises is an error of torch's, too."""
    try:
        # A thread of its own has no mode of the caller's, whose tensors may be inference tensors.
        with torch.inference_mode():
            run()
    except Error as error:
        raise for_torch(error, call, tensors) from None


class _Failed:
    """What a future has instead of tensors. In Python, `wait` raises the error. torch's DDP waits
    in C++, and looks for tensors by pickling: what that raises is what it shows."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def reraise(self) -> NoReturn:
        """As the future's unwrapping function."""
        raise self._error

    def __reduce__(self) -> NoReturn:
        raise self._error


class FerryWork(dist._Work):  # type: ignore[misc,name-defined]
    """A call under way; `result`: the tensors that it fills."""

    def __init__(self, result: list[torch.Tensor], timeout: float) -> None:
        super().__init__()
        self._result = result
        self._timeout = timeout
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is over; raises what it raised."""
        self._wait(timeout.total_seconds() if timeout else self._timeout)
        return True

    def _wait(self, seconds: float) -> None:
        """Of a call that is over."""

    def is_completed(self) -> bool:
        """Whether it is over."""
        return True

    def is_success(self) -> bool:
        """Whether it is over and raised nothing."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it raised."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the tensors."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._when_over(self._complete)
        return self._future

    def _when_over(self, then: Callable[[BaseException | None], None]) -> None:
        then(None)

    def _complete(self, error: BaseException | None) -> None:
        assert self._future is not None
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future._set_unwrap_func(_Failed.reraise)
            self._future.set_result(_Failed(error))


class WorkerWork(FerryWork):
    """A call on the group's thread."""

    def __init__(self, run: Future[None], result: list[torch.Tensor], timeout: float) -> None:
        super().__init__(result, timeout)
        self._run = run

    def _wait(self, seconds: float) -> None:
        try:
            self._run.result(seconds)
        except FutureTimeoutError:
            if self._run.done():  # the call raised it
                raise
            raise _late(seconds) from None

    def is_completed(self) -> bool:
        return self._run.done()

    def exception(self) -> BaseException | None:
        return self._run.exception() if self._run.done() else None

    def _when_over(self, then: Callable[[BaseException | None], None]) -> None:
        self._run.add_done_callback(lambda done: then(done.exception()))


class TransferWork(FerryWork):
    """A send or a receive. `finish`: what is still to be done when all is there."""

    def __init__(
        self,
        end: _ferry.Event,
        result: list[torch.Tensor],
        timeout: float,
        source: int,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(result, timeout)
        self._end = end
        self._source = source
        self._finish = finish
        self._lock = threading.Lock()

    def _wait(self, seconds: float) -> None:
        def run() -> None:
            self._end.wait(seconds)
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()

        guarded(run)

    def is_completed(self) -> bool:
        if not self._end.ready():
            return False
        self.exception()  # finishes it: programs that ask read what was received
        return True

    def exception(self) -> BaseException | None:
        if not self._end.ready():
            return None
        try:
            self._wait(self._timeout)
        except Error as error:
            return error
        return None

    def _source_rank(self) -> int:
        return self._source

    def _when_over(self, then: Callable[[BaseException | None], None]) -> None:
        def run() -> None:
            try:
                self._wait(self._timeout)
            except Error as error:
                then(error)
            else:
                then(None)

        if self._end.ready():
            run()
        else:
            threading.Thread(target=run, name="ferry-transfer", daemon=True).start()


class AllWork(FerryWork):
    """Several calls as one."""

    def __init__(self, works: list[FerryWork], timeout: float) -> None:
        super().__init__([tensor for work in works for tensor in work.result()], timeout)
        self._works = works

    def _wait(self, seconds: float) -> None:
        for work in self._works:
            work._wait(seconds)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def _when_over(self, then: Callable[[BaseException | None], None]) -> None:
        left = len(self._works)
        first: BaseException | None = None
        lock = threading.Lock()

        def one(error: BaseException | None) -> None:
            nonlocal left, first
            with lock:
                left -= 1
                first = first or error
                if left > 0:
                    return
            then(first)

        if not self._works:
            then(None)
        for work in self._works:
            work._when_over(one)


def _late(seconds: float) -> Error:
    return for_torch(
        DeadlineExceededError(f"ferry process group: the call did not end within {seconds:g} s")
    )
