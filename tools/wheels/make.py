"""`make wheels`: wheels that need no compiler to install, and the sdist that they are made from.

    make.py [--arch x86_64 ...] [--python PROGRAM ...] [--no-cuda]

For each architecture a wheel for CPython 3.11, and one of the stable ABI for 3.12 and all later
ones. clang of `ziglang` compiles them for glibc 2.28, whatever this machine has, with a static
libc++; auditwheel checks that. They have the host engine and the command; libfabric is loaded at
run time where there is one. The same with the CUDA engine, for x86-64, where there is an nvcc
(tools/setup/cuda.sh): its version ends in +cu13, as CUDA's does; CUDAARCHS of the environment says
for which GPUs. Where there is mingw-w64, one for CPython 3.11 of Windows. Results: dist/ and
dist/cuda/; all else: build/wheels/.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import windows
from building import DIST, WORK, environment_of, make_sdist, run
from linux import (
    ARCHITECTURES,
    CUDA_ARCHITECTURE,
    MOST_BYTES,
    Kind,
    audit,
    build_linux_wheel,
    find_nvcc,
    gather_libraries,
    with_cuda_version,
)


def pythons() -> list[Path]:
    """One of 3.11 and the oldest newer one, with headers."""
    probe = (
        "import sys, sysconfig, os; print(sys.version_info[1] * (sys.version_info[0] == 3 and "
        "os.path.exists(sysconfig.get_path('include') + '/Python.h')), sys.executable)"
    )
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    places = [Path(sys.executable), *sorted(root.glob("versions/3.*/bin/python3"))]
    places += [Path(p) for n in range(11, 20) if (p := shutil.which(f"python3.{n}"))]
    found: dict[int, Path] = {}
    for place in places:
        done = subprocess.run([place, "-c", probe], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            minor, path = done.stdout.split(maxsplit=1)
            found.setdefault(int(minor), Path(path.strip()))
    chosen = [found[11]] if 11 in found else []
    later = min((minor for minor in found if minor > 11), default=None)
    return chosen + ([found[later]] if later else [])


def main() -> None:
    architectures = (*ARCHITECTURES, windows.ARCHITECTURE)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=architectures, default=architectures)
    parser.add_argument("--python", nargs="+", type=Path, help="default: 3.11 and one newer")
    parser.add_argument("--no-cuda", action="store_true", help="no wheels with the CUDA engine")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too
    WORK.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    found = arguments.python or pythons()
    if len(found) < 2:
        print("wheels: no two Pythons with headers (3.11, and 3.12 or newer): fewer wheels")
    environments = [environment_of(python) for python in found]
    libraries = gather_libraries()
    archive, sources = make_sdist(environments[0])
    shutil.copy(archive, DIST)
    # A module of this machine and Python is imported to make the stub for the others.
    archs = sorted(set(arguments.arch) & set(ARCHITECTURES), key=lambda a: a != platform.machine())
    kinds = [Kind(arch) for arch in archs]
    if not arguments.no_cuda and CUDA_ARCHITECTURE in arguments.arch:
        if nvcc := find_nvcc():
            kinds.append(Kind(CUDA_ARCHITECTURE, nvcc))
        else:
            print("wheels: no nvcc: no wheels with the CUDA engine")
    stub = None
    for kind in kinds:
        of_kind = with_cuda_version(sources, kind.nvcc) if kind.nvcc else sources
        for python in environments:
            start = time.monotonic()
            plain = build_linux_wheel(python, kind, of_kind, libraries, stub)
            report(audit(python, plain, kind), start, small=not kind.nvcc)
            if stub is None:
                stub = Path(shutil.copy(WORK / kind.name / "python/ferry/_ferry.pyi", WORK))
    if windows.ARCHITECTURE in arguments.arch:
        if reason := "no stub of another wheel" if stub is None else windows.why_not(environments):
            print(f"wheels: {reason}: no wheel for Windows")
        else:
            start = time.monotonic()
            plain = windows.build_windows_wheel(environments[0], sources, libraries, stub)
            report(Path(shutil.copy(plain, DIST)), start, small=True)


def report(wheel: Path, start: float, small: bool) -> None:
    if small and shutil.which("advzip"):
        run("advzip", "--recompress", "-3", wheel)  # 3 % less than zlib makes of it
    size = wheel.stat().st_size
    print(f"wheels: {wheel.name}: {size / 1e6:.2f} MB, {time.monotonic() - start:.0f} s")
    if small and size > MOST_BYTES:
        sys.exit(f"wheels: {wheel.name} is over {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
