"""The modules beside the tests can be imported by name; what tests on several hosts need."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def network() -> None:
    """Skips where ranks on several hosts cannot be tried."""
    from job import why_not

    if why := why_not():
        pytest.skip(why)
