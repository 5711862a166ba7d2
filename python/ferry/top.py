"""`ferry top`: ranks, their rates, waits and masks, from the counters that they serve for
Prometheus (FERRY_METRICS_PORT, `ferry.serve_metrics`)."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple

MOST_PORTS = 512
DEFAULT_PORT = 9400
#: Waits of less than this part of the time are nobody's fault.
MUCH = 0.3

Endpoint = tuple[str, int]
#: Counters of one group in one process, by name; of calls and stages, "name/which".
Counters = dict[str, float]


class Row(NamedTuple):
    """What one rank did in the time between two polls."""

    rank: int
    ranks: int
    group: int
    calls: float
    """A second, as are rows and bytes."""
    rows: float
    bytes: float
    busy: float
    """The part of the time inside calls, waits included."""
    waiting: float
    """The part of the time waiting for others."""
    stage: str
    """Where it waited longest; "": nowhere."""
    masked: int
    failures: int
    epoch: int


def endpoints_in(words: list[str]) -> list[Endpoint]:
    """[HOST:]PORT[-LAST] each. Raises ValueError."""
    found: list[Endpoint] = []
    for word in words:
        match = re.fullmatch(r"(?:(.+):)?(\d{1,5})(?:-(\d{1,5}))?", word)
        first = int(match[2]) if match else 0
        last = int(match[3] or first) if match else 0
        if not match or not 0 < first <= last < 65536 or last - first >= MOST_PORTS:
            raise ValueError(
                f"'{word}': expected [HOST:]PORT or [HOST:]FIRST-LAST, at most {MOST_PORTS} ports "
                "from 1 to 65535"
            )
        found += [(match[1] or "127.0.0.1", port) for port in range(first, last + 1)]
    return found


def counters_in(page: str) -> dict[tuple[int, int], Counters]:
    """By rank and group."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[int, int], Counters] = {}
    for family in text_string_to_metric_families(page):
        for name, labels, value, *_ in family.samples:
            if not name.startswith("ferry_"):
                continue
            of = found.setdefault((int(labels["rank"]), int(labels["group"])), {})
            which = labels.get("call") or labels.get("stage")
            of[name.removeprefix("ferry_") + (f"/{which}" if which else "")] = value
    return found


def read(endpoint: Endpoint) -> dict[tuple[int, int], Counters] | None:
    """None: nobody answers there."""
    host, port = endpoint
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=2) as answer:
            return counters_in(answer.read().decode())
    except (OSError, urllib.error.URLError, ValueError, KeyError):
        return None


def found_from(port: int) -> list[Endpoint]:
    """Ports of this host from this one on, up to the first that does not answer."""
    found: list[Endpoint] = []
    for each in range(port, min(port + MOST_PORTS, 65536)):
        if read(("127.0.0.1", each)) is None:
            break
        found.append(("127.0.0.1", each))
    return found


def row_of(rank: int, group: int, before: Counters, now: Counters, seconds: float) -> Row:
    def grown(name: str) -> float:
        """A second. A counter that is smaller now is that of another process."""
        last = before.get(name, 0.0)
        return (now[name] - (last if last <= now[name] else 0.0)) / seconds

    def all_calls(name: str) -> float:
        return sum(grown(key) for key in now if key.startswith(f"{name}/"))

    stages = {key: grown(key) for key in now if key.startswith("stage_seconds_total/")}
    longest = max(stages, key=lambda key: stages[key], default="")
    return Row(
        rank,
        int(now.get("ranks", 0)),
        group,
        all_calls("calls_total"),
        all_calls("call_rows_total"),
        all_calls("call_bytes_total"),
        all_calls("call_seconds_total"),
        all_calls("call_wait_seconds_total"),
        longest.partition("/")[2] if longest and stages[longest] > 0 else "",
        int(now.get("masked_total", 0)),
        int(now.get("failures_total", 0)),
        int(now.get("epoch", 0)),
    )


def slow_ranks(rows: list[Row]) -> set[tuple[int, int]]:
    """Rank and group of those for whom the others wait: of a group whose ranks wait much, who waits
    less than half as long as the median."""
    slow = set()
    for row in rows:
        waits = [other.waiting for other in rows if other.group == row.group]
        middle = median(waits)
        if len(waits) > 1 and middle > MUCH and row.waiting < middle / 2:
            slow.add((row.rank, row.group))
    return slow


