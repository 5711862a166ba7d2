"""The log, counters, and the timeline of a group."""

from __future__ import annotations

import inspect
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from prometheus_client.parser import text_string_to_metric_families
from rank_threads import run_ranks, run_threads

import ferry
from ferry import trace, trace_plot

ROUTES = np.array([[0, 4], [5, -1], [1, 2]])  # of 8 experts on 2 ranks: 2 tokens to each
X = np.ones((3, 64), np.float32)


class Records(logging.Handler):
    """The fields of what Ferry logged."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[dict[str, Any]] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.all.append(record.ferry | {"level": record.levelname})  # type: ignore[attr-defined]
            self.changed.notify_all()

    def wait_for(self, event: str, rank: int) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [of for of in self.all if (of["event"], of["rank"]) == (event, rank)]

        with self.changed:
            assert self.changed.wait_for(found, 20), self.all
            return found()[0]


@pytest.fixture
def records(request: pytest.FixtureRequest) -> Any:
    handler = Records()
    logger = logging.Logger("test", logging.DEBUG)
    logger.addHandler(handler)
    ferry.set_log("info", logger)
    yield handler
    ferry.set_log("off")


def exchange(group: ferry.Group) -> None:
    plan = group.plan(ROUTES)
    group.combine(group.dispatch(X, plan).x, plan)


def test_a_stalled_rank_is_found_in_the_log(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 goes on when the log has said that rank 0 waits for it."""
    monkeypatch.setenv("FERRY_WAIT_NOTICE", "0.05")

    def body(group: ferry.Group) -> None:
        if group.rank == 1:
            wait = records.wait_for("wait", 0)
            assert (wait["ranks"], wait["stage"], wait["level"]) == ("1", "plan: counts", "WARNING")
            assert "rank 1 is in no call of this group" in wait["what"]
        exchange(group)

    run_ranks(2, body)
    ferry.set_log("off")  # all has come
    fabric = records.wait_for("fabric", 1)
    assert (fabric["fabric"], fabric["why"]) == ("local", "all ranks are threads of one process")
    group = records.wait_for("group", 0)
    assert (group["size"], group["experts"], group["level"]) == ("2", "8", "INFO")


def test_growth_and_failures_are_logged(records: Records) -> None:
    def body(group: ferry.Group) -> None:
        rows = np.ones((1024, 4096), np.float32)  # 16 MiB
        group.dispatch(rows, group.plan(np.zeros((1024, 1), np.int64)))
        if group.rank == 1:
            group.destroy()
            return
        with pytest.raises(ferry.PeerLeftError):
            group.barrier()

    with pytest.raises(ferry.DestroyedError):  # the barrier of run_ranks
        run_ranks(2, body)
    ferry.set_log("off")
    assert int(records.wait_for("grow", 0)["bytes"]) >= 32 << 20
    failure = records.wait_for("failure", 0)
    assert (failure["kind"], failure["peer"]) == ("peer left", "1")


def test_masks_are_logged_and_counted(records: Records) -> None:
    left = threading.Event()

    def body(rank: int) -> None:
        group = ferry.Group(bootstraps[rank], experts=2, deadline=20)
        latency = ferry.LatencyExchange(group, capacity=4, hidden=64, topk=1, masks=True)
        if rank == 1:
            group.destroy()
            left.set()
            return
        assert left.wait(20)
        latency.dispatch(torch.ones(1, 64, dtype=torch.bfloat16), np.zeros((1, 1), np.int64))
        assert group.metrics()["masked"] == 1
        group.destroy()

    bootstraps = ferry.threads(2)
    run_threads(2, body)
    ferry.set_log("off")
    mask = records.wait_for("mask", 0)
    assert (mask["peer"], mask["why"], mask["level"]) == ("1", "gone", "WARNING")


def test_the_environment_says_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRY_LOG", "loud")
    with pytest.raises(
        ferry.InvalidArgumentError, match=r'FERRY_LOG is "loud", expected off, warn'
    ):
        ferry.Group(ferry.threads(1)[0], experts=1)


def test_metrics_count_calls_rows_and_waits() -> None:
    def body(group: ferry.Group) -> None:
        for _ in range(3):
            exchange(group)
        metrics = group.metrics()
        calls = metrics["calls"]
        assert {name: of["calls"] for name, of in calls.items()} == {
            "plan": 3,
            "dispatch": 3,
            "combine": 3,
        }
        # Both ranks send 2 tokens to rank 0 and 2 to rank 1, and get their 3 back.
        assert (calls["dispatch"]["rows"], calls["dispatch"]["bytes"]) == (12, 12 * 256)
        assert (calls["combine"]["rows"], calls["combine"]["bytes"]) == (9, 9 * 256)
        assert 0 < calls["dispatch"]["wait_seconds"] < calls["dispatch"]["seconds"]
        assert metrics["waits"]["dispatch: rows"]["waits"] == 3
        assert metrics["ranks"] == [0, 1] and metrics["failures"] == 0
        latency = ferry.LatencyExchange(group, capacity=4, hidden=64, topk=2, dtype="f32")
        latency.dispatch(X, ROUTES)
        of = group.metrics()["calls"]["latency dispatch"]
        assert (of["calls"], of["rows"], of["bytes"]) == (1, 4, 4 * 256)

    run_ranks(2, body)


