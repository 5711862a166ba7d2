"""Links between pages lead to a file of the repository and to a heading of that file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)


def pages() -> list[Path]:
    built = {"_build", "_doxygen"}
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in found if not built & set(page.relative_to(ROOT).parts))


def prose_of(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """As GitHub and MyST make them: lower case, without punctuation, a dash for each space."""
    words = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(prose_of(page)))
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            wrong.append(link)
    assert not wrong, f"{page.relative_to(ROOT)} links to what is not there: {wrong}"
