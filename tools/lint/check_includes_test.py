"""The include checker lets right arrows through and catches each wrong one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_includes

HOUSE = [
    "include/ferry/error.hpp",
    "src/platform/pages.hpp",
    "src/base/text.hpp",
    "src/core/plan.hpp",
    "src/protocol/barrier.hpp",
    "src/fabric/fabric.hpp",
    "src/fabric/shm/segment.hpp",
    "src/bootstrap/store.hpp",
    "src/host/throughput/engine.hpp",
    "src/cuda/engine.hpp",
    "src/api/group_impl.hpp",
    "src/cuda/kernels/base/wait.cuh",
    "src/cuda/kernels/latency/view.hpp",
    "src/cuda/latency/engine.hpp",
    "src/cuda/latency/proxy/proxy.hpp",
    "src/cuda/runtime/event.hpp",
    "src/cuda/throughput/engine.hpp",
    "src/host/latency/engine.hpp",
    "tools/ferry/run/run.hpp",
    "python/src/bindings.hpp",
    "tests/conformance/reference.hpp",
]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name in HOUSE:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#pragma once\n")
    return tmp_path


def faults_of(house: Path, path: str, *includes: str) -> list[str]:
    file = house / path
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ["#pragma once", *(f"#include {include}" for include in includes)]
    file.write_text("\n".join(lines) + "\n")
    return [str(fault) for fault in check_includes.check(house)]


RIGHT = [
    ("include/ferry/group.hpp", "<vector>", "<ferry/error.hpp>", '"ferry/error.hpp"'),
    ("src/core/layout.hpp", '"core/plan.hpp"', '"ferry/error.hpp"', "<immintrin.h>", "<bit>"),
    ("src/base/claim.hpp", '"ferry/error.hpp"', "<atomic>"),
    ("src/core/check.cpp", '"base/text.hpp"'),
    ("src/cuda/latency/send.cpp", '"cuda/throughput/engine.hpp"', '"cuda/runtime/event.hpp"'),
    ("src/cuda/kernels/latency/a.cu", '"cuda/kernels/base/wait.cuh"'),
    ("src/cuda/latency/proxy/a_test.cpp", '"cuda/kernels/latency/view.hpp"', "<gtest/gtest.h>"),
    ("src/host/latency/a.cpp", '"host/throughput/engine.hpp"', '"core/plan.hpp"'),
    ("src/platform/posix/pages.cpp", '"platform/pages.hpp"', "<sys/mman.h>", "<sys/socket.h>"),
    ("src/base/limits.cpp", '"platform/pages.hpp"'),
    ("src/protocol/swap.hpp", '"core/plan.hpp"', '"platform/pages.hpp"', "<atomic>"),
    ("src/fabric/shm/shm.cpp", '"fabric/fabric.hpp"', '"platform/pages.hpp"'),
    ("src/fabric/ofi/library.cpp", "<dlfcn.h>", "<sys/socket.h>"),
    ("src/fabric/ofi/ofi_test.cpp", "<netinet/in.h>", "<unistd.h>"),
    (
        "src/host/throughput/dispatch.cpp",
        '"protocol/barrier.hpp"',
        '"fabric/fabric.hpp"',
        "<thread>",
    ),
    (
        "src/api/group.cpp",
        '"host/throughput/engine.hpp"',
        '"cuda/engine.hpp"',
        '"bootstrap/store.hpp"',
    ),
    ("src/core/plan_test.cpp", '"core/plan.hpp"', "<gtest/gtest.h>", "<thread>"),
    ("src/core/q_test.cpp", '"tests/conformance/reference.hpp"'),
    ("tools/ferry/main.cpp", "<ferry/error.hpp>", '"run/run.hpp"', "<CLI/CLI.hpp>"),
    ("tools/ferry/posix/job.cpp", '"run/run.hpp"', '"platform/pages.hpp"'),
    ("src/platform/windows/pages.cpp", "<winsock2.h>", "<windows.h>"),
    ("tests/cuda/crew.cpp", "<sys/wait.h>", "<cuda_runtime.h>"),
    ("python/src/group.cpp", "<ferry/error.hpp>", '"bindings.hpp"', "<nanobind/nanobind.h>"),
    (
        "tests/conformance/all_test.cpp",
        '"host/throughput/engine.hpp"',
        '"reference.hpp"',
        "<gtest/gtest.h>",
    ),
]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case[0])
def test_right_arrows_pass(house: Path, case: tuple[str, ...]) -> None:
    assert faults_of(house, *case) == []


WRONG = [
    ("src/platform/posix/pages.cpp", '"base/text.hpp"'),
    ("src/core/plan.cpp", '"platform/pages.hpp"'),
    ("src/base/text.cpp", "<sys/resource.h>"),
    ("src/protocol/futex.hpp", "<linux/futex.h>"),
    ("src/fabric/shm/shm.cpp", "<sys/mman.h>"),
    ("src/bootstrap/tcp.cpp", "<poll.h>"),
    ("src/engine/proxy.cpp", "<pthread.h>"),
    ("src/api/group.cpp", "<unistd.h>"),
    ("python/src/group.cpp", "<unistd.h>"),
    ("examples/cpp/hello.cpp", "<unistd.h>"),
    ("tools/ferry/main.cpp", "<unistd.h>"),
    ("tools/ferry/run/run.cpp", "<windows.h>"),
    ("tools/ferry/posix/job.cpp", "<unistd.h>"),
    ("tools/ferry/windows/job.cpp", "<windows.h>"),
    ("bench/a.cpp", "<sched.h>"),
    ("src/bootstrap/new_test.cpp", "<unistd.h>"),
    ("tests/conformance/new_test.cpp", "<sys/wait.h>"),
    ("src/base/text.cpp", '"core/plan.hpp"'),
    ("src/cuda/runtime/event.cpp", '"cuda/throughput/engine.hpp"'),
    ("src/cuda/throughput/monitor.cpp", '"cuda/latency/engine.hpp"'),
    ("src/cuda/throughput/create.cpp", '"cuda/kernels/latency/view.hpp"'),
    ("src/cuda/latency/engine.cpp", '"cuda/latency/proxy/proxy.hpp"'),
    ("src/cuda/kernels/base/entry.cuh", '"cuda/kernels/latency/view.hpp"'),
    ("src/cuda/kernels/base/entry_test.cpp", '"cuda/kernels/latency/view.hpp"'),
    ("src/host/throughput/a.cpp", '"host/latency/engine.hpp"'),
    ("src/host/a.cpp", "<vector>"),
    ("src/cuda/attic/a.cpp", "<vector>"),
    ("include/ferry/group.hpp", '"core/plan.hpp"'),
    ("include/ferry/group.hpp", "<sys/mman.h>"),
    ("include/ferry/group.hpp", "<fmt/format.h>"),
    ("src/core/plan.cpp", '"protocol/barrier.hpp"'),
    ("src/core/plan.cpp", '"fabric/fabric.hpp"'),
    ("src/core/plan.cpp", "<unistd.h>"),
    ("src/core/plan.cpp", "<thread>"),
    ("src/core/plan.cpp", "<gtest/gtest.h>"),
    ("src/core/plan_test.cpp", '"host/throughput/engine.hpp"'),
    ("src/protocol/swap.cpp", '"fabric/fabric.hpp"'),
    ("src/protocol/swap.cpp", "<sys/socket.h>"),
    ("src/protocol/swap.cpp", '"host/throughput/engine.hpp"'),
    ("src/fabric/local.cpp", '"host/throughput/engine.hpp"'),
    ("src/bootstrap/tcp.cpp", '"fabric/fabric.hpp"'),
    ("src/host/throughput/a.cpp", '"cuda/engine.hpp"'),
    ("src/host/throughput/a.cpp", '"bootstrap/store.hpp"'),
    ("src/host/throughput/a.cpp", '"api/group_impl.hpp"'),
    ("src/cuda/a.cpp", '"host/throughput/engine.hpp"'),
    ("src/host/throughput/a.cpp", "<cuda_runtime.h>"),
    ("src/host/throughput/a.cpp", "<nanobind/nanobind.h>"),
    ("src/api/a.cpp", '"run/run.hpp"'),
    ("tools/ferry/main.cpp", '"core/plan.hpp"'),
    ("python/src/a.cpp", '"host/throughput/engine.hpp"'),
    ("src/host/throughput/a.cpp", '"../core/plan.hpp"'),
    ("src/host/throughput/a.cpp", '"core/no_such_file.hpp"'),
    ("src/host/runtime/utils.hpp", "<vector>"),
    ("src/common/a.hpp", "<vector>"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case))
def test_wrong_arrows_are_caught(house: Path, case: tuple[str, ...]) -> None:
    faults = faults_of(house, *case)
    assert len(faults) == 1
    assert faults[0].startswith(case[0] + ":")


def test_pragma_once_is_asked_for(house: Path) -> None:
    (house / "src/core/naked.hpp").write_text("int x;\n")
    assert [fault.line for fault in check_includes.check(house)] == [1]


def test_only_the_platform_asks_which_system_this_is(house: Path) -> None:
    for path in ("src/core/a.cpp", "src/platform/a.cpp", "src/core/a_test.cpp"):
        (house / path).write_text("#if defined(_WIN32)\n#endif\n")
    assert [str(fault.path) for fault in check_includes.check(house)] == ["src/core/a.cpp"]


def test_rooms_stand_in_order() -> None:
    above: set[str] = set()
    for room, allowed in check_includes.ROOMS.items():
        assert allowed <= above, room
        above.add(room)


def test_every_room_is_there() -> None:
    root = Path(check_includes.__file__).resolve().parents[2]
    for room in check_includes.ROOMS:
        assert any(file.is_file() for file in (root / room).iterdir()), room
