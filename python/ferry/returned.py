"""Collectives over arrays that nobody may write: they return their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ferry.arguments import instance, refuse
from ferry.collectives import Collectives
from ferry.errors import ExhaustedError
from ferry.frameworks import array_from_numpy, as_numpy
from ferry.tensors import Like, array, dtype_named

_ALIGNMENT = 64  # bytes, of a result: JAX copies what lies elsewhere


class Returning:
    """The collectives of one framework, "jax" or "tensorflow"."""

    def __init__(self, framework: str) -> None:
        self._framework = framework

    def all_reduce(self, ranks: Collectives, x: Any, *, op: str = "sum") -> Any:
        """Collective. The reduction of x over all ranks, as `Collectives.all_reduce`; x is an array
        or a list of arrays, whose results come as a list: those of one dtype in one exchange."""
        if not isinstance(x, (list, tuple)):
            return self.all_reduce(ranks, [x], op=op)[0]
        sources = [self._source("all_reduce", ranks, one) for one in x]
        results: list[Any] = [None] * len(x)
        for dtype in dict.fromkeys(one.dtype for one in sources):
            those = [at for at, one in enumerate(sources) if one.dtype == dtype]
            unit = _ALIGNMENT // dtype.itemsize
            rooms = [-(-sources[at].size // unit) * unit for at in those]
            whole = self._memory(ranks, (sum(rooms),), dtype)
            ends = np.cumsum(rooms)
            for at, room, end in zip(those, rooms, ends):
                whole[end - room : end] = 0  # what follows an array is reduced, too
                whole[end - room :][: sources[at].size] = sources[at].reshape(-1)
            ranks.all_reduce(whole, op=op)
            for at, room, end in zip(those, rooms, ends):
                part = whole[end - room :][: sources[at].size]
                results[at] = self._result(part.reshape(sources[at].shape))
        return results

    def broadcast(self, ranks: Collectives, x: Any, root: int) -> Any:
        """Collective. x of rank `root`; all ranks give arrays of one shape and dtype."""
        source = self._source("broadcast", ranks, x)
        return self._made(ranks, source.shape, source, lambda out: ranks.broadcast(out, root), True)

    def all_gather(self, ranks: Collectives, x: Any) -> Any:
        """Collective. x of all ranks, in a new first dimension."""
        source = self._source("all_gather", ranks, x)
        shape = (ranks.size, *source.shape)
        return self._made(ranks, shape, source, partial(ranks.all_gather, source))

    def reduce_scatter(self, ranks: Collectives, x: Any, *, op: str = "sum") -> Any:
        """Collective. Block `rank` of the reduction of x, whose first extent is divided."""
        source = self._source("reduce_scatter", ranks, x)
        shape = self._block("reduce_scatter", ranks, source)
        return self._made(ranks, shape, source, partial(ranks.reduce_scatter, source, op=op))

    def all_to_all(self, ranks: Collectives, x: Any) -> Any:
        """Collective. The first extent of x is divided among the ranks; block r of the result is
        what rank r had for this one."""
        source = self._source("all_to_all", ranks, x)
        self._block("all_to_all", ranks, source)
        return self._made(ranks, source.shape, source, partial(ranks.all_to_all, source))

    def _source(self, call: str, ranks: Collectives, x: Any) -> np.ndarray[Any, Any]:
        instance(f"{call}: ranks", ranks, Collectives, "a ferry.Collectives")
        found = as_numpy(f"{call}: x", x, False)
        if found is None or found[1] != self._framework:
            kind = {"jax": "a jax.Array", "tensorflow": "an eager tensor of TensorFlow"}
            refuse(f"{call}: x", f"an object of type {type(x).__name__}", kind[self._framework])
        return np.ascontiguousarray(found[0]).reshape(found[0].shape)

    def _block(
        self, call: str, ranks: Collectives, source: np.ndarray[Any, Any]
    ) -> tuple[int, ...]:
        if source.ndim == 0 or source.shape[0] % ranks.size:
            refuse(
                f"{call}: x", f"shape {source.shape}", f"a first extent divisible by {ranks.size}"
            )
        return (source.shape[0] // ranks.size, *source.shape[1:])

    def _made(
        self,
        ranks: Collectives,
        shape: tuple[int, ...],
        source: np.ndarray[Any, Any],
        fill: Callable[[np.ndarray[Any, Any]], Any],
        begins_as_source: bool = False,
    ) -> Any:
        out = self._memory(ranks, shape, source.dtype)
        if begins_as_source:
            out[...] = source
        fill(out)
        return self._result(out)

    def _memory(
        self, ranks: Collectives, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Registered memory, and other where there is no room."""
        try:
            tensor = ranks._raw.empty([math.prod(shape)], dtype_named("x", dtype))
        except ExhaustedError:
            return np.empty(shape, dtype)
        flat: np.ndarray[Any, Any] = array(tensor, Like("numpy", True))
        return flat.reshape(shape)

    def _result(self, values: np.ndarray[Any, Any]) -> Any:
        return array_from_numpy(values, self._framework)
