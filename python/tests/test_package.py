"""The package itself: quick to import, no torch, typed, documented."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import ferry


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick_and_imports_no_framework() -> None:
    """What takes milliseconds is imported by those who use it."""
    code = """
        import sys, time
        start = time.process_time()
        before = set(sys.modules)
        import ferry
        spent = time.process_time() - start
        slow = {"dataclasses", "inspect", "json", "logging", "pathlib", "re", "traceback", "typing"}
        rare = {"ferry." + name for name in ("collectives", "experts", "latency", "vault")}
        new = ({"torch", "numpy", "ml_dtypes"} | slow | rare) & (set(sys.modules) - before)
        assert not new, new
        assert set(ferry.__all__) <= set(dir(ferry))  # what is not there yet, too
        assert rare & set(sys.modules) == set()
        assert ferry.Collectives is ferry.collectives.Collectives
        print(spent)
    """
    assert min(float(python(code)) for _ in range(3)) < 0.3


def test_modules_that_come_later_are_attributes() -> None:
    """And whoever asks for all attributes, as `help` does, needs no framework."""
    python("""
        import sys
        for name in ("jax", "tensorflow", "torch"):
            sys.modules[name] = None  # importing it fails
        import inspect, pydoc
        import ferry
        assert ferry.latency.LatencyExchange is ferry.LatencyExchange
        assert ferry.vault.__name__ == "ferry.vault" and ferry.experts and ferry.collectives
        assert dict(inspect.getmembers(ferry))["Window"] is ferry.Window
        assert "class Vault" in pydoc.plain(pydoc.render_doc(ferry))
    """)


@pytest.mark.parametrize("name", ["jax", "tensorflow", "torch"])
def test_a_missing_framework_is_no_attribute(name: str) -> None:
    """`hasattr` is false, the error says what to install, `import` fails as an import does."""
    python(f"""
        import sys
        sys.modules[{name!r}] = None  # importing it fails
        import ferry
        assert not hasattr(ferry, {name!r})
        try:
            ferry.{name}
        except AttributeError as error:
            assert "pip install {name}" in str(error), error
        try:
            from ferry import {name}
        except ModuleNotFoundError as error:
            assert error.name == {name!r}, error
        else:
            raise AssertionError("imported")
    """)


def test_numpy_users_need_no_torch() -> None:
    python("""
        import sys
        sys.modules["torch"] = None  # importing it fails
        import numpy as np
        import ferry
        group = ferry.Group(ferry.threads(1)[0], experts=2)
        plan = group.plan(np.zeros((2, 1), np.int32))
        got = group.dispatch(np.ones((2, 16), np.float16), plan)
        assert (group.combine(got.x, plan).x == 1).all()
    """)


def test_torch_comes_when_asked_for() -> None:
    python("""
        import ferry
        assert ferry.torch.from_process_group
        import torch
        assert ferry.torch is not torch
        import sys
        assert "torch._dynamo" not in sys.modules  # seconds, for those who compile
    """)
    with pytest.raises(AttributeError, match="nonsense"):
        ferry.nonsense  # noqa: B018


SAMPLE = """
from typing import assert_type
import numpy as np
import torch
from numpy.typing import NDArray
import ferry
import ferry.torch as ft

boot = ferry.threads(1)[0]
assert_type(boot, ferry.Bootstrap)
with ferry.Group(boot, experts=4, deadline=1.0) as group:
    plan = group.plan(torch.zeros(2, 1, dtype=torch.int64))
    assert_type(plan, ferry.Plan)
    x = torch.ones(2, 16)
    received = group.dispatch(x, plan, order="expert_major", alignment=8)
    assert_type(received, ferry.Received[torch.Tensor])
    assert_type(received.x, torch.Tensor)
    assert_type(received.topk_weights, torch.Tensor | None)
    assert_type(group.combine(received.x, plan).x, torch.Tensor)
    assert_type(plan.recv_rows_per_rank(), list[int])
    rows: NDArray[np.float32] = np.ones((2, 16), np.float32)
    assert_type(group.dispatch(rows, plan).x, NDArray[np.float32])
    latency = ferry.LatencyExchange(group, capacity=2, hidden=16, topk=1, dtype="f32")
    low = latency.dispatch(x, torch.zeros(2, 1), hook=True)
    low.receive()
    assert_type(low.counts, torch.Tensor)
    assert_type(latency.combine(low.x, low, torch.ones(2, 1)).x, torch.Tensor)
    assert_type(ft.dispatch(group, plan, x).x, torch.Tensor)
    assert_type(ft.dispatch(group, ft.plan(group, x), x).x, torch.Tensor)
    assert_type(group.device, str)
    assert_type(ferry.Stream.of_cuda(0, 0).cuda_stream, int | None)
    assert_type(ft.combine(group, plan, x), torch.Tensor)
    event = ferry.Stream().record()
    event.wait(deadline=1.0)
    assert_type(group.memory().arena_bytes, int)
