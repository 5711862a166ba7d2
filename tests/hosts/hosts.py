"""Hosts that are network namespaces of this machine: own addresses, joined by a bridge, or by a
relay that harms packets.

Nothing outside them changes: the bridge is in a namespace of its own. Needs root, or the right to
make network namespaces, and `ip`. To Ferry they are one host, whose ranks share memory, unless
each is given a boot id of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from namespace import BOOT_ID

INTERFACE = "eth0"  # the first of a host
LOSSES = "ferry-losses"  # the table of nftables


def ip(*words: str) -> str:
    """Runs `ip`; returns its output. Raises CalledProcessError."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def nft(namespace: str, words: str) -> str:
    """Runs `nft` in a namespace; returns its output. Raises CalledProcessError."""
    command = ["ip", "netns", "exec", namespace, "nft", words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
    """`count` hosts with addresses 10.77.0.1 … A context manager, which ends their processes and
    takes everything away.

    Args:
        nics: interfaces of a host, eth0 …, each in a network of its own: 10.77.0.0/24, 10.78.0.0/24
            … Of a relay: one.
        own_boot_ids: each host is another machine to Ferry: no shared memory with the others.
        relay: options of relay.py, which then carries the packets; none: bridges do.
        variables: of the environment of every rank.
    """

    def __init__(
        self,
        count: int,
        *,
        nics: int = 1,
        own_boot_ids: bool = False,
        relay: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        tag = secrets.token_hex(3)
        self.switch = f"ferry-{tag}-sw"
        self.names = [f"ferry-{tag}-{i}" for i in range(count)]
        self.processes: list[list[subprocess.Popen[str]]] = [[] for _ in range(count)]
        self.nics = nics
        self.variables = dict(variables or {})
        self.own_boot_ids = own_boot_ids
        self.relay_options = relay
        self.relay: subprocess.Popen[str] | None = None
        self.drops = False
        self.folder = tempfile.TemporaryDirectory(prefix="ferry-hosts-")

    def address(self, host: int, nic: int = 0) -> str:
        return f"10.{77 + nic}.0.{host + 1}"

    def __enter__(self) -> Hosts:
        try:
            for host, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                id = f"0b5e3f6a-0000-4000-8000-{host:012}\n"
                (Path(self.folder.name) / name).write_text(id)
            self._connect_relay() if self.relay_options else self._connect_bridges()
            for host, name in enumerate(self.names):
                for nic in range(self.nics):
                    address = f"{self.address(host, nic)}/24"
                    ip("-n", name, "address", "add", address, "dev", f"eth{nic}")
                    ip("-n", name, "link", "set", f"eth{nic}", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect_bridges(self) -> None:
        ip("netns", "add", self.switch)
        for nic in range(self.nics):
            bridge = f"br{nic}"
            ip("-n", self.switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self.switch, "link", "set", bridge, "up")
            for host, name in enumerate(self.names):
                port = f"port{host}-{nic}"
                ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name",
                   f"eth{nic}", "netns", name)  # fmt: skip
                ip("-n", self.switch, "link", "set", port, "master", bridge, "up")

    def _connect_relay(self) -> None:
        program = Path(__file__).with_name("relay.py")
        self.relay = subprocess.Popen(
            [sys.executable, program, *self.relay_options, *self.names],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.relay.stdout is not None
        if "ready" not in self.relay.stdout.readline():
            raise RuntimeError("the relay did not start")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in range(len(self.names)):
            self.send(host, signal.SIGKILL)
        if self.relay is not None:
            self.relay.kill()
            self.relay.communicate()
        for process in (process for host in self.processes for process in host):
            process.wait()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self.folder.cleanup()

    def start(
        self, host: int, command: Sequence[str | Path], log: Path, **variables: str
    ) -> subprocess.Popen[str]:
        """Starts a program on a host; its output goes to `log`."""
        words = list(map(str, command))
        if self.own_boot_ids:  # `ip netns exec` makes a mount namespace, too
            bind = f'mount --bind "$0" {BOOT_ID} && exec "$@"'
            words = ["sh", "-c", bind, str(Path(self.folder.name) / self.names[host]), *words]
        with log.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *words],
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
        self, each: int, command: Sequence[str | Path], logs: Path
    ) -> list[subprocess.Popen[str]]:
        """`each` ranks on every host, which meet at the first: by rank. Logs: rank-N.txt."""
        return [
            self.start(host, command, logs / f"rank-{rank}.txt", **variables)
            for rank, (host, variables) in enumerate(self._ranks(each))
        ]

    def fork_ranks(
        self, each: int, program: Path, arguments: Sequence[str], imports: Sequence[str], logs: Path
    ) -> subprocess.Popen[str]:
        """The same, of a Python program, forked from one process that has imported `imports`, and
        that ends as they do."""
        boot_ids = Path(self.folder.name)
        ranks = [
            {
                "namespace": self.names[host],
                "boot_id": str(boot_ids / self.names[host]) if self.own_boot_ids else "",
                "log": str(logs / f"rank-{rank}.txt"),
                "variables": variables,
            }
            for rank, (host, variables) in enumerate(self._ranks(each))
        ]
        job = {"program": str(program), "arguments": arguments, "imports": imports, "ranks": ranks}
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("nursery.py")],
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.processes[0].append(process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.close()
        return process

    def _ranks(self, each: int) -> list[tuple[int, dict[str, str]]]:
        """Host and environment of each rank."""
        size = each * len(self.names)
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29400",
            "FERRY_PORT": "29500",
            "FERRY_SECRET": secrets.token_hex(16),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }
        return [(rank // each, {"RANK": str(rank)} | common) for rank in range(size)]

    def send(self, host: int, number: signal.Signals) -> None:
        """A signal to every process of a host."""
        for process in self.processes[host]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def link(self, host: int, state: str, nic: int = 0) -> None:
        """Pulls a cable of a host ("down") or plugs it in again ("up")."""
        ip("-n", self.switch, "link", "set", f"port{host}-{nic}", state)

    def part(self, hosts: Sequence[int]) -> None:
        """Plugs the cables of these hosts into a switch of their own."""
        ip("-n", self.switch, "link", "add", "apart", "type", "bridge")
        ip("-n", self.switch, "link", "set", "apart", "up")
        for host in hosts:
            ip("-n", self.switch, "link", "set", f"port{host}-0", "master", "apart")

    def heal(self) -> None:
        """Plugs all cables into one switch again."""
        for host in range(len(self.names)):
            ip("-n", self.switch, "link", "set", f"port{host}-0", "master", "br0")

    def sent_bytes(self, host: int, nic: int) -> int:
        """What an interface has sent, headers included."""
        told = json.loads(ip("-n", self.names[host], "-s", "-j", "link", "show", f"eth{nic}"))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def queue(self, *words: str) -> None:
        """The queueing discipline of what every interface sends, in the words of `tc`. Raises
        CalledProcessError."""
        for name in self.names:
            for nic in range(self.nics):
                subprocess.run(
                    ["tc", "-n", name, "qdisc", "replace", "dev", f"eth{nic}", "root", *words],
                    check=True,
                    capture_output=True,
                    text=True,
                )

    def shape(self, rate: str) -> None:
        """Every interface sends at most at this rate ("200mbit")."""
        self.queue("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")

    def shape_link(self, host: int, mbit: float) -> None:
        """What a host sends, and what it gets, both at most at this rate, by bridges."""
        for nic in range(self.nics):
            ends = ((self.names[host], f"eth{nic}"), (self.switch, f"port{host}-{nic}"))
            for place, name in ends:
                words = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
                subprocess.run(
                    ["tc", "-n", place, "qdisc", "replace", "dev", name, "root", *words],
                    check=True,
                    capture_output=True,
                    text=True,
                )

    def set_congestion(self, host: int, name: str) -> None:
        """TCP's congestion control there; CalledProcessError where the system does not let it."""
        setting = f"net.ipv4.tcp_congestion_control={name}"
        command = ["ip", "netns", "exec", self.names[host], "sysctl", "-qw", setting]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def shape_pair(self, one: int, other: int, mbit: float, rest_mbit: float) -> None:
        """What two hosts send each other at `mbit`, all that they send at `rest_mbit`."""
        for host, peer in ((one, other), (other, one)):
            to = self.address(peer)
            for words in (
                "qdisc replace dev eth0 root handle 1: htb default 10",
                f"class add dev eth0 parent 1: classid 1:1 htb rate {rest_mbit}mbit burst 256kb",
                f"class add dev eth0 parent 1:1 classid 1:10 htb rate {rest_mbit}mbit burst 256kb",
                f"class add dev eth0 parent 1:1 classid 1:20 htb rate {mbit}mbit burst 256kb",
                f"filter add dev eth0 protocol ip parent 1: u32 match ip dst {to} flowid 1:20",
            ):
                command = ["tc", "-n", self.names[host], *words.split()]
                subprocess.run(command, check=True, capture_output=True, text=True)

    def drop(self, per_mille: int) -> None:
        """Every host loses so many of 1000 packets that reach it, at random."""
        rule = f"numgen random mod 1000 < {per_mille} counter drop"
        hook = "type filter hook input priority 0;"
        self.drops = True
        for name in self.names:
            table = f"table inet {LOSSES} {{ chain input {{ {hook} {rule}; }}; }}"
            nft(name, table)

    def packets(self) -> dict[str, int]:
        """How many were "lost", by the relay, which ends, or by `drop`; the relay tells more."""
        if self.relay is not None:
            self.relay.terminate()
            told: dict[str, int] = json.loads(self.relay.communicate(timeout=10)[0])
            return told
        if not self.drops:
            return {}
        words = "".join(nft(name, f"list table inet {LOSSES}") for name in self.names)
        return {"lost": sum(map(int, re.findall(r"counter packets (\d+)", words)))}
