"""Names of earlier releases: they work, and say what to use instead."""

from __future__ import annotations

import importlib

import pytest

import ferry
from ferry import errors


@pytest.mark.parametrize("module", [ferry, errors])
@pytest.mark.parametrize("old", errors._RENAMED)
def test_an_old_name_is_the_same_class_and_warns(module: object, old: str) -> None:
    new = errors._RENAMED[old]
    assert new.__name__.endswith("Error") and getattr(module, new.__name__) is new
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated; use .*\.{new.__name__}$"):
        found = getattr(module, old)
    assert found is new


@pytest.mark.parametrize("old", ["MemoryUse", "NetworkUse", "NicUse", "TimeUse"])
def test_an_old_name_of_stats_warns(old: str) -> None:
    new = old.replace("Use", "Stats")
    with pytest.warns(DeprecationWarning, match=f"^ferry.{old} is deprecated; use ferry.{new}$"):
        found = getattr(ferry, old)
    assert found is getattr(ferry, new)


def test_an_old_name_catches_and_names_the_line_that_uses_it() -> None:
    with pytest.warns(DeprecationWarning) as said:
        try:
            raise ferry.EvictedError("rank 1 has masked this rank")
        except ferry.LeftBehind as error:
            assert error.kind == "left behind"
    assert [warning.filename for warning in said] == [__file__]


def test_other_names_are_unknown() -> None:
    for module in ("ferry", "ferry.errors"):
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Peer'"):
            getattr(importlib.import_module(module), "Peer")  # noqa: B009
    assert not set(errors._RENAMED) & set(ferry.__all__)
