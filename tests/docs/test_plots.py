"""The plots of the pages are what bench/plot_pages.py draws from bench/results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_plots_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "bench" / "plot_pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
