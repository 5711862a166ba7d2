"""The drop-in as it is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import ferry

SOURCE = Path(__file__).resolve().parents[1]


def test_a_wheel_is_pure_python_and_serves(tmp_path: Path) -> None:
    build = f"from scikit_build_core.build import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=SOURCE, check=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.startswith("deep_ep-1.2.1") and wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        (metadata,) = (n for n in names if n.endswith("METADATA"))
        asked = [
            line
            for line in content.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist")
        ]
    # The index has another project of the name ferry: nobody shall be given that one.
    assert asked == ["Requires-Dist: torch>=2.4"]
    modules = {p.relative_to(SOURCE).as_posix() for p in SOURCE.glob("deep_ep*/**/*.py")}
    assert modules == {n for n in names if n.endswith(".py")}
    # A wheel of pure Python can be imported as it lies.
    code = f"""
import sys
sys.path[:0] = [{str(wheel)!r}, {str(Path(ferry.__file__).parents[1])!r}]
import time
import torch
start = time.process_time()
import deep_ep, deep_ep.utils, deep_ep.buffer, deep_ep_cpp
assert time.process_time() - start < 0.3  # beyond torch
assert ".whl" in deep_ep.__file__ and ".whl" in deep_ep_cpp.__file__
"""
    subprocess.run([sys.executable, "-c", code], check=True)
