"""While a call waits for a peer, other threads of Python run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_buffers import ThreadComm, run_ranks
from reference import make_job
from throughput_calls import dispatched

import deep_ep

STEPS = 5


class Clock:
    """A thread that counts."""

    def __init__(self) -> None:
        self.steps = 0
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            self.steps += 1
            time.sleep(0.001)

    def await_more(self, steps: int) -> None:
        end = self.steps + steps
        while self.steps < end:
            time.sleep(0.001)

    def stop(self) -> None:
        self._over = True
        self._thread.join()


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    yield made
    made.stop()


def test_other_threads_run(clock: Clock) -> None:
    """Rank 1 comes to each call only when the clock has gone on after rank 0 came to it. If rank 0
    held the GIL there, nothing would go on, and the call would end with its deadline."""
    calls: list[str] = []

    def body(comm: ThreadComm) -> None:
        rank, job, entered = comm.Get_rank(), make_job(2), entries[comm.Get_rank()]

        def together(name: str, call: Callable[[], Any]) -> Any:
            comm.allgather(None)
            if rank == 1:
                assert entries[0].acquire(timeout=20), name
                clock.await_more(STEPS)
                return call()
            calls.append(name)
            before = clock.steps
            entered.release()
            result = call()
            assert clock.steps >= before + STEPS, f"{name} did not wait: the test shows nothing"
            return result

        buffer: Any = together(
            "the constructor", lambda: deep_ep.Buffer(None, comm=comm, low_latency_mode=True)
        )
        x, idx, weights = job.x[rank], job.topk_idx[rank], job.topk_weights[rank]
        got = together("dispatch", lambda: dispatched(buffer, "cpu", job, x))
        together("dispatch, cached", lambda: buffer.dispatch(x, handle=got[4]))
        together("dispatch without routes", lambda: dispatched(buffer, "cpu", job, x, "none"))
        worst = {"num_worst_tokens": 60}
        together("dispatch, worst case", lambda: dispatched(buffer, "cpu", job, x, **worst))
        together("combine", lambda: buffer.combine(got[0], got[4]))
        copies = tuple(one.clone() for one in got[4])
        together("combine, copied handle", lambda: buffer.combine(got[0], copies))

        def send(**how: Any) -> Any:
            return buffer.low_latency_dispatch(x, idx, 16, job.experts, use_fp8=False, **how)

        def answer(sent: Any, **how: Any) -> Any:
            rows = torch.zeros_like(sent[0])
            return buffer.low_latency_combine(rows, idx, weights, sent[2], **how)

        sent = together("low_latency_dispatch", send)
        together("low_latency_combine", lambda: answer(sent))
        together("low_latency_combine, again", lambda: answer(sent))
        hooked = {"return_recv_hook": True}

        def received() -> Any:
            sent = send(**hooked)
            sent[4]()
            return sent

        sent = together("the hook of a dispatch", received)
        together("the hook of a combine", lambda: answer(sent, **hooked)[2]())
        comm.allgather(None)

    entries = [threading.Semaphore(0), threading.Semaphore(0)]
    run_ranks(2, body)
    assert len(calls) == 12
