"""`make test`: every stage, one after another, its time, and the count of all tests at the end.

    run_all.py [--jobs N] [STAGE ...]

Without stages: all but `conformance`. The last line is "N passed, M failed", alone; the exit status
is 1 if anything failed. A build that fails counts as one failed test. A stage that cannot run on
this machine says so in capital letters, and fails when CI=true. Then only do limits of time hold: a
slow or busy machine is no failure. Full output: build/logs/.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from steps import IN_CI, LOGS, ROOT, Result, at_once, counted, run, say

LIMIT_S = 30 * 60  # of the whole, on two cores of CI
FUZZ_S = 10  # of each target
JOBS = "2"


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


def build(result: Result, preset: str, *options: str, targets: tuple[str, ...] = ()) -> bool:
    """Configures and builds a preset."""
    say(f"   configuring and building the preset {preset}")
    if not result.step(
        run(preset, "cmake", "--preset", preset, *options, quiet=True), "configuring"
    ):
        return False
    chosen = ("--target", *targets) if targets else ()
    command = ("cmake", "--build", "--preset", preset, *chosen)
    return result.step(run(preset, *command, quiet=True), "building")


def ctest(preset: str, *options: str, wrapper: list[str] | None = None) -> Result:
    """Runs the tests of a preset that is built."""
    junit = LOGS / f"{preset}.xml"
    command = [*(wrapper or []), "ctest", "--preset", preset, "-j", JOBS, "--no-tests=error"]
    return counted(preset, *command, "--output-junit", junit, *options, junit=junit)


def stage_host() -> Result:
    result = Result()
    if build(result, "host"):
        result.add(ctest("host"))
    return result


# All that the sanitizers may be told to leave alone: leaks inside libraries that are not ours.
SUPPRESSED = ("leak:libfabric.so",)


def stage_sanitizer(preset: str) -> Result:
    result = Result()
    for file in sorted((ROOT / "tests" / "sanitizers").glob("*.supp")):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        hidden = [line for line in lines if line not in SUPPRESSED]
        result.step(not hidden, f"{file.name} hides more than other people's leaks: {hidden}; it")
    if build(result, preset):
        # `slow` programs are slow because they repeat much, not because they reach more code.
        result.add(ctest(preset, "-LE", "slow|install", wrapper=without_aslr()))
    return result


def stage_arm64() -> Result:
    result = Result()
    if platform.machine() == "aarch64":
        say("   this machine is Arm64: the stage host covers it")
        result.passed = 1
        return result
    missing = [n for n in ("aarch64-linux-gnu-g++", "qemu-aarch64") if not shutil.which(n)]
    if missing:
        raise CannotRunError(f"{' and '.join(missing)} not found")
    # The whole library must compile; the tests of base, core and protocol run.
    targets = ("ferry_library", "src/base/all", "src/core/all", "src/protocol/all")
    if build(result, "arm64", targets=targets):
        result.add(ctest("arm64"))
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


def stage_cuda() -> Result:
    """Compiles; what needs a GPU runs where there is one. The test machine_code makes the machine
    code of all kernels for every architecture: a build that cannot run ends before that, and is not
    optimised."""
    result = Result()
    options = [f"-DCMAKE_CUDA_COMPILER={find_nvcc()}"]
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if not has_gpu:
        options.append("-DCMAKE_CUDA_ARCHITECTURES=90-virtual")
        options.append("-DCMAKE_CUDA_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG -Xcicc -O0")
    targets = (
        "ferry_library",
        "src/fabric/cuda/all",
        "src/cuda/all",
        "tests/cuda/all",
        "conformance_cuda",
    )
    if not build(result, "cuda", *options, targets=targets):
        return result
    result.passed = 1
    result.add(ctest("cuda", "-L", "^nogpu$"))
    if has_gpu:
        result.add(ctest("cuda", "-L", "^(gpu|cuda)$", "-j", "1"))
    else:
        result.words.append("TESTS ON GPUS SKIPPED: THIS MACHINE HAS NONE")
    return result


def stage_package() -> Result:
    result = Result()
    if result.step(run("package", "make", "package", quiet=True), "building the package"):
        result.passed = 1
    return result


def pytest(name: str, folders: list[str]) -> Result:
    junit, log = LOGS / f"{name}.xml", LOGS / f"{name}.log"
    log.unlink(missing_ok=True)
    command = (sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", *folders)
    return counted(name, *command, junit=junit)


def stage_pytest() -> Result:
    """The package's tests beside all others, among them the examples of the docs."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    package = [folder for folder in folders if folder.startswith("python/")]
    others = [folder for folder in folders if folder not in package]
    return at_once(lambda: pytest("pytest", package), lambda: pytest("pytest-others", others))


