"""The demo model on several hosts (network namespaces), joined by libfabric over TCP: its losses
are those of one host, whatever the network does to packets.

FERRY_HOSTS=all runs every number of hosts and ranks, and every harm: many minutes. Otherwise one
run for each number of hosts.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from job import wait_for_job

pytestmark = pytest.mark.usefixtures("network")

WORKER = Path(__file__).resolve().parents[2] / "examples" / "moe_lm" / "worker.py"
IMPORTS = ("torch", "torch._dynamo", "ferry.torch")  # the optimizer takes the second one
STEPS = 40
STEP_TOLERANCE = 1e-4  # of the demo, examples/moe_lm/report.py
everything = pytest.mark.skipif(
    os.environ.get("FERRY_HOSTS") != "all", reason="minutes: FERRY_HOSTS=all runs it"
)


@dataclass
class Run:
    """How many ranks train on how many hosts, what joins them, what is done to their packets."""

    hosts: int
    each: int
    fabric: str = "ofi"
    crossing: str = "automatic"
    relay: tuple[str, ...] = ()
    harm: Callable[[Hosts], None] | None = None
    batch: int = 12  # sequences of a step, in as many parts: a multiple of the ranks
    packets: dict[str, int] = field(default_factory=dict)  # what became of them

    def losses(self, folder: Path) -> list[float]:
        batch = str(self.batch)
        arguments = ["--out", str(folder), "--steps", str(STEPS), "--context", "16"]
        arguments += ["--batch", batch, "--shares", batch, "--held-out", batch]
        arguments += ["--fabric", self.fabric, "--crossing", self.crossing]
        # `automatic` makes a domain of each host if they are not one machine.
        own_boot_ids = self.fabric == "automatic"
        with Hosts(self.hosts, own_boot_ids=own_boot_ids, relay=self.relay) as machines:
            if self.harm is not None:
                self.harm(machines)
            job = machines.fork_ranks(self.each, WORKER, arguments, IMPORTS, folder)
            wait_for_job(job, folder)
            self.packets = machines.packets()
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        assert result["fabric"] == self.joined_by()
        losses: list[float] = result["losses"]
        return losses

    def joined_by(self) -> str:
        if self.hosts == 1:
            return "local"
        return "shm+ofi" if self.fabric == "automatic" and self.each > 1 else "ofi"


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """The losses of one rank on one host, by batch."""

    @functools.cache
    def losses(batch: int) -> list[float]:
        return Run(1, 1, "automatic", batch=batch).losses(tmp_path_factory.mktemp("one"))

    return losses


def compare(run: Run, folder: Path, one_host: Callable[[int], list[float]]) -> None:
    several, one = run.losses(folder), one_host(run.batch)
    assert len(several) == STEPS
    for step, (a, b) in enumerate(zip(several, one, strict=True)):
        assert abs(a - b) <= STEP_TOLERANCE * abs(b), f"step {step}: {a} and {b}"


def joined(crossing: str) -> tuple[str, str]:
    """Fabric and crossing of a run; "none": every rank is a domain of its own."""
    return ("ofi", "automatic") if crossing == "none" else ("automatic", crossing)


def bad_relay(seed: int, loss: float) -> tuple[str, ...]:
    harm = ("--loss", str(loss), "--delay", "0.2", "--jitter", "0.5", "--held-back", "0.02")
    return ("--seed", str(seed), *harm)


def check_harm(run: Run) -> None:
    """The packets were treated badly, indeed."""
    assert run.packets["lost"] > 0, run.packets
    assert not run.relay or run.packets["overtaken"] > 0, run.packets


def test_two_hosts_are_domains(tmp_path: Path, one_host: Callable[[int], list[float]]) -> None:
    compare(Run(2, 2, "automatic", "hierarchical"), tmp_path, one_host)


def test_three_hosts_over_a_bad_network(
    tmp_path: Path, one_host: Callable[[int], list[float]]
) -> None:
    run = Run(3, 1, relay=bad_relay(1, 0.001))
    compare(run, tmp_path, one_host)
    check_harm(run)


def test_four_hosts(tmp_path: Path, one_host: Callable[[int], list[float]]) -> None:
    compare(Run(4, 1), tmp_path, one_host)


@everything
@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize("hosts", [2, 3, 4])
@pytest.mark.parametrize("crossing", ["none", "direct", "hierarchical"])
def test_every_number(
    hosts: int, each: int, crossing: str, tmp_path: Path, one_host: Callable[[int], list[float]]
) -> None:
    if each == 1 and crossing != "none":
        pytest.skip("one rank a host: nothing to spread")
    compare(Run(hosts, each, *joined(crossing), batch=48), tmp_path, one_host)


@everything
@pytest.mark.parametrize("crossing", ["none", "hierarchical"])
@pytest.mark.parametrize("seed", [2, 3])
def test_bad_networks(
    seed: int, crossing: str, tmp_path: Path, one_host: Callable[[int], list[float]]
) -> None:
    run = Run(2, 2, *joined(crossing), relay=bad_relay(seed, 0.005))
    compare(run, tmp_path, one_host)
    check_harm(run)


@everything
@pytest.mark.parametrize("crossing", ["none", "hierarchical"])
def test_dropped_packets(
    crossing: str, tmp_path: Path, one_host: Callable[[int], list[float]]
) -> None:
    if shutil.which("nft") is None:
        pytest.skip("no `nft` (nftables) here")
    run = Run(2, 2, *joined(crossing), harm=lambda machines: machines.drop(5))
    compare(run, tmp_path, one_host)
    check_harm(run)


def queue_all(*words: str) -> Callable[[Hosts], None]:
    """Gives each host this queueing discipline; skips where there is none."""

    def harm(machines: Hosts) -> None:
        if shutil.which("tc") is None:
            pytest.skip("no `tc` (iproute2) here")
        try:
            machines.queue(*words)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"tc qdisc {words[0]}: {error.stderr.strip()}")

    return harm


@everything
@pytest.mark.parametrize(
    "words",
    [
        ("tbf", "rate", "200mbit", "burst", "256kb", "latency", "200ms"),
        ("netem", "delay", "1ms", "1ms", "loss", "0.5%", "reorder", "5%"),
    ],
    ids=["tbf", "netem"],
)
def test_queues(
    words: tuple[str, ...], tmp_path: Path, one_host: Callable[[int], list[float]]
) -> None:
    compare(Run(2, 2, harm=queue_all(*words)), tmp_path, one_host)
