"""What the benchmarks in Python share: ranks as processes of one host, percentiles, reports."""

from __future__ import annotations

import argparse
import atexit
import datetime
import json
import os
import platform
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import plot_figures

if TYPE_CHECKING:
    import ferry

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


def own_rank() -> str | None:
    """None: this process is no rank."""
    return os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))


def is_rank() -> bool:
    return "RANK" in os.environ


def bootstrap(ranks: int) -> ferry.Bootstrap:
    """Of this rank. Ends the program where no launcher has started ranks, with the command."""
    import ferry

    try:
        return ferry.from_environment()
    except ferry.InvalidArgumentError as error:
        program = f"ferry run -n {ranks} -- python {' '.join(sys.argv)}"
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {error}\nHere: {program}") from None


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
    program = Path(sys.argv[0]).stem
    print(f"{program}: {ranks} ranks start", file=sys.stderr, flush=True)
    env = environment(WORLD_SIZE=str(ranks), **variables)
    command = [sys.executable, *sys.argv]
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    codes = []
    for process in processes:
        codes.append(process.wait())
        say_progress(f"{program}: {len(codes)} of {ranks} ranks have ended")
    say_progress("")
    return next((code for code in codes if code), 0)


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


class Progress:
    """What this process is at, on stderr: on a terminal in place, until more is said; in a pipe a
    line each two seconds. A thread says it again while nothing new comes."""

    EVERY = 2.0  # seconds

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words = ""
        self._since = self._said = time.monotonic()
        self._repeats = False

    def say(self, words: str) -> None:
        """Of rank 0, and of what is no rank. Empty: nothing more, until there is."""
        if own_rank() not in (None, "0"):
            return
        with self._lock:
            now = time.monotonic()
            self._words, self._since = words, now
            if sys.stderr.isatty() or (words and now - self._said >= self.EVERY):
                self._show(words, now)
            if words and not self._repeats:
                self._repeats = True
                threading.Thread(target=self._repeat, daemon=True).start()
                atexit.register(self.say, "")

    def _show(self, words: str, now: float) -> None:
        self._said = now
        begin, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
        print(f"{begin}{words}", end=end, file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        while True:
            time.sleep(max(0.1, self._said + self.EVERY - time.monotonic()))
            with self._lock:
                now = time.monotonic()
                if self._words and now - self._said >= self.EVERY:
                    seconds = f", {now - self._since:.0f} s" if now - self._since >= 1 else ""
                    self._show(f"{self._words}{seconds}", now)


say_progress = Progress().say
if own_rank() is not None:  # before torch is imported, which takes seconds
    say_progress(f"{Path(sys.argv[0]).stem}: starting")


def shown(steps: Collection[T], words: str) -> Iterator[T]:
    """The steps. Rank 0 says how far they are."""
    for at, step in enumerate(steps):
        say_progress(f"{words}: {at} of {len(steps)}")
        yield step
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
