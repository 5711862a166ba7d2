"""README.md of this folder names a test for every argument of every call, and no other; and the
bodies that it names give those arguments."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mask_bodies
import pytest
import test_low_latency
import test_process_ranks
import test_throughput
from rank_buffers import run_buffers

import deep_ep

HERE = Path(__file__).parent
NOT_OF_THE_INTERFACE = {"EventHandle.stream_wait", "EventHandle.stream"}
ONLY_ON_GPUS = {("get_comm_stream", "")}
Table = dict[str, dict[str, list[str]]]


def table() -> Table:
    """{call: {argument, or nothing: tests}}."""
    read: Table = defaultdict(dict)
    call = ""
    for line in (HERE / "README.md").read_text().splitlines():
        if not line.startswith("|") or line.startswith(("| call", "| ---")):
            continue
        names, arguments, tests = (re.findall(r"`([^`]+)`", part) for part in line.split("|")[1:4])
        call = names[0] if names else call
        for argument in arguments or [""]:
            assert argument not in read[call], f"{call}: two rows for {argument}"
            read[call][argument] = tests
    return read


def calls() -> dict[str, set[str]]:
    """{call: its arguments}, of all that callers use."""
    found: dict[str, Any] = {
        name: one
        for name, one in inspect.getmembers(deep_ep.Buffer, callable)
        if not name.startswith("_")
    }
    for cls in (deep_ep.Buffer, deep_ep.Config, deep_ep.EventOverlap):
        found[cls.__name__] = cls
    for cls in (deep_ep.Config, deep_ep.EventOverlap, deep_ep.EventHandle):
        for name, one in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                found[f"{cls.__name__}.{name}"] = one
    return {
        name: {argument for argument in inspect.signature(one).parameters if argument != "self"}
        for name, one in found.items()
        if name not in NOT_OF_THE_INTERFACE
    }


def test_every_argument_has_a_row() -> None:
    rows = {call: set(arguments) - {""} for call, arguments in table().items()}
    assert rows == calls()
    assert all(tests for row in table().values() for tests in row.values())


def bodies_on(parameters: Any) -> set[str]:
    return {body.__name__ for body in parameters}


def parameters_of(test: Any, name: str) -> list[Any]:
    (found,) = (mark.args[1] for mark in test.pytestmark if mark.args[:1] == (name,))
    return list(found)


def test_every_body_runs_on_all_ranks_and_devices() -> None:
    on_cpu, on_gpus = set(), set()
    for test in (
        test_throughput.test_on_cpu,
        test_low_latency.test_on_cpu,
        test_low_latency.test_masks_on_cpu,
    ):
        assert tuple(parameters_of(test, "size")) == (1, 2, 4, 8)
        on_cpu |= bodies_on(parameters_of(test, "body"))
    for test in (
        test_process_ranks.test_on_gpus,
        test_process_ranks.test_low_latency_on_gpus,
        test_process_ranks.test_masks_on_gpus,
    ):
        assert tuple(parameters_of(test, "size")) == (1, 2, 4, 8)
        on_gpus |= bodies_on(parameters_of(test, "body"))
    assert on_cpu == on_gpus - {"captured"}  # graphs are of GPUs alone
    named = {test for row in table().values() for tests in row.values() for test in tests}
    assert {test for test in named if "::" not in test} <= on_cpu


@pytest.mark.parametrize(
    "name",
    sorted({t for row in table().values() for tests in row.values() for t in tests if "::" in t}),
)
def test_every_test_is_there(name: str) -> None:
    file, test = name.split("::")
    assert re.search(rf"^def {test}\(", (HERE / file).read_text(), re.MULTILINE)


@contextmanager
def recorded() -> Iterator[set[tuple[str, str]]]:
    """(call, argument) of each argument of a Buffer's calls that was not its default, and
    (call, "") of each call."""
    given: set[tuple[str, str]] = set()
    cls: Any = deep_ep.Buffer

    def spy(name: str, call: Any) -> Any:
        signature = inspect.signature(call)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given.add((name, ""))
            for argument, value in signature.bind(*args, **kwargs).arguments.items():
                if value is not signature.parameters[argument].default:
                    given.add((name, argument))
            return call(*args, **kwargs)

        return wrapped

    patch = pytest.MonkeyPatch()
    for name, one in inspect.getmembers(cls, inspect.isfunction):
        static = isinstance(inspect.getattr_static(cls, name), staticmethod)
        if name == "__init__" or not name.startswith("_"):
            made = spy("Buffer" if name == "__init__" else name, one)
            patch.setattr(cls, name, staticmethod(made) if static else made)
    try:
        yield given
    finally:
        patch.undo()


def test_the_bodies_give_the_arguments() -> None:
    """On as few ranks as show it."""
    given = {}
    for ranks, bodies, options in (
        (1, test_throughput.BODIES, {}),
        (1, test_low_latency.calls.ALL, {"low_latency_mode": True}),
        (2, mask_bodies.ALL, {"low_latency_mode": True, "enable_shrink": True}),
    ):
        for body in bodies:
            with recorded() as given[body.__name__]:
                run_buffers(ranks, lambda buffer, body=body: body(buffer, "cpu"), **options)
    methods = dict(inspect.getmembers(deep_ep.Buffer, inspect.isfunction)) | {"Buffer": None}
    missing = [
        (call, argument, bodies)
        for call, row in table().items()
        for argument, tests in row.items()
        if call in methods and (call, argument) not in ONLY_ON_GPUS
        if (bodies := [test for test in tests if "::" not in test])
        if not any((call, argument) in given[body] for body in bodies)
    ]
    assert not missing
