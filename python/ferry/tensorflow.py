"""Ferry for TensorFlow."""

from __future__ import annotations

import tensorflow as _tf  # noqa: F401

from ferry.returned import Returning

_calls = Returning("tensorflow")
all_gather = _calls.all_gather
all_reduce = _calls.all_reduce
all_to_all = _calls.all_to_all
broadcast = _calls.broadcast
reduce_scatter = _calls.reduce_scatter
