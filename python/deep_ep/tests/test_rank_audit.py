"""Each call of each face, and each argument, is tried on 1, 2, 4 and 8 ranks, and on 16 as of
several hosts. What the tests of this folder did is asked when all others are over."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import rank_audit

RANKS = {1, 2, 4, 8, 16}
EXCEPTIONS: list[tuple[str, str, set[int], str]] = [
    (
        "Buffer.*dispatch",
        "num_tokens_per_rdma_rank",
        {1, 2, 4, 8},
        "None up to 8 ranks, as get_dispatch_layout returns it",
    ),
    (
        "Buffer.low_latency_update_mask_buffer",
        "*",
        {1},
        "a rank cannot mask itself, which is refused: test_low_latency_masks.py",
    ),
    (
        "BucketBuffer.reduce_scatter",
        "comm_precision",
        {1},
        "on one host another than the default is refused: test_bucket.py",
    ),
    (
        "EngramBuffer*",
        "*",
        {16},
        "ranks read each other's memory, so several hosts are refused: test_later_domains.py",
    ),
    ("ElasticBuffer.engram_*", "*", {16}, "the same"),
    ("EventHandle", "stream", {rank_audit.ANY}, "of GPUs, and of no caller's"),
]
"""(calls, arguments, ranks, why no test gives them there). "*": any."""


def missing(audit: rank_audit.Audit) -> dict[tuple[str, str], set[int]]:
    holes = {}
    for (call, argument), with_ranks in audit.with_ranks.items():
        wanted = RANKS if with_ranks else {rank_audit.ANY}
        ranks = audit.ranks(call, argument)
        if not wanted <= ranks and (with_ranks or not ranks):
            holes[call, argument] = wanted - ranks
    return holes


def excepted(call: str, argument: str) -> set[int]:
    return {
        ranks
        for calls, arguments, some, _ in EXCEPTIONS
        if fnmatchcase(call, calls) and fnmatchcase(argument, arguments)
        for ranks in some
    }


def test_every_argument_on_every_number_of_ranks(audit: rank_audit.Audit | None) -> None:
    if audit is None:
        pytest.skip("needs all tests of this folder: pytest python/deep_ep/tests")
    holes = missing(audit)
    untried = {
        key: sorted(more) for key, ranks in holes.items() if (more := ranks - excepted(*key))
    }
    assert untried == {}, "no test gives it on so many ranks"
    for calls, arguments, ranks, why in EXCEPTIONS:
        of_it = [
            some
            for (call, argument), some in holes.items()
            if fnmatchcase(call, calls) and fnmatchcase(argument, arguments)
        ]
        assert any(some & ranks for some in of_it), f"{calls} {arguments} is tried: strike it off"
        assert why


class Some:
    """A buffer as the audit sees it."""

    def __init__(self, group: int, size: int = 1) -> None:
        self._groups = SimpleNamespace(everyone=SimpleNamespace(size=group))

    def call(self, a: int, b: int = 2, c: int | None = None) -> None:
        if c is not None:
            raise ValueError

    @staticmethod
    def hint(n: int) -> None: ...


def test_what_counts_as_tried() -> None:
    """Another value than the default, to a call that returns; one that is refused where no other is
    taken."""
    audit = rank_audit.Audit(Some)
    try:
        for ranks in RANKS:
            some = Some(ranks)
            some.call(1, 2)
            with pytest.raises(ValueError):
                some.call(1, 2, 3)
        some.call(1, 3)
        with pytest.raises(ValueError):
            Some(2).call(1, 3, 3)
    finally:
        audit.end()
    names = ("Some", "Some.call", "Some.hint")
    assert {key: left for key, left in missing(audit).items() if key[0] in names} == {
        ("Some", "size"): RANKS,
        ("Some.call", "b"): RANKS - {some._groups.everyone.size},
        ("Some.hint", ""): {rank_audit.ANY},
        ("Some.hint", "n"): {rank_audit.ANY},
    }
