"""Runs sequences on ranks that are threads or processes. Either way they live in other processes
than this one, which sees when one crashes or does not come to an end."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from sequences.model import Call, Calls, Sequence
from sequences.ranks import Failure, ThreadMeeting, first_cause, run_rank

CONFIG = ("experts", "memory_bytes", "fabric", "domain_size", "network", "crossing", "sim_seed")


class AbortedError(Exception):
    """Another rank has failed."""


class ProcessMeeting:
    """All-gathers through the parent."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def gather(self, mine: bytes) -> list[bytes]:
        self.pipe.send(("gather", mine))
        answer = self.pipe.recv()
        if answer is None:
            raise AbortedError
        result: list[bytes] = answer
        return result

    def sync(self) -> None:
        self.gather(b"")

    def abort(self) -> None:
        pass  # the parent hears of the failure next


def run_threads(
    size: int, config: dict[str, Any], calls: list[Calls], deadline: float
) -> Failure | None:
    import ferry

    meeting, bootstraps = ThreadMeeting(size, 2 * deadline), ferry.threads(size)

    def one(rank: int) -> Failure | None:
        mine: list[Call | None] = [step[rank] for step in calls]
        return run_rank(bootstraps[rank], config, mine, meeting)

    with ThreadPoolExecutor(size) as pool:
        return first_cause(list(pool.map(one, range(size))))


def serve(pipe: Connection) -> None:
    """The life of a worker: sequences until the pipe closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import ferry

    while True:
        try:
            rank, size, config, calls, deadline = pipe.recv()
        except (EOFError, ConnectionError):
            return
        if rank is None:
            found = run_threads(size, config, calls, deadline)
        else:
            meeting = ProcessMeeting(pipe)
            bootstrap = ferry.from_all_gather(rank, size, meeting.gather)
            found = run_rank(bootstrap, config, calls, meeting)
        tell(pipe, ("done", found))


def tell(pipe: Connection, what: Any) -> None:
    with suppress(ConnectionError):  # that the worker died is seen when it is to answer
        pipe.send(what)


class Runner:
    """Keeps its workers for the next sequence; those of one that failed are replaced."""

    def __init__(self, deadline: float = 20.0) -> None:
        self.deadline = deadline
        self.workers: dict[int, tuple[Any, Connection]] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def worker(self, index: int) -> Connection:
        if index not in self.workers:
            context = multiprocessing.get_context("spawn")
            mine, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs,), daemon=True)
            child.start()
            theirs.close()
            self.workers[index] = (child, mine)
        return self.workers[index][1]

    def stop(self) -> None:
        for child, pipe in self.workers.values():
            pipe.close()
            child.kill()
            child.join()
        self.workers.clear()

    def run(self, sequence: Sequence, calls: list[Calls]) -> Failure | None:
        size = sequence["ranks"]
        config = {key: sequence[key] for key in CONFIG} | {"deadline": self.deadline}
        count = size if sequence["processes"] else 1
        pipes = [self.worker(index) for index in range(count)]
        for rank, pipe in enumerate(pipes):
            if sequence["processes"]:
                tell(pipe, (rank, size, config, [step[rank] for step in calls], self.deadline))
            else:
                tell(pipe, (None, size, config, calls, self.deadline))
        found = self.await_all(pipes)
        if found is not None:
            self.stop()
        return found

    def await_all(self, pipes: list[Connection]) -> Failure | None:
        """Answers the ranks' gathers until all are done."""
        end = time.monotonic() + 4 * self.deadline + 20
        nothing: Failure = {"rank": -1, "step": -1, "do": "", "what": ""}
        pending, asked = dict(enumerate(pipes)), {}
        failures: list[Failure | None] = []
        while pending:
            ready = wait(list(pending.values()), max(0, end - time.monotonic()))
            if not ready:
                late = f"ranks {sorted(pending)} did not come to an end"
                failures.append(nothing | {"kind": "hang", "text": late})
                return first_cause(failures)
            for rank, pipe in list(pending.items()):
                if pipe not in ready:
                    continue
                try:
                    word, value = pipe.recv()
                except (EOFError, ConnectionError):
                    self.workers[rank][0].join(5)
                    code = self.workers[rank][0].exitcode
                    return nothing | {"kind": "crash", "text": f"worker {rank} died: {code}"}
                if word == "gather":
                    asked[rank] = value
                else:
                    failures.append(value)
                    del pending[rank]
            self.answer(pipes, pending, asked, any(f is not None for f in failures))
        return first_cause(failures)

    @staticmethod
    def answer(
        pipes: list[Connection],
        pending: dict[int, Connection],
        asked: dict[int, bytes],
        failed: bool,
    ) -> None:
        if failed or len(asked) == len(pipes):
            answer = None if failed else [asked[rank] for rank in range(len(pipes))]
            for rank in asked:
                tell(pending[rank], answer)
            asked.clear()