def test_metrics_are_served_to_prometheus(tmp_path: Path) -> None:
    def body(group: ferry.Group) -> None:
        exchange(group)
        if group.rank != 0:
            return
        text = group.metrics_text()
        samples = {
            (sample.name, sample.labels.get("call", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels["rank"] == "0"
        }
        assert samples["ferry_calls_total", "dispatch"] == 1
        assert samples["ferry_call_rows_total", "dispatch"] == 4
        port = ferry.serve_metrics()
        assert ferry.serve_metrics() == port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            assert f'ferry_ranks{{group="{group.handle}",rank="0"}} 2.0' in page.read().decode()
        if prometheus := shutil.which("prometheus"):
            assert scraped(prometheus, port, tmp_path) == {"0": 2.0, "1": 2.0}

    run_ranks(2, body)


def scraped(prometheus: str, port: int, folder: Path) -> dict[str, float]:
    """ferry_ranks by rank, as the real Prometheus has it after a scrape."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = free.getsockname()[1]
    (folder / "prometheus.yml").write_text(
        "scrape_configs: [{job_name: ferry, scrape_interval: 1s, "
        f'static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]'
    )
    command = [prometheus, "--config.file=prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{own}", "--log.level=error"]
    server = subprocess.Popen(command, cwd=folder)
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            time.sleep(0.2)
            try:
                url = f"http://127.0.0.1:{own}/api/v1/query?query=ferry_ranks"
                with urllib.request.urlopen(url) as page:
                    found = json.load(page)["data"]["result"]
            except OSError:
                continue  # it still starts
            if found:
                return {of["metric"]["rank"]: float(of["value"][1]) for of in found}
    finally:
        server.terminate()
        server.wait()
    raise AssertionError("nothing was scraped")


def test_the_environment_starts_the_exporter(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import ferry, urllib.request\n"
        "group = ferry.Group(ferry.threads(1)[0], experts=1)\n"
        "port = ferry.serve_metrics()\n"
        "urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics')\n"
        "print(port)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = run_program(program, FERRY_METRICS_PORT=str(port - 1), LOCAL_RANK="1").stdout
    assert out == f"{port}\n"
    bad = run_program(program, FERRY_METRICS_PORT="http")
    assert "FERRY_METRICS_PORT: got 'http' and LOCAL_RANK '0'" in bad.stderr


def run_program(program: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_slow_rank_is_found_in_the_trace(tmp_path: Path) -> None:
    """Rank 2 begins its calls when the others wait in theirs."""
    file = tmp_path / "trace.json"
    began = [threading.Semaphore(0) for _ in range(3)]

    def body(group: ferry.Group) -> str:
        recorder = group.trace(file, plot=tmp_path / "trace.svg")
        with recorder:
            for _ in range(3):
                if group.rank == 2:
                    began[0].acquire()
                    began[1].acquire()
                    time.sleep(0.02)
                else:
                    began[group.rank].release()
                exchange(group)
        return recorder.summary

    summary, *others = run_ranks(3, body)
    assert others == ["", ""]
    words = [line.split() for line in summary.splitlines()[2:]]
    assert [row[0] for row in words] == ["0", "1", "2"]
    assert int(words[2][1]) >= 3 and float(words[2][2]) > max(float(row[2]) for row in words[:2])
    made = json.loads(file.read_text())
    assert made["otherData"]["dropped"] == 0
    events = [event for event in made["traceEvents"] if event["ph"] == "X"]
    calls = [event for event in events if event["cat"] == "call" and event["name"] == "dispatch"]
    assert sorted(event["pid"] for event in calls) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sum(event["args"]["rows"] for event in calls) == 3 * 3 * 4  # calls, ranks, rows of each
    plans = [event for event in events if event["name"] == "plan" and event["pid"] == 2]
    assert all(event["args"]["late_us"] > 10_000 for event in plans)
    assert "rank 2" in (tmp_path / "trace.svg").read_text()
    expect_drawn(made["traceEvents"], events)
    for event in events:  # waits lie inside the calls that they belong to
        if event["cat"] == "wait":
            assert any(
                call["ts"] <= event["ts"]
                and event["ts"] + event["dur"] <= call["ts"] + call["dur"] + 0.01
                for call in events
                if call["cat"] == "call" and call["pid"] == event["pid"]
            )


def expect_drawn(made: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    """The picture has a box for each call and wait, where and as long as it was."""
    axes = Figure().subplots()
    trace_plot.draw(axes, made)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    first = min(event["ts"] for event in events)
    boxes = []
    for one in axes.collections:
        for path in one.get_paths():
            low, high = path.get_extents().get_points()
            boxes.append((round(low[1]) if high[1] - low[1] > 0.5 else -1, low[0], high[0]))
    assert len(boxes) == len(events)
    for event in events:
        begin = (event["ts"] - first) / 1e3
        row = -1 if event["cat"] == "wait" else event["pid"]
        wanted = pytest.approx((row, begin, begin + event["dur"] / 1e3), abs=1e-6)
        assert any(box == wanted for box in boxes), event


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    group = ferry.Group(ferry.threads(1)[0], experts=1)
    with pytest.raises(ferry.UnsupportedError, match="pip install 'ferry-moe\\[plot\\]'"):
        group.trace(tmp_path / "trace.json", plot="trace.png")


@pytest.mark.parametrize("given", [("no/t.json", None), ("t.json", "no/t.svg")])
def test_files_that_cannot_be_written_are_refused_at_the_start(
    tmp_path: Path, given: tuple[str, str | None]
) -> None:
    """On all ranks, though one alone would write them."""

    def body(group: ferry.Group) -> None:
        file, plot = (None if name is None else tmp_path / name for name in given)
        words = r"trace: file, plot: got .*; expected files that rank 0 can write"
        with (
            pytest.raises(ferry.InvalidArgumentError, match=words),
            group.trace(file, plot=plot),  # type: ignore[arg-type]
        ):
            pytest.fail("entered")
        with pytest.raises(ferry.InvalidArgumentError, match=r"ends in \.png, \.svg or \.pdf"):
            group.trace(tmp_path / "t.json", plot="t.jpg")
        assert not list(tmp_path.iterdir())
        group.barrier()
        with group.trace(tmp_path / "good.json"):
            exchange(group)

    run_ranks(2, body)


def test_a_trace_that_fails_leaves_what_each_rank_saw(tmp_path: Path) -> None:
    def body(group: ferry.Group) -> None:
        with pytest.raises(ZeroDivisionError), group.trace(tmp_path / "trace.json"):
            exchange(group)
            raise ZeroDivisionError
        with group.trace(tmp_path / "again.json", most_events=2):
            exchange(group)

    run_ranks(2, body)
    names = {
        event["name"]
        for event in json.loads((tmp_path / "trace.json.rank1").read_text())["traceEvents"]
    }
    assert {"plan", "dispatch", "combine"} <= names
    assert json.loads((tmp_path / "again.json").read_text())["otherData"]["dropped"] > 0


def test_clocks_are_compared_by_barriers() -> None:
    ours = [(100, 130), (200, 220), (300, 345)]
    # The other one enters later, and its clock is 5000 behind.
    theirs = [(110 - 5000, 131 - 5000), (205 - 5000, 221 - 5000), (330 - 5000, 344 - 5000)]
    offset, wrong = trace.clock_offset(theirs, ours)
    assert abs(offset - 5000) <= wrong <= 20
    assert trace.clock_offset(ours, ours)[0] == 0


def test_calls_are_ranges_of_the_profiler() -> None:
    def body(group: ferry.Group) -> None:
        latency = ferry.LatencyExchange(group, capacity=4, hidden=64, topk=2, dtype="f32")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            exchange(group)
            sent = latency.dispatch(X, ROUTES, hook=True)
            sent.receive()
            latency.combine(sent.x, sent, np.ones((3, 2), np.float32))
        names = {event.key for event in profile.key_averages()}
        assert names >= {"ferry.plan", "ferry.dispatch", "ferry.combine", "ferry.latency_dispatch"}
        assert names >= {"ferry.latency_dispatch.receive", "ferry.latency_combine"}

    run_ranks(1, body)


def test_without_a_profiler_no_function_of_python_is_around_a_call() -> None:
    group = ferry.Group(ferry.threads(1)[0], experts=8)
    with pytest.raises(ferry.InvalidArgumentError) as error:
        group.plan(np.zeros((2, 1, 1), np.int64))
    files = [Path(frame.filename).name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert files[:2] == [Path(__file__).name, "group.py"], files
    assert ferry.Group.plan.__doc__ and ferry.Group.plan.__name__ == "plan"
    assert next(iter(inspect.signature(group.plan).parameters)) == "topk_idx"
    with pytest.raises(TypeError, match="unexpected keyword argument 'route'"):
        group.dispatch(X, route=ROUTES)  # type: ignore[call-arg]
    group.destroy()


LEFT_ON = """
import logging, os, sys
import ferry

class Picky(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        raise ValueError("of the handler")

log = logging.getLogger("picky")
log.setLevel(logging.INFO)
log.addHandler(Picky())
log.propagate = False
ferry.set_log("info", log)
def one():
    ferry.Group(ferry.threads(1)[0], experts=1).destroy()
one()
one()
if sys.argv[1:] == ["fork"]:
    child = os.fork()
    if child == 0:
        one()
        ferry.set_log("off")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("arguments", [[], ["fork"]], ids=str)
def test_a_program_that_leaves_its_log_on_ends(arguments: list[str]) -> None:
    """Its handler raises, too, which costs no later record."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ON, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    groups = 3 if arguments else 2
    assert done.stdout.count("event=group") == groups, done.stdout
    assert "ValueError: of the handler" in done.stderr
