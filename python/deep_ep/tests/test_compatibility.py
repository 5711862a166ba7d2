"""docs/compatibility.md says what the replays are and how they ended."""

from __future__ import annotations

import json
from typing import Any

import compatibility
import pytest

AGAIN = "run: python python/deep_ep/tests/compatibility.py"


@pytest.fixture
def records() -> dict[str, Any]:
    records: dict[str, Any] = json.loads(compatibility.RECORDS.read_text())
    return records


def test_the_page_is_what_was_recorded(records: dict[str, Any]) -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(records), f"{AGAIN} page"


def test_every_replay_was_recorded_as_it_is(records: dict[str, Any]) -> None:
    recorded = records["cpu"]["replays"]
    names = [replay.__name__ for replay in compatibility.replays()]
    assert len(names) == len(set(names)), "two replays of one name: records are by name"
    assert set(recorded) == set(names), f"{AGAIN} cpu"
    for module in compatibility.modules():
        for replay in module.ALL:
            entry = recorded[replay.__name__]
            assert entry["result"] == "passed", replay.__name__
            assert entry["fingerprint"] == compatibility.fingerprint(module), f"{AGAIN} cpu"
            assert compatibility.what(replay), f"{replay.__name__}: say in a docstring what it does"


def test_a_result_that_is_missing_or_old_shows() -> None:
    module = compatibility.modules()[0]
    name = module.ALL[0].__name__
    shown = compatibility.page({})
    assert f"| `{name}` | {compatibility.what(module.ALL[0])} | not run | not run |" in shown
    entry = {"result": "failed", "fingerprint": "of another file"}
    old = {"machine": "m", "torch": "t", "ferry": "f", "date": "2026-01-02"}
    shown = compatibility.page({"cuda": {**old, "replays": {name: entry}}})
    assert "| not run | failed, 2026-01-02, earlier form |" in shown
