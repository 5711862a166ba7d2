"""Ferry over libfabric against libfabric alone on links of several rates: two hosts (network
namespaces) whose interfaces are shaped. A measurement, no test.

    link_speed.py NETWORK_SPEED [--mbit N ...] [--rounds N] [--json FILE]

NETWORK_SPEED: the program of bench/network_speed.cpp. A rate of 0: as fast as the interfaces are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hosts import Hosts


def run(program: Path, mbit: int, rounds: int) -> dict[str, Any]:
    """The program's JSON, with the rate."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as machines:
        if mbit > 0:
            machines.shape(f"{mbit}mbit")
        hosts = ",".join(f"{name}={machines.address(i)}" for i, name in enumerate(machines.names))
        file = Path(folder) / "figures.json"
        options = ["--hosts", hosts, "--rounds", str(rounds), "--json", str(file)]
        subprocess.run([program, *options], check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(file.read_text())
    return figures | {"mbit": mbit, "command": f"{program.name} --rounds {rounds}"}


def table(measured: list[dict[str, Any]]) -> str:
    """Against the best raw write: dispatch and combine in shares of its rate, few tokens in times
    of its latency."""
    shares = ("dispatch", "combine")
    times = ("1 token: latency dispatch", "8 tokens: latency dispatch")
    lines = [f"{'Mbit/s':>8}" + "".join(f"{name:>28}" for name in (*shares, *times))]
    for one in measured:
        figures = {figure["name"]: figure for figure in one["figures"]}
        cells = [f"{one['mbit'] or 'veth':>8}"]
        cells += [f"{100 * figures[name]['share_of_raw']:>26.0f} %" for name in shares]
        cells += [f"{figures[name]['times_raw']:>26.2f} x" for name in times]
        lines.append("".join(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, metavar="NETWORK_SPEED")
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 10000, 5000, 1000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = []
    for mbit in options.mbit:
        measured.append(run(options.program.resolve(), mbit, options.rounds))
        print(table(measured[-1:]), flush=True)
    print(table(measured))
    if options.json:
        told = {
            "command": "python tests/hosts/link_speed.py " + " ".join(sys.argv[1:]),
            "runs": measured,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
