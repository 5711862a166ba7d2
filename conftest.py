"""How long a test may take before it counts as hung: what it says in CI, five times that elsewhere,
where a machine may be slow or busy."""

from __future__ import annotations

import os

import pytest

TIMEOUT_FACTOR = 1 if os.environ.get("CI") == "true" else 5


@pytest.hookimpl(trylast=True)  # after the folders have given their tests limits
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    usual = float(config.getini("timeout") or 0)
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0]) if marker and marker.args else usual
        item.add_marker(pytest.mark.timeout(TIMEOUT_FACTOR * seconds), append=False)
