"""On how many ranks the tests of this folder make each call of each face, and give each of its
arguments another value than its default. `test_rank_audit.py` says what is missing."""

from __future__ import annotations

import inspect
from collections import defaultdict
from functools import wraps
from typing import Any

import idle_arguments
import pytest

import deep_ep

ANY = 0
"""Instead of a number of ranks: of a call that no ranks make."""
OF_ANOTHER = (deep_ep.BufferBase,)
"""Calls are counted as those of the classes that have them from these."""
Seen = dict[tuple[str, str], set[int]]


class Audit:
    """Watches every call. given: by (call, argument), "" for the call itself, the numbers of ranks
    on which it returned; refused: on which it raised."""

    def __init__(self, *kinds: Any) -> None:
        """kinds: classes; none: those of `deep_ep`."""
        self.given: Seen = defaultdict(set)
        self.refused: Seen = defaultdict(set)
        self.with_ranks: dict[tuple[str, str], bool] = {}
        self._patch = pytest.MonkeyPatch()
        named = [getattr(deep_ep, name) for name in deep_ep.__all__]
        for kind in kinds or named:
            if inspect.isclass(kind) and kind not in (*OF_ANOTHER, *idle_arguments.OURS):
                self._watch(kind)

    def end(self) -> None:
        """Watch no longer."""
        self._patch.undo()

    def _watch(self, kind: Any) -> None:
        buffer = "group" in inspect.signature(kind).parameters or kind is deep_ep.BucketSession
        found = {
            name: inspect.getattr_static(kind, name)
            for name, one in inspect.getmembers(kind, inspect.isroutine)
            if inspect.isfunction(one)
            and (name in idle_arguments.CALLABLE or not name.startswith(("_", "require_")))
        }
        for name, one in found.items():
            static = isinstance(one, staticmethod)
            call = one.__func__ if static else one
            shown = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
            for argument in ("", *inspect.signature(call).parameters):
                if argument not in ("self", "kwargs"):
                    self.with_ranks[shown, argument] = buffer and not static
            spy = self._spy(kind, shown, call)
            self._patch.setattr(kind, name, staticmethod(spy) if static else spy)

    def _spy(self, kind: Any, shown: str, call: Any) -> Any:
        signature = inspect.signature(call)
        defaults = {name: one.default for name, one in signature.parameters.items()}

        @wraps(call)
        def spy(*args: Any, **kwargs: Any) -> Any:
            seen = self.refused
            try:
                made = call(*args, **kwargs)
                seen = self.given
                return made
            finally:
                if "self" not in defaults or type(args[0]) is kind:
                    bound = signature.bind(*args, **kwargs).arguments
                    size = ranks_of(bound)
                    seen[shown, ""].add(size)
                    for argument, value in bound.items():
                        if value is not defaults[argument]:
                            seen[shown, argument].add(size)

        return spy

    def ranks(self, call: str, argument: str) -> set[int]:
        """On how many ranks tests give it. A value that is refused counts where no other is
        taken."""
        key = call, argument
        return self.given[key] or self.refused[key]


def ranks_of(bound: dict[str, Any]) -> int:
    """Of the buffer that makes the call, or that is made."""
    own = bound.get("self")
    own = getattr(own, "__dict__", {}).get("buffer", own)  # a session's
    groups = getattr(own, "__dict__", {}).get("_groups")
    if groups is not None:
        return int(groups.everyone.size)
    for name in ("group", "comm"):  # of a constructor that refuses
        size = getattr(bound.get(name), "Get_size", None)
        if size is not None:
            return int(size())
    return ANY
