"""`make wheels`: wheels that need no compiler to install, and the sdist that they are made from.

    make.py [--arch x86_64 ...] [--python PROGRAM ...] [--no-cuda]

For each architecture a wheel for CPython 3.11, and one of the stable ABI for 3.12 and all later
ones. clang of `ziglang` compiles them for glibc 2.28, whatever this machine has, with a static
libc++; auditwheel checks that. They have the host engine and the command; libfabric is loaded at
run time where there is one. The same with the CUDA engine, for x86-64, where there is an nvcc
(tools/setup/cuda.sh): its version ends in +cu13, as CUDA's does; CUDAARCHS of the environment says
for which GPUs. Results: dist/ and dist/cuda/; all else: build/wheels/.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
SETUP = ROOT / "tools" / "setup"
GLIBC = (2, 28)
ARCHITECTURES = ("x86_64", "aarch64")
CUDA_ARCHITECTURE = "x86_64"
MOST_BYTES = 2_000_000  # of a wheel without the CUDA engine
#: Headers that the command and the network fabric are compiled with: the distribution's packages.
HEADERS = ("CLI", "fmt", "nlohmann", "rdma")


def run(*command: str | Path, cwd: Path = ROOT, log: str = "", **variables: str) -> str:
    """What it prints, which is also in build/wheels/LOG.log while it runs; ends this program, with
    the end of it, when the command fails."""
    words = [str(word) for word in command]
    with (WORK / f"{log}.log").open("w+") if log else tempfile.TemporaryFile("w+") as out:
        done = subprocess.run(
            words, cwd=cwd, env=os.environ | variables, stdout=out, stderr=out, check=False
        )
        out.seek(0)
        said = out.read()
    if done.returncode != 0:
        print(*said.splitlines()[-60:], sep="\n", file=sys.stderr)
        sys.exit(f"wheels: failed: {' '.join(words)}")
    return said


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


def environment_of(python: Path) -> Path:
    """A virtual environment on it with what builds; returns its Python."""
    name = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2], end='')")
    folder = WORK / f"venv-{name}"
    pins = "".join((SETUP / f"requirements-{n}.txt").read_text() for n in ("build", "wheels"))
    stamp = folder / "pins"
    if not stamp.exists() or stamp.read_text() != pins:
        run(python, "-m", "venv", "--clear", folder)
        files = [f"-r{SETUP}/requirements-{n}.txt" for n in ("build", "wheels")]
        pip = (folder / "bin/python", "-m", "pip", "install", "-q")
        run(*pip, "-c", SETUP / "constraints.txt", *files)
        stamp.write_text(pins)
    return folder / "bin/python"


def fetch_source(package: str, folder: Path) -> Path:
    """The archive of a package's sources as the distribution has them, by apt with its checks of
    signatures; lists and settings of this machine stay as they are."""
    lists = WORK / "apt"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    format_ = "deb-src $(SITE) $(RELEASE) $(COMPONENT)"
    targets = run("apt-get", "indextargets", "--format", format_, "Created-By: Packages")
    own = re.compile(r".*(debian|ubuntu).* (main|universe)")
    sources = {line for line in targets.splitlines() if own.fullmatch(line)}
    (WORK / "sources.list").write_text("\n".join(sorted(sources)) + "\n")
    apt = ["apt-get", "-q", f"-oDir::Etc::SourceList={WORK}/sources.list"]
    apt += ["-oDir::Etc::SourceParts=/dev/null", f"-oDir::State::Lists={lists}"]
    apt += ["-oAPT::Sandbox::User=root"]
    run(*apt, "update")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run(*apt, "source", "--download-only", "--tar-only", package, cwd=folder)
    (archive,) = (path for path in folder.glob("*.orig.tar.*") if path.suffix != ".asc")
    print(f"wheels: {package} from {archive.name}")
    return archive


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


def make_sdist(python: Path) -> tuple[Path, Path]:
    """The sdist, and the folder that it is unpacked in: the wheels are built from it."""
    fresh = WORK / "sdist"
    shutil.rmtree(fresh, ignore_errors=True)
    run(python, "-m", "build", "--sdist", "--no-isolation", "--outdir", fresh, ROOT, log="sdist")
    (archive,) = fresh.iterdir()
    run("tar", "-xf", archive, "-C", fresh)
    (unpacked,) = (path for path in fresh.iterdir() if path.is_dir())
    sources = WORK / "ferry"
    update(sources, unpacked)
    return archive, sources


def update(folder: Path, new: Path) -> None:
    """Makes `folder` what `new` is; files that are the same keep their times, so their objects."""
    wanted = {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder) not in wanted:
            path.unlink()
    for name in wanted:
        old = folder / name
        if not old.exists() or not filecmp.cmp(old, new / name, shallow=False):
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(new / name, old)


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


def build_wheel(
    python: Path, kind: Kind, sources: Path, libraries: Path, stub: Path | None
) -> Path:
    """One wheel, as the compiler leaves it."""
    arch = kind.arch
    objects = WORK / kind.name
    (objects / "CMakeCache.txt").unlink(missing_ok=True)  # of the other Python; objects stay
    out = WORK / "plain"
    shutil.rmtree(out, ignore_errors=True)
    minor = run(python, "-c", "import sys; print(sys.version_info[1], end='')")
    defines = {
        "CMAKE_TOOLCHAIN_FILE": sources / "cmake/zig.cmake",
        "FERRY_ZIG": zig(),
        "FERRY_ZIG_TARGET": target_of(arch),
        "FERRY_BUNDLED": libraries,
        "FERRY_OFI_INCLUDE": libraries / "include",
        "CMAKE_CXX_FLAGS_RELEASE": "-O2 -DNDEBUG -ffunction-sections -fdata-sections",
        **cuda_settings(kind),
    }
    if stub:
        defines["FERRY_PYTHON_STUB"] = stub
    settings = [f"cmake.define.{name}={value}" for name, value in defines.items()]
    settings += [f"build-dir={objects}", "cmake.build-type=Release", "install.strip=false"]
    command = [python, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", out]
    run(
        *command,
        *(f"--config-settings={setting}" for setting in settings),
        sources,
        log=f"{kind.name}-3.{minor}",
        _PYTHON_HOST_PLATFORM=f"linux-{arch}",
        SETUPTOOLS_EXT_SUFFIX=f".cpython-3{minor}-{arch}-linux-gnu.so",
        CMAKE_CXX_COMPILER_LAUNCHER="",
        ZIG_GLOBAL_CACHE_DIR=str(WORK / "zig-cache"),
        ZIG_LOCAL_CACHE_DIR=str(WORK / "zig-cache"),
        VIRTUAL_ENV=str(python.parents[1]),
    )
    (wheel,) = out.iterdir()
    return wheel


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
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
    kinds = [Kind(arch) for arch in sorted(arguments.arch, key=lambda a: a != platform.machine())]
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
            wheel = audit(python, build_wheel(python, kind, of_kind, libraries, stub), kind)
            size = wheel.stat().st_size
            print(f"wheels: {wheel.name}: {size / 1e6:.2f} MB, {time.monotonic() - start:.0f} s")
            if size > MOST_BYTES and not kind.nvcc:
                sys.exit(f"wheels: {wheel.name} is over {MOST_BYTES} bytes")
            if stub is None:
                stub = Path(shutil.copy(WORK / kind.name / "python/ferry/_ferry.pyi", WORK))


if __name__ == "__main__":
    main()
