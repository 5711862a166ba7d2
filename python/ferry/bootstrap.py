"""How the ranks of a group find each other. A bootstrap serves while a group is made, not after."""

from __future__ import annotations

from collections.abc import Callable

from ferry import _ferry
from ferry.arguments import INT32_MAX, flag, integer, refuse, seconds, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Bootstrap = _ferry.Bootstrap


def threads(ranks: int) -> list[Bootstrap]:
    """Ranks as threads of this process: element r is for the thread that is rank r.

    Make each group in its own thread: creation waits for all ranks. Python runs signal handlers in
    its main thread only, so Ctrl-C ends the waits of that thread's rank; `Group.destroy` or the
    deadline ends the others'.
    """
    return _ferry.threads(integer("threads: ranks", ranks, 1, 4096))


def tcp(
    *,
    rank: int,
    size: int,
    port: int,
    secret: str,
    address: str = "127.0.0.1",
    deadline: float = 60.0,
    join: bool = False,
    begin: bool = False,
) -> Bootstrap:
    """Ranks as processes that meet at a TCP store, which rank 0 runs at `address`:`port`.

    All ranks give the same size, port and secret (not empty). Blocks for at most `deadline`
    seconds. Raises `RefusedError` with the reason on a wrong secret, another version, another size
    or a rank that is already there, `DeadlineExceededError` when the store does not answer.

    join: this process takes the place of a rank that is lost, in groups that run (`elastic`); it
        does not look for the store, which need not run any more.
    begin: this process begins groups alone (`elastic`): all other ranks are missing at first, and
        join when they come. One process of the job; there is no store.
    """
    if text("tcp: secret", secret) == "":
        refuse("tcp: secret", "an empty string", "the job's secret, the same on all ranks")
    ranks = integer("tcp: size", size, 1, INT32_MAX)
    return _ferry.tcp(
        integer("tcp: rank", rank, 0, ranks - 1),
        ranks,
        text("tcp: address", address),
        integer("tcp: port", port, 1, 65535),
        secret,
        seconds("tcp: deadline", deadline),
        flag("tcp: join", join),
        flag("tcp: begin", begin),
    )


def from_environment(
    *, rank: int | None = None, size: int | None = None, deadline: float = 60.0
) -> Bootstrap:
    """The same from the variables that `ferry run`, torchrun, srun, Open MPI or MPICH set, and
    FERRY_SECRET, which is not needed where all ranks are on one host. With FERRY_JOIN=1 this
    process takes the place of a rank that is lost, as with `tcp(join=True)`; with FERRY_BEGIN=1 it
    begins alone, as with `tcp(begin=True)`.

    Args:
        rank, size: instead of the environment's, both or none: for the ranks that are left.
        deadline: seconds.

    Raises `InvalidArgumentError` naming the variable that is missing or wrong.
    """
    limit = seconds("from_environment: deadline", deadline)
    if rank is None and size is None:
        return _ferry.from_environment(0, 0, limit)
    ranks = integer("from_environment: size", size, 1, INT32_MAX)
    return _ferry.from_environment(
        integer("from_environment: rank", rank, 0, ranks - 1), ranks, limit
    )


def from_all_gather(
    rank: int, size: int, fn: Callable[[bytes], list[bytes]], own_address: str = ""
) -> Bootstrap:
    """The caller's own all-gather: `fn(mine)` is collective and returns the bytes of all ranks in
    rank order. Its deadline and its interruption are its own business.

    own_address: of this host on the network of the job, where ranks of other hosts reach it if
        FERRY_HOST names none. Empty: loopback, so all ranks must be on one host.
    """
    if not callable(fn):
        refuse("from_all_gather: fn", f"an object of type {type(fn).__name__}", "a function")
    size = integer("from_all_gather: size", size, 1, INT32_MAX)
    rank = integer("from_all_gather: rank", rank, 0, size - 1)
    address = text("from_all_gather: own_address", own_address)
    return _ferry.from_all_gather(rank, size, fn, address)


def from_mpi(comm: Any) -> Bootstrap:
    """The ranks of an mpi4py communicator."""
    for method in ("Get_rank", "Get_size", "allgather"):
        if not callable(getattr(comm, method, None)):
            refuse(
                "from_mpi: comm",
                f"an object of type {type(comm).__name__} without {method}()",
                "an mpi4py communicator",
            )
    return from_all_gather(comm.Get_rank(), comm.Get_size(), comm.allgather)
