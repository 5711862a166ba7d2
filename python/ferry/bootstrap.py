"""How the ranks of a group find each other. A bootstrap serves while a group is made, not after."""

from __future__ import annotations

import os
from collections.abc import Callable

from ferry import _ferry
from ferry.arguments import INT32_MAX, describe, flag, instance, integer, refuse, seconds, text
from ferry.errors import DeadlineExceededError, SystemCallError
from ferry.group import Group
from ferry.meetings import Meeting, is_late

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
    rank: int,
    size: int,
    fn: Callable[[bytes], list[bytes]],
    own_address: str = "",
    *,
    job_key: bytes = b"",
    join: bool = False,
    begin: bool = False,
) -> Bootstrap:
    """The caller's own all-gather: `fn(mine)` is collective and returns the bytes of all ranks in
    rank order. Its deadline and its interruption are its own business.

    own_address is of this host on the network of the job, where ranks of other hosts reach it if
    FERRY_HOST names none. Empty: loopback, so all ranks must be on one host. job_key, for groups
    with `elastic`, tells the job from others of this user; it is the same on all ranks and on
    processes that join, and no message shows it. join and begin are as of `tcp`; `fn` is not
    called.
    """
    if not callable(fn):
        refuse("from_all_gather: fn", f"an object of type {type(fn).__name__}", "a function")
    if not isinstance(job_key, bytes):
        refuse("from_all_gather: job_key", f"an object of type {type(job_key).__name__}", "bytes")
    size = integer("from_all_gather: size", size, 1, INT32_MAX)
    rank = integer("from_all_gather: rank", rank, 0, size - 1)
    address = text("from_all_gather: own_address", own_address)
    joins, begins = flag("from_all_gather: join", join), flag("from_all_gather: begin", begin)
    return _ferry.from_all_gather(rank, size, fn, address, "", lambda: job_key, joins, begins)


def from_store(
    store: Any,
    rank: int,
    size: int,
    *,
    name: str = "ferry",
    own_address: str | None = None,
    join: bool = False,
    begin: bool = False,
) -> Bootstrap:
    """Ranks that meet in a store: torch's TCPStore, FileStore, HashStore or PrefixStore, an
    `EtcdStore`, or any object with `set(key, bytes)`, `get(key)`, which waits for the key, and
    `add(key, number)`, which adds to a count and returns it.

    The store is used while groups are made, and its own timeout ends its waits. Then
    `DeadlineExceededError` names the rank that did not come.

    Args:
        name: of the job, before all keys. The n-th meeting of a rank is with the n-th of the
            others. So a job that starts anew in the same store after a meeting that failed takes
            another name, and so does a second job beside one that runs: `RefusedError` says so
            where its ranks find the first one's (on their hosts, or before those have met).
        own_address: as of `from_all_gather`; None: from which this host reaches the store.
        join, begin: as of `tcp`. Groups with `elastic` are found by a random key that the first
            rank puts into the store. So a process that joins needs the same store, with the same
            name; where it has ended, or dropped the key (`EtcdStore(ttl=)`), `Group` raises
            `SystemCallError` or `DeadlineExceededError`, which says so.
    """
    for method in ("set", "get", "add"):
        if not callable(getattr(store, method, None)):
            got = f"an object of type {type(store).__name__} without {method}()"
            refuse("from_store: store", got, "one as torch.distributed.TCPStore or ferry.EtcdStore")
    size = integer("from_store: size", size, 1, INT32_MAX)
    rank = integer("from_store: rank", rank, 0, size - 1)
    if own_address is None:
        own_address = address_towards(store)
    joins, begins = flag("from_store: join", join), flag("from_store: begin", begin)
    alone = joins or begins
    text("from_store: name", name)
    meeting = None if alone else Meeting(store, rank, size, name)

    def all_gather(mine: bytes) -> list[bytes]:
        assert meeting is not None  # who is alone gathers nothing
        return meeting.all_gather(mine)

    def job_key() -> bytes:
        return _job_key(store, f"{name}/{size}/job", rank, joins)

    job = f'the store, name "{name}"'
    address = text("from_store: own_address", own_address)
    return _ferry.from_all_gather(rank, size, all_gather, address, job, job_key, joins, begins)


def _job_key(store: Any, key: str, rank: int, joins: bool) -> bytes:
    """Of a job: what the first rank that asked drew, known to whoever can read the store."""
    try:
        if not joins and store.add(f"{key}/asked", 1) == 1:
            store.set(key, os.urandom(16))
        value = store.get(key)
    except Exception as error:
        late = is_late(error)
        raise (DeadlineExceededError if late else SystemCallError)(
            f"from_store: rank {rank} cannot {'join' if joins else 'learn which job this is'}: the "
            f"store {'has no' if late else 'does not tell the'} key {key!r}, by which the ranks of "
            f"an elastic group are found: {error}; a process joins by the store in which the group "
            "was made, with the same name and size; when that has ended, no other process can join",
            rank=rank,
            stage="bootstrap: job",
        ) from error
    if not isinstance(value, bytes):
        refuse("from_store: store.get", describe(value), "the bytes that were set")
    return value


def address_towards(store: Any) -> str:
    """The address from which this host reaches a store, or else MASTER_ADDR; empty where there is
    neither: then all ranks must be on one host, or FERRY_HOST be set."""
    import socket

    while getattr(store, "host", None) is None and hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
    if not host or not isinstance(host, str):
        return ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the latter of a name that no host has
        return ""


def from_group(group: Group) -> Bootstrap:
    """The ranks of a group's epoch, renumbered from 0 in their order: `group.view().ranks`. They
    meet by calls of the group itself, so that no store and no host is needed; again after each
    `Group.regroup`. For `Collectives`, or another group:

        collectives = ferry.Collectives(ferry.from_group(group))

    Collective where it is used, in the order of the group's calls and with the group's deadline.
    When a rank dies meanwhile, it raises `PeerFailedError` as any call of the group, and the ranks
    that are left regroup. Raises `InvalidArgumentError` in a later epoch.
    """
    return _ferry.from_group(instance("from_group: group", group, Group, "a ferry.Group")._raw)


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