try:
    ferry.tcp(rank=0, size=1, port=1, secret="s")
except ferry.Error as error:
    assert_type(error.peer, int | None)
"""
WRONG = {
    "assert_type(received.x, int)": "Expression is of type",
    "group.plan()": "Missing positional argument",
    "group.dispatch(x, 3)": "Argument 2",
    "group.dispatch(x, plan, 3)": "Too many positional arguments",
    "ferry.Group(boot)": "Missing named argument",
    "ferry.threads('2')": "incompatible type",
    "group.nonsense()": "no attribute",
}


# Of torch, the tensors alone: reading all of it takes five times as long.
TYPES_OF_TORCH = """
[mypy-torch.*]
follow_imports = skip
[mypy-torch,torch._C.*,torch._tensor,torch.types]
follow_imports = normal
"""


def wrong_lines(tmp_path: Path) -> tuple[Path, dict[int, str]]:
    """The user's program with lines that a checker must refuse, and their numbers."""
    sample = tmp_path / "sample.py"
    sample.write_text(SAMPLE + "\n".join(f"{line}  # wrong" for line in WRONG) + "\n")
    first = len(SAMPLE.splitlines()) + 1
    return sample, {first + i: line for i, line in enumerate(WRONG)}


@pytest.mark.timeout(200)
def test_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    sample, wrong = wrong_lines(tmp_path)
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nstrict = True{TYPES_OF_TORCH}")
    where = Path(ferry.__file__).parents[1]
    installed = where.name in ("site-packages", "dist-packages")  # mypy looks there by itself
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path, sample],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": "/usr/bin"} | ({} if installed else {"MYPYPATH": str(where)}),
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == len(wrong), done.stdout + done.stderr
    for number, line in wrong.items():
        found = [e for e in errors if f":{number}:" in e]
        assert found, f"{line}: not refused\n{done.stdout}"
        assert WRONG[line] in found[0]


def test_types_by_pyright(tmp_path: Path) -> None:
    """basedpyright is pyright with its Node in a wheel; its own checks are off."""
    pytest.importorskip("basedpyright")
    sample, wrong = wrong_lines(tmp_path)
    settings = {
        "include": [sample.name],
        "typeCheckingMode": "strict",
        "extraPaths": [str(Path(ferry.__file__).parents[1])],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    told = json.loads(done.stdout)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in told} == set(wrong), done.stdout


ROOT = Path(__file__).resolve().parents[2]


def test_all_places_ask_for_the_same_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["requires-python"]
    assert project["tool"]["ruff"]["target-version"] == "py" + wanted[2:].replace(".", "")
    probe = (ROOT / "tools/setup/probe.sh").read_text()
    found = re.search(r"sys.version_info >= \((\d+), (\d+)\)", probe)
    assert found and f">={found[1]}.{found[2]}" == wanted
    assert set(re.findall(r"Python (>= [\d.]+)", probe)) == {wanted.replace("=", "= ")}
    for cmake in ("python/CMakeLists.txt", "tools/ferry/CMakeLists.txt"):
        found = re.search(r"find_package\(Python3? ([\d.]+) ", (ROOT / cmake).read_text())
        assert found and f">={found[1]}" == wanted, cmake


