"""`make package` builds anew when the machine has got what an earlier build lacked.

The Makefile and package.sh are the real ones, in a folder whose compiler, Python and nvcc only say
what a test wants to hear.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = """#!/bin/sh
case $1 in
  --version) echo "g++ $(cat "$HERE/release")" ;;
  *) cat >/dev/null; test -e "$HERE/headers" ;;
esac
"""
PYTHON = """#!/bin/sh
case "$*" in
  *build-dir*) test ! -e build/python/CMakeCache.txt && echo "$FERRY_CUDA" >>"$HERE/builds" ;;
esac
"""
NVCC = "#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n"
NOTHING = "#!/bin/sh\n"


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "cmake", "tools/setup", "pyproject.toml", "CMakeLists.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    script(tmp_path / "tools/setup/install.sh", NOTHING)
    script(tmp_path / "tools/setup/venv.sh", NOTHING)
    script(tmp_path / "tools/setup/cuda.sh", 'echo "$CUDACXX"\n')
    script(tmp_path / ".venv/bin/python", PYTHON)
    script(tmp_path / "bin/g++", COMPILER)
    script(tmp_path / "bin/nvcc", NVCC)
    (tmp_path / "release").write_text("12.2.0\n")
    return tmp_path


def builds(clone: Path, **variables: str) -> int:
    """How often the package has been built, after `make package`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "FERRY_"))}
    done = subprocess.run(
        ["make", "-s", "package"],
        cwd=clone,
        env=inherited
        | {"HERE": str(clone), "CXX": str(clone / "bin/g++"), "CUDACXX": str(clone / "bin/nvcc")}
        | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return len((clone / "builds").read_text().splitlines())


def test_headers_of_libfabric_that_came_later_are_built_in(clone: Path) -> None:
    assert [builds(clone), builds(clone)] == [1, 1]
    (clone / "headers").touch()  # as `make test` installs them after `make demo`
    (clone / "build/python").mkdir(parents=True)
    (clone / "build/python/CMakeCache.txt").touch()  # holds that there were none
    assert [builds(clone), builds(clone)] == [2, 2]


def test_another_compiler_or_engine_is_another_build(clone: Path) -> None:
    assert [builds(clone), builds(clone)] == [1, 1]
    (clone / "release").write_text("13.1.0\n")
    assert builds(clone) == 2
    assert [builds(clone, FERRY_CUDA="0"), builds(clone, FERRY_CUDA="0")] == [3, 3]
    assert [builds(clone), builds(clone)] == [4, 4]


def test_a_source_that_changed_is_another_build(clone: Path) -> None:
    assert builds(clone) == 1
    os.utime(clone / "CMakeLists.txt", ns=(2**62, 2**62))
    assert builds(clone) == 2
