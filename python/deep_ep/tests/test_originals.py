"""Names, arguments and defaults are those of the originals' releases, as docs/deep_ep_names.json
has them, or named there as missing; and each argument does something, or docs/deep_ep_names.md says
why not."""

from __future__ import annotations

import json
from typing import Any

import idle_arguments
import originals
import pytest

from deep_ep.errors import require_integer

RECORDS: dict[str, Any] = json.loads(originals.RECORD.read_text())
NAMES = list(originals.names(RECORDS))
HERE = [one for one in NAMES if originals.gap(RECORDS, *one[1:3]) is None]


def test_the_page_is_what_was_recorded() -> None:
    again = "run: python python/deep_ep/tests/originals.py page"
    assert originals.PAGE.read_text() == originals.page(RECORDS), again


@pytest.mark.parametrize(
    ("release", "module", "name", "words"),
    HERE,
    ids=[f"{release}:{module}.{name}" for release, module, name, _ in HERE],
)
def test_arguments_are_those_of_the_original(
    release: str, module: str, name: str, words: str
) -> None:
    known = RECORDS["differs"].get(f"{release}:{module}.{name}", {"what": []})
    assert originals.differences(originals.ours(module, name), words) == known["what"]


def test_what_differs_is_recorded() -> None:
    assert set(RECORDS["differs"]) <= {f"{release}:{m}.{n}" for release, m, n, _ in HERE}


@pytest.mark.parametrize("listed", sorted(RECORDS["gaps"]))
def test_a_gap_is_recorded_and_is_one(listed: str) -> None:
    """Of a name of the originals, with a reason; and whoever closes it strikes it off."""
    assert RECORDS["gaps"][listed]
    under = [(m, n) for _, m, n, _ in NAMES if f"{m}.{n}.".startswith(f"{listed}.")]
    assert under, f"{listed}: no such name is recorded"
    for module, name in under:
        with pytest.raises((AttributeError, ImportError)):
            originals.ours(module, name)


def test_what_counts_as_a_difference() -> None:
    def found(self: Any, a: int, b: int = 1, *, c: int = 2, d: int) -> None: ...

    assert not originals.differences(found, "a, b=1, *, c=2, d")
    assert originals.differences(found, "b=1, a=0") == [
        "b in another place",
        "a in another place",
        "d is required",
    ]
    assert originals.differences(found, "a, b=2, *, d, e") == ["b with another default", "no e"]


def test_how_arguments_are_read() -> None:
    (name, words), *_ = originals.read("def f(self, a: int, b: str = 'x', *, c=(1, 2)): pass")
    assert (name, words) == ("f", "a, b='x', *, c=(1, 2)")


def test_arguments_that_change_nothing_are_named() -> None:
    named = list(idle_arguments.listed())
    assert len(named) == len(set(named))
    assert sorted(idle_arguments.idle_arguments() - set(named)) == []
    arguments = {argument for _, argument in named}
    assert arguments == {one for _, words in idle_arguments.REASONS for one in words.split(", ")}


def test_what_counts_as_doing_nothing() -> None:
    def call(self: Any, read: int, checked: int, kept: int, unread: int, absent: int) -> int:
        require_integer("call", "checked", checked, None, "any")
        self.shown, self.hidden = kept, unread
        return read

    assert idle_arguments.idle_of(call, {"shown"}) == {"checked", "unread", "absent"}
