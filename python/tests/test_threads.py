"""The GIL is free while a call waits; objects may be dropped anywhere; Python ends in any state."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import run_ranks

import ferry

ROUTES = np.zeros((4, 1), np.int64)


def test_long_waits_say_for_whom(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last rank comes when the others have said that they wait for it, step by step."""
    monkeypatch.setenv("FERRY_WAIT_NOTICE", "0.05")
    said = ""

    def comes(text: str) -> None:
        nonlocal said
        end = time.monotonic() + 20
        while text not in said and time.monotonic() < end:
            said += capfd.readouterr().err
            time.sleep(0.01)
        assert text in said, said

    bootstraps = ferry.threads(3)

    def rank(number: int) -> None:
        if number == 2:
            comes("for other ranks (Group: configuration): rank 2 did not come yet; ")
        with ferry.Group(bootstraps[number], experts=3, deadline=40) as group:
            if number == 2:
                comes("for other ranks (LatencyExchange: configuration): rank 2 did not come yet; ")
            ferry.LatencyExchange(group, capacity=4, hidden=16, topk=1)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(rank, number) for number in range(3)]:
            future.result()


@pytest.mark.parametrize("what", ["creation", "plan", "event", "barrier", "latency"])
def test_other_threads_run_while_a_call_waits(what: str) -> None:
    """If the wait held the GIL, the rank that it waits for could not come."""
    bootstraps = ferry.threads(2)
    progress = [0]
    waiting, came = threading.Event(), threading.Event()

    def meet(group: ferry.Group) -> None:
        if what == "plan":
            group.plan(ROUTES)
        elif what == "event":
            stream = ferry.Stream()
            group.plan(ROUTES, stream=stream)
            stream.record().wait()
        elif what == "latency":
            ferry.LatencyExchange(group, capacity=4, hidden=16, topk=1)
        else:
            group.barrier()

    def late() -> None:
        group = None
        if what != "creation":
            group = ferry.Group(bootstraps[1], experts=4, deadline=20.0)
        waiting.wait()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            progress[0] += 1
        came.set()
        if group is None:
            group = ferry.Group(bootstraps[1], experts=4, deadline=20.0)
        meet(group)

    thread = threading.Thread(target=late)
    thread.start()
    if what == "creation":
        waiting.set()
    group = ferry.Group(bootstraps[0], experts=4, deadline=20.0)
    waiting.set()
    meet(group)
    assert came.is_set()
    assert progress[0] > 1000
    thread.join()


def test_many_groups_leak_nothing() -> None:
    """Threads, descriptors and mappings after many create and destroy cycles."""

    def counts() -> tuple[int, int, int]:
        import os

        with open("/proc/self/maps") as maps:
            mappings = sum("ferry" in line or "/dev/shm" in line for line in maps)
        return threading.active_count(), len(os.listdir("/proc/self/fd")), mappings

    def body(group: ferry.Group) -> Any:
        stream = ferry.Stream()
        plan = group.plan(ROUTES, stream=stream)
        got = group.dispatch(torch.ones(4, 16), plan, stream=stream)
        got.event.wait()
        return got.x

    run_ranks(2, body)
    before = counts()
    for _ in range(20):
        run_ranks(2, body)
    assert counts() == before


ENDINGS = {
    "group alive": "",
    "arrays alive": "plan = group.plan(routes); got = group.dispatch(x, plan); x2 = got.x; t = got",
    "stream busy": "stream = ferry.Stream(); plan = other.plan(routes, stream=stream)",
    "event": "s = ferry.Stream(); p = other.plan(routes, stream=s); e = s.record()",
    "in a cycle": "c = [group]; c.append(c); d = [group.empty((4, 16), 'f32')]; d.append(d)",
    "an exception": "group.plan(routes); raise SystemExit(0)",
    "after destroy": "p = group.plan(routes); group.destroy()",
    "a daemon thread that waits": """
threading.Thread(target=lambda: idle[0].plan(routes), daemon=True).start()
import time
time.sleep(0.2)
del other
""",
    "a daemon thread that waits until the very end": """
class Late:
    def __del__(self, group=other, sleep=__import__("time").sleep):
        group.destroy()
        sleep(0.2)  # in which the thread comes back
late = Late()
del other
threading.Thread(target=lambda: idle[0].plan(routes), daemon=True).start()
__import__("time").sleep(0.2)
""",
    # It asks for the GIL before Python says that it exits, and Python has it until after that.
    "a daemon thread that comes back at the end": """
import sys, time
class Slow:
    def __del__(self, clock=time.monotonic):
        end = clock() + 0.6
        while clock() < end:
            pass
sys.slow = Slow()  # goes late
pair = ferry.threads(2)
def wait():
    try:
        pair[0].all_gather(b"", deadline=0.3)
    except ferry.DeadlineExceededError:
        pass
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.05)
sys.setswitchinterval(0.3)
end = time.monotonic() + 0.4
while time.monotonic() < end:
    pass
""",
    "a latency hook": """
lat = ferry.LatencyExchange(group, capacity=4, hidden=16, topk=1, dtype="f32")
r = lat.dispatch(x, routes, hook=True)
""",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_interpreter_ends(name: str) -> None:
    """Whatever is alive at exit: no crash, no message, no wait for peers that do not come."""
    code = textwrap.dedent("""
        import threading
        import numpy as np
        import ferry
        group = ferry.Group(ferry.threads(1)[0], experts=4)
        boots = ferry.threads(2)
        idle = []
        t = threading.Thread(
            target=lambda: idle.append(ferry.Group(boots[1], experts=4)), daemon=True)
        t.start()
        other = ferry.Group(boots[0], experts=4)
        t.join()
        routes = np.zeros((4, 1), np.int64)
        x = np.ones((4, 16), np.float32)
    """)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code + ENDINGS[name]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - start < 10


def test_forked_child_is_told() -> None:
    """A child process that fork made cannot use its parent's group, and does not disturb it."""
    code = textwrap.dedent("""
        import os
        import numpy as np
        import ferry
        group = ferry.Group(ferry.threads(1)[0], experts=4)
        routes = np.zeros((4, 1), np.int64)
        stream = ferry.Stream()
        plan = group.plan(routes, stream=stream)
        stream.synchronize()
        x = group.empty((4, 16), "f32")
        child = os.fork()
        if child == 0:
            for call in (lambda: group.plan(routes), lambda: plan.tokens, stream.record):
                try:
                    call()
                except ferry.UnsupportedError as error:
                    assert "forked" in str(error)
                else:
                    os._exit(1)
            del x, stream, plan, group  # leaves the parent's memory and threads alone
            fresh = ferry.Group(ferry.threads(1)[0], experts=4)  # its own is fine
            assert fresh.plan(routes).recv_rows() == 4
            raise SystemExit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        x[:] = 3
        got = group.dispatch(x, group.plan(routes))
        assert (group.combine(got.x, plan).x == 3).all()
    """)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
