"""`ferry top`: ranks, their rates, waits and masks, from the counters that they serve for
Prometheus (FERRY_METRICS_PORT, `ferry.serve_metrics`)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple

from ferry.endpoints import Counters, Endpoint, endpoints_in, found_from, read

DEFAULT_PORT = 9400
#: Waits of less than this part of the time are nobody's fault.
MUCH = 0.3


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

    def poll(self) -> tuple[list[Row], list[Endpoint], list[Endpoint]]:
        """Rows by group and rank, who does not answer, and who has no groups. No rows in the first
        poll."""
        rows, silent, empty, last = [], [], [], {}
        for endpoint, found in zip(self._endpoints, self._pool.map(read, self._endpoints)):
            now = time.monotonic()
            if found is None:
                silent.append(endpoint)
            elif not found:
                empty.append(endpoint)
            for key, counters in (found or {}).items():
                last[endpoint, key] = (now, counters)
                if before := self._last.get((endpoint, key)):
                    rows.append(row_of(*key, before[1], counters, max(now - before[0], 1e-9)))
        self._last = last
        return sorted(rows, key=lambda row: (row.group, row.rank)), silent, empty


def lines_of(
    rows: list[Row], silent: list[Endpoint], empty: Sequence[Endpoint] = ()
) -> Iterator[str]:
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
    for host, port in empty:
        yield f"endpoint={host}:{port} answers=1 groups=0"


def table_of(rows: list[Row], silent: list[Endpoint], empty: Sequence[Endpoint] = ()) -> Any:
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
    for host, port in empty:
        table.add_row(f"{host}:{port} has no groups of Ferry", style="dim")
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
            found = watched.poll()
            if live is not None:
                live.update(table_of(*found), refresh=True)
            else:
                print(*(f"{line}\n" for line in lines_of(*found)), sep="", end="", flush=True)
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
        help="where ranks serve; default: $FERRY_METRICS_PORT, else "
        f"{DEFAULT_PORT}; where that is one port, those behind it too, up to the last that answers",
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
        word = os.environ.get("FERRY_METRICS_PORT") or str(DEFAULT_PORT)
        endpoints = endpoints_in(arguments.endpoints or [word])
    except ValueError as error:
        print(f"ferry top: {error}", file=sys.stderr)
        return 2
    host, port = endpoints[0]
    if not arguments.endpoints and len(endpoints) == 1:
        endpoints = found_from(host, port)
    if not endpoints:
        print(
            f"ferry top: nobody answers at http://{host}:{port}/metrics; start the program with "
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
