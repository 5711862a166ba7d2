"""What each stage of `make test` builds, and what it then runs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from steps import IN_CI, JOBS, LOGS, ROOT, Result, at_once, counted, run, say

FUZZ_S = 10  # of each target


class CannotRunError(Exception):
    """This machine lacks what a stage needs; the message says what."""


def without_aslr() -> list[str]:
    """The sanitizers of g++ 12 and 13 do not start when mappings have 32 random bits."""
    wrapper = ["setarch", platform.machine(), "-R"]
    if shutil.which("setarch") and subprocess.run([*wrapper, "true"], check=False).returncode == 0:
        return wrapper
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    if bits.exists() and int(bits.read_text()) > 28:
        say("   setarch -R is not allowed here and vm.mmap_rnd_bits is over 28: if the programs do")
        say("   not start, have an administrator run: sysctl vm.mmap_rnd_bits=28")
    return []


def build(preset: str, *options: str, targets: tuple[str, ...] = ()) -> Result:
    """Configures and builds a preset."""
    result = Result()
    chosen = ("--target", *targets) if targets else ()
    for what, command in (
        ("configuring", ("cmake", "--preset", preset, *options)),
        ("building", ("cmake", "--build", "--preset", preset, *chosen)),
    ):
        if not result.step(run(preset, *command, quiet=True), what):
            break
    return result


def ctest(preset: str, *options: str, wrapper: list[str] | None = None) -> Result:
    """Runs the tests of a preset that is built."""
    junit = LOGS / f"{preset}.xml"
    command = [*(wrapper or []), "ctest", "--preset", preset, "-j", JOBS, "--no-tests=error"]
    return counted(preset, *command, "--output-junit", junit, *options, junit=junit)


# All that the sanitizers may be told to leave alone: leaks inside libraries that are not ours.
SUPPRESSED = ("leak:libfabric.so",)


def build_sanitizer(preset: str) -> Result:
    result = Result()
    for file in sorted((ROOT / "tests" / "sanitizers").glob("*.supp")):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        hidden = [line for line in lines if line not in SUPPRESSED]
        result.step(not hidden, f"{file.name} hides more than other people's leaks: {hidden}; it")
    result.add(build(preset))
    return result


def test_sanitizer(preset: str) -> Result:
    # `slow` programs are slow because they repeat much, not because they reach more code.
    return ctest(preset, "-LE", "slow|install", wrapper=without_aslr())


def is_arm64() -> bool:
    return platform.machine() == "aarch64"


def build_arm64() -> Result:
    if is_arm64():
        say("   this machine is Arm64: the stage host covers it")
        return Result(passed=1)
    missing = [n for n in ("aarch64-linux-gnu-g++", "qemu-aarch64") if not shutil.which(n)]
    if missing:
        raise CannotRunError(f"{' and '.join(missing)} not found")
    # The whole library must compile; these programs run.
    parts = ("src/base/all", "src/core/all", "src/protocol/all")
    programs = ("fabric_tests", "bootstrap_tests", "conformance_test", "reliability_spawned_test")
    return build("arm64", targets=("ferry_library", *parts, *programs))


def test_arm64() -> Result:
    return Result() if is_arm64() else ctest("arm64")


WINE = "/usr/lib/wine/wine64"  # Debian's wine64 without the package of 32-bit programs


def find_wine() -> str | None:
    return shutil.which("wine64") or shutil.which("wine") or shutil.which(WINE)


def build_windows() -> Result:
    missing = [] if shutil.which("x86_64-w64-mingw32-g++-posix") else ["mingw-w64's g++"]
    missing += [] if find_wine() else ["wine64"]
    if missing:
        raise CannotRunError(f"{' and '.join(missing)} not found (tools/setup/install.sh windows)")
    parts = [f"src/{name}/all" for name in ("base", "core", "protocol", "fabric", "bootstrap")]
    programs = ("conformance_test", "reliability_spawned_test", "examples/all", "ferry_cli")
    return build("windows", targets=("ferry_library", *parts, *programs))


# Of the command under wine: its words, and what a line that it prints must have, so often.
WINDOWS_COMMANDS = (
    (["run", "-n", "4", "--", "examples/hello_processes.exe"], " 0 values wrong", 4),
    (["run", "-n", "2", "--", "cmd", "/c", "exit 3"], "exited with code 3", 1),
    (["doctor"], "passed", 2),
    (["bench", "--ranks", "2", "--iterations", "5", "--warmup", "1"], "dispatch", 1),
)


@contextmanager
def wine_server(environment: dict[str, str]) -> Iterator[None]:
    """The server of wine stays for some seconds after the last program and holds its output open,
    and readers wait for that: here one program runs all the while, and all use its server."""
    command = [find_wine(), "cmd"]
    keeper = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with keeper:
        keeper.stdout.readline()  # it runs
        yield
        keeper.stdin.close()  # and ends


def test_windows() -> Result:
    """Under wine: the tests, then the command."""
    folder = ROOT / "build/windows"
    environment = {**os.environ, "WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
    with wine_server(environment):
        result = ctest("windows", "-j", "1")
        for words, expected, times in WINDOWS_COMMANDS:
            result.add(ferry_under_wine(folder, environment, words, expected, times))
    return result


def ferry_under_wine(
    folder: Path, environment: dict[str, str], words: list[str], expected: str, times: int
) -> Result:
    done = subprocess.run(
        [find_wine(), folder / "tools/ferry/ferry.exe", *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    result = Result()
    well = said.count(expected) >= times
    if not well:
        say(f"   ferry {' '.join(words)}: exit code {done.returncode}\n{said}")
    result.passed += result.step(well, f"ferry {' '.join(words)}")
    return result


def find_nvcc() -> str:
    """The path of nvcc; taken from the Python index where the machine has none."""
    found = subprocess.run(
        ["tools/setup/cuda.sh"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    say("\n".join(f"   {line}" for line in found.stderr.splitlines()))
    if found.returncode != 0:
        raise CannotRunError("no nvcc, and none could be taken from the Python index")
    return found.stdout.split()[-1]


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def set_kernel_options() -> None:
    """The test machine_code makes the machine code of all kernels for every architecture: where
    they cannot run, builds end before that and do not optimise them."""
    if not has_gpu():
        os.environ.setdefault("CUDAARCHS", "90-virtual")
        os.environ.setdefault("CUDAFLAGS", "-Xcicc -O0")


def build_cuda() -> Result:
    targets = (
        "ferry_library",
        "src/fabric/cuda/all",
        "tests/cuda/all",
        "conformance_cuda",
    )
    result = build("cuda", f"-DCMAKE_CUDA_COMPILER={find_nvcc()}", targets=targets)
    result.passed = int(not result.failed)
    return result


def test_cuda() -> Result:
    """What needs a GPU runs where there is one."""
    result = ctest("cuda", "-L", "^nogpu$")
    if has_gpu():
        result.add(ctest("cuda", "-L", "^(gpu|cuda)$", "-j", "1"))
    else:
        result.words.append("TESTS ON GPUS SKIPPED: THIS MACHINE HAS NONE")
    return result


def build_host() -> Result:
    """All but src/{base,core,fabric,bootstrap,engine}: a sanitizer runs their unit tests alike."""
    folders = [f"src/{name}" for name in ("protocol", "host", "cuda", "api")]
    folders += ["tools/ferry", "bench", "examples", "tests"]
    return build("host", targets=("ferry_library", *(f"{folder}/all" for folder in folders)))


def test_host() -> Result:
    return ctest("host", "-LE", "^(core|fabric|bootstrap|engine)$")


def build_package() -> Result:
    result = Result()
    if result.step(run("package", "make", "package", quiet=True), "building the package"):
        result.passed = 1
    return result


def pytest(name: str, folders: list[str]) -> Result:
    junit, log = LOGS / f"{name}.xml", LOGS / f"{name}.log"
    log.unlink(missing_ok=True)
    command = (sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", *folders)
    return counted(name, *command, junit=junit)


def test_pytest() -> Result:
    """The package's tests beside all others, among them the examples of the docs."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    package = [folder for folder in folders if folder.startswith("python/")]
    others = [folder for folder in folders if folder not in package]
    return at_once(lambda: pytest("pytest", package), lambda: pytest("pytest-others", others))


