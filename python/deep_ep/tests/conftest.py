"""Makes the helpers of this folder importable, and bounds every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
os.environ.setdefault("FERRY_DEADLINE", "50")  # seconds; a test that reaches it has failed


LAST = "test_rank_audit.py"
_partial = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Whether some tests of this folder are left out; the last one asks what the others did."""
    session.items.sort(key=lambda item: item.path == HERE / LAST)
    files = {item.path for item in session.items}
    option = session.config.option
    chosen = option.keyword or option.markexpr or option.deselect or option.ignore
    several = all("::" not in argument for argument in session.config.args)
    whole = several and not chosen and files.issuperset(HERE.glob("test_*.py"))
    session.config.stash[_partial] = not whole


@pytest.fixture(scope="session", autouse=True)
def audit(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What the tests call; None where some are left out."""
    if request.config.stash[_partial]:
        yield None
        return
    from rank_audit import Audit

    made = Audit()
    yield made
    made.end()
