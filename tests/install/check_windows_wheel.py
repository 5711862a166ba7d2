"""The wheel for Windows of `make wheels`: what its module needs, and the ten lines of the README by
a Python for Windows under wine. A plain pytest does not collect them:

    make test STAGES=wheels

Skipped, with the reason, where the wheel, wine or that Python (tools/wheels/windows.py) is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "wheels"), str(ROOT / "tests"), str(Path(__file__).parent)]
import windows  # noqa: E402  # of `make wheels`
from check_wheels import ten_lines, wheel_for  # noqa: E402
from stages import find_wine  # noqa: E402

#: What Windows has, and what has the Python.
LIBRARIES = {"advapi32", "bcrypt", "kernel32", "msvcrt", "ws2_32", "python311"}
SPAWNED = """
import multiprocessing, os, runpy, socket

def rank(number):
    os.environ["RANK"] = str(number)
    runpy.run_path("ten.py")

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", FERRY_PORT=str(port), FERRY_SECRET="ten lines",
                      WORLD_SIZE="2")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(n,)) for n in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    raise SystemExit(any(each.exitcode for each in ranks))
"""
THREADS = """
import threading
import ferry

text, boots = open("ten.py").read(), iter(ferry.threads(2))
ferry.from_environment = lambda: next(boots)
ranks = [threading.Thread(target=exec, args=(text, {})) for _ in range(2)]
for each in ranks:
    each.start()
for each in ranks:
    each.join()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is unpacked in."""
    folder = tmp_path_factory.mktemp("windows")
    shutil.unpack_archive(wheel_for("3.11", "amd64"), folder, "zip")
    return folder


@pytest.fixture(scope="module")
def environment(wheel: Path) -> dict[str, str]:
    if not find_wine():
        pytest.skip("no wine (tools/setup/install.sh windows)")
    if not (windows.PYTHON / "pins").exists():
        pytest.skip("no Python for Windows: make wheels says why")
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return own | {
        "PYTHONHOME": str(windows.PYTHON / "run"),
        "PYTHONPATH": f"{windows.PYTHON / 'packages'};{wheel}",
        "WINEPREFIX": str(windows.PYTHON / "wine"),
        "WINEDEBUG": "-all",
    }


def python(environment: dict[str, str], folder: Path, *words: str) -> str:
    """What a Python for Windows says that runs them. Its input is a pipe: /dev/null is not one of
    the files that it can open."""
    (folder / "ten.py").write_text(ten_lines())
    done = subprocess.run(
        [find_wine(), windows.PYTHON / "run/python.exe", *words],
        cwd=folder,
        env=environment,
        input="",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def ranks_in(said: str) -> list[int]:
    return sorted(int(n) for n in re.findall(r"rank (\d): \d+ rows came, y is \(16, 128\)", said))


def test_the_module_needs_what_windows_has(wheel: Path) -> None:
    (module,) = (wheel / "ferry").glob("*.pyd")
    said = subprocess.run(
        [f"{windows.TARGET}-objdump", "-p", module], capture_output=True, text=True, check=True
    ).stdout
    needed = {name.lower() for name in re.findall(r"DLL Name: (\w+)\.dll", said, re.I)}
    assert needed <= LIBRARIES, needed
    assert re.search(r"\bPyInit__ferry$", said, re.M), said[-2000:]


def test_ranks_as_threads(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(THREADS)
    assert ranks_in(python(environment, tmp_path, "threads.py")) == [0, 1]


def test_ranks_as_processes_that_python_spawns(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    assert ranks_in(python(environment, tmp_path, "spawned.py")) == [0, 1]


def test_ranks_as_processes_of_the_command(environment: dict[str, str], tmp_path: Path) -> None:
    program = "Z:" + str(windows.PYTHON / "run/python.exe").replace("/", "\\")
    said = python(environment, tmp_path, "-m", "ferry", "run", "-n", "4", "--", program, "ten.py")
    assert ranks_in(said) == [0, 1, 2, 3]