WHEELS = ("wheels", "windows_wheel")


def build_wheels() -> Result:
    result = Result()
    result.passed = int(result.step(run("wheels", "make", "wheels", quiet=True), "make wheels"))
    return result


def build_debian() -> Result:
    result = Result()
    result.passed = int(result.step(run("debian", "make", "deb", quiet=True), "make deb"))
    return result


def check_lint() -> Result:
    ok = run("lint", sys.executable, "tools/lint/lint.py")
    found = re.findall(r"lint: (\d+) passed, (\d+) failed", (LOGS / "lint.log").read_text())
    if not found:
        return Result(failed=1, words=["lint did not end"])
    result = Result(passed=int(found[-1][0]), failed=int(found[-1][1]))
    result.step(ok or result.failed > 0, "lint")
    return result


def build_fuzz() -> Result:
    probe = ". tools/setup/probe.sh && find_clangxx"
    found = subprocess.run(
        ["bash", "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise CannotRunError("no clang++ >= 16 with libFuzzer found")
    compiler = f"-DCMAKE_CXX_COMPILER={found.stdout.strip()}"
    return build("fuzz", compiler, targets=("tests/fuzz/all",))


def test_fuzz() -> Result:
    result = Result()
    programs = [p for p in sorted((ROOT / "build/fuzz").rglob("*_fuzz")) if os.access(p, os.X_OK)]
    result.step(bool(programs), "no fuzz target found: the stage")
    if programs:
        wrapper = without_aslr()
        result.add(at_once(*(partial(fuzz, program, wrapper) for program in programs)))
    return result


def fuzz(program: Path, wrapper: list[str]) -> Result:
    """The seeds of a target, then new inputs."""
    seeds = ROOT / "tests" / "fuzz" / "corpus" / program.name.removesuffix("_fuzz")
    result = Result()
    with tempfile.TemporaryDirectory() as fresh:
        folders = [fresh, *([str(seeds)] if seeds.is_dir() else [])]
        options = (
            f"-max_total_time={FUZZ_S}",
            f"-timeout={10 if IN_CI else 50}",
            "-print_final_stats=1",
        )
        crashes = f"-artifact_prefix={LOGS}/{program.name}-"
        ok = run("fuzz", *wrapper, program, *options, crashes, *folders, quiet=True)
    result.passed += ok
    result.step(ok, program.name)
    return result


def build_docs() -> Result:
    result = Result()
    if not shutil.which("doxygen"):
        raise CannotRunError("doxygen not found")
    result.passed = int(result.step(run("docs", "make", "docs", quiet=True), "building the docs"))
    return result


def test_conformance() -> Result:
    """The full product, long: the program itself, without CTest's limit. It prints its progress."""
    result = Result()
    program = ROOT / "build/host/tests/conformance/conformance_full"
    ok = run("conformance", program, limit=12 * 3600, FERRY_CONFORMANCE="full")
    log = (LOGS / "conformance.log").read_text()
    counts = re.findall(r"^(\d+) of \d+ cases \(.*, (\d+) failures$", log, re.MULTILINE)
    if counts:
        done, result.failed = (int(count) for count in counts[-1])
        result.passed = done - min(done, result.failed)
    if not result.failed:
        result.step(ok and result.passed > 0, "conformance_full")
    return result


@dataclass(frozen=True)
class Stage:
    """What computes, and what then mostly waits: beside it the next stages are built."""

    build: Callable[[], Result] = Result
    test: Callable[[], Result] = Result


STAGES: dict[str, Stage] = {
    "host": Stage(build_host, test_host),
    "package": Stage(build_package),
    "pytest": Stage(test=test_pytest),
    "asan": Stage(partial(build_sanitizer, "asan"), partial(test_sanitizer, "asan")),
    "tsan": Stage(partial(build_sanitizer, "tsan"), partial(test_sanitizer, "tsan")),
    "arm64": Stage(build_arm64, test_arm64),
    "windows": Stage(build_windows, test_windows),
    "fuzz": Stage(build_fuzz, test_fuzz),
    "cuda": Stage(build_cuda, test_cuda),
    "lint": Stage(check_lint),
    "docs": Stage(build_docs),
    "wheels": Stage(
        build_wheels,
        lambda: pytest("wheels-roots", [f"tests/install/check_{n}.py" for n in WHEELS]),
    ),
    "debian": Stage(build_debian, lambda: pytest("debian-root", ["tests/install/check_debian.py"])),
    "conformance": Stage(partial(build, "host", targets=("conformance_full",)), test_conformance),
}
