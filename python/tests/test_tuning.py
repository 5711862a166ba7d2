"""`Group(tuning=...)`: what it tells, where it begins, and that results stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rank_threads import run_ranks

import ferry

RANKS, HIDDEN, TOKENS, TOPK = 4, 1024, 64, 4


def steps(group: ferry.Group) -> tuple[list[np.ndarray], list[tuple[object, ...]]]:
    rng = np.random.default_rng(20261126 + group.rank)
    results = []
    for _ in range(16):
        x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        routes = rng.integers(0, group.experts, (TOKENS, TOPK))
        received = group.dispatch(x, topk_idx=routes)
        results += [np.array(received.x), np.array(group.combine(received.x, received.plan).x)]
    told = [
        (one.call, one.dtype, one.order, one.first, one.crossing, one.chunk_bytes, one.probes)
        for one in group.tuning()
    ]
    return results, told


def test_results_are_the_same_and_ranks_alike() -> None:
    plain = run_ranks(RANKS, steps, domain_size=2, tuning=False)
    tuned = run_ranks(RANKS, steps, domain_size=2, tuning=True)
    for (expected, nothing), (got, told) in zip(plain, tuned):
        assert nothing == []
        assert told == tuned[0][1]
        assert {(one[0], one[3]) for one in told} == {("dispatch", True), ("combine", False)}
        assert all(one[6] > 3 for one in told)  # more than the beginning
        for a, b in zip(expected, got):
            assert np.array_equal(a, b)


def first_chunk(group: ferry.Group) -> int:
    group.dispatch(np.zeros((TOKENS, HIDDEN), np.float32), topk_idx=np.zeros((TOKENS, 1), np.int64))
    (told,) = group.tuning()
    assert "TunedCall(dispatch f32, tokens=64" in repr(told)
    return told.chunk_bytes


def test_begins_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tuning.json"
    entry = {"call": "dispatch", "dtype": "f32", "ranks": RANKS, "chunk_bytes": 1 << 20}
    file.write_text(json.dumps({"format": 1, "entries": [entry]}))
    assert run_ranks(RANKS, first_chunk, domain_size=2, tuning=str(file))[0] == 1 << 20
    assert run_ranks(RANKS, first_chunk, domain_size=2, tuning=True)[0] == 256 << 10
    monkeypatch.setenv("FERRY_TUNING", str(file))
    assert run_ranks(RANKS, first_chunk, domain_size=2)[0] == 1 << 20


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"Group: tuning: got .*expected None, a bool or the name"):
        ferry.Group(ferry.threads(1)[0], experts=1, tuning=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tuning: /no/such/file cannot be read"):
        ferry.Group(ferry.threads(1)[0], experts=1, tuning="/no/such/file")
    with pytest.raises(ValueError, match=r"fewest_sms and most_sms"):
        ferry.Group(ferry.threads(1)[0], experts=1, tuning_sms=(8, 2))
