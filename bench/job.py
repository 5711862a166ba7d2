"""What the benchmarks in Python share: ranks as processes of one host, percentiles, reports."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import plot_figures

T = TypeVar("T")


def free_port() -> int:
    """A port on the loopback address that nobody uses. It is below the ephemeral ports of Linux
    (from 32768 on): the system gives it to no connection before the store listens there."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def is_rank() -> bool:
    return "RANK" in os.environ


def gpu_count() -> int:
    """Asked in a child: this process keeps no CUDA context, which ranks must not inherit."""
    count = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True).stdout or 0)


def environment(**variables: str) -> dict[str, str]:
    """What all ranks of a job on this host have."""
    return dict(
        os.environ,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        FERRY_PORT=str(free_port()),
        FERRY_SECRET=secrets.token_hex(16),
        OMP_NUM_THREADS="1",
        **variables,
    )


def launch(ranks: int, **variables: str) -> int:
    """Runs this program once for each rank; returns the first exit code that is not 0."""
    say_progress(f"{Path(sys.argv[0]).stem}: {ranks} ranks start", at_once=True)
    env = environment(WORLD_SIZE=str(ranks), **variables)
    command = [sys.executable, *sys.argv]
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    return next((code for code in [process.wait() for process in processes] if code), 0)


def run_exchange(args: argparse.Namespace, run_rank: Callable[[argparse.Namespace], None]) -> int:
    """The main function of a benchmark of exchanges: launcher without RANK in the environment, rank
    with it. args: ranks (0: one for each GPU), experts. Returns the exit code."""
    ranks = args.ranks or gpu_count()
    if ranks == 0:
        print(f"{Path(sys.argv[0]).stem}: NO GPU", file=sys.stderr)
        return 1
    if args.experts % ranks:
        raise SystemExit(f"--experts {args.experts}: expected a multiple of --ranks {ranks}")
    if not is_rank():
        return launch(ranks)
    run_rank(args)
    return 0


said_last = time.monotonic()  # by `say_progress`


def say_progress(words: str, at_once: bool = False) -> None:
    """On stderr: on a terminal in place, until more is said; in a pipe a line each two seconds."""
    global said_last
    if sys.stderr.isatty():
        print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
    elif words and (at_once or time.monotonic() - said_last >= 2):
        said_last = time.monotonic()
        print(words, file=sys.stderr, flush=True)


def shown(steps: Collection[T], words: str) -> Iterator[T]:
    """The steps. Rank 0 says how far they are."""
    says = os.environ.get("RANK", "0") == "0"
    for at, step in enumerate(steps):
        if says:
            say_progress(f"{words}: {at} of {len(steps)}")
        yield step
    if says:
        say_progress("")


def percentile(values: list[float], share: float) -> float:
    """Linear between the neighbours, as `ferry bench` does."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--plot", type=Path, help="draw them there, as SVG")


def write(args: argparse.Namespace, facts: Any) -> None:
    """Into the files that `add_outputs` takes."""
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        program = Path(sys.argv[0]).stem
        args.plot.write_text(plot_figures.drawn(program, facts), encoding="utf-8")


def settings_of(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    kept = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
    return kept | {"ranks": ranks}


def report(settings: dict[str, Any], gpu: str = "") -> dict[str, Any]:
    """What every file begins with, by the keys of `ferry bench --json`."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "program": os.path.basename(sys.argv[0]),
        "command": ["python", *sys.argv],
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()}
        | ({"gpu": gpu} if gpu else {}),
        "settings": settings,
    }
