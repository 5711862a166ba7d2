"""Holds the arrows of the house: who may include whom (docs/design.md, "One question a folder").

    bench -> tools, fabric,  python -> tools (the command, one header),  tools -> platform
    python, tools, examples, bench -> include <- api <- {host, cuda} -> engine
    engine -> {protocol, fabric} -> core -> base,  bootstrap -> core;  all but core -> platform

`include/ferry` is the vocabulary: it includes nothing of ours but itself, and every floor may
include it. `src/api` picks the engine, the fabric and the bootstrap, so it may include all of
src. Besides our own headers, what an outside header stands for has a floor of its own, too: a
socket is not seen in core, nanobind is not seen outside python/src.

The floors of the engines have rooms: folders inside them, with arrows of their own.

    check_includes.py [ROOT]      prints one line for each wrong include; exit status 1 if any
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = {".hpp", ".cpp", ".h", ".inc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers"}

# What the engines stand on.
GROUND = {
    "include/ferry",
    "src/platform",
    "src/base",
    "src/core",
    "src/protocol",
    "src/fabric",
}
# A floor: the folder, and the floors that its files may include besides their own.
FLOORS = {
    "include/ferry": set(),
    "src/platform": {"include/ferry"},
    "src/base": {"include/ferry", "src/platform"},
    "src/core": {"include/ferry", "src/base"},
    "src/protocol": {"include/ferry", "src/platform", "src/base", "src/core"},
    "src/fabric": {"include/ferry", "src/platform", "src/base", "src/core", "src/protocol"},
    "src/bootstrap": {"include/ferry", "src/platform", "src/base", "src/core"},
    "src/engine": GROUND,
    "src/host": GROUND | {"src/engine"},
    "src/cuda": GROUND | {"src/engine"},
    "src/api": GROUND | {"src/bootstrap", "src/engine", "src/host", "src/cuda"},
    "tools": {"include/ferry", "src/platform"},
    "python/src": {"include/ferry", "tools"},
    "examples": {"include/ferry"},
    # A measurement compares with what lies below, and runs its ranks as the command does.
    "bench": {"include/ferry", "src/platform", "src/core", "src/fabric", "tools"},
}
# A room: a folder inside a floor, and the rooms of the floor that its files may include besides
# their own. The order is from the ground up: an arrow goes to a room above it in this list. Every
# file of these floors lies in a room.
ROOMS = {
    "src/engine": set(),  # what moves and waits, in a group that stays as it is
    "src/engine/membership": {"src/engine"},
    "src/engine/vault": {"src/engine", "src/engine/membership"},
    "src/cuda": set(),  # the front: what the API asks the engine for
    "src/cuda/kernels/base": set(),
    "src/cuda/kernels/throughput": {"src/cuda/kernels/base"},
    "src/cuda/kernels/latency": {"src/cuda/kernels/base"},
    "src/cuda/kernels/collectives": {"src/cuda/kernels/base"},
    "src/cuda/runtime": set(),
    "src/cuda/throughput": {
        "src/cuda",
        "src/cuda/kernels/base",
        "src/cuda/kernels/throughput",
        "src/cuda/runtime",
    },
    "src/cuda/latency": {
        "src/cuda",
        "src/cuda/kernels/latency",
        "src/cuda/runtime",
        "src/cuda/throughput",
    },
    "src/cuda/collectives": {
        "src/cuda",
        "src/cuda/kernels/base",
        "src/cuda/kernels/collectives",
        "src/cuda/runtime",
        "src/cuda/throughput",
    },
    "src/cuda/latency/proxy": {"src/cuda/kernels/latency", "src/cuda/latency"},
    "src/cuda/domains": {
        "src/cuda",
        "src/cuda/kernels/throughput",
        "src/cuda/runtime",
        "src/cuda/throughput",
        "src/cuda/latency",
        "src/cuda/latency/proxy",
    },
    "src/host/kernels": set(),
    "src/host/runtime": set(),
    "src/host/throughput": {"src/host/kernels"},
    "src/host/collectives": {"src/host/kernels", "src/host/throughput"},
    "src/host/latency": {"src/host/kernels", "src/host/throughput"},
    "src/host/domains": {"src/host/kernels", "src/host/throughput"},
}
# tests/ holds what no folder owns: it may look everywhere.
UNBOUND = ("tests",)

# Who may include headers of an operating system, and ask which one this is: the platform, and what
# drives NICs and GPUs, with its tests.
SYSTEM_FLOORS = (
    "src/platform",
    "src/fabric/ofi",
    "src/fabric/cuda",
    "src/cuda",
    "tests/cuda",
)
OUTSIDE = (
    # (what, headers, floors that may include them; a test may include the first group anywhere)
    ("test libraries", re.compile(r"^(gtest|gmock|rapidcheck)([./]|$)"), ()),
    ("Google Benchmark", re.compile(r"^benchmark/"), ("bench",)),
    (
        "Python and nanobind",
        re.compile(r"^(nanobind/|Python\.h|structmember\.h|dlpack/|pybind11/)"),
        ("python/src",),
    ),
    (
        "the CLI and JSON libraries",
        re.compile(r"^(CLI/|nlohmann/)"),
        ("tools", "bench", "examples"),
    ),
    (
        "CUDA",
        re.compile(r"^(cuda|cooperative_groups|cub/|thrust/|nccl)"),
        ("src/cuda", "src/fabric/cuda", "tools"),  # tools: ferry bench measures on GPUs
    ),
    (
        "sockets",
        re.compile(
            r"^(sys/socket\.h|sys/un\.h|netinet/|arpa/|netdb\.h|net/|ifaddrs\.h|winsock2\.h)"
        ),
        SYSTEM_FLOORS,
    ),
    ("networks' libraries", re.compile(r"^(rdma/|infiniband/)"), ("src/fabric",)),
    (
        "the operating system",
        re.compile(r"^([a-z0-9_]+\.h|sys/.*|linux/.*|asm/.*)$"),
        SYSTEM_FLOORS,
    ),
)
# C headers that only compute, and intrinsics: core may use them.
HARMLESS = re.compile(
    r"^(std(int|def|io|lib|arg)|string|math|float|limits|inttypes|assert|errno|"
    r"[a-z0-9]*intrin|arm_neon|arm_bf16|arm_fp16|cpuid)\.h$"
)
SYSTEM = re.compile(r"^\s*#.*\b(_WIN32|_WIN64|__linux__|__unix__|__MINGW\w*|_MSC_VER)\b")
# Pure: no threads, no clocks that run, no files of the system's own.
THREADS = {"thread", "mutex", "condition_variable", "future"}
PURE = {"include/ferry": set(), "src/base": THREADS, "src/core": THREADS}


@dataclass(frozen=True)
class Fault:
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def floor_of(path: Path) -> str | None:
    """The floor that a path relative to the root lies on; None: bound by nothing."""
    text = path.as_posix()
    return next((floor for floor in FLOORS if text.startswith(floor + "/")), None)


def lies_in(path: Path, places: tuple[str, ...]) -> bool:
    """In one of these folders, or one of these files."""
    return any(f"{path.as_posix()}/".startswith(f"{place}/") for place in places)


def has_rooms(floor: str | None) -> bool:
    return any(room == floor or room.startswith(f"{floor}/") for room in ROOMS)


def is_test(path: Path) -> bool:
    by_name = path.stem.endswith("_test") or path.stem.startswith("test_")
    return by_name or path.parts[0] in UNBOUND or "tests" in path.parts[:-1]


def resolve(root: Path, path: Path, name: str) -> Path | None:
    """The file of ours that `#include "name"` in `path` means, relative to the root."""
    tool = Path("tools/ferry")
    for base in (path.parent, *map(Path, ("src", "include", "python/src", "tests")), tool, Path()):
        candidate = base / name
        if (root / candidate).is_file():
            return candidate
    return None


def check_room(path: Path, line: int, name: str, target: Path) -> list[Fault]:
    """Of an include inside a floor that has rooms."""
    mine, theirs = path.parent.as_posix(), target.parent.as_posix()
    if mine == theirs or mine not in ROOMS or theirs in ROOMS[mine]:
        return []
    allowed = ", ".join(sorted(ROOMS[mine])) or "no other room"
    return [Fault(path, line, f'"{name}" lies in {theirs}; {mine} may include {allowed}')]


def check_ours(path: Path, line: int, name: str, target: Path) -> list[Fault]:
    mine, theirs = floor_of(path), floor_of(target)
    if theirs == mine and has_rooms(mine):
        return check_room(path, line, name, target)
    if mine is None or theirs == mine or (theirs is not None and theirs in FLOORS[mine]):
        return []
    if theirs is None and is_test(path):
        return []
    if theirs is None and target.parts[0] == path.parts[0]:
        return []
    allowed = ", ".join(sorted(FLOORS[mine])) or "nothing of ours but itself"
    return [
        Fault(
            path, line, f'"{name}" lies in {theirs or target.parent}; {mine} may include {allowed}'
        )
    ]


def check_outside(path: Path, line: int, name: str) -> list[Fault]:
    floor = floor_of(path)
    if name in PURE.get(floor, ()) and not is_test(path):
        return [Fault(path, line, f"<{name}>: {floor} is pure, it starts and waits for nothing")]
    if HARMLESS.match(name):
        return []
    for what, pattern, floors in OUTSIDE:
        if not pattern.match(name):
            continue
        if floors is SYSTEM_FLOORS:
            allowed = lies_in(path, floors)
        else:
            unbound = floor is None or (is_test(path) and what == "test libraries")
            allowed = unbound or lies_in(path, floors)
        if not allowed:
            places = ", ".join(floors) or "tests"
            return [Fault(path, line, f"<{name}>: {what}: only in {places}")]
        return []
    if floor == "include/ferry" and ("/" in name or name.endswith((".h", ".hpp"))):
        return [Fault(path, line, f"<{name}>: public headers include only the standard library")]
    return []


def check_file(root: Path, path: Path) -> list[Fault]:
    """All faults of one file; `path` is relative to `root`."""
    faults = []
    lines = (root / path).read_text(encoding="utf-8").splitlines()
    if path.suffix in {".hpp", ".cuh"} and not any(x.strip() == "#pragma once" for x in lines):
        faults.append(Fault(path, 1, "a header starts with #pragma once"))
    for part in (*path.parts[:-1], path.stem):
        if part.lower() in FORBIDDEN_NAMES:
            faults.append(Fault(path, 1, f"'{part}': a helper lives with its user, then in core"))
    if has_rooms(floor_of(path)) and path.parent.as_posix() not in ROOMS:
        faults.append(Fault(path, 1, f"{path.parent} is no room (ROOMS in check_includes.py)"))
    for number, text in enumerate(lines, 1):
        bound = path.parts[0] in ("src", "tools", "bench", "examples") and not is_test(path)
        if bound and SYSTEM.match(text) and not lies_in(path, SYSTEM_FLOORS):
            faults.append(Fault(path, number, "only src/platform asks which system this is"))
        found = INCLUDE.match(text)
        if not found:
            continue
        quoted, name = found[1] == '"', found[2]
        if name.startswith(("../", "./", "/")):
            faults.append(Fault(path, number, f'"{name}": name it from src/ or include/'))
            continue
        target = resolve(root, path, name) if quoted or name.startswith("ferry/") else None
        if target is not None:
            faults += check_ours(path, number, name, target)
        elif quoted:
            faults.append(
                Fault(path, number, f'"{name}": no such file; use <> for others\' headers')
            )
        else:
            faults += check_outside(path, number, name)
    return faults


def check(root: Path) -> list[Fault]:
    """All faults below `root`."""
    faults = []
    for top in ("include", "src", "tools", "python", "examples", "bench", "tests"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix in SUFFIXES and file.is_file() and "build" not in file.parts:
                faults += check_file(root, file.relative_to(root))
    return faults


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    faults = check(root)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
