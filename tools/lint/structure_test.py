"""The measures of the tree's shape count what they say, and fail past a limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import structure

CODE = """// void commented(int x) {
#define MACRO(x) { x
namespace a {
struct alignas(8) Plain {
  int value = 0;
  int member{3};
  explicit Plain(int x) : value{x}, member(2) {
    if (x) { value = 1; }
  }
  int get() const { return value; }
};
constexpr int kTable[] = {1, 2,
                          3};
template <class T>
__global__ void __launch_bounds__(128)
    kernel(T x) {
  const auto lambda = [&](int y) {
    return "{" + y + '}';
  };
  while (x) {
  }
}
}  // namespace a
"""


def test_functions() -> None:
    found = [(first, lines) for first, lines, _ in structure.functions(CODE)]
    assert found == [(7, 3), (10, 1), (15, 8)]


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#pragma once\n" + text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    base, latency = "cuda/kernels/base", "cuda/kernels/latency"
    write(tmp_path, "src/core/plan.hpp", "")
    write(tmp_path, f"src/{base}/wait.cuh", '#include "core/plan.hpp"\n')
    write(tmp_path, f"src/{latency}/view.hpp", f'#include "{base}/wait.cuh"\n')
    write(tmp_path, f"src/{latency}/send.cu", f'#include "{latency}/view.hpp"\n')
    write(tmp_path, f"src/{latency}/send_test.cpp", "")
    write(tmp_path, "src/host/runtime/long.cpp", "int f() {\n" + "  g();\n" * 59 + "}\n")
    job = "void A::run() {\n  push();\n  pull();\n}\n"
    write(tmp_path, "src/host/throughput/combine.cpp", job + "void A::pull() { push(); }\n")
    write(tmp_path, "src/host/domains/combine.cpp", "void A::push() {}\n")
    return tmp_path


def values(tree: Path) -> list[int]:
    return [found.value for found in structure.measure(tree).values()]


def test_measures(tree: Path) -> None:
    assert values(tree) == [2, 1, 3, 1, 0, 2, 2]


@pytest.mark.parametrize(
    ("path", "text", "worse"),
    [
        ("src/cuda/kernels/latency/more.hpp", "", [3, 1, 3, 1, 0, 2, 2]),
        ("src/core/long.hpp", "void f() {\n" + "  g();\n" * 59 + "}\n", [2, 2, 3, 1, 0, 2, 2]),
        (
            "src/cuda/kernels/base/wait.cuh",
            '#include "cuda/kernels/base/flags.cuh"\n',
            [2, 1, 4, 1, 0, 2, 2],
        ),
        (
            "src/cuda/latency/a.cpp",
            '#include "cuda/kernels/latency/view.hpp"\n',
            [2, 1, 3, 2, 0, 2, 2],
        ),
        (
            "src/cuda/kernels/base/flags.cuh",
            '#include "cuda/kernels/latency/view.hpp"\n',
            [2, 1, 3, 2, 1, 2, 2],
        ),
        ("src/core/a.cpp", "int A::B::value() const { return 1; }\n", [2, 1, 3, 1, 0, 3, 2]),
        (
            "src/host/throughput/combine.cpp",
            "void A::run() {\n  push();\n  pull();\n  push();\n}\n",
            [2, 1, 3, 1, 0, 3, 4],
        ),
    ],
    ids=["width", "length", "depth", "arrow", "arrow up", "class over files", "switches"],
)
def test_each_limit_can_fail(tree: Path, path: str, text: str, worse: list[int]) -> None:
    limits = dict(zip(structure.LIMITS, values(tree), strict=True))
    assert structure.check(tree, limits) == []
    if "pull" in text:
        write(tree, "src/host/throughput/combine_pull.cpp", "void A::pull() {}\n")
    if "flags.cuh" in text:
        write(tree, "src/cuda/kernels/base/flags.cuh", "")
    write(tree, path, text)
    assert values(tree) == worse
    assert structure.check(tree, limits)


def test_this_tree_is_within_its_limits() -> None:
    assert structure.check(Path(structure.__file__).resolve().parents[2]) == []
