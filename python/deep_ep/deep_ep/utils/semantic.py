"""Defaults, and caches that do not keep their object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from deep_ep.errors import require_flags


def value_or(value: Any, default: Any) -> Any:
    """value, unless it is None."""
    return default if value is None else value


def weak_lru(maxsize: int | None = 128, typed: bool = False) -> Callable[..., Any]:
    """functools.lru_cache for methods, which keeps no reference to the object."""
    require_flags("weak_lru", typed=typed)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @lru_cache(maxsize, typed)
        def cached(weak: Any, *args: Any, **kwargs: Any) -> Any:
            return method(weak(), *args, **kwargs)

        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return cached(weakref.ref(self), *args, **kwargs)

        return call

    return decorate
