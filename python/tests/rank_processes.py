"""Runs a test's body on ranks that are processes, which stay for the next test.

A body is a function of a module in this folder. `device` "cpu" takes the host engine; "cuda" the
CUDA engine, ranks on the GPUs round-robin: several ranks may share one.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import ferry

DEADLINE = 30.0  # seconds; a test that reaches it has failed
LONGEST_BODY = 150.0  # seconds, for a body that compiles


def free_port() -> int:
    """A port on the loopback address that nobody uses. It is below the ephemeral ports of Linux
    (from 32768 on): the system gives it to no connection before the store listens there."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def exchange(boot: Any, where: dict[str, Any], body: Any, arguments: Any, config: Any) -> Any:
    """One body on this rank, with a group."""
    config = {"experts": 8, "deadline": DEADLINE, "memory_bytes": 1 << 20} | config
    with ferry.Group(boot, **where, **config) as group:
        result = body(group, *arguments)
        if not group.destroyed:
            group.barrier()
        return result


def serve(pipe: Connection, device: str, rank: int, one: Any) -> None:
    """The life of a rank: calls `one` with bodies until the pipe closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    where: dict[str, Any] = {"backend": "host"}
    if device == "cuda":
        gpu = rank % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        where = {"backend": "cuda", "device": gpu}
    while True:
        try:
            module, name, meeting, config, arguments = pipe.recv()
        except EOFError:
            return
        try:
            body = getattr(importlib.import_module(module), name)
            boot = ferry.tcp(**meeting, deadline=DEADLINE)
            pipe.send((True, one(boot, where, body, arguments, config)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, traceback.format_exc())))


def forks(*imported: str) -> Any:
    """Starts processes that are forks of one, which has imported what takes long (torch._dynamo: of
    every layer); nothing of Ferry or of CUDA is made there. `imported`: of the first call alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "ferry.torch", *imported])
    return context


class RankProcesses:
    """`size` processes on a device. `one` runs a body there, as `exchange` does. `imported`: what
    the process imports whose forks the ranks are; of the first of these objects in a program."""

    def __init__(
        self, size: int, device: str, one: Any = exchange, imported: tuple[str, ...] = ()
    ) -> None:
        self.size, self.device, self.one, self.imported = size, device, one, imported
        self.children: list[tuple[Any, Connection]] = []

    def start(self) -> None:
        context = forks(*self.imported)
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            child = context.Process(
                target=serve, args=(theirs, self.device, rank, self.one), daemon=True
            )
            child.start()
            theirs.close()
            self.children.append((child, mine))

    def stop(self) -> None:
        for _, pipe in self.children:
            pipe.close()
        for child, _ in self.children:
            child.join(5)
            child.kill()
            child.join()
        self.children.clear()

    def run(self, body: Any, *arguments: Any, **config: Any) -> list[Any]:
        """`body(group, *arguments)` on every rank; results in rank order. Ranks that failed are
        replaced before the next run."""
        if not self.children:
            self.start()
        common = {"size": self.size, "port": free_port(), "secret": secrets.token_hex(8)}
        for rank, (_, pipe) in enumerate(self.children):
            meeting = common | {"rank": rank}
            pipe.send((body.__module__, body.__name__, meeting, config, arguments))
        answers: list[tuple[bool, Any]] = []
        for _, pipe in self.children:
            try:
                late = not pipe.poll(LONGEST_BODY)
                answers.append((False, ("Late", "no answer")) if late else pipe.recv())
            except EOFError:
                answers.append((False, ("Dead", "the process died")))
        failed = [(r, *what) for r, (ok, what) in enumerate(answers) if not ok]
        if failed:
            self.stop()
            # A rank that fails leaves; what the others say about that is not the cause.
            failed.sort(key=lambda entry: entry[1] in ("PeerLeftError", "PeerFailedError", "Late"))
            raise AssertionError("\n".join(f"rank {r}: {text}" for r, _, text in failed))
        return [what for _, what in answers]


@contextmanager
def kept(
    make: Callable[[int, str], RankProcesses],
) -> Iterator[Callable[[str, int], RankProcesses]]:
    """`get(device, size)`: one RankProcesses for each, stopped at the end."""
    made: dict[tuple[str, int], RankProcesses] = {}

    def get(device: str, size: int) -> RankProcesses:
        if (device, size) not in made:
            made[device, size] = make(size, device)
        return made[device, size]

    yield get
    for processes in made.values():
        processes.stop()


def run_to_an_end(ranks: list[Any], seconds: float = 60) -> list[int | None]:
    """Until all have ended, or one badly: the others would wait for it."""
    end = time.monotonic() + seconds
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < end:
        if any(rank.exitcode for rank in ranks):
            break
        wait([rank.sentinel for rank in ranks if rank.exitcode is None], timeout=0.2)
    return [rank.exitcode for rank in ranks]
