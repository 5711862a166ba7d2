"""Wheels for Linux: compiled by clang of `ziglang` for glibc 2.28, named by auditwheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from building import DIST, ROOT, SETUP, WORK, build_wheel, fetch_source, minor_of, run, update

GLIBC = (2, 28)
ARCHITECTURES = ("x86_64", "aarch64")
CUDA_ARCHITECTURE = "x86_64"
MOST_BYTES = 2_000_000  # of a wheel without the CUDA engine
#: Headers that the command and the network fabric are compiled with: the distribution's packages.
HEADERS = ("CLI", "fmt", "nlohmann", "rdma")


def fetch_yaml_cpp(into: Path) -> None:
    folder = WORK / "source"
    archive = fetch_source("yaml-cpp", folder)
    run("tar", "-xf", archive, "-C", folder)
    (unpacked,) = folder.glob("*/CMakeLists.txt")
    shutil.move(unpacked.parent, into)


def gather_libraries() -> Path:
    """The folder FERRY_BUNDLED of tools/ferry/CMakeLists.txt."""
    libraries = WORK / "bundled"
    for name in HEADERS:
        found = Path("/usr/include") / name
        if not found.is_dir():
            sys.exit(f"wheels: no headers {found}; tools/setup/install.sh test installs them")
        shutil.copytree(found, libraries / "include" / name, dirs_exist_ok=True)
    if not (libraries / "yaml-cpp").exists():
        fetch_yaml_cpp(libraries / "yaml-cpp")
    return libraries


@dataclass(frozen=True)
class Kind:
    """A kind of wheel."""

    arch: str
    nvcc: Path | None = None  # with the CUDA engine

    @property
    def name(self) -> str:
        return f"{self.arch}-cuda" if self.nvcc else self.arch

    @property
    def dist(self) -> Path:
        return DIST / "cuda" if self.nvcc else DIST


def find_nvcc() -> Path | None:
    found = subprocess.run(
        [SETUP / "cuda.sh"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    return Path(found.stdout.split()[-1]) if found.returncode == 0 else None


def zig() -> Path:
    """The same for all Pythons, so that they share the objects of the engine."""
    return min(WORK.glob("venv-*/lib/python*/site-packages/ziglang/zig"))


def target_of(arch: str) -> str:
    return f"{arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"


def cuda_settings(kind: Kind) -> dict[str, object]:
    """nvcc does not take a libc++, so this machine's compiler is its partner. That mixes no two
    libraries: between kernels and the engine go numbers and pointers alone, and what kernels need
    of newer systems is refused when the module is linked."""
    if not kind.nvcc:
        return {"FERRY_CUDA": "OFF"}
    return {
        "FERRY_CUDA": "ON",
        "CMAKE_CUDA_COMPILER": kind.nvcc,
        "CMAKE_CUDA_HOST_COMPILER": shutil.which(os.environ.get("CXX") or "g++"),
        "CMAKE_CUDA_FLAGS_RELEASE": "-O3 -DNDEBUG",
    }


def with_cuda_version(sources: Path, nvcc: Path) -> Path:
    """A copy whose version says for which CUDA it is, so that pip tells the two apart."""
    said = run(nvcc, "--version")
    major = re.search(r"release (\d+)", said)
    copy = WORK / "ferry-cuda"
    update(copy, sources)
    settings = copy / "pyproject.toml"
    plain = 'result = "{major}.{minor}.{patch}"'
    text = settings.read_text()
    if not major or plain not in text:
        sys.exit(f"wheels: no version in what {nvcc} says, or no {plain} in pyproject.toml")
    settings.write_text(text.replace(plain, f'{plain[:-1]}+cu{major[1]}"'))
    return copy


def build_linux_wheel(
    python: Path, kind: Kind, sources: Path, libraries: Path, stub: Path | None
) -> Path:
    """One wheel, as the compiler leaves it."""
    minor = minor_of(python)
    defines = {
        "CMAKE_TOOLCHAIN_FILE": sources / "cmake/zig.cmake",
        "FERRY_ZIG": zig(),
        "FERRY_ZIG_TARGET": target_of(kind.arch),
        "FERRY_BUNDLED": libraries,
        "FERRY_OFI_INCLUDE": libraries / "include",
        "CMAKE_CXX_FLAGS_RELEASE": "-O2 -DNDEBUG -ffunction-sections -fdata-sections",
        "CMAKE_MODULE_LINKER_FLAGS": "-Os",  # zig compiles its libc++ at that
        **cuda_settings(kind),
    }
    if stub:
        defines["FERRY_PYTHON_STUB"] = stub
    return build_wheel(
        python,
        sources,
        kind.name,
        defines,
        _PYTHON_HOST_PLATFORM=f"linux-{kind.arch}",
        SETUPTOOLS_EXT_SUFFIX=f".cpython-3{minor}-{kind.arch}-linux-gnu.so",
        CMAKE_CXX_COMPILER_LAUNCHER="",
        ZIG_GLOBAL_CACHE_DIR=str(WORK / "zig-cache"),
        ZIG_LOCAL_CACHE_DIR=str(WORK / "zig-cache"),
    )


def audit(python: Path, wheel: Path, kind: Kind) -> Path:
    """Named by auditwheel after the oldest glibc that has all it needs."""
    fresh = WORK / "audited"
    shutil.rmtree(fresh, ignore_errors=True)
    path = f"{python.parent}:{os.environ['PATH']}"
    options = ("--plat", "auto", "--only-plat", "-z", "9", "-w", fresh)
    run(python, "-m", "auditwheel", "repair", *options, wheel, log="auditwheel", PATH=path)
    (audited,) = fresh.iterdir()
    named = re.search(rf"-manylinux_(\d+)_(\d+)_{kind.arch}\.whl$", audited.name)
    if not named or (int(named[1]), int(named[2])) > GLIBC:
        sys.exit(f"wheels: {audited.name} needs more than glibc {GLIBC[0]}.{GLIBC[1]}")
    print(run(python, "-m", "auditwheel", "show", audited, PATH=path).strip())
    kind.dist.mkdir(exist_ok=True)
    return Path(shutil.copy(audited, kind.dist))