@pytest.mark.parametrize(
    ("release", "asked", "with_engine"),
    [
        ("12.2", None, False),
        ("12.3", None, True),
        ("13.0", None, True),
        ("13.0", "0", False),
        ("12.2", "1", True),
        (None, None, False),
    ],
)
def test_a_build_of_the_package_says_whether_it_has_the_cuda_engine(
    tmp_path: Path, release: str | None, asked: str | None, with_engine: bool
) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    if release is None and Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("this machine has an nvcc where CMake looks for it")
    if release is not None:
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(
            f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n"
        )
        nvcc.chmod(0o755)
    done = subprocess.run(
        [cmake, "-P", str(ROOT / "cmake/FerryCudaChoice.cmake")],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": str(tmp_path)} | ({} if asked is None else {"FERRY_CUDA": asked}),
    )
    words = "with the CUDA engine" if with_engine else "without the CUDA engine"
    assert f"Ferry: {words}: " in done.stdout, done.stdout + done.stderr
    if asked is not None:
        assert f"FERRY_CUDA={asked} in the environment" in done.stdout


def test_pip_brings_the_command_ferry() -> None:
    """And `make package` builds what pip does: it says only where, how, and for which GPUs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["scikit-build"]["cmake"]["define"]["FERRY_TOOLS"] == "ON"
    package = (ROOT / "tools/setup/package.sh").read_text()
    given = set(re.findall(r"--config-settings=(?:cmake\.define\.)?([\w-]+)", package))
    assert given == {"build-dir", "FERRY_PCH", "CMAKE_CUDA_ARCHITECTURES"}
    if Path(ferry.__file__).parents[1].name not in ("site-packages", "dist-packages"):
        return  # of a build folder
    files = importlib.metadata.files("ferry-moe") or []
    places = [Path(str(file.locate())) for file in files if file.name == "ferry"]
    (command,) = [place for place in places if place.parent.name == "bin"]
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ferry {ferry.__version__}\n"
    module = [sys.executable, "-m", "ferry", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True).stdout == done.stdout
    assert importlib.metadata.version("ferry-moe") == ferry.__version__


def test_the_version_is_that_of_the_header() -> None:
    header = (ROOT / "include/ferry/version.hpp").read_text()
    assert ".".join(re.findall(r"#define FERRY_VERSION_\w+ (\d+)", header)) == ferry.__version__
    drop_in = tomllib.loads((ROOT / "python/deep_ep/pyproject.toml").read_text())
    assert drop_in["project"]["version"].endswith(f"+ferry.{ferry.__version__}")


def test_pages_give_settings_as_old_pips_know_them() -> None:
    """pip 23.0 of Debian 12 has --config-settings but no -C."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "cmake").iterdir()):
        assert not re.search(r"-C ?cmake\.", page.read_text()), page


def test_an_installed_extension_carries_no_debug_sections() -> None:
    extension = Path(ferry._ferry.__file__)
    if extension.parent.parent.name not in ("site-packages", "dist-packages"):
        pytest.skip("not installed: the build tree keeps its line numbers")
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    # Not the bytes of the file: kernels inside it are files of the same format.
    command = [readelf, "--sections", "--wide", str(extension)]
    sections = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ".text" in sections
    assert ".debug_info" not in sections and ".symtab" not in sections
    size = extension.stat().st_size
    assert size < (64 if ferry.has_cuda else 5) << 20  # kernels of four architectures


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"\.PHONY: ((?:.*\\\n)*.*)", makefile)
    assert phony
    targets = {t for t in phony[1].replace("\\", "").split() if not t.startswith("setup-")}
    assert targets - {"help"} == set(re.findall(r"@echo '  make (\w+) ", makefile))


def test_everything_public_is_documented() -> None:
    missing = []
    for name in ferry.__all__:
        thing = getattr(ferry, name)
        if not inspect.getdoc(thing):
            missing.append(name)
        if not inspect.isclass(thing) or issubclass(thing, Exception):
            continue
        for member, value in vars(thing).items():
            if not member.startswith("_") and not inspect.getdoc(value):
                missing.append(f"{name}.{member}")
    assert missing == []