class Watch:
    """Polls all endpoints; each time says what happened since the last."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints
        self._pool = ThreadPoolExecutor(min(32, len(endpoints)))
        self._last: dict[tuple[Endpoint, tuple[int, int]], tuple[float, Counters]] = {}

    def poll(self) -> tuple[list[Row], list[Endpoint]]:
        """Rows by group and rank, and who does not answer. No rows in the first poll."""
        rows, silent, last = [], [], {}
        for endpoint, found in zip(self._endpoints, self._pool.map(read, self._endpoints)):
            now = time.monotonic()
            if found is None:
                silent.append(endpoint)
            for key, counters in (found or {}).items():
                last[endpoint, key] = (now, counters)
                if before := self._last.get((endpoint, key)):
                    rows.append(row_of(*key, before[1], counters, max(now - before[0], 1e-9)))
        self._last = last
        return sorted(rows, key=lambda row: (row.group, row.rank)), silent


def lines_of(rows: list[Row], silent: list[Endpoint]) -> Iterator[str]:
    """For a pipe: one line each, as key=value."""
    slow = slow_ranks(rows)
    for row in rows:
        yield (
            f"rank={row.rank} ranks={row.ranks} group={row.group} calls_per_s={row.calls:.4g} "
            f"rows_per_s={row.rows:.4g} bytes_per_s={row.bytes:.4g} busy={row.busy:.3f} "
            f'waiting={row.waiting:.3f} stage="{row.stage}" masked={row.masked} '
            f"failures={row.failures} epoch={row.epoch} "
            f"slow={int((row.rank, row.group) in slow)}"
        )
    for host, port in silent:
        yield f"endpoint={host}:{port} answers=0"


def table_of(rows: list[Row], silent: list[Endpoint]) -> Any:
    """For a terminal."""
    from rich.table import Table

    slow = slow_ranks(rows)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("rank", "group", "calls/s", "rows/s", "MB/s", "busy", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("longest in", no_wrap=True)
    table.add_column("")
    for row in rows:
        is_slow = (row.rank, row.group) in slow
        notes = {
            "others wait": is_slow,
            f"{row.masked} masked": row.masked,
            f"{row.failures} failed": row.failures,
            f"epoch {row.epoch}": row.epoch > 1,
        }
        table.add_row(
            f"{row.rank} of {row.ranks}",
            str(row.group),
            f"{row.calls:.0f}",
            f"{row.rows:.0f}",
            f"{row.bytes / 1e6:.1f}",
            f"{min(row.busy, 1):.0%}",
            f"{min(row.waiting, 1):.0%}",
            row.stage,
            ", ".join(note for note, holds in notes.items() if holds),
            style="bold" if is_slow else "red" if row.masked or row.failures else "",
        )
    for host, port in silent:
        table.add_row(f"{host}:{port} does not answer", style="dim")
    return table


def watch(endpoints: list[Endpoint], interval: float, polls: int) -> None:
    """Shows `polls` times what happened, or (0) until Ctrl-C."""
    watched = Watch(endpoints)
    watched.poll()
    live = None
    if sys.stdout.isatty():
        from rich.live import Live

        live = Live(auto_refresh=False)
        live.start()
    try:
        shown = 0
        while not polls or shown < polls:
            time.sleep(interval)
            rows, silent = watched.poll()
            if live is not None:
                live.update(table_of(rows, silent), refresh=True)
            else:
                print(*lines_of(rows, silent), sep="\n", flush=True)
            shown += 1
    finally:
        if live is not None:
            live.stop()


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ferry top",
        description="Ranks, rates, waits and masks of running groups, live in a terminal and as "
        "lines of key=value in a pipe. The groups serve them: start the program with "
        f"FERRY_METRICS_PORT={DEFAULT_PORT}, or have it call ferry.serve_metrics.",
    )
    parser.add_argument(
        "endpoints",
        nargs="*",
        metavar="[HOST:]PORT[-LAST]",
        help="where ranks serve; default: ports of this host from $FERRY_METRICS_PORT, else "
        f"{DEFAULT_PORT}, up to the first that does not answer",
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument(
        "--count", type=int, default=0, metavar="N", help="ends after N polls; 0: Ctrl-C ends it"
    )
    arguments = parser.parse_args(words)
    if not 0.05 <= arguments.interval <= 3600:
        parser.error(f"--interval is {arguments.interval}, expected 0.05 to 3600 seconds")
    if arguments.count < 0:
        parser.error(f"--count is {arguments.count}, expected 0 or more")
    return arguments


def main(words: list[str]) -> int:
    arguments = arguments_of(words)
    try:
        import prometheus_client.parser  # noqa: F401
        import rich.live  # noqa: F401
    except ImportError as error:
        print(f"ferry top: {error}; pip install 'ferry-moe[metrics]'", file=sys.stderr)
        return 1
    try:
        port = os.environ.get("FERRY_METRICS_PORT") or str(DEFAULT_PORT)
        (first,) = endpoints_in([port]) if not arguments.endpoints else [("", 0)]
        endpoints = endpoints_in(arguments.endpoints) or found_from(first[1])
    except ValueError as error:
        print(f"ferry top: {error}", file=sys.stderr)
        return 2
    if not endpoints:
        print(
            f"ferry top: nobody answers at http://127.0.0.1:{port}/metrics; start the program with "
            f"FERRY_METRICS_PORT={port}, or say where it serves: ferry top [HOST:]PORT[-LAST]",
            file=sys.stderr,
        )
        return 1
    try:
        watch(endpoints, arguments.interval, arguments.count)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0
    return 0
