"""Names of earlier releases: they work, and say what to use instead."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import ferry
from ferry import errors
from ferry.arguments import renamed_keywords


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


def test_an_old_keyword_is_the_new_one_and_warns() -> None:
    @renamed_keywords(sms="num_sms")
    def call(x: int, *, num_sms: int = 0) -> tuple[int, int]:
        return x, num_sms

    with pytest.warns(
        DeprecationWarning, match=r"call\(\): sms is deprecated; use num_sms$"
    ) as said:
        assert call(1, sms=2) == (1, 2)
    assert [warning.filename for warning in said] == [__file__]
    with pytest.raises(TypeError, match="got num_sms and its old name, sms"):
        call(1, num_sms=1, sms=2)  # type: ignore[call-arg]


def test_calls_take_their_old_keywords() -> None:
    group = ferry.Group(ferry.threads(1)[0], experts=1)
    x, routes = np.ones((2, 16), np.float32), np.zeros((2, 1), np.int64)
    old: dict[str, Any] = {"worst_case_rows": 3, "sms": 1}
    with pytest.warns(DeprecationWarning) as said:
        got = group.dispatch(x, topk_idx=routes, **old)
    assert len(said) == 2 and got.x.shape == (3, 16)
    with pytest.warns(DeprecationWarning):
        group.combine(got.x, got.plan, sms=1)  # type: ignore[call-arg]
    waits: dict[str, Any] = {"waits": np.zeros(1, np.int64)}
    latency = ferry.LatencyExchange(group, capacity=2, hidden=16, topk=1, dtype="f32")
    with pytest.warns(DeprecationWarning):
        received = latency.dispatch(x, routes, **waits)
    with pytest.warns(DeprecationWarning):
        latency.combine(received.x, received, np.ones((2, 1), np.float32), **waits)
    group.destroy()


def test_other_names_are_unknown() -> None:
    for module in ("ferry", "ferry.errors"):
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Peer'"):
            getattr(importlib.import_module(module), "Peer")  # noqa: B009
    assert not set(errors._RENAMED) & set(ferry.__all__)
