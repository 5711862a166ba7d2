"""etcd as the store where ranks meet: a real one, and what is none."""

from __future__ import annotations

import base64
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rank_processes import free_port
from rank_threads import run_threads
from test_from_store import meet
from test_joins import replace_one
from test_processes import check_good, environment, finish, start

import ferry


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an etcd of this test."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("etcd is not installed (Debian's etcd-server: tools/setup/install.sh test)")
    folder = tmp_path_factory.mktemp("etcd")
    url, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = [program, "--data-dir", str(folder / "data"), "--unsafe-no-fsync"]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"default={peers}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        await_health(url, server, folder / "log")
        yield url
    finally:
        server.terminate()
        server.wait()


def await_health(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as page:
                if json.load(page)["health"] == "true":
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def all_keys(url: str) -> list[dict[str, Any]]:
    store = ferry.EtcdStore(url)
    everything = {"key": "AA==", "range_end": "AA=="}
    return store._ask("/v3/kv/range", everything, time.monotonic() + 10).get("kvs", [])


def test_set_get_and_add(etcd: str) -> None:
    store, other = ferry.EtcdStore(etcd), ferry.EtcdStore(etcd + "/")
    assert repr(store) == f"<ferry.EtcdStore: {etcd}>"
    for value in (b"", bytes(range(256)), b"x" * 1_000_000):
        store.set("one/\u00fc", value)
        assert other.get("one/\u00fc") == value
    with pytest.raises(ferry.DeadlineExceededError, match="there is no key 'two' after 1 s"):
        ferry.EtcdStore(etcd, deadline=1).get("two")
    threading.Timer(0.2, store.set, ("late", b"come")).start()
    assert ferry.EtcdStore(etcd).get("late") == b"come"

    def count(_: int) -> list[int]:
        return [store.add("count", 1) for _ in range(20)]

    counted = [number for each in run_threads(4, count) for number in each]
    assert sorted(counted) == list(range(1, 81))
    with pytest.raises(ferry.InvalidArgumentError, match="expected a number"):
        store.add("late", 1)
    with pytest.raises(ferry.SystemCallError, match=r"status 429, .*larger than max"):
        store.set("large", bytes(3_000_000))


def test_nothing_stays_for_ever(etcd: str) -> None:
    ferry.EtcdStore(etcd, ttl=1).set("short", b"life")
    assert all(int(one["lease"]) > 0 for one in all_keys(etcd))
    end = time.monotonic() + 30
    while any(base64.b64decode(one["key"]) == b"short" for one in all_keys(etcd)):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_count_that_etcd_has_dropped_goes_on(etcd: str) -> None:
    store = ferry.EtcdStore(etcd)
    assert [store.add("dropped", 1) for _ in range(2)] == [1, 2]
    gone = {"key": base64.b64encode(b"dropped").decode()}
    store._ask("/v3/kv/deleterange", gone, time.monotonic() + 10)
    assert store.add("dropped", 1) == 3


def test_threads_meet_again_and_again(etcd: str) -> None:
    def rank(number: int) -> None:
        store = ferry.EtcdStore(etcd)
        assert store.host == "127.0.0.1"
        for _ in range(2):
            meet(store, number, 3)

    run_threads(3, rank)


def test_processes_meet(etcd: str) -> None:
    code = f"""
        store = ferry.EtcdStore({etcd!r})
        exchange(ferry.from_store(store, int(os.environ["RANK"]), 3, name="job 7"))
    """
    check_good(finish([start(code, **v) for v in environment(3)]))
    assert any(base64.b64decode(one["key"]).startswith(b"job 7/3/") for one in all_keys(etcd))


@pytest.mark.timeout(150)
def test_a_process_joins_by_etcd(etcd: str) -> None:
    replace_one("cpu", ("etcd", etcd))
    assert any(b"/3/job" in base64.b64decode(one["key"]) for one in all_keys(etcd))


def test_a_rank_that_does_not_come_is_named(etcd: str) -> None:
    boot = ferry.from_store(ferry.EtcdStore(etcd, deadline=2), 0, 2, name="alone")
    with pytest.raises(ferry.DeadlineExceededError, match="rank 0 waits for rank 1") as caught:
        ferry.Group(boot, experts=2)
    assert caught.value.peer == 1


class Asked(http.server.BaseHTTPRequestHandler):
    answer: Callable[[socket.socket], None]

    def do_POST(self) -> None:
        # All of it: who closes with bytes unread resets the connection, and the answer is lost.
        self.rfile.read(int(self.headers["Content-Length"]))
        with suppress(OSError):  # who asks has had enough
            self.answer(self.connection)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers a request so, byte by byte."""
    handler = type("These", (Asked,), {"answer": staticmethod(answer)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}"
        one.shutdown()


def server(said: bytes, status: int = 200) -> AbstractContextManager[str]:
    return raw_server(lambda there: there.sendall(b"HTTP/1.0 %d -\r\n\r\n" % status + said))


def kvs(**fields: Any) -> bytes:
    return json.dumps({"kvs": [fields]}).encode()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"<html>hello</html>", "expected JSON in an answer, got b'<html>hello"),
        (b"[" * 100_000, r"expected JSON in an answer, got b'\[\["),
        (b"[]", "expected an object of JSON"),
        (b'{"kvs": 7}', "expected a list of keys in an answer, got 7"),
        (b'{"kvs": [7]}', r"expected a list of keys in an answer, got \[7\]"),
        (kvs(value="!!!!", mod_revision="1"), "'key' in base64 in an answer, got '?!!!!"),
        (kvs(value=7, mod_revision="1"), "'key' in base64 in an answer, got 7"),
        (kvs(value="AAAA", mod_revision="9" * 5000), "a number as mod_revision"),
        (kvs(value="AAAA", mod_revision=-1), "a number as mod_revision"),
        (kvs(value="AAAA"), "a number as mod_revision in an answer, got None"),
        (kvs(value="A" * (8 << 20)), "expected at most 4194304 bytes"),
    ],
)
def test_answers_that_no_etcd_gives(said: bytes, words: str) -> None:
    with server(said) as url, pytest.raises(ferry.MismatchError, match=words) as caught:
        ferry.EtcdStore(url, deadline=20).get("key")
    assert url in str(caught.value) and "3.4 or newer" in str(caught.value)


def test_a_count_that_others_change_for_ever() -> None:
    with server(b"{}") as url:
        store = ferry.EtcdStore(url, deadline=0.5)
        store._lease, store._lease_until = "7", time.monotonic() + 100
        with pytest.raises(ferry.DeadlineExceededError, match=f"{url}: .* after 0.5 s"):
            store.add("key", 1)


def test_what_is_no_etcd_is_named() -> None:
    with server(b"no such page", 404) as url:
        with pytest.raises(ferry.SystemCallError, match="404, b'no such page'; expected an etcd"):
            ferry.EtcdStore(url).get("key")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ferry.SystemCallError, match=f"{url}: .*refused; expected an etcd"):
        ferry.EtcdStore(url).set("key", b"")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ferry.DeadlineExceededError, match=r"does not answer after 0\.3 s"):
            ferry.EtcdStore(url, deadline=0.3).get("key")


@pytest.mark.parametrize(
    ("begin", "part", "words"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{", b" ", "its answer does not end after 0.5 s"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0", "does not end after"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 300\r\n\r\n", b"x", "does not end after"),
        (b"HTTP/1.1 200 OK\r\nName: ", b"x", "it does not answer after 0.5 s"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "it does not answer after"),
    ],
)
def test_an_answer_that_does_not_end(begin: bytes, part: bytes, words: str) -> None:
    def drip(there: socket.socket) -> None:
        there.sendall(begin)
        for _ in range(250):  # five seconds; a header takes 65536 bytes
            there.sendall(part)
            time.sleep(0.02)

    with raw_server(drip) as url:
        with pytest.raises(ferry.DeadlineExceededError, match=words):
            ferry.EtcdStore(url, deadline=0.5).get("key")


def test_no_redirection_is_followed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"http://127.0.0.1:{other.getsockname()[1]}/"

        def redirect(there: socket.socket) -> None:
            there.sendall(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\n\r\n".encode())

        with raw_server(redirect) as url, pytest.raises(ferry.SystemCallError, match="status 302"):
            ferry.EtcdStore(url, deadline=2).get("key")


def test_an_etcd_that_falls_silent_is_told_from_a_key_that_is_not_there() -> None:
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]

    def once(there: socket.socket) -> None:
        if answers:
            there.sendall(answers.pop())
        else:
            time.sleep(5)

    with raw_server(once) as url:
        with pytest.raises(ferry.DeadlineExceededError, match="it does not answer after 1 s"):
            ferry.EtcdStore(url, deadline=1).get("key")


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        ("set", ("key", 5), "set: value: got 5"),
        ("set", (5, b""), "set: key: got 5"),
        ("get", (None,), "get: key: got None"),
        ("add", (b"key", 1), "add: key: got b'key'"),
        ("add", ("key", 1.5), "add: amount: got 1.5"),
    ],
)
def test_arguments_that_cannot_be(call: str, given: tuple[Any, ...], words: str) -> None:
    store = ferry.EtcdStore("http://127.0.0.1:1")
    with pytest.raises(ferry.InvalidArgumentError, match=f"EtcdStore: {words}"):
        getattr(store, call)(*given)


def test_an_answer_that_is_no_http() -> None:
    def answer(there: socket.socket) -> None:
        there.sendall(b"\0\1\2 hello\r\n\r\n")

    with raw_server(answer) as url:
        with pytest.raises(ferry.MismatchError, match="expected HTTP in an answer"):
            ferry.EtcdStore(url, deadline=20).get("key")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:2379",
        "ftp://host",
        "http://",
        "http://a:b@host",
        "http://h:x",
        "http://h/v3",
        "http://[",
        "http://h..x",
        f"http://{'h' * 64}",
        "http://user:hunter2@host",
        "http://host?key=hunter2",
    ],
)
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(ferry.InvalidArgumentError, match="EtcdStore: url: got") as caught:
        ferry.EtcdStore(url)
    assert "hunter2" not in str(caught.value)
