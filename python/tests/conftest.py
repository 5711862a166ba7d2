"""Makes the helpers of this folder and of tests/ importable, seeds, and bounds every test."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))

# docs/torch.md: what older versions of torch need to compile layers whose sizes follow the routes.
# It is set where this folder has not been run without; ranks that are processes inherit it.
if [int(n) for n in importlib.metadata.version("torch").split(".")[:2]] < [2, 13]:
    os.environ["TORCHDYNAMO_CAPTURE_DYNAMIC_OUTPUT_SHAPE_OPS"] = "1"

SEED = int(os.environ.get("FERRY_TEST_SEED", "20261"))


def pytest_report_header() -> str:
    return f"ferry: FERRY_TEST_SEED={SEED}"


@pytest.fixture
def rng() -> np.random.Generator:
    """Seeded from FERRY_TEST_SEED, which the header of the report prints."""
    return np.random.default_rng(SEED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60))
