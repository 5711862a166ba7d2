"""On how many ranks tests in CPU memory give each argument of each call another value than its
default, and make each call:

    python python/deep_ep/tests/rank_audit.py [-k WORDS ...]

Runs the tests whose ranks are threads and prints what no test does on 1, 2, 4 and 8 ranks, and
which calls none makes on 16.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SIZES = {1, 2, 4, 8}
ELSEWHERE = ("test_mpi.py", "test_package.py", "test_process_ranks.py", "test_originals.py")
"""Tests whose ranks are processes, or that have none."""


class Audit:
    """A plugin of pytest."""

    def __init__(self) -> None:
        import idle_arguments

        self.seen: dict[tuple[str, str], set[int]] = defaultdict(set)
        for name, _ in idle_arguments.calls():
            cls, _, call = name.partition(".")
            kind = getattr(idle_arguments.deep_ep, cls, None)
            if inspect.isclass(kind) and hasattr(kind, "destroy"):  # the calls of buffers
                self._watch(kind, call)

    def _watch(self, kind: Any, call: str) -> None:
        found = inspect.getattr_static(kind, call)
        if isinstance(found, staticmethod):
            return  # of no ranks
        signature = inspect.signature(found)
        names = [f"{kind.__name__}.{call}", *(one for one in signature.parameters if one != "self")]
        for argument in names[1:]:
            self.seen[names[0], argument] = set()
        self.seen[names[0], ""] = set()

        @wraps(found)
        def spy(own: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return found(own, *args, **kwargs)
            finally:
                groups = own.__dict__.get("_groups")
                if groups is not None and type(own) is kind:
                    size = groups.everyone.size
                    self.seen[names[0], ""].add(size)
                    for argument, value in signature.bind(own, *args, **kwargs).arguments.items():
                        if (
                            argument != "self"
                            and value is not signature.parameters[argument].default
                        ):
                            self.seen[names[0], argument].add(size)

        setattr(kind, call, spy)

    def holes(self) -> str:
        lines = []
        for (call, argument), sizes in sorted(self.seen.items()):
            if missing := SIZES - sizes:
                lines.append(f"{call} {argument}: not on {sorted(missing)} ranks")
        lines += [
            f"{call}: not on 16 ranks"
            for (call, argument), sizes in sorted(self.seen.items())
            if argument == "" and 16 not in sizes
        ]
        return "\n".join(lines)


def main() -> None:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
    audit = Audit()
    ignored = [f"--ignore={HERE / name}" for name in ELSEWHERE]
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", *ignored, *sys.argv[1:], str(HERE)], [audit]
    )
    print(audit.holes())
    sys.exit(code)


if __name__ == "__main__":
    main()
