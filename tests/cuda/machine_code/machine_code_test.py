"""Rules over the machine code of the kernels: python3 machine_code_test.py NVCC ROOT [JOBS]"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import machine_code as code

NVCC = os.environ.get("FERRY_NVCC", "")
ROOT = Path(__file__).resolve().parents[3]
# Together they compile every branch of the sources, those for 100 too: its own code differs from
# theirs in which branches it combines (test_all_that_sources_tell_apart_is_compiled).
ARCHITECTURES = (80, 90, 120)
JOBS = 2

SPILLING = """
__global__ void spilling_kernel(float* data) {
  float x[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) x[i] = data[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int i = 0; i < 48; ++i) x[i] = x[i] * x[(i * 7 + r) % 48] + x[(i + 5) % 48];
#pragma unroll
  for (int i = 0; i < 48; ++i) data[i * 32 + threadIdx.x] = x[i];
}
"""


def setUpModule() -> None:
    if not NVCC:
        raise unittest.SkipTest("give the path of nvcc (ctest -R machine_code does)")


def families(source: Path) -> list[tuple[int, ...]]:
    """Architectures by what a source tells apart: one PTX serves those it does not."""
    asked = code.asked_architectures(source, ROOT)
    found: dict[int, list[int]] = {}
    for sm in ARCHITECTURES:
        found.setdefault(sum(sm * 10 >= n for n in asked), []).append(sm)
    return [tuple(family) for family in found.values()]


class Kernels(unittest.TestCase):
    compiled: list[code.Compiled]

    @classmethod
    def setUpClass(cls) -> None:
        sources = sorted((ROOT / "src/cuda/kernels").rglob("*.cu"))
        work = [(source, family) for source in sources for family in families(source)]
        with ThreadPoolExecutor(JOBS) as pool:
            made = pool.map(lambda item: code.compile_source(NVCC, ROOT, *item), work)
            cls.compiled = [compiled for several in made for compiled in several]

    def complaints(self, rule) -> list[str]:
        return [
            f"{c.source} sm_{c.architecture}: {text}" for c in self.compiled for text in rule(c)
        ]

    def test_every_kernel_is_looked_at(self) -> None:
        for sm in ARCHITECTURES:
            names = " ".join(n for c in self.compiled if c.architecture == sm for n in c.spills)
            for kernel in (*code.MEETING, *code.BULK):
                self.assertIn(f"{len(kernel)}{kernel}", names, f"sm_{sm}")
        for compiled in self.compiled:
            # Functions that were not inlined may be there, too.
            self.assertLessEqual(set(compiled.entries()), set(compiled.spills), compiled.source)

    def test_all_that_sources_tell_apart_is_compiled(self) -> None:
        sources = (ROOT / "src/cuda/kernels").rglob("*.cu")
        asked = {sm for source in sources for sm in code.asked_architectures(source, ROOT)}
        self.assertEqual(asked, {860, 890, 900, 1000, 1200})

    def test_meets_at_system_scope(self) -> None:
        self.assertEqual(self.complaints(code.meets_at_system_scope), [])

    def test_swaps_tagged_words(self) -> None:
        self.assertEqual(self.complaints(code.swaps_tagged_words), [])

    def test_moves_in_bulk(self) -> None:
        self.assertEqual(self.complaints(code.moves_in_bulk), [])

    def test_never_spills(self) -> None:
        self.assertEqual(self.complaints(code.never_spills), [])

    def test_nothing_forbidden(self) -> None:
        self.assertEqual(self.complaints(code.nothing_forbidden), [])

    def one(self, kernel: str, sm: int) -> code.Compiled:
        return next(c for c in self.compiled if c.architecture == sm and c.of((kernel,)))

    def test_each_rule_can_fail(self) -> None:
        for kernel in code.MEETING:
            good = self.one(kernel, 90)
            for what, other in (
                ("ld.acquire.sys", "ld.relaxed.sys"),
                ("ld.acquire.sys", "ld.acquire.gpu"),
                ("st.release.sys", "st.relaxed.sys"),
                ("st.release.sys", "st.release.gpu"),
            ):
                bad = replace(good, ptx=good.ptx.replace(what, other))
                self.assertTrue(code.meets_at_system_scope(bad), f"{kernel}: {other}")
            for what, other in (
                ("st.relaxed.sys.global.v2.u64", "st.relaxed.gpu.global.v2.u64"),
                ("ld.acquire.sys.global.v2.u64", "ld.relaxed.sys.global.v2.u64"),
            ):
                bad = replace(good, ptx=good.ptx.replace(what, other))
                self.assertTrue(code.swaps_tagged_words(bad), f"{kernel}: {other}")
        for kernel in code.OFFERING:
            good = self.one(kernel, 90)
            for other in ("fence.acq_rel.gpu", "fence.proxy.async"):
                bad = replace(good, ptx=good.ptx.replace("fence.acq_rel.sys", other))
                self.assertTrue(code.swaps_tagged_words(bad), f"{kernel}: {other}")
        for kernel in code.BULK:
            self.assertTrue(code.moves_in_bulk(replace(self.one(kernel, 90), architecture=80)))
            self.assertTrue(code.moves_in_bulk(replace(self.one(kernel, 80), architecture=90)))
        good = self.one("barrier_kernel", 90)
        for text in (
            "\ttrap;",
            "\t@%p1 trap;",
            "call.uni (retval0), vprintf, (p0, p1);",
            "\tmul.ftz.f32 %f1, %f2, %f3;",
            "\tdiv.approx.f32 %f1, %f2, %f3;",
            "\tmultimem.st.global.u32 [%rd1], %r1;",
        ):
            self.assertTrue(code.nothing_forbidden(replace(good, ptx=text + "\n" + good.ptx)), text)

    def test_a_spill_is_found(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "spilling.cu"
            source.write_text(SPILLING)
            for one in code.compile_source(NVCC, ROOT, source, ARCHITECTURES, "-maxrregcount=24"):
                self.assertTrue(code.never_spills(one), f"sm_{one.architecture}")


if __name__ == "__main__":
    if len(sys.argv) > 2 and not sys.argv[1].startswith("-"):
        NVCC, ROOT = sys.argv.pop(1), Path(sys.argv.pop(1)).resolve()
    unittest.main()
