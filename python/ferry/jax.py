"""Ferry for JAX: collectives over arrays in CPU memory, which return arrays.

The first argument is a `ferry.Collectives`. Results lie in its registered memory while there is
room (`memory_bytes`). The calls are made outside `jax.jit`. The calls of a `ferry.Group` take and
bring arrays of JAX as they are; i64 results are int32 there unless `jax_enable_x64` is set.
"""

from __future__ import annotations

import jax as _jax  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

from ferry.returned import Returning

_calls = Returning("jax")
all_gather = _calls.all_gather
all_reduce = _calls.all_reduce
all_to_all = _calls.all_to_all
broadcast = _calls.broadcast
reduce_scatter = _calls.reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]
