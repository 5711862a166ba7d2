"""etcd as a store where ranks meet, by the JSON of its version 3 over HTTP."""

from __future__ import annotations

import base64
import http.client
import io
import json
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from ferry.arguments import INT32_MAX, INT64_MAX, describe, integer, refuse, seconds, text
from ferry.errors import DeadlineExceededError, MismatchError, SystemCallError

if TYPE_CHECKING:
    from socket import socket
    from ssl import SSLContext

_MOST_ANSWER_BYTES = 4 << 20  # etcd takes requests of 1.5 MiB
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2
_EXPECTED = "expected an etcd, 3.4 or newer, with its gRPC gateway; is that its client URL?"


class EtcdStore:
    """An etcd, 3.4 or newer, for `from_store`.

    Args:
        url: of a member for clients, "http://10.0.0.1:2379" or "https://…".
        deadline: seconds, of every wait. A key or an etcd that is late raises
            `DeadlineExceededError`.
        ttl: seconds, after which etcd drops a key that this object has set; longer than the start
            of the job takes.
        context: for https: which certificates to trust, and the one that etcd asks of clients.

    No proxy is asked, no redirection followed. What etcd refuses, or no etcd would answer, raises
    `SystemCallError` or `MismatchError` with the address.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline: float = 60.0,
        ttl: int = 3600,
        context: SSLContext | None = None,
    ) -> None:
        self._parts = _checked(text("EtcdStore: url", url))
        self._url = f"{self._parts.scheme}://{self._parts.netloc}"
        self.host = self._parts.hostname or ""
        self._context = context
        self._deadline = seconds("EtcdStore: deadline", deadline)
        self._ttl = integer("EtcdStore: ttl", ttl, 1, INT32_MAX)
        self._lease, self._lease_until = "", 0.0
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        if not isinstance(value, (bytes, bytearray, memoryview, str)):
            refuse("EtcdStore: set: value", describe(value), "bytes")
        until = self._until()
        self._ask("/v3/kv/put", self._put_of(text("EtcdStore: set: key", key), value, until), until)

    def get(self, key: str) -> bytes:
        """The value of a key, when there is one."""
        text("EtcdStore: get: key", key)
        until = self._until()
        pause = _SHORTEST_PAUSE
        value, _ = self._find(key, until)
        answered = time.monotonic()
        while value is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if time.monotonic() >= until:
                silent = until - answered > 2 * _LONGEST_PAUSE
                raise self._late("it does not answer" if silent else f"there is no key {key!r}")
            with suppress(DeadlineExceededError):
                value, _ = self._find(key, until)
                answered = time.monotonic()
        return value

    def add(self, key: str, amount: int) -> int:
        """Adds to the number that a key has, 0 at first, and returns the sum. Never less than this
        object has added already, though etcd may have dropped the key since."""
        text("EtcdStore: add: key", key)
        more = integer("EtcdStore: add: amount", amount, -INT64_MAX, INT64_MAX)
        until = self._until()
        while True:
            value, revision = self._find(key, until)
            try:
                before = int(value or b"0")
            except ValueError:
                refuse(f"EtcdStore: add: key {key!r}", describe(value), "a number, as add sets it")
            total = max(before, self._counts.get(key, 0)) + more
            same = {"key": _coded(key), "target": "MOD", "mod_revision": str(revision)}
            put = {"request_put": self._put_of(key, str(total).encode(), until)}
            done = self._ask("/v3/kv/txn", {"compare": [same], "success": [put]}, until)
            if done.get("succeeded"):
                self._counts[key] = total
                return total
            if time.monotonic() >= until:
                raise self._late(f"others still change key {key!r}")

    def _put_of(self, key: str, value: str | bytes, until: float) -> dict[str, str]:
        """Under a lease that lasts for half of the time at least."""
        if time.monotonic() >= self._lease_until:
            half = time.monotonic() + self._ttl / 2
            answer = self._ask("/v3/lease/grant", {"TTL": str(self._ttl)}, until)
            self._lease, self._lease_until = str(self._number(answer, "ID")), half
        return {"key": _coded(key), "value": _coded(value), "lease": self._lease}

    def _find(self, key: str, until: float) -> tuple[bytes | None, int]:
        """The value and the revision in which it was set; None and 0: there is none."""
        answer = self._ask("/v3/kv/range", {"key": _coded(key)}, until)
        found = answer.get("kvs", [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self._odd("a list of keys", found)
        if not found:
            return None, 0
        coded = found[0].get("value", "")
        try:
            value = base64.b64decode(coded, validate=True)
        except (TypeError, ValueError):
            raise self._odd(f"the value of key {key!r} in base64", coded) from None
        return value, self._number(found[0], "mod_revision")

    def _number(self, answer: dict[str, Any], name: str) -> int:
        got = answer.get(name)
        if not isinstance(got, str) or not got.isascii() or not got.isdigit() or len(got) > 20:
            raise self._odd(f"a number as {name}", got)
        return int(got)

    def _ask(self, call: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        try:
            status, raw = self._post(call, json.dumps(body).encode(), until)
        except DeadlineExceededError:
            raise
        except TimeoutError as error:
            raise self._late("it does not answer") from error
        except OSError as error:
            raise SystemCallError(f"EtcdStore: {self._url}: {error}; {_EXPECTED}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise self._odd("HTTP", describe(error)) from error
        if status != http.client.OK:
            said = raw[:300]
            hint = "" if b'"error"' in said else f"; {_EXPECTED}"
            raise SystemCallError(f"EtcdStore: {self._url}{call}: status {status}, {said!r}{hint}")
        if len(raw) > _MOST_ANSWER_BYTES:
            raise self._odd(f"at most {_MOST_ANSWER_BYTES} bytes", raw)
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._odd("JSON", raw) from None
        if not isinstance(parsed, dict):
            raise self._odd("an object of JSON", parsed)
        return parsed

    def _post(self, call: str, body: bytes, until: float) -> tuple[int, bytes]:
        """The status and the first bytes of the answer."""
        host, port, left = self.host, self._parts.port, max(until - time.monotonic(), 0.01)
        connection = http.client.HTTPConnection(host, port, timeout=left)
        if self._parts.scheme == "https":
            https = http.client.HTTPSConnection
            connection = https(host, port, timeout=left, context=self._context)
        with closing(connection):
            connection.request("POST", call, body, {"Content-Type": "application/json"})
            there: Any = _Answer(connection.sock, until)
            with http.client.HTTPResponse(there) as answer:
                answer.begin()
                try:
                    return answer.status, answer.read(_MOST_ANSWER_BYTES + 1)
                except TimeoutError as error:
                    raise self._late("its answer does not end") from error

    def _until(self) -> float:
        return time.monotonic() + self._deadline

    def _late(self, what: str) -> DeadlineExceededError:
        return DeadlineExceededError(f"EtcdStore: {self._url}: {what} after {self._deadline:g} s")

    def _odd(self, expected: str, got: Any) -> MismatchError:
        said = describe(got) if not isinstance(got, bytes) else repr(got[:100])
        return MismatchError(
            f"EtcdStore: {self._url}: expected {expected} in an answer, got {said}; {_EXPECTED}"
        )

    def __repr__(self) -> str:
        return f"<ferry.EtcdStore: {self._url}>"


class _Answer(io.RawIOBase):
    """What comes through a socket until a time, however many parts it comes in."""

    def __init__(self, there: socket, until: float) -> None:
        self._there, self._until = there, until

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self._there.settimeout(max(self._until - time.monotonic(), 0.001))
        return self._there.recv_into(into)


def _checked(url: str) -> SplitResult:
    """Its parts, which say a scheme, a host and perhaps a port. A password is not shown."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.username is None and parts.port != 0
        fits = fits and bool(parts.hostname) and parts.path in ("", "/")
        fits = fits and not parts.query and not parts.fragment
        (parts.hostname or "").encode("idna")
    except ValueError:  # of a port that is none, brackets, or a name that no host has
        fits = False
    if not fits:
        secret = "@" in url or "?" in url
        got = "one with a user, a password or a query" if secret else describe(url)
        refuse("EtcdStore: url", got, '"http://HOST:PORT" or "https://HOST:PORT"')
    return parts


def _coded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
