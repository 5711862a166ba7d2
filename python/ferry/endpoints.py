"""Pages of counters that ranks serve for Prometheus, for `ferry top`."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

MOST_PORTS = 512
#: Of an answer, to its last byte.
SECONDS = 2.0
#: So many ports in a row that do not answer are the end of those of a program.
FURTHER = 8

Endpoint = tuple[str, int]
#: Counters of one group in one process, by name; of calls and stages, "name/which".
Counters = dict[str, float]


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
    """None: nobody answers there, or not as a rank does."""
    try:
        return counters_in(_page(endpoint))
    except (OSError, http.client.HTTPException, ValueError, LookupError):
        return None


def found_from(host: str, port: int) -> list[Endpoint]:
    """Ports from this one on, up to the last before a gap: ranks that ended leave smaller ones."""
    found: list[Endpoint] = []
    answered = 0
    with ThreadPoolExecutor(FURTHER) as pool:
        for first in range(port, min(port + MOST_PORTS, 65536), FURTHER):
            block = [(host, each) for each in range(first, min(first + FURTHER, 65536))]
            pages = list(pool.map(read, block))
            found += block
            if not any(page is not None for page in pages):
                break
            answered = len(found) - next(
                place for place, page in enumerate(reversed(pages)) if page is not None
            )
    return found[:answered]


def _page(endpoint: Endpoint) -> str:
    """Raises also where the whole answer takes longer than SECONDS."""
    until = time.monotonic() + SECONDS
    host, port = endpoint
    connection = http.client.HTTPConnection(f"{host}:{port}", timeout=SECONDS)
    try:
        connection.connect()
        late = threading.Timer(until - time.monotonic(), _cut, [connection.sock])
        late.start()
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            page = answer.read()
        finally:
            late.cancel()
    finally:
        connection.close()
    if answer.status != http.client.OK or time.monotonic() > until:
        raise OSError(f"status {answer.status}, or cut off")
    return page.decode()


def _cut(connection: socket.socket) -> None:
    """Whoever reads from it sees its end."""
    with suppress(OSError):  # closed meanwhile
        connection.shutdown(socket.SHUT_RDWR)