def stage_lint() -> Result:
    ok = run("lint", sys.executable, "tools/lint/lint.py")
    found = re.findall(r"lint: (\d+) passed, (\d+) failed", (LOGS / "lint.log").read_text())
    if not found:
        return Result(failed=1, words=["lint did not end"])
    result = Result(passed=int(found[-1][0]), failed=int(found[-1][1]))
    result.step(ok or result.failed > 0, "lint")
    return result


def stage_fuzz() -> Result:
    probe = ". tools/setup/probe.sh && find_clangxx"
    found = subprocess.run(
        ["bash", "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise CannotRunError("no clang++ >= 16 with libFuzzer found")
    result = Result()
    compiler = f"-DCMAKE_CXX_COMPILER={found.stdout.strip()}"
    if not build(result, "fuzz", compiler, targets=("tests/fuzz/all",)):
        return result
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


def stage_docs() -> Result:
    result = Result()
    if not shutil.which("doxygen"):
        raise CannotRunError("doxygen not found")
    result.passed = int(result.step(run("docs", "make", "docs", quiet=True), "building the docs"))
    return result


def stage_conformance() -> Result:
    """The full product, long: the program itself, without CTest's limit. It prints its progress."""
    result = Result()
    if not build(result, "host", targets=("conformance_full",)):
        return result
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


STAGES: dict[str, Callable[[], Result]] = {
    "host": stage_host,
    "package": stage_package,
    "pytest": stage_pytest,
    "lint": stage_lint,
    "asan": lambda: stage_sanitizer("asan"),
    "tsan": lambda: stage_sanitizer("tsan"),
    "arm64": stage_arm64,
    "cuda": stage_cuda,
    "fuzz": stage_fuzz,
    "docs": stage_docs,
    "conformance": stage_conformance,
}
ON_DEMAND = ("conformance",)


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_stage(name: str) -> Result:
    say(f"== {name}")
    (LOGS / f"{name}.log").unlink(missing_ok=True)
    start, cpu_start = time.monotonic(), children_cpu_seconds()
    try:
        result = STAGES[name]()
    except CannotRunError as reason:
        result = Result(failed=int(IN_CI), words=[f"DID NOT RUN: {reason}"])
    result.seconds = time.monotonic() - start
    result.cpu_seconds = children_cpu_seconds() - cpu_start
    say(line_of(name, result))
    return result


def line_of(name: str, result: Result) -> str:
    counts = f"{result.passed:5} passed {result.failed:4} failed"
    if result.skipped:
        counts += f" {result.skipped} skipped"
    notes = "; ".join(result.words)
    times = f"{result.seconds:7.1f} s {result.cpu_seconds:7.1f} CPU s"
    return f"-- {name:11} {times} {counts}{'  ' if notes else ''}{notes}"


def main() -> int:
    global JOBS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default=str(os.cpu_count() or 2))
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.stages if name not in STAGES]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    JOBS = arguments.jobs
    LOGS.mkdir(parents=True, exist_ok=True)
    names = arguments.stages or [name for name in STAGES if name not in ON_DEMAND]
    results = {name: run_stage(name) for name in names}
    total = Result()
    say("\nAll stages:")
    for name, result in results.items():
        total.add(result)
        say(line_of(name, result))
    say(line_of("total", total))
    if IN_CI and total.seconds > LIMIT_S and not arguments.stages:
        say(f"   over the limit of {LIMIT_S} s in CI: make it faster")
    say(f"\n{total.passed} passed, {total.failed} failed")
    return 1 if total.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
