"""Measures the shape of the tree, and fails when it gets worse than the limits written here.

    files in the widest folder   without tests and CMakeLists.txt
    functions over 60 lines      of C++ and CUDA, without tests; from signature to last brace
    depth of includes            files of src/cuda on the longest chain from a latency kernel down
    arrows inside src/cuda       pairs of rooms of which one includes the other, and those of them
                                 that go up the table in check_includes.py
    files that define a class    .cpp and .cu files with member functions of the class with most
    switches between files       of who reads a call from its first function down, the others where
                                 they are first called: how often the next line is in another file

A limit is what was reached: who does better lowers it; who must raise it says why, and stays within
AIM, where it shall go.

    structure.py [ROOT]      prints the table and what is behind it; exit status 1: past a limit
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_includes

LIMITS = {
    "files in the widest folder": 38,
    "functions over 60 lines": 6,
    "depth of includes below a latency kernel": 7,
    "arrows inside src/cuda": 23,
    "arrows inside src/cuda that go up": 0,
    "files that define a class": 3,
    "switches between files in a call": 6,
}
AIM = {
    "files in the widest folder": 40,
    "functions over 60 lines": 6,
    "depth of includes below a latency kernel": 7,
    "arrows inside src/cuda": 20,
    "arrows inside src/cuda that go up": 0,
    "files that define a class": 3,
    "switches between files in a call": 6,
}
TOPS = ("include", "src", "tools", "python/src", "bench")
KERNELS = "src/cuda/kernels/latency"
LONG = 60
# Where a call begins, and the files that belong to it.
CALLS = {
    "src/cuda/throughput/dispatch.cpp": ("src/cuda/throughput/dispatch*.cpp",),
    "src/cuda/throughput/combine.cpp": ("src/cuda/throughput/combine*.cpp",),
    "src/host/throughput/dispatch.cpp": (
        "src/host/throughput/dispatch*.cpp",
        "src/host/domains/dispatch*.cpp",
    ),
    "src/host/throughput/combine.cpp": (
        "src/host/throughput/combine*.cpp",
        "src/host/domains/combine*.cpp",
    ),
}
FIRST = "run"


@dataclass
class Measure:
    value: int
    detail: list[str] = field(default_factory=list)


def sources(root: Path) -> Iterator[Path]:
    """The files of C++ and CUDA that are no tests, relative to the root."""
    for top in TOPS:
        for file in sorted((root / top).rglob("*")):
            path = file.relative_to(root)
            is_code = file.suffix in check_includes.SUFFIXES and file.is_file()
            if is_code and not check_includes.is_test(path):
                yield path


def widest_folder(root: Path) -> Measure:
    counts: dict[str, int] = {}
    for path in sources(root):
        folder = path.parent.as_posix()
        counts[folder] = counts.get(folder, 0) + 1
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
    return Measure(most[0][1] if most else 0, [f"{count} {folder}" for folder, count in most])


def blanked(text: str) -> str:
    """Without comments, texts and preprocessor lines; every line stays where it is."""
    words = re.compile(
        r'R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
        r"|//[^\n]*|/\*(?:.|\n)*?\*/|^[ \t]*#(?:\\\n|[^\n])*",
        re.MULTILINE,
    )
    return words.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


SCOPE = re.compile(r"(template <.*> )?(inline )?(namespace|class|struct|union|enum|extern)\b")
# Not part of a function, though they stand before it.
LEAD = re.compile(r"\s*((public|private|protected):\s*)*(template <[^\n]*>\n\s*)?")


def kind_of(statement: str) -> str:
    """What the brace behind a statement opens. Code is formatted: a space stands before the brace
    of a body, and none before one that initialises."""
    words = " ".join(statement.split())
    if SCOPE.match(words):
        return "scope"
    is_body = statement[-1:].isspace() and "(" in words and not words.endswith("=")
    return "body" if is_body else "initialiser"


def functions(text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, lines, signature) of every function that has a body; lambdas are part of it."""
    code = blanked(text)
    begin = 0  # of the statement
    depth = 0  # braces that are open inside a body or an initialiser
    body = False
    for found in re.finditer(r"[{};]", code):
        at, mark = found.start(), found[0]
        if depth > 0:
            depth += {"{": 1, "}": -1, ";": 0}[mark]
            if depth == 0 and body:
                start = LEAD.match(code, begin).end()  # type: ignore[union-attr]
                first = code.count("\n", 0, start) + 1
                signature = " ".join(code[start:at].split("{")[0].split())
                yield first, code.count("\n", 0, at) + 2 - first, signature
                begin = at + 1
            continue
        kind = kind_of(code[begin:at]) if mark == "{" else "scope"
        if kind == "scope":
            begin = at + 1
        else:
            depth, body = 1, kind == "body"


def long_functions(root: Path) -> Measure:
    found = []
    for path in sources(root):
        for first, lines, signature in functions((root / path).read_text(encoding="utf-8")):
            if lines > LONG:
                name = re.findall(r"[\w:~]+(?=\()", signature) or [signature]
                found.append(f"{lines} {name[0]} ({path}:{first})")
    found.sort(key=lambda line: -int(line.split()[0]))
    return Measure(len(found), found)


