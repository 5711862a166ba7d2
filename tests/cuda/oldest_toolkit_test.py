"""The host code of the CUDA engine compiles with the headers of the oldest CUDA that serves.

python3 oldest_toolkit_test.py CXX. Kernels are not compiled: the index has no nvcc of that age.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tools/setup/requirements-cuda-oldest.txt"
FOLDER = ROOT / ".venv/cuda-oldest"
CXX = "c++"

# Of CUDA 12.5: what must not compile.
NEWER = """#include <cuda_runtime_api.h>
auto call = cudaGetDriverEntryPointByVersion;
"""


def setUpModule() -> None:
    stamp = FOLDER / ".ferry"
    wanted = REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    pip = [str(ROOT / ".venv/bin/python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    options = ["--disable-pip-version-check", "--upgrade", "--target", str(FOLDER)]
    subprocess.run([*pip, *options, "-r", str(REQUIREMENTS)], check=True)
    stamp.write_text(wanted)


def compiled(source: str) -> subprocess.CompletedProcess[str]:
    headers = [f"{FOLDER}/nvidia/{part}/include" for part in ("cuda_runtime", "cuda_nvcc")]
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
        file.write(source)
        file.flush()
        return subprocess.run(
            [CXX, "-std=c++20", "-fsyntax-only", f"-I{ROOT}/include", f"-I{ROOT}/src"]
            + [word for folder in headers for word in ("-isystem", folder)]
            + [file.name],
            capture_output=True,
            text=True,
        )


def sources(*folders: str) -> list[Path]:
    return [
        file
        for folder in folders
        for file in sorted((ROOT / "src" / folder).glob("*.cpp"))
        if not file.name.endswith("_test.cpp") and file.name != "no_cuda.cpp"
    ]


class OldestToolkit(unittest.TestCase):
    def test_host_code_compiles(self) -> None:
        for folders in (
            ("fabric/cuda",),
            ("cuda", "cuda/runtime", "cuda/throughput"),
            ("cuda/collectives", "cuda/domains", "cuda/latency"),
        ):
            with self.subTest(folders=folders):
                files = sources(*folders)
                self.assertGreaterEqual(len(files), 5)
                result = compiled("".join(f'#include "{file}"\n' for file in files))
                self.assertEqual(result.returncode, 0, result.stderr)

    def test_what_came_later_does_not(self) -> None:
        result = compiled(NEWER)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("cudaGetDriverEntryPointByVersion", result.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        CXX = sys.argv.pop(1)
    unittest.main()
