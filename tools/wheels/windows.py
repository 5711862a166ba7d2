"""The wheel for Windows (CPython 3.11, x86-64), cross-compiled by mingw-w64, with static libraries.

Neither the distribution nor the index has a Python for Windows as such: headers and library are
those of the distribution's sources of Python, and python311.dll comes in a wheel of the index
(tools/setup/requirements-windows.txt). Under wine they are a Python that can run Ferry
(tests/install/check_windows_wheel.py).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from building import SETUP, WORK, build_wheel, fetch_source, minor_of, run

ARCHITECTURE = "win_amd64"
TARGET = "x86_64-w64-mingw32"
SUFFIX = ".cp311-win_amd64.pyd"
#: Has include/, python311.lib, packages/ (numpy) and run/, where python.exe is.
PYTHON = WORK / "python-windows"
#: A program that is Python: its library has all of it.
PROGRAM = """#include <wchar.h>
int Py_Main(int, wchar_t**);
int wmain(int argc, wchar_t** argv) { return Py_Main(argc, argv); }
"""


def why_not(environments: list[Path]) -> str:
    """Empty: this machine can build the wheel."""
    if not shutil.which(f"{TARGET}-g++-posix"):
        return "no mingw-w64 (tools/setup/install.sh windows)"
    return "" if minor_of(environments[0]) == "11" else "no Python 3.11 with headers"


def fetch_python(python: Path) -> None:
    pins = (SETUP / "requirements-windows.txt").read_text()
    stamp = PYTHON / "pins"
    if stamp.exists() and stamp.read_text() == pins:
        return
    shutil.rmtree(PYTHON, ignore_errors=True)
    PYTHON.mkdir(parents=True)
    take_sources()
    take_libraries(python)
    link_program()
    stamp.write_text(pins)


def take_sources() -> None:
    archive = fetch_source("python3.11", PYTHON / "source")
    run("tar", "-xf", archive, "-C", archive.parent, "--exclude=*/test/*")
    (config,) = archive.parent.glob("*/PC/pyconfig.h")
    shutil.move(config.parents[1] / "Include", PYTHON / "include")
    shutil.copy(config, PYTHON / "include")
    shutil.move(config.parents[1] / "Lib", PYTHON / "run/Lib")
    shutil.rmtree(archive.parent)


def take_libraries(python: Path) -> None:
    """Of the wheels that requirements-windows.txt names; numpy's is for our wheel's tests."""
    wheels = PYTHON / "wheels"
    pip = [python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    pip += ["--platform", ARCHITECTURE, "--python-version", "3.11", "-d", wheels]
    run(*pip, "-r", SETUP / "requirements-windows.txt")
    for wheel in wheels.iterdir():
        shutil.unpack_archive(wheel, PYTHON / wheel.name.split("-")[0], "zip")
    for library in (PYTHON / "panda3d/deploy_libs").iterdir():
        if library.suffix in (".dll", ".pyd"):
            shutil.copy(library, PYTHON / "run")
    (PYTHON / "numpy").rename(PYTHON / "packages")
    for name in ("wheels", "panda3d"):
        shutil.rmtree(PYTHON / name)


def link_program() -> None:
    said = run(f"{TARGET}-objdump", "-p", PYTHON / "run/python311.dll")
    table = said.split("[Ordinal/Name Pointer] Table")[1].split("\n\n")[0]
    names = re.findall(r"\]\s+(\w+)", table)
    definition = PYTHON / "python311.def"
    definition.write_text("LIBRARY python311.dll\nEXPORTS\n" + "\n".join(names) + "\n")
    library = PYTHON / "python311.lib"
    run(f"{TARGET}-dlltool", "-d", definition, "-l", library)
    source = PYTHON / "python.c"
    source.write_text(PROGRAM)
    run(f"{TARGET}-gcc", "-municode", source, library, "-o", PYTHON / "run/python.exe")


def build_windows_wheel(python: Path, sources: Path, libraries: Path, stub: Path) -> Path:
    fetch_python(python)
    defines = {
        "CMAKE_TOOLCHAIN_FILE": sources / "cmake/windows-mingw64.cmake",
        "Python_INCLUDE_DIR": PYTHON / "include",
        "Python_LIBRARY": PYTHON / "python311.lib",
        "NB_SUFFIX": SUFFIX,
        "FERRY_BUNDLED": libraries,
        "FERRY_PYTHON_STUB": stub,
        "FERRY_CUDA": "OFF",
        # Less padding, fewer copies of blocks and functions: what is downloaded is smaller.
        "CMAKE_CXX_FLAGS_RELEASE": "-O2 -DNDEBUG -ffunction-sections -fdata-sections "
        "-falign-functions=1 -falign-jumps=1 -falign-loops=1 -falign-labels=1 "
        "-freorder-blocks-algorithm=simple --param=max-inline-insns-single=30",
        "CMAKE_MODULE_LINKER_FLAGS": "-static -s -Wl,--gc-sections",
    }
    return build_wheel(
        python,
        sources,
        ARCHITECTURE,
        defines,
        _PYTHON_HOST_PLATFORM="win-amd64",
        SETUPTOOLS_EXT_SUFFIX=SUFFIX,
    )
