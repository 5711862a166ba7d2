"""The check of built pages finds links to what is not there, and pages that the search misses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_pages


def test_wrong_links_and_unknown_pages_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="#top">1</a><a href="b.html#in">2</a><a href="#no">3</a>'
        '<a href="https://example.com/#x">4</a><img src="gone.svg">'
    )
    (tmp_path / "b.html").write_text('<a id="in" href="a.html#top">5</a><a href="a.html#no">6</a>')
    index = json.dumps({"docnames": ["a"], "titles": ["A"]})
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({index})")
    assert check_pages.wrong_links(tmp_path) == [
        "a.html: #no",
        "a.html: gone.svg",
        "b.html: a.html#no",
    ]
    assert check_pages.unknown_to_search(tmp_path) == ["b"]
