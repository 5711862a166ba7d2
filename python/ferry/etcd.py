"""etcd as a store where ranks meet, by the JSON of its version 3 over HTTP."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ferry.arguments import INT32_MAX, describe, integer, refuse, seconds, text
from ferry.errors import DeadlineExceededError, MismatchError, SystemCallError

if TYPE_CHECKING:
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

    No proxy is asked. What etcd refuses, or no etcd would answer, raises `SystemCallError` or
    `MismatchError` with the address.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline: float = 60.0,
        ttl: int = 3600,
        context: SSLContext | None = None,
    ) -> None:
        self._url, self.host = _checked(text("EtcdStore: url", url))
        self._deadline = seconds("EtcdStore: deadline", deadline)
        self._ttl = integer("EtcdStore: ttl", ttl, 1, INT32_MAX)
        handlers: list[Any] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)
        self._lease, self._lease_until = "", 0.0
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        until = self._until()
        self._ask("/v3/kv/put", self._put_of(key, value, until), until)

    def get(self, key: str) -> bytes:
        """The value of a key, when there is one."""
        until = self._until()
        pause = _SHORTEST_PAUSE
        value, _ = self._find(key, until)
        while value is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if time.monotonic() >= until:
                raise self._late(f"there is no key {key!r}")
            with suppress(DeadlineExceededError):
                value, _ = self._find(key, until)
        return value

    def add(self, key: str, amount: int) -> int:
        """Adds to the number that a key has, 0 at first, and returns the sum. Never less than this
        object has added already, though etcd may have dropped the key since."""
        until = self._until()
        while True:
            value, revision = self._find(key, until)
            try:
                before = int(value or b"0")
            except ValueError:
                refuse(f"EtcdStore: add: key {key!r}", describe(value), "a number, as add sets it")
            total = max(before, self._counts.get(key, 0)) + amount
            same = {"key": _coded(key), "target": "MOD", "mod_revision": str(revision)}
            put = {"request_put": self._put_of(key, str(total).encode(), until)}
            done = self._ask("/v3/kv/txn", {"compare": [same], "success": [put]}, until)
            if done.get("succeeded"):
                self._counts[key] = total
                return total
            if time.monotonic() >= until:
                raise self._late(f"others still change key {key!r}")

    def _put_of(self, key: str, value: bytes, until: float) -> dict[str, str]:
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
        request = urllib.request.Request(
            self._url + call, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=max(until - time.monotonic(), 0.01)) as answer:
                raw = self._read(answer, until)
        except urllib.error.HTTPError as error:
            said = b""
            with suppress(OSError, HTTPException):
                said = error.read(300)
            hint = "" if b'"error"' in said else f"; {_EXPECTED}"
            raise SystemCallError(
                f"EtcdStore: {self._url}{call}: status {error.code}, {said!r}{hint}"
            ) from error
        except DeadlineExceededError:
            raise
        except OSError as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise self._late("it does not answer") from error
            raise SystemCallError(f"EtcdStore: {self._url}: {reason}; {_EXPECTED}") from error
        except (HTTPException, ValueError) as error:
            raise self._odd("HTTP", describe(error)) from error
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._odd("JSON", raw) from None
        if not isinstance(parsed, dict):
            raise self._odd("an object of JSON", parsed)
        return parsed

    def _read(self, answer: Any, until: float) -> bytes:
        raw = b""
        while part := answer.read1(1 << 16):
            raw += part
            if len(raw) > _MOST_ANSWER_BYTES:
                raise self._odd(f"at most {_MOST_ANSWER_BYTES} bytes", raw)
            if time.monotonic() > until:
                raise self._late(f"its answer does not end, after {len(raw)} bytes")
        return raw

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


def _checked(url: str) -> tuple[str, str]:
    """The same without what follows the port, and its host."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.username is None and parts.port != 0
        fits = fits and bool(parts.hostname) and parts.path in ("", "/") and not parts.query
    except ValueError:  # of a port that is none, or brackets
        fits = False
    if not fits:
        refuse("EtcdStore: url", describe(url), '"http://HOST:PORT" or "https://HOST:PORT"')
    return f"{parts.scheme}://{parts.netloc}", parts.hostname or ""


def _coded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
