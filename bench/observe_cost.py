"""What watching a group costs: CPU time of a decode round, in pairs.

    observe_cost.py [--base PYTHON] [--pairs 400] [--rounds 30]

A round is a latency dispatch and combine of 16 tokens of 4096 channels, top-4 of 8 experts, on one
rank: no round holds a wait, so it is as short as it gets, and the shares as large. Both sides of
a pair take turns in one process, or with `--base` in two, so that both meet the same load.
`--base`: the interpreter of an environment with another Ferry, such as one without metrics.
Prints for each way to watch the median over pairs of (CPU time with) / (CPU time without) - 1,
where it lies with 95 % confidence, and the same of the blocks that the machine disturbed least.
A bar is met when all of that interval is below it, missed when all of it is above; between the
two more pairs are needed: with 4 times as many the interval is half as wide.

nothing           the same twice: what pairs can tell
ranges            calls as they are, against calls that look for no profiler
log               FERRY_LOG=info
trace             a trace that runs
against the base  metrics, where that Ferry has none

At last the ranges of the two calls of a round by themselves, in a loop around an empty function,
as a share of a round: pairs would take hours to tell what is less than 0.1 %.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import job

RANK = """
import sys, time
import numpy as np
import ferry
rounds = int(sys.argv[1])
group = ferry.Group(ferry.threads(1)[0], experts=8)
latency = ferry.LatencyExchange(group, capacity=16, hidden=4096, topk=4, dtype="f16")
x = np.ones((16, 4096), np.float16)
routes = np.tile(np.arange(4), (16, 1))
weights = np.full((16, 4), 0.25, np.float32)
def run():
    for _ in range(rounds):
        sent = latency.dispatch(x, routes)
        latency.combine(sent.x, sent, weights)
        del sent
kind = type(latency)
ranged = kind.dispatch, kind.combine
run()
for line in sys.stdin:
    how = line.strip()
    if how == "trace":
        group._raw.start_trace(1 << 16)
    elif how == "log":
        ferry.set_log("info")
    elif how == "without ranges":
        kind.dispatch, kind.combine = (call.__wrapped__ for call in ranged)
    begin = time.process_time()
    run()
    print((time.process_time() - begin) / rounds * 1e6, flush=True)
    if how == "trace":
        group._raw.take_trace()
    elif how == "log":
        ferry.set_log("off")
    elif how == "without ranges":
        kind.dispatch, kind.combine = ranged
"""

#: Ways to watch, the two sides of a pair: without, with.
WAYS = {
    "nothing": ("", ""),
    "ranges": ("without ranges", ""),
    "log": ("", "log"),
    "trace": ("", "trace"),
    "against the base": ("", ""),
}
#: At most so many percent.
BARS = {"ranges": 0.1, "trace": 3.0, "against the base": 0.5}


class Rank:
    """A process that makes rounds when asked."""

    def __init__(self, python: str, rounds: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", RANK, str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def round_us(self, how: str) -> float:
        """Microseconds of CPU time of a round, watched like this."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{how}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(
    python: str, base: str, name: str, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """(without, with). Processes are started anew now and then: each has a pace of its own."""
    pairs = []
    plain_way, watched_way = WAYS[name]
    for _ in job.shown(range(options.processes), name):
        way = Rank(python, options.rounds)
        without = way if base == python else Rank(base, options.rounds)
        for number in range(options.pairs // options.processes):
            if number % 2 == 0:
                plain = without.round_us(plain_way)
                pairs.append((plain, way.round_us(watched_way)))
            else:
                watched = way.round_us(watched_way)
                pairs.append((without.round_us(plain_way), watched))
        without.end()
        if way is not without:
            way.end()
    return pairs


def median_of(values: list[float]) -> tuple[float, float, float]:
    """With the interval that has the true median in 95 of 100 cases: order statistics, so whatever
    the distribution is."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = round(len(values) / 2 - half), round(len(values) / 2 + half)
    return (
        ordered[max(low - 1, 0)],
        statistics.median(ordered),
        ordered[min(high, len(values) - 1)],
    )


def judged(name: str, low: float, high: float) -> str:
    """Whether the bar is met, of the interval in percent."""
    if name not in BARS:
        return ""
    bar = BARS[name]
    verdict = "met" if high <= bar else "missed" if low > bar else "open, more pairs would tell"
    return f"; at most {bar} %: {verdict}"


def range_ns() -> float:
    """Nanoseconds that a range adds to a call with two positional arguments and a keyword."""
    from ferry.trace import ranged

    class Calls:
        def plain(self, x: object, routes: object, *, hook: bool = False) -> None:
            pass

        called = ranged("empty")(plain)

    def loop_ns(call: Callable[..., None]) -> float:
        begin = time.thread_time_ns()
        for _ in range(20000):
            call(None, None, hook=False)
        return (time.thread_time_ns() - begin) / 20000

    calls = Calls()
    return statistics.median(loop_ns(calls.called) - loop_ns(calls.plain) for _ in range(100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", help="an interpreter with another Ferry")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=10)
    options = parser.parse_args()
    here, rounds_us = sys.executable, []
    for name in WAYS:
        if name == "against the base" and not options.base:
            continue
        base = options.base if name == "against the base" else here
        pairs = measure(here, base, name, options)
        shares = [100 * (watched / plain - 1) for plain, watched in pairs]
        low, middle, high = median_of(shares)
        plain, watched = (statistics.quantiles(side, n=10)[0] for side in zip(*pairs))
        print(
            f"{name:16} {statistics.median(plain for plain, _ in pairs):6.1f} us a round, "
            f"{middle:+.2f} % ({low:+.2f} to {high:+.2f}, {len(pairs)} pairs); "
            f"quietest tenth {plain:.1f} us, {100 * (watched / plain - 1):+.2f} %"
            f"{judged(name, low, high)}",
            flush=True,
        )
        rounds_us.append(statistics.median(plain for plain, _ in pairs))
    alone = range_ns()
    print(f"ranges alone: {alone:.0f} ns a call, {0.2 * alone / min(rounds_us):.3f} % of a round")


if __name__ == "__main__":
    main()
