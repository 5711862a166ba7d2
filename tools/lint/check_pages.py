"""Whether the built pages hang together: each link inside them leads to a file and an anchor, and
the search knows each page.

    check_pages.py docs/_build/html
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

MADE_BY_SPHINX = {"genindex", "py-modindex", "search"}  # pages with nothing to search for


class Page(HTMLParser):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


def wrong_links(root: Path) -> list[str]:
    pages = {file: Page(file) for file in sorted(root.rglob("*.html"))}
    wrong = []
    for file, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):  # outside
                continue
            path, _, anchor = link.partition("#")
            target = (file.parent / unquote(path.partition("?")[0])).resolve() if path else file
            missing = target in pages and anchor and unquote(anchor) not in pages[target].anchors
            if missing or not target.exists():
                wrong.append(f"{file.relative_to(root)}: {link}")
    return wrong


def unknown_to_search(root: Path) -> list[str]:
    """Pages that have no title in the index of the search."""
    text = (root / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    known = {name for name, title in zip(index["docnames"], index["titles"]) if title}
    pages = {file.relative_to(root).with_suffix("").as_posix() for file in root.rglob("*.html")}
    return sorted(pages - known - MADE_BY_SPHINX)


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    wrong = [f"link to what is not there: {link}" for link in wrong_links(root)]
    wrong += [f"not found by the search: {page}" for page in unknown_to_search(root)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
