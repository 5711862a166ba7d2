"""Limits of time hold in CI only: a slow or busy machine is no failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """
import steps
from pathlib import Path
steps.LOGS = Path(".")
print(steps.run("slow", "sleep", "1", limit=0.2))
"""
PROJECT = f"""
cmake_minimum_required(VERSION 3.25)
project(limits CXX)
set(FERRY_TESTS ON)
include({ROOT}/cmake/FerryTargets.cmake)
enable_testing()
file(WRITE a.cpp "")
ferry_add_test(a NO_GTEST SOURCES a.cpp TIMEOUT 60)
"""
TEST = """
import pytest
def test_usual(request):
    assert request.node.get_closest_marker("timeout").args == ({usual},)
@pytest.mark.timeout(20)
def test_marked(request):
    assert request.node.get_closest_marker("timeout").args == ({marked},)
"""


def run(*command: str | Path, ci: bool, where: Path) -> str:
    variables = {k: v for k, v in os.environ.items() if k != "CI"} | ({"CI": "true"} if ci else {})
    variables["PYTHONPATH"] = str(ROOT / "tests")
    done = subprocess.run(
        command, cwd=where, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ci", [True, False])
def test_ci_alone_stops_a_command_and_says_so(ci: bool, tmp_path: Path) -> None:
    said = run(sys.executable, "-c", COMMAND, ci=ci, where=tmp_path)
    assert said.endswith("False\n" if ci else "True\n"), said
    assert ("the limit in CI" in said) == ci


@pytest.mark.parametrize(("ci", "seconds"), [(True, 60), (False, 300)])
def test_ctest_waits_longer_outside_ci(ci: bool, seconds: int, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    run("cmake", "-S", ".", "-B", "build", ci=ci, where=tmp_path)
    shown = json.loads(run("ctest", "--show-only=json-v1", ci=ci, where=tmp_path / "build"))
    properties = {p["name"]: p["value"] for p in shown["tests"][0]["properties"]}
    assert properties["TIMEOUT"] == seconds


@pytest.mark.parametrize(("ci", "usual", "marked"), [(True, 300, 20), (False, 1500, 100)])
def test_pytest_waits_longer_outside_ci(ci: bool, usual: int, marked: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 300\n")
    (tmp_path / "test_it.py").write_text(TEST.format(usual=usual, marked=marked))
    run(sys.executable, "-m", "pytest", "-q", "test_it.py", ci=ci, where=tmp_path)
