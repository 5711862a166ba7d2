"""Hosts that are network namespaces of this machine: own addresses, joined by a bridge.

Nothing outside them changes: the bridge is in a namespace of its own. Needs root, or the right to
make network namespaces, and `ip`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"


def ip(*words: str) -> str:
    """Runs `ip`; returns its output. Raises CalledProcessError."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@functools.cache
def problem() -> str:
    """Why there can be no hosts on this machine; empty: there can."""
    if shutil.which("ip") is None:
        return "no `ip` (iproute2) here"
    name = f"ferry-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    try:
        # Sees that links can be made, too.
        ip("-n", name, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    except subprocess.CalledProcessError as error:
        return f"links are not allowed in network namespaces here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Hosts:
    """`count` hosts with addresses 10.77.0.1 … and a bridge between them. A context manager, which
    ends their processes and takes everything away."""

    def __init__(self, count: int) -> None:
        tag = secrets.token_hex(3)
        self.switch = f"ferry-{tag}-sw"
        self.names = [f"ferry-{tag}-{i}" for i in range(count)]
        self.processes: list[list[subprocess.Popen[str]]] = [[] for _ in range(count)]

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for host, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                port = f"port{host}"
                ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name",
                   INTERFACE, "netns", name)  # fmt: skip
                ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
                ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", INTERFACE, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in range(len(self.names)):
            self.send(host, signal.SIGKILL)
        for process in (process for host in self.processes for process in host):
            process.wait()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(
        self, host: int, command: Sequence[str | Path], log: Path, **variables: str
    ) -> subprocess.Popen[str]:
        """Starts a program on a host; its output goes to `log`."""
        with log.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=dict(os.environ, **variables),
                start_new_session=True,
            )
        self.processes[host].append(process)
        return process

    def start_ranks(
        self, each: int, command: Sequence[str | Path], logs: Path, **variables: str
    ) -> list[subprocess.Popen[str]]:
        """`each` ranks on every host, which meet at the first: by rank. Logs: rank-N.txt."""
        size = each * len(self.names)
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29400",
            "FERRY_PORT": "29500",
            "FERRY_SECRET": secrets.token_hex(16),
            "FERRY_HOST": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        return [
            self.start(
                rank // each,
                command,
                logs / f"rank-{rank}.txt",
                RANK=str(rank),
                **(common | variables),
            )
            for rank in range(size)
        ]

    def send(self, host: int, number: signal.Signals) -> None:
        """A signal to every process of a host."""
        for process in self.processes[host]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def link(self, host: int, state: str) -> None:
        """Pulls the cable of a host ("down") or plugs it in again ("up")."""
        ip("-n", self.switch, "link", "set", f"port{host}", state)

    def shape(self, rate: str) -> None:
        """Every host sends at most at this rate ("200mbit")."""
        for name in self.names:
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate,
                 "burst", "256kb", "latency", "200ms"],
                check=True,
            )  # fmt: skip