def includes(root: Path, path: Path) -> list[Path]:
    """Files of the tree that a file includes."""
    found = []
    for line in (root / path).read_text(encoding="utf-8").splitlines():
        include = check_includes.INCLUDE.match(line)
        if include and include[1] == '"':
            target = check_includes.resolve(root, path, include[2])
            if target is not None:
                found.append(target)
    return found


def include_depth(root: Path) -> Measure:
    @cache
    def chain(path: Path) -> tuple[Path, ...]:
        ours = [target for target in includes(root, path) if target.is_relative_to("src/cuda")]
        below = [chain(target) for target in ours]
        return (path, *max(below, key=len, default=()))

    longest: tuple[Path, ...] = ()
    for kernel in sorted((root / KERNELS).glob("*.cu")):
        longest = max(longest, chain(kernel.relative_to(root)), key=len)
    return Measure(len(longest), [" > ".join(path.name for path in longest)])


def arrows(root: Path) -> tuple[Measure, Measure]:
    rooms = list(check_includes.ROOMS)
    found: set[tuple[str, str]] = set()
    for path in sources(root):
        mine = path.parent.as_posix()
        if not mine.startswith("src/cuda"):
            continue
        for target in includes(root, path):
            theirs = target.parent.as_posix()
            if theirs.startswith("src/cuda") and theirs != mine:
                found.add((mine, theirs))
    order = {room: place for place, room in enumerate(rooms)}
    top = len(order)  # folders that are no rooms
    up = [(mine, to) for mine, to in found if order.get(mine, -1) < order.get(to, top)]
    words = [f"{mine} > {theirs}" for mine, theirs in sorted(found)]
    return Measure(len(found), words), Measure(len(up), [f"{a} > {b}" for a, b in sorted(up)])


MEMBER = re.compile(r"([A-Z]\w*)(?:::[A-Z]\w*)*::(?:~?\w+|operator\S*)$")
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)


def class_files(root: Path) -> Measure:
    files: dict[str, set[str]] = {}
    for path in sources(root):
        if path.suffix not in (".cpp", ".cu"):
            continue
        text = (root / path).read_text(encoding="utf-8")
        space = NAMESPACE.search(text)
        for _, _, signature in functions(text):
            member = MEMBER.search(signature.split("(")[0])
            if member:
                name = f"{space[1]}::{member[1]}" if space else member[1]
                files.setdefault(name, set()).add(path.as_posix())
    most = sorted(files.items(), key=lambda item: (-len(item[1]), item[0]))[:8]
    return Measure(len(most[0][1]) if most else 0, [f"{len(at)} {name}" for name, at in most])


def switches(root: Path, first: str, globs: tuple[str, ...]) -> int:
    """How often the reader of a call changes the file."""
    bodies: dict[str, list[tuple[Path, str]]] = {}
    for path in sorted(path for glob in globs for path in root.glob(glob)):
        code = blanked(path.read_text(encoding="utf-8")).splitlines()
        for line, lines, signature in functions(path.read_text(encoding="utf-8")):
            name = re.findall(r"[\w~]+", signature.split("(")[0])[-1]
            bodies.setdefault(name, []).append((path, "\n".join(code[line - 1 : line - 1 + lines])))
    read: list[Path] = []  # the file of each stretch
    seen: set[str] = set()

    def visit(path: Path, body: str) -> None:
        read.append(path)
        for name in re.findall(r"\w+(?=\()", body):
            known = bodies.get(name, [])
            if name in seen or len(known) != 1:  # no names that several files use
                continue
            seen.add(name)
            visit(*known[0])
            read.append(path)

    for path, body in bodies.get(FIRST, []):
        if path == root / first:
            seen.add(FIRST)
            visit(path, body)
    return sum(a != b for a, b in pairwise(read))


def call_switches(root: Path) -> Measure:
    counts = {first: switches(root, first, globs) for first, globs in CALLS.items()}
    words = [f"{count} {first}" for first, count in counts.items()]
    return Measure(max(counts.values()), words)


def measure(root: Path) -> dict[str, Measure]:
    every, up = arrows(root)
    values = (
        *(widest_folder(root), long_functions(root), include_depth(root), every, up),
        *(class_files(root), call_switches(root)),
    )
    return dict(zip(LIMITS, values, strict=True))


def check(root: Path, limits: dict[str, int] = LIMITS) -> list[str]:
    """What is worse than its limit."""
    faults = []
    for name, found in measure(root).items():
        if found.value > limits[name]:
            faults.append(f"{name}: {found.value}, at most {limits[name]}:")
            faults += [f"  {line}" for line in found.detail]
    return faults


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    print(f"{'':42} {'now':>4} {'limit':>6} {'aim':>4}")
    for name, found in measure(root).items():
        print(f"{name:42} {found.value:4} {LIMITS[name]:6} {AIM[name]:4}")
        for line in found.detail:
            print(f"    {line}")
    faults = check(root)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
