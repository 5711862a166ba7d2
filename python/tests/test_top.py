"""`ferry top`: what it makes of the counters, in a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from rank_threads import run_ranks

import ferry
from ferry import endpoints, top

pytest.importorskip("prometheus_client")
pytest.importorskip("rich")

PAGE = """
# TYPE ferry_calls_total counter
ferry_calls_total{{call="plan",group="1",rank="{rank}"}} {calls}
ferry_calls_total{{call="dispatch",group="1",rank="{rank}"}} {calls}
ferry_call_rows_total{{call="dispatch",group="1",rank="{rank}"}} 40
ferry_call_bytes_total{{call="dispatch",group="1",rank="{rank}"}} 400
ferry_call_seconds_total{{call="dispatch",group="1",rank="{rank}"}} {waited}
ferry_call_wait_seconds_total{{call="dispatch",group="1",rank="{rank}"}} {waited}
ferry_stage_seconds_total{{stage="dispatch: rows",group="1",rank="{rank}"}} {waited}
ferry_masked_total{{group="1",rank="{rank}"}} 3
ferry_failures_total{{group="1",rank="{rank}"}} 0
ferry_ranks{{group="1",rank="{rank}"}} 3
ferry_epoch{{group="1",rank="{rank}"}} 2
python_info{{version="3"}} 1
"""


def counters(rank: int, calls: float, waited: float) -> endpoints.Counters:
    return endpoints.counters_in(PAGE.format(rank=rank, calls=calls, waited=waited))[rank, 1]


def test_rates_are_those_between_two_looks() -> None:
    row = top.row_of(2, 1, counters(2, 10, 1.0), counters(2, 30, 2.0), 2.0)
    assert (row.calls, row.rows, row.waiting, row.busy) == (20.0, 0.0, 0.5, 0.5)
    assert (row.stage, row.masked, row.ranks, row.epoch) == ("dispatch: rows", 3, 3, 2)
    # The process was started anew: its counters began again.
    assert top.row_of(2, 1, counters(2, 10, 1.0), counters(2, 4, 0.5), 2.0).calls == 4.0


def test_the_slow_rank_is_the_one_that_does_not_wait() -> None:
    def rows(*waits: float) -> list[top.Row]:
        return [
            top.row_of(rank, 1, counters(rank, 0, 0), counters(rank, 1, wait), 1.0)
            for rank, wait in enumerate(waits)
        ]

    assert top.slow_ranks(rows(0.8, 0.1, 0.7)) == {(1, 1)}
    assert top.slow_ranks(rows(0.2, 0.01, 0.2)) == set()  # they hardly wait
    assert top.slow_ranks(rows(0.8, 0.7, 0.7)) == set()
    assert top.slow_ranks(rows(0.9)) == set()
    lines = list(top.lines_of(rows(0.8, 0.1, 0.7), [("host", 9)], [("host", 8)]))
    assert [line.rsplit("slow=")[-1] for line in lines[:3]] == ["0", "1", "0"]
    assert lines[3] == "endpoint=host:9 answers=0"
    assert lines[4] == "endpoint=host:8 answers=1 groups=0"


def test_a_table_of_80_columns() -> None:
    rich_console = pytest.importorskip("rich.console")
    rows = [
        top.Row(rank, 4, 1, 118.2, 12550.0, 51e6, 1.04, wait, "dispatch: grants", 0, 0, epoch)
        for rank, wait, epoch in ((0, 0.9, 1), (1, 0.1, 1), (2, 0.9, 2), (3, 0.9, 1))
    ]
    console = rich_console.Console(width=80)
    with console.capture() as capture:
        console.print(top.table_of(rows, []))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert len(lines) == 5 and "100%" in lines[1]
    assert lines[2].endswith("10% dispatch: grants others wait")
    assert lines[3].endswith("90% dispatch: grants epoch 2")


def test_endpoints() -> None:
    assert endpoints.endpoints_in(["9400-9401", "a.b:7"]) == [
        ("127.0.0.1", 9400),
        ("127.0.0.1", 9401),
        ("a.b", 7),
    ]
    for wrong in ("a:b", "70000", "9401-9400", "1-600", "0"):
        with pytest.raises(ValueError, match=r"expected \[HOST:\]PORT"):
            endpoints.endpoints_in([wrong])


def test_top_of_a_running_group() -> None:
    """As its user starts it: lines in a pipe, a table on a terminal."""
    ended = threading.Event()
    goes_on = [True]
    everyone = threading.Barrier(2, lambda: goes_on.append(not ended.is_set()))

    def body(group: ferry.Group) -> None:
        port = ferry.serve_metrics()
        if group.rank == 0:
            worker = threading.Thread(target=look, args=(port,))
            worker.start()
        while goes_on[-1]:
            plan = group.plan(np.array([[0], [7]]))
            group.combine(group.dispatch(np.ones((2, 64), np.float32), plan).x, plan)
            everyone.wait(60)
        if group.rank == 0:
            worker.join()

    found: list[str] = []

    def look(port: int) -> None:
        command = [sys.executable, "-m", "ferry", "top", str(port), "--count=1", "--interval=0.2"]
        try:
            piped = subprocess.run(command, capture_output=True, text=True, check=False)
            assert piped.returncode == 0, piped.stderr
            found.append(piped.stdout)
            found.append(on_a_terminal(command))
        finally:
            ended.set()

    run_ranks(2, body)
    lines, table = found
    found = re.findall(r"^rank=(\d) ranks=2 group=\d+ calls_per_s=[1-9]", lines, re.M)
    assert sorted(found) == ["0", "1"]
    assert "rows/s" in table and "0 of 2" in table and "1 of 2" in table


def on_a_terminal(command: list[str]) -> str:
    """What it writes there."""
    own, its = pty.openpty()
    with subprocess.Popen(command, stdout=its, env=os.environ | {"TERM": "xterm"}):
        os.close(its)
        text = b""
        while True:
            try:
                text += os.read(own, 4096)
            except OSError:  # its end is closed
                break
    os.close(own)
    return text.decode()


def test_nobody_answers() -> None:
    command = [sys.executable, "-m", "ferry", "top"]
    environment = os.environ | {"FERRY_METRICS_PORT": "9"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "nobody answers at http://127.0.0.1:9/metrics; start the program with" in done.stderr


@contextmanager
def served(answer: bytes, host: str = "127.0.0.1", drips: bool = False) -> Iterator[int]:
    """The port where every request gets that; drips: and then a byte each 20 ms."""
    ended = threading.Event()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:

        def serve() -> None:
            while not ended.is_set():
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    try:
                        connection.sendall(answer)
                        while drips and not ended.wait(0.02):
                            connection.sendall(b"#")
                    except OSError:
                        pass  # it went

        worker = threading.Thread(target=serve)
        worker.start()
        port = server.getsockname()[1]
        try:
            yield port
        finally:
            ended.set()
            socket.create_connection((host, port)).close()
            worker.join()


def http(page: str) -> bytes:
    return f"HTTP/1.0 200 OK\r\nContent-Length: {len(page)}\r\n\r\n{page}".encode()


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 60\r\n\r\n#"]
)
@pytest.mark.parametrize("drips", [False, True])
def test_answers_of_others(answer: bytes, drips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page, one that is cut off, and one that takes more than a second to its end."""
    monkeypatch.setattr(endpoints, "SECONDS", 0.3)
    with served(answer, drips=drips) as port:
        assert endpoints.read(("127.0.0.1", port)) is None


def test_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    with served(http("up 1\n"), "::1") as port:
        (endpoint,) = endpoints.endpoints_in([f"[::1]:{port}"])
        assert endpoints.read(endpoint) == {}


def run_top(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ferry", "top", "--count=1", "--interval=0.05", *words]
    known = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=known)


def test_where_the_environment_says() -> None:
    """Also behind ranks that have ended, and where there are no groups."""
    with served(http("up 1\n")) as port:
        line = f"endpoint=127.0.0.1:{port} answers=1 groups=0\n"
        for word in (str(port), f"127.0.0.1:{port}", str(port - 1), f"localhost:{port}-{port}"):
            done = run_top(FERRY_METRICS_PORT=word)
            host = "localhost" if word.startswith("l") else "127.0.0.1"
            assert (done.returncode, done.stderr) == (0, "")
            assert line.replace("127.0.0.1", host) in done.stdout and "\n\n" not in done.stdout
        done = run_top(FERRY_METRICS_PORT=f"{port - 1}-{port}")
        assert done.stdout.startswith(f"endpoint=127.0.0.1:{port - 1} answers=0\n") and (
            line in done.stdout
        )
