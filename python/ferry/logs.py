"""Events of Ferry on stderr or in Python's `logging`."""

from __future__ import annotations

import atexit
import os
import threading

from ferry import _ferry
from ferry.arguments import choice, instance
from ferry.errors import InvalidArgumentError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

_LEVELS = {
    "off": _ferry.LogLevel.off,
    "warn": _ferry.LogLevel.warn,
    "info": _ferry.LogLevel.info,
    "debug": _ferry.LogLevel.debug,
}
# As in `logging`, which takes some milliseconds to import.
_LOGGING = {_ferry.LogLevel.warn: 30, _ferry.LogLevel.info: 20, _ferry.LogLevel.debug: 10}
_thread: _Forwarder | None = None
_lock = threading.RLock()
_flushes = False


class _Forwarder(threading.Thread):
    """Takes records out of the queue in which calls leave them, so that no call takes the GIL."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(name="ferry-log", daemon=True)
        self._logger = logger
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            self.forward(1.0)

    def forward(self, seconds: float) -> None:
        for record in _ferry.take_log(seconds):
            level = _LOGGING[record.level]
            if not self._logger.isEnabledFor(level):
                continue
            fields = {"event": record.event, "rank": record.rank, **dict(record.fields)}
            made = self._logger.makeRecord(
                self._logger.name,
                level,
                "ferry",
                0,
                record.text(),
                (),
                None,
                None,
                {"ferry": fields},
            )
            made.created = record.time_ns / 1e9
            try:
                self._logger.handle(made)
            except Exception:  # of the program's handler; the next record may fare better
                import traceback

                traceback.print_exc()

    def end(self) -> None:
        self._ends.set()
        _ferry.stop_log_queue()
        self.join()
        self.forward(0.0)


def set_log(level: str, logger: logging.Logger | None = None) -> None:
    """What this process logs, in place of what the environment says (FERRY_LOG).

    level: "off", "warn" (who is waited for, masks, failures), "info" (also how groups were made,
    memory that grows, regroups) or "debug" (also every call).
    logger: None: one line for each event on stderr. A logger: its records, by a thread of their
    own, with the line as message and the fields as a dict in their attribute `ferry`.
    """
    global _thread, _flushes
    chosen = choice("set_log: level", level, _LEVELS)
    if logger is not None:
        import logging

        instance("set_log: logger", logger, logging.Logger, "a logging.Logger or None")
    if threading.current_thread() is _thread:
        raise InvalidArgumentError("set_log: called by a handler of the log; call it elsewhere")
    with _lock:
        if _thread is not None:
            _ferry.log_to_stderr(_ferry.LogLevel.off)
            _thread.end()
            _thread = None
        if logger is None or level == "off":
            _ferry.log_to_stderr(chosen)
            return
        if not _flushes:  # after the package's own, so that it runs before it
            atexit.register(_flush)
            _flushes = True
        _thread = _Forwarder(logger)
        _ferry.log_to_queue(chosen)
        _thread.start()


def _flush() -> None:
    if _thread is not None:
        set_log("off")


def _go_on_in_child() -> None:
    """The thread is the parent's, and whoever had the queue's lock may not be there."""
    global _thread, _lock
    _lock = threading.RLock()
    _ferry.renew_log_queue()
    if _thread is not None:
        _thread = _Forwarder(_thread._logger)
        _thread.start()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_go_on_in_child)
