"""Recorded routes: what is in the files, and that `ferry plan` reads them."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_threads import run_ranks

import ferry
from ferry.routes import read_routes

RANKS, EXPERTS, TOPK = 4, 8, 2


def routes(rank: int, call: int) -> np.ndarray:
    random = np.random.default_rng([rank, call])
    ids = random.integers(-1, EXPERTS, (3 + rank + call, TOPK))
    return ids.astype(np.int64 if call % 2 else np.int32)


def record(file: Path) -> None:
    def body(group: ferry.Group) -> None:
        group.plan(routes(group.rank, 9))
        group.record_routes(file)
        group.plan(routes(group.rank, 0))
        x = np.zeros((len(routes(group.rank, 1)), 16), np.float32)
        plan = group.dispatch(x, topk_idx=routes(group.rank, 1)).plan
        group.dispatch(x, plan)  # the routes of a plan that was recorded
        latency = ferry.LatencyExchange(group, capacity=16, hidden=16, topk=TOPK, dtype="f32")
        ids = routes(group.rank, 2)
        latency.dispatch(np.zeros((len(ids), 16), np.float32), ids)
        group.record_routes(None)
        group.plan(routes(group.rank, 9))

    run_ranks(RANKS, body, experts=EXPERTS)


def test_files_have_the_routes_of_every_call(tmp_path: Path) -> None:
    record(tmp_path / "routes")
    for rank in range(RANKS):
        calls = read_routes(tmp_path / "routes", rank)
        assert len(calls) == 3
        for call, ids in enumerate(calls):
            np.testing.assert_array_equal(ids, routes(rank, call))
        head = (tmp_path / f"routes.{rank}").read_bytes()[:24]
        assert struct.unpack("<8sIIQ", head) == (b"FERRYRT1", rank, RANKS, EXPERTS)


def test_torch_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def body(group: ferry.Group) -> None:
        group.record_routes(tmp_path / "t")
        group.plan(torch.tensor([[0, 1], [2, -1]]))

    run_ranks(1, body, experts=EXPERTS)
    assert read_routes(tmp_path / "t", 0)[0].tolist() == [[0, 1], [2, -1]]


@pytest.fixture
def command() -> str:
    places = [Path(sys.executable).parent, *map(Path, os.environ["PATH"].split(os.pathsep))]
    found = shutil.which("ferry", path=os.pathsep.join(map(str, places)))
    assert found, "the command `ferry` is not installed"
    return found


def plan(
    command: str, tmp_path: Path, *options: str, experts: int = EXPERTS
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "m.yaml").write_text(f"hidden: 64\nexperts: {experts}\ntopk: {TOPK}\n")
    (tmp_path / "c.yaml").write_text("host_ranks: 2\nnic: 1\n")
    return subprocess.run(
        [command, "plan", "--cluster", "c.yaml", "--model", "m.yaml", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_plan_takes_what_was_recorded(command: str, tmp_path: Path) -> None:
    """All tokens of rank 0 go to rank 2: those rows cross, whatever the others do."""

    def body(group: ferry.Group) -> None:
        group.record_routes(tmp_path / "skewed")
        tokens = 10 if group.rank == 0 else 0
        group.plan(np.full((tokens, TOPK), 4))

    run_ranks(RANKS, body, experts=EXPERTS)
    done = plan(command, tmp_path, "--routes", "skewed", "--ranks", "4", "--json")
    assert done.returncode == 0, done.stderr
    dispatch, combine = json.loads(done.stdout)
    assert dispatch["tokens"] == 2.5
    assert dispatch["direct_us"] == pytest.approx(10 * (64 + 4) / 1e3)
    assert combine["direct_us"] == pytest.approx(10 * 128 / 1e3)
    twice = plan(command, tmp_path, "--routes", "skewed", "--ranks", "4", "--tokens", "5", "--json")
    assert json.loads(twice.stdout)[0]["direct_us"] == pytest.approx(20 * (64 + 4) / 1e3)


def test_plan_refuses_what_is_no_recording(command: str, tmp_path: Path) -> None:
    record(tmp_path / "good")
    first = (tmp_path / "good.0").read_bytes()
    at = 24  # of the first call
    for broken, said in {
        first[:20]: "not what Group.record_routes writes",
        b"NUMPYFIL" + first[8:]: "not what Group.record_routes writes",
        first[:8] + struct.pack("<I", 1) + first[12:]: "not what Group.record_routes writes",
        first[:24]: "other ranks, experts or calls",
        first[:-2]: "ends inside a call",
        first[:at] + struct.pack("<II", 2**32 - 1, 64): "ends inside a call",
        first[:at] + struct.pack("<II", 1, 65): "cannot be read",
        first[: at + 8] + struct.pack("<i", EXPERTS) + first[at + 12 :]: "names expert 8",
        first[:at] + struct.pack("<IIi", 1, 1, 0) + first[at:]: "record them apart",
    }.items():
        (tmp_path / "good.0").write_bytes(broken)
        done = plan(command, tmp_path, "--routes", "good", "--ranks", "4")
        assert done.returncode == 1
        # The second rank's file may be the first that differs.
        assert said in done.stderr, done.stderr
    (tmp_path / "good.0").write_bytes(first)
    (tmp_path / "good.2").unlink()
    missing = plan(command, tmp_path, "--routes", "good").stderr
    assert "good.2: cannot be read; expected what rank 2 recorded" in missing


def test_plan_says_which_model_fits_a_recording(command: str, tmp_path: Path) -> None:
    record(tmp_path / "good")
    done = plan(command, tmp_path, "--routes", "good", "--ranks", "2", experts=EXPERTS - 2)
    assert done.returncode == 1
    assert f"expected --model FILE with experts: {EXPERTS}, topk: {TOPK}" in done.stderr
