"""A network that loses, delays and reorders packets: a relay between network namespaces.

    relay.py [--seed N] [--loss SHARE] [--delay MS] [--jitter MS] [--held-back SHARE] NAMESPACE ...

Each namespace gets an interface eth0 (TUN) whose packets this process carries: host N has the
address 10.77.0.N+1. A packet is lost with probability --loss, takes --delay and up to --jitter
milliseconds more, so packets overtake each other; a share of them is held back for five times the
jitter. What happens to the n-th packet from one host to another follows from the seed. Prints a
line of JSON when it is ready, and its counts after SIGTERM.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import time
from dataclasses import asdict, dataclass

from namespace import enter

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
HELD_BACK = 5  # times the jitter
MOST_BYTES = 65536


def open_tun(interface: str) -> int:
    """The packets of a new interface of this namespace."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", interface.encode(), IFF_TUN | IFF_NO_PI))
    return tun


@dataclass
class Counts:
    """Of packets."""

    carried: int = 0
    lost: int = 0
    overtaken: int = 0  # arrived after one that was sent later


class Way:
    """From one host to another."""

    def __init__(self, given: argparse.Namespace, source: int, target: int) -> None:
        self.random = random.Random(f"{given.seed} {source} {target}")
        self.given = given
        self.sent = 0
        self.newest = -1

    def delay(self) -> float | None:
        """Seconds that the next packet takes; None: it is lost."""
        lost, jitter, held = (self.random.random() for _ in range(3))
        if lost < self.given.loss:
            return None
        late = HELD_BACK if held < self.given.held_back else jitter
        return float(self.given.delay + self.given.jitter * late) / 1000


class Relay:
    def __init__(self, given: argparse.Namespace, tuns: list[int]) -> None:
        self.tuns = tuns
        hosts = range(len(tuns))
        self.ways = {(i, j): Way(given, i, j) for i in hosts for j in hosts}
        self.waiting: list[tuple[float, int, int, int, int, bytes]] = []  # a heap, by due time
        self.counts = Counts()
        self.order = 0

    def take(self, source: int, packet: bytes) -> None:
        target = packet[19] - 1  # the last byte of the destination's address
        if packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x4d\x00" or target >= len(self.tuns):
            return  # IPv6 looks for routers; nobody is there
        way = self.ways[source, target]
        way.sent += 1
        delay = way.delay()
        if delay is None:
            self.counts.lost += 1
            return
        self.order += 1
        due = time.monotonic() + delay
        heapq.heappush(self.waiting, (due, self.order, source, target, way.sent, packet))

    def deliver(self) -> float:
        """What is due; returns the seconds until the next one is."""
        while self.waiting:
            due, _, source, target, number, packet = self.waiting[0]
            left = due - time.monotonic()
            if left > 0:
                return left
            heapq.heappop(self.waiting)
            try:
                os.write(self.tuns[target], packet)
            except OSError:  # its interface is down
                self.counts.lost += 1
                continue
            way = self.ways[source, target]
            self.counts.carried += 1
            self.counts.overtaken += number < way.newest
            way.newest = max(way.newest, number)
        return 1.0

    def run(self) -> None:
        """Until SIGTERM."""
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
        poll = select.epoll()
        sources = {tun: host for host, tun in enumerate(self.tuns)}
        for tun in self.tuns:
            poll.register(tun, select.EPOLLIN)
        while not stopped:
            for tun, _ in poll.poll(self.deliver()):
                self.drain(tun, sources[tun])

    def drain(self, tun: int, source: int) -> None:
        try:
            for _ in range(64):
                self.take(source, os.read(tun, MOST_BYTES))
        except OSError:  # empty, or its interface is down
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    for name in ("loss", "delay", "jitter", "held-back"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("namespaces", nargs="+")
    given = parser.parse_args()
    tuns = []
    for name in given.namespaces:
        enter(name)
        tuns.append(open_tun("eth0"))
    relay = Relay(given, tuns)
    print(json.dumps({"ready": True}), flush=True)
    relay.run()
    print(json.dumps(asdict(relay.counts)), flush=True)


if __name__ == "__main__":
    main()
