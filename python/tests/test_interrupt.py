"""Ctrl-C ends every wait at once with KeyboardInterrupt, and Python can go on or exit at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest
from rank_processes import free_port

# Seconds from the signal to the end of the process. On idle cores it takes 0.1; without the signal
# every wait lasts its deadline, 60.
LIMIT = 10.0

START = """
import signal, sys, threading, time
# A job in the background of a shell starts with SIGINT ignored, and so does what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
import ferry
boots = ferry.threads(2)

def partner(body=None):
    # Rank 1: takes part in the creation, then does not come.
    def run():
        group = ferry.Group(boots[1], experts=4, deadline=60)
        if body is not None:
            body(group)
        keep.append(group)
    threading.Thread(target=run, daemon=True).start()

keep = []
routes = np.zeros((4, 1), np.int64)
x = np.ones((4, 16), np.float32)

def waiting():
    print("waiting", flush=True)
"""

WAITS = {
    "bootstrap": """
waiting()
ferry.Group(boots[0], experts=4, deadline=60)
""",
    "store: rank 0": """
waiting()
boot = ferry.tcp(rank=0, size=2, port=PORT, secret="s", deadline=60)
ferry.Group(boot, experts=4, deadline=60)
""",
    "store: rank 1": """
waiting()
ferry.tcp(rank=1, size=2, port=PORT, secret="s", deadline=60)
""",
    "plan": """
partner()
group = ferry.Group(boots[0], experts=4, deadline=60)
waiting()
group.plan(routes)
""",
    "barrier inside with": """
partner()
with ferry.Group(boots[0], experts=4, deadline=60) as group:
    waiting()
    group.barrier()
""",
    "dispatch": """
partner(lambda group: group.plan(routes))
group = ferry.Group(boots[0], experts=4, deadline=60)
plan = group.plan(routes)
waiting()
group.dispatch(x, plan)
""",
    "event": """
partner()
group = ferry.Group(boots[0], experts=4, deadline=60)
stream = ferry.Stream()
plan = group.plan(routes, stream=stream)
waiting()
stream.record().wait()
""",
    "synchronize": """
partner()
group = ferry.Group(boots[0], experts=4, deadline=60)
stream = ferry.Stream()
plan = group.plan(routes, stream=stream)
waiting()
stream.synchronize()
""",
    "counts of a plan on a stream": """
partner()
group = ferry.Group(boots[0], experts=4, deadline=60)
stream = ferry.Stream()
plan = group.plan(routes, stream=stream)
waiting()
plan.recv_rows()
""",
    "second stream": """
partner()
group = ferry.Group(boots[0], experts=4, deadline=60)
first, second = ferry.Stream(), ferry.Stream()
plan = group.plan(routes, stream=first)
second.wait(first.record())
waiting()
second.synchronize()
""",
    "latency": """
def other(group):
    keep.append(ferry.LatencyExchange(group, capacity=4, hidden=16, topk=1, dtype="f32"))
partner(other)
group = ferry.Group(boots[0], experts=4, deadline=60)
latency = ferry.LatencyExchange(group, capacity=4, hidden=16, topk=1, dtype="f32")
waiting()
latency.dispatch(x, routes)
""",
    "dropping a stream": """
partner()
def inner():
    stream = ferry.Stream()
    plan = group.plan(routes, stream=stream)
    waiting()
group = ferry.Group(boots[0], experts=4, deadline=60)
inner()
while True: time.sleep(0.01)
""",
    "handled inside a function that owns stream and group": """
partner()
def inner():
    group = ferry.Group(boots[0], experts=4, deadline=60)
    stream = ferry.Stream()
    plan = group.plan(routes, stream=stream)
    waiting()
    stream.synchronize()
try:
    inner()
except KeyboardInterrupt:
    print("handled", flush=True)
    raise
""",
}


def interrupt(code: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """Runs `code`, sends SIGINT while it waits; its standard error, and how long it took to end."""
    errors = tmp_path_factory.mktemp("interrupt") / "stderr"
    with errors.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=file, text=True
        )
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line == "waiting\n", errors.read_text()
            time.sleep(0.3)
            assert child.poll() is None, errors.read_text()
            start = time.monotonic()
            child.send_signal(signal.SIGINT)
            child.wait(timeout=20)
            return errors.read_text(), time.monotonic() - start
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    code = START + textwrap.dedent(WAITS[name]).replace("PORT", str(free_port()))
    errors, seconds = interrupt(code, tmp_path_factory)
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert seconds < LIMIT


def test_a_handler_of_the_programs_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a signal handler raises comes out of the wait; one that returns lets it go on."""
    code = START + textwrap.dedent("""
        import signal
        calls = []
        def handler(number, frame):
            calls.append(number)
            if number == signal.SIGUSR1:
                raise LookupError("from the handler")
        signal.signal(signal.SIGUSR1, handler)
        signal.signal(signal.SIGUSR2, handler)
        import os
        def send():
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGUSR1)
        partner()
        group = ferry.Group(boots[0], experts=4, deadline=60)
        threading.Thread(target=send, daemon=True).start()
        try:
            group.plan(routes)
        except LookupError as error:
            assert calls == [signal.SIGUSR2, signal.SIGUSR1], calls
            print("good:", error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "good: from the handler\n", done.stderr
    assert done.returncode == 0, done.stderr
