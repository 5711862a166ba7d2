"""The host code of the CUDA engine compiles with the headers of the oldest CUDA that serves.

python3 oldest_toolkit_test.py CXX [--all]. With --all also with those of each later version that
the index has (minutes of loading the first time). Kernels are not compiled: the index has no nvcc
before 13.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv/cuda-headers"
CXX = "c++"

RUNTIME, NVCC = "nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12"
#: The packages that have the headers of each version, the oldest first.
PINS = {
    "12.3": (f"{RUNTIME}==12.3.101", f"{NVCC}==12.3.107"),
    "12.4": (f"{RUNTIME}==12.4.127", f"{NVCC}==12.4.131"),
    "12.5": (f"{RUNTIME}==12.5.82", f"{NVCC}==12.5.82"),
    "12.6": (f"{RUNTIME}==12.6.77", f"{NVCC}==12.6.85"),
    "12.8": (f"{RUNTIME}==12.8.90", f"{NVCC}==12.8.93"),
    "12.9": (f"{RUNTIME}==12.9.79", f"{NVCC}==12.9.86"),
    "13.0": ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"),
    "13.5": ("nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37"),
}
OLDEST = "12.3"
versions = [OLDEST]

# Of CUDA 12.5: what must not compile.
NEWER = """#include <cuda_runtime_api.h>
auto call = cudaGetDriverEntryPointByVersion;
"""


def headers_of(version: str) -> list[str]:
    """Folders of its headers, installed when they are missing."""
    folder = FOLDER / version
    stamp = folder / ".ferry"
    wanted = "\n".join(PINS[version])
    if not stamp.exists() or stamp.read_text() != wanted:
        pip = [str(ROOT / ".venv/bin/python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        options = ["--disable-pip-version-check", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, *options, *PINS[version]], check=True)
        stamp.write_text(wanted)
    return [str(path) for path in sorted(folder.glob("nvidia/*/include"))]


def compiled(source: str, version: str = OLDEST) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
        file.write(source)
        file.flush()
        return subprocess.run(
            [CXX, "-std=c++20", "-fsyntax-only", f"-I{ROOT}/include", f"-I{ROOT}/src"]
            + [word for folder in headers_of(version) for word in ("-isystem", folder)]
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
        parts = (
            ("fabric/cuda",),
            ("cuda", "cuda/runtime", "cuda/throughput"),
            ("cuda/collectives", "cuda/domains", "cuda/latency"),
        )
        for version, folders in itertools.product(versions, parts):
            with self.subTest(version=version, folders=folders):
                files = sources(*folders)
                self.assertGreaterEqual(len(files), 5)
                result = compiled("".join(f'#include "{file}"\n' for file in files), version)
                self.assertEqual(result.returncode, 0, result.stderr)

    def test_what_came_later_does_not(self) -> None:
        result = compiled(NEWER)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("cudaGetDriverEntryPointByVersion", result.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        CXX = sys.argv.pop(1)
    if "--all" in sys.argv:
        sys.argv.remove("--all")
        versions = list(PINS)
    unittest.main()
