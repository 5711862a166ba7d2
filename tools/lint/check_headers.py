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


def needs_cuda(root: Path, header: Path) -> bool:
    """True when the header reaches one of CUDA's, itself or by another of ours."""
    seen: set[Path] = set()
    waiting = [root / header]
    while waiting:
        text = waiting.pop().read_text(encoding="utf-8")
        for name in re.findall(r'^#include ["<](.+)[">]', text, re.MULTILINE):
            if re.match(r"cuda[^/]*\.h$", name):
                return True
            for ours in (root / "src" / name, root / "tools/ferry" / name):
                if ours.exists() and ours not in seen:
                    seen.add(ours)
                    waiting.append(ours)
    return False


def compile_alone(root: Path, header: Path) -> str:
    """Empty if the header compiles alone, else what the compiler said."""
    compiler = os.environ.get("CXX", "g++")
    include = ["-I", "include"]
    if header.parts[0] != "include":  # a public header must do without ours
        include += ["-I", "src"]
    if header.parts[:2] == ("tools", "ferry"):
        include += ["-I", "tools/ferry"]
    if header.parts[:2] == ("python", "src"):
        include += ["-I", "python/src", *python_flags()]
    cuda = cuda_include(root)
    if cuda is not None:
        include += [f"-isystem{cuda}"]
    elif needs_cuda(root, header):
        return ""
    source = f'#include "{(root / header).as_posix()}"\n'
    done = subprocess.run(
        [compiler, *FLAGS, *include, "-x", "c++", "-"],
        cwd=root,
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"{header} does not compile alone:\n{done.stderr}"


def is_proved_by_its_source(root: Path, header: Path) -> bool:
    """True when the source of the same name includes it first: then the build shows it."""
    source = (root / header).with_suffix(".cpp")
    if header.parts[0] == "include" or not source.exists():
        return False
    first = re.search(r'^#include ["<](.+)[">]', source.read_text(encoding="utf-8"), re.MULTILINE)
    return first is not None and header.as_posix().endswith("/" + first[1])


def headers(root: Path) -> list[Path]:
    found = []
    for top in ("include", "src", "tools", "python/src", "examples"):
        for file in sorted((root / top).rglob("*.hpp")):
            header = file.relative_to(root)
            if header.is_relative_to("src/platform/windows"):
                continue  # the stage windows compiles it
            if not is_proved_by_its_source(root, header):
                found.append(header)
    return found


def check(root: Path) -> list[str]:
    """What is wrong, one entry for each header that does not compile alone."""
    jobs = int(os.environ.get("JOBS", os.cpu_count() or 2))
    with ThreadPoolExecutor(jobs) as pool:
        answers = pool.map(lambda header: compile_alone(root, header), headers(root))
        return [answer for answer in answers if answer]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    faults = check(root)
    print("\n".join(faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
