"""Every header compiles alone, so that nobody must know what to include before it.

A file that is meant to be included inside something else (a namespace for each instruction set,
say) is not a header: it ends in .inc.

Headers that need CUDA's are left out where CUDA is not installed; the build of the preset cuda
still compiles them.

check_headers.py [ROOT]      prints the compiler's words for each that does not; exit status 1
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = [
    "-std=c++20",
    "-fsyntax-only",
    "-fmax-errors=3",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wshadow",
    "-Werror",
]


def python_flags() -> list[str]:
    """Where the headers of Python and nanobind are, for python/src."""
    import nanobind

    folders = [sysconfig.get_path("include"), nanobind.include_dir()]
    return [f"-isystem{folder}" for folder in folders]


def cuda_include(root: Path) -> Path | None:
    """Where CUDA's headers are, if this machine has them (tools/setup/cuda.sh fetches them)."""
    compiler = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    homes = [Path("/usr/local/cuda"), root / ".venv/cuda/nvidia/cu13"]
    if compiler:
        homes.insert(0, Path(compiler).resolve().parents[1])
    folders = [home / "include" for home in homes]
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").exists()), None)


def included(root: Path, header: Path) -> tuple[set[Path], set[str]]:
    """Our headers that the header reaches, itself or by another one, and names of others."""
    ours: set[Path] = set()
    others: set[str] = set()
    waiting = [header]
    while waiting:
        text = (root / waiting.pop()).read_text(encoding="utf-8")
        for name in re.findall(r'^#include ["<](.+)[">]', text, re.MULTILINE):
            places = [Path(top) / name for top in ("include", "src", "tools/ferry", "python/src")]
            found = next((place for place in places if (root / place).exists()), None)
            if found is None:
                others.add(name)
            elif found not in ours:
                ours.add(found)
                waiting.append(found)
    return ours, others


def options(root: Path, header: Path, cuda: Path | None) -> tuple[str, ...]:
    """Of the compiler, for one header."""
    flags = [*FLAGS, "-I", "include"]
    if header.parts[0] != "include":  # a public header must do without ours
        flags += ["-I", "src"]
    if header.parts[:2] == ("tools", "ferry"):
        flags += ["-I", "tools/ferry"]
    if header.parts[:2] == ("python", "src"):
        flags += ["-I", "python/src", *python_flags()]
    if cuda is not None:
        flags += [f"-isystem{cuda}"]
    return tuple(flags)


def rows(before: dict[Path, set[Path]]) -> list[list[Path]]:
    """The headers in few rows: `before` has those that may stand before each in its row.

    As few as there can be: a largest matching of headers with those after them."""
    after: dict[Path, Path] = {}

    def match(header: Path, seen: set[Path]) -> bool:
        for earlier in sorted(before[header] - seen):
            seen.add(earlier)
            if earlier not in after or match(after[earlier], seen):
                after[earlier] = header
                return True
        return False

    firsts = [header for header in before if not match(header, set())]
    made = []
    for header in firsts:
        made.append([header])
        while made[-1][-1] in after:
            made[-1].append(after[made[-1][-1]])
    return made


def compile_row(root: Path, row: list[Path], flags: tuple[str, ...]) -> str:
    """Empty if each header of a row compiles alone, else what the compiler said."""
    compiler = os.environ.get("CXX", "g++")
    done = subprocess.run(
        [compiler, *flags, "-x", "c++", "-"],
        cwd=root,
        input="".join(f'#include "{(root / header).as_posix()}"\n' for header in row),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    return f"{' or '.join(map(str, row))} does not compile alone:\n{done.stderr}"


def is_proved_by_its_source(root: Path, header: Path) -> bool:
    """True when the source of the same name includes it first: then the build shows it."""
    source = (root / header).with_suffix(".cpp")
    if header.is_relative_to("include") or header.is_relative_to("src/core"):
        return False  # no build compiles files of core one by one
    if not source.exists():
        return False
    first = re.search(r'^#include ["<](.+)[">]', source.read_text(encoding="utf-8"), re.MULTILINE)
    return first is not None and header.as_posix().endswith("/" + first[1])


def headers(root: Path) -> list[Path]:
    found = []
    for top in ("include", "src", "tools", "python/src", "examples"):
        for file in sorted((root / top).rglob("*.hpp")):
            header = file.relative_to(root)
            if header.parent.name == "windows":
                continue  # the stage windows compiles it
            if not is_proved_by_its_source(root, header):
                found.append(header)
    return found


def check(root: Path) -> list[str]:
    """What is wrong, one entry for each row of headers with one that does not compile alone.

    Of headers that include each other one compilation is enough: what stands before a header is
    what it includes itself."""
    cuda = cuda_include(root)
    alike: dict[tuple[str, ...], dict[Path, set[Path]]] = {}
    for header in headers(root):
        ours, others = included(root, header)
        if cuda is not None or not any(re.match(r"cuda[^/]*\.h$", name) for name in others):
            alike.setdefault(options(root, header, cuda), {})[header] = ours
    work = [
        (row, flags)
        for flags, reached in alike.items()
        for row in rows({header: ours & reached.keys() for header, ours in reached.items()})
    ]
    jobs = int(os.environ.get("JOBS", os.cpu_count() or 2))
    with ThreadPoolExecutor(jobs) as pool:
        answers = pool.map(lambda item: compile_row(root, *item), work)
        return [answer for answer in answers if answer]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    faults = check(root)
    print("\n".join(faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
