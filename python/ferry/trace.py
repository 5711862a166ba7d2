"""When calls ran: ranges for torch's profiler and NVTX, and a timeline of all ranks."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType

# json, pathlib, statistics and zlib are imported where they are used: `import ferry` does without.
from ferry import _ferry
from ferry.arguments import refuse, take_new_names
from ferry.errors import MismatchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")


_ROW = 4096  # bytes of a row in which ranks send what they recorded
_ROUNDS = 8  # barriers that compare clocks
_NVTX = os.environ.get("FERRY_NVTX", "") not in ("", "0")

Stamps = list[tuple[int, int]]


def ranged(name: str, **names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For calls: while torch's profiler runs they are ranges of this name (`record_function`, and
    with `emit_nvtx` NVTX), and with FERRY_NVTX=1 NVTX ranges always. Otherwise they cost a look
    for the profiler, from C. `names`: as in `renamed_keywords`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        called = f"{function.__qualname__}()"

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> T:
            if keywords and names:
                take_new_names(called, names, keywords)
            profiler: Any = sys.modules.get("torch.autograd.profiler")
            if profiler is not None and profiler._is_profiler_enabled:
                with profiler.record_function(name):
                    return function(*args, **keywords)
            if _NVTX and profiler is not None:
                with sys.modules["torch"].cuda.nvtx.range(name):
                    return function(*args, **keywords)
            return function(*args, **keywords)

        if _NVTX:
            return call
        return functools.update_wrapper(_ferry.ranged_call(function, call, (*names,)), function)

    return decorate


class GroupTrace:
    """What `Group.trace` returns: records while it is entered. After the block rank 0 (or the
    lowest rank that is left) has written the file, and its `summary` says who came late."""

    def __init__(self, group: Any, file: str, image: str, most_events: int) -> None:
        from pathlib import Path

        self._group = group
        self._file = Path(file)
        self._image = image
        self._most = most_events
        self._before: Stamps = []
        self._begin = 0
        self.summary = ""

    def __enter__(self) -> GroupTrace:
        self._group._raw.start_trace(self._most)
        try:
            _check_files(self._group, [str(self._file), self._image])
            self._before = _stamps(self._group)
        except BaseException:
            self._group._raw.take_trace()
            raise
        self._begin = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        import json

        raw = self._group._raw.take_trace()
        mine = {
            "rank": self._group.rank,
            "before": self._before,
            "after": [],
            "dropped": raw.dropped,
            "events": [
                (e.name, int(e.wait), e.begin_ns, e.ns, e.generation, e.rows, e.bytes)
                for e in raw.events
                if e.begin_ns >= self._begin
            ],
        }
        if error is not None:
            self._write_own(mine, error)
            return
        try:
            mine["after"] = _stamps(self._group)
            ranks = _gather(self._group, mine)
        except BaseException as failure:
            self._write_own(mine | {"after": []}, failure)
            raise
        if ranks:
            made, self.summary = timeline(ranks)
            self._file.write_text(json.dumps(made), encoding="utf-8")
            if self._image:
                from ferry.trace_plot import draw_file

                draw_file(made, self._image)

    def _write_own(self, mine: dict[str, Any], error: BaseException) -> None:
        """What this rank saw, since the others may not come. `error` is what the program hears."""
        import json

        file = self._file.with_name(f"{self._file.name}.rank{self._group.rank}")
        try:
            file.write_text(json.dumps(timeline([mine])[0]), encoding="utf-8")
        except OSError as why:
            error.add_note(f"trace: {file} was not written: {why}")


def _check_files(group: Any, files: list[str]) -> None:
    """Collective: refuses on all ranks where the one that writes them cannot."""
    import numpy as np

    writer = group.view().ranks[0]
    problem = "" if group.rank != writer else next(filter(None, map(_problem, files)), "")
    try:
        group._compare("trace: file", int(problem != ""), np.full((0, 1), -1, np.int64))
    except MismatchError:
        problem = problem or f"files that rank {writer} cannot write"
    if problem:
        refuse("trace: file, plot", problem, f"files that rank {writer} can write")


def _problem(file: str) -> str:
    """Why this file, which may not be there yet, cannot be written; empty: it can."""
    if not file:
        return ""
    there = os.path.lexists(file)
    try:
        with open(file, "ab"):
            pass
        if not there:
            os.unlink(file)
    except (OSError, ValueError) as why:
        return str(why)
    return ""


def _stamps(group: Any) -> Stamps:
    """When this rank entered and left barriers, on its clock."""
    stamps = []
    for _ in range(_ROUNDS):
        entered = time.monotonic_ns()
        group.barrier()
        stamps.append((entered, time.monotonic_ns()))
    return stamps


def clock_offset(theirs: Stamps, ours: Stamps) -> tuple[float, float]:
    """What to add to their clock, and by how much that may be wrong. Nobody leaves a barrier before
    all have entered it, so each one bounds the difference from both sides."""
    low = max(our[0] - their[1] for their, our in zip(theirs, ours))
    high = min(our[1] - their[0] for their, our in zip(theirs, ours))
    # One host has one clock, and then none is within the bounds.
    return (0.0 if low <= 0 <= high else (low + high) / 2), (high - low) / 2


def _gather(group: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks recorded, on the lowest one; elsewhere nothing. It is sent as tokens."""
    import json
    import zlib

    import numpy as np

    packed = zlib.compress(json.dumps(mine).encode())
    packed = len(packed).to_bytes(8, "little") + packed
    rows = -(-len(packed) // _ROW)
    x = np.zeros((rows, _ROW), np.uint8)
    x.reshape(-1)[: len(packed)] = np.frombuffer(packed, np.uint8)
    writer = group.view().ranks[0]
    base, more = divmod(group.experts, group.size)
    expert = min(writer * base + min(writer, more), group.experts - 1)
    recorded, group._routes = group._routes, None  # these are no tokens of the program
    try:
        received = group.dispatch(x, group.plan(np.full((rows, 1), expert, np.int64)))
    finally:
        group._routes = recorded
    ranks, at, came = [], 0, np.asarray(received.x)
    while at < len(came):
        size = int.from_bytes(came[at, :8].tobytes(), "little")
        end = at + -(-(size + 8) // _ROW)
        ranks.append(json.loads(zlib.decompress(came[at:end].tobytes()[8 : 8 + size])))
        at = end
    return ranks


def timeline(ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The events of these ranks on the first one's clock, for Perfetto, and a summary."""
    from statistics import median

    events: list[dict[str, Any]] = []
    begins: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    calls: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    uncertain = 0.0
    for of in ranks:
        rank = of["rank"]
        offset, wrong = _offsets(of, ranks[0])
        uncertain = max(uncertain, wrong)
        events.append({
            "name": "process_name",
            "ph": "M",
            "pid": rank,
            "args": {"name": f"rank {rank}"},
        })
        times: dict[str, int] = defaultdict(int)
        for name, wait, begin, ns, generation, rows, size in of["events"]:
            start = begin + offset(begin)
            args = {"generation": generation}
            if not wait:
                args |= {"rows": rows, "bytes": size}
                key = (name, times[name])
                times[name] += 1
                begins[key][rank] = start
            events.append({
                "name": name,
                "cat": "wait" if wait else "call",
                "ph": "X",
                "ts": start / 1e3,
                "dur": ns / 1e3,
                "pid": rank,
                "tid": 0,
                "args": args,
            })
            if not wait:
                calls[key][rank] = events[-1]
    for key, at in begins.items():
        for rank, start in at.items():
            calls[key][rank]["args"]["late_us"] = (start - median(at.values())) / 1e3
    other = {"dropped": sum(of["dropped"] for of in ranks), "clock_error_us": uncertain / 1e3}
    made = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    return made, _summary(ranks, begins)


def _offsets(of: dict[str, Any], first: dict[str, Any]) -> tuple[Callable[[int], float], float]:
    """What to add to a time of this rank, between the two times that clocks were compared."""
    if not of["after"] or of is first:
        return (lambda _: 0.0), 0.0
    early, wrong = clock_offset(of["before"], first["before"])
    late, wrong_too = clock_offset(of["after"], first["after"])
    start, end = of["before"][0][0], of["after"][-1][1]
    drift = (late - early) / max(end - start, 1)
    return (lambda at: early + drift * (at - start)), max(wrong, wrong_too)


def _summary(ranks: list[dict[str, Any]], begins: dict[tuple[str, int], dict[int, float]]) -> str:
    """Who came last to the calls that all ranks made, how late, and who waited."""
    from statistics import fmean, median

    together = [at for at in begins.values() if len(at) == len(ranks) > 1]
    lines = [
        f"{len(together)} calls of {len(ranks)} ranks",
        "rank  came last  late, mean  in calls  waiting",
    ]
    for of in ranks:
        rank = of["rank"]
        last = sum(max(at, key=at.__getitem__) == rank for at in together)
        late = [at[rank] - median(at.values()) for at in together]
        mean = fmean(late) / 1e6 if late else 0.0
        spent, waited = (
            sum(ns for _, wait, _, ns, *_ in of["events"] if bool(wait) == kind) / 1e6
            for kind in (False, True)
        )
        lines.append(f"{rank:4}  {last:9}  {mean:7.2f} ms  {spent:5.0f} ms  {waited:4.0f} ms")
    return "\n".join(lines)
