"""What Ferry raises: one class for each kind of error, all of them `ferry.Error`."""

from __future__ import annotations

import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Error(RuntimeError):
    """Every error of Ferry. The message names rank, peer, stage or argument, what was got, what was
    expected and, where it helps, what to do."""

    #: The kind as a word: "deadline", "peer failed", "invalid argument", ...
    kind: str = "error"
    #: The rank that raises; None when the error is not about a rank.
    rank: int | None
    #: The rank that it names: the one that died, is late, differs; or None.
    peer: int | None
    #: "plan: counts", "dispatch: rows", ...; empty outside an exchange.
    stage: str
    #: Number of the exchange step; 0 outside an exchange.
    generation: int
    #: The flag value waited for.
    expected: int
    #: The flag value found.
    seen: int

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        peer: int = -1,
        stage: str = "",
        generation: int = 0,
        expected: int = 0,
        seen: int = 0,
    ) -> None:
        super().__init__(message)
        self.rank = rank if rank >= 0 else None
        self.peer = peer if peer >= 0 else None
        self.stage = stage
        self.generation = generation
        self.expected = expected
        self.seen = seen


class InvalidArgumentError(Error, ValueError):
    """An argument was refused before anything moved."""

    kind = "invalid argument"


class MismatchError(Error):
    """Ranks disagree: configuration, call, dtype or sizes."""

    kind = "mismatch"


class DeadlineExceededError(Error, TimeoutError):
    """A wait reached its deadline."""

    kind = "deadline"


class PeerFailedError(Error):
    """A rank died or reported a failure; `peer` names it."""

    kind = "peer failed"


class PeerLeftError(Error):
    """A rank destroyed its group while others still exchange."""

    kind = "peer left"


class EvictedError(Error):
    """The peers went on without this rank: they masked it in latency mode
    (`LatencyExchange.rejoin`), or called `Group.regroup`."""

    kind = "left behind"


class RefusedError(Error):
    """The bootstrap turned this process away: secret, version, size, or the rank is taken."""

    kind = "refused"


class WaitInterruptedError(Error):
    """A wait was asked to stop, e.g. because its stream was dropped. Ctrl-C is KeyboardInterrupt,
    not this."""

    kind = "interrupted"


class DestroyedError(Error):
    """Use after destroy."""

    kind = "destroyed"


class ExhaustedError(Error):
    """No room: memory, capacity, live results."""

    kind = "exhausted"


class UnsupportedError(Error):
    """Not built, or not possible on this machine."""

    kind = "unsupported"


class SystemCallError(Error):
    """The operating system refused a call."""

    kind = "system"


_CLASSES = {cls.kind: cls for cls in Error.__subclasses__()}


def make(kind: str, message: str, *where: Any) -> Error:
    """The exception for an error of the C++ side, which calls this: `where` is what Error takes."""
    names = ("rank", "peer", "stage", "generation", "expected", "seen")
    return _CLASSES.get(kind, Error)(message, **dict(zip(names, where, strict=True)))


#: Names of earlier releases, which go with the next one.
_RENAMED: dict[str, type[Error]] = {
    "InvalidArgument": InvalidArgumentError,
    "Mismatch": MismatchError,
    "DeadlineExceeded": DeadlineExceededError,
    "PeerFailed": PeerFailedError,
    "PeerLeft": PeerLeftError,
    "LeftBehind": EvictedError,
    "Refused": RefusedError,
    "Interrupted": WaitInterruptedError,
    "Destroyed": DestroyedError,
    "Exhausted": ExhaustedError,
    "Unsupported": UnsupportedError,
    "SystemFailure": SystemCallError,
}


def renamed_class(name: str, module: str) -> type[Error]:
    """For `__getattr__` of a module: the class that had this name, and a DeprecationWarning."""
    if name not in _RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new = _RENAMED[name]
    message = f"{module}.{name} is deprecated; use {module}.{new.__name__}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return new


def __getattr__(name: str) -> Any:
    return renamed_class(name, __name__)
