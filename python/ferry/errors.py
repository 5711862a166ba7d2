"""What Ferry raises: one class for each kind of error, all of them `ferry.Error`."""

from __future__ import annotations


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


class InvalidArgument(Error, ValueError):  # noqa: N818
    """An argument was refused before anything moved."""

    kind = "invalid argument"


class Mismatch(Error):  # noqa: N818
    """Ranks disagree: configuration, call, dtype or sizes."""

    kind = "mismatch"


class DeadlineExceeded(Error, TimeoutError):  # noqa: N818
    """A wait reached its deadline."""

    kind = "deadline"


class PeerFailed(Error):  # noqa: N818
    """A rank died or reported a failure; `peer` names it."""

    kind = "peer failed"


class PeerLeft(Error):  # noqa: N818
    """A rank destroyed its group while others still exchange."""

    kind = "peer left"


class LeftBehind(Error):  # noqa: N818
    """Latency mode with masks: the peers masked this rank and went on; `LatencyExchange.rejoin`."""

    kind = "left behind"


class Refused(Error):  # noqa: N818
    """The bootstrap turned this process away: secret, version, size, or the rank is taken."""

    kind = "refused"


class Interrupted(Error):  # noqa: N818
    """A wait was asked to stop, e.g. because its stream was dropped. Ctrl-C is KeyboardInterrupt,
    not this."""

    kind = "interrupted"


class Destroyed(Error):  # noqa: N818
    """Use after destroy."""

    kind = "destroyed"


class Exhausted(Error):  # noqa: N818
    """No room: memory, capacity, live results."""

    kind = "exhausted"


class Unsupported(Error):  # noqa: N818
    """Not built, or not possible on this machine."""

    kind = "unsupported"


class SystemFailure(Error):  # noqa: N818
    """The operating system refused a call."""

    kind = "system"


_CLASSES: dict[str, type[Error]] = {
    cls.kind: cls
    for cls in (
        InvalidArgument,
        Mismatch,
        DeadlineExceeded,
        PeerFailed,
        PeerLeft,
        LeftBehind,
        Refused,
        Interrupted,
        Destroyed,
        Exhausted,
        Unsupported,
        SystemFailure,
    )
}


def make(
    kind: str,
    message: str,
    rank: int,
    peer: int,
    stage: str,
    generation: int,
    expected: int,
    seen: int,
) -> Error:
    """The exception for an error of the C++ side, which calls this."""
    return _CLASSES.get(kind, Error)(
        message,
        rank=rank,
        peer=peer,
        stage=stage,
        generation=generation,
        expected=expected,
        seen=seen,
    )
