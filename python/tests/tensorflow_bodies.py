"""What the ranks of test_tensorflow.py do."""

from __future__ import annotations

from typing import Any

import numpy as np
from rank_processes import DEADLINE

import ferry


def with_collectives(boot: Any, where: Any, body: Any, arguments: Any, config: Any) -> Any:
    with ferry.Collectives(boot, deadline=DEADLINE, memory_bytes=1 << 20) as ranks:
        result = body(ranks, *arguments)
        ranks.barrier()
        return result


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table, and a batch of eight."""
    rng = np.random.default_rng(4)
    table, x, y = (rng.integers(-2, 3, shape) for shape in ((4, 2), (8, 4), (8, 2)))
    return table.astype(np.float32), x.astype(np.float32), y.astype(np.float32)


def fit(ranks: ferry.Collectives) -> list[bytes]:
    """Three steps of Keras, as one rank with the whole batch and as one of two with half of it."""
    import keras

    import ferry.tensorflow as ft

    table, x, y = data()
    found = []
    for alone in (True, False):
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.25, momentum=0.5)
        mine = slice(0, 8)
        if not alone:
            optimizer = ft.distributed_optimizer(ranks, optimizer)
            mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        if alone or ranks.rank == 0:
            model.set_weights([table, np.zeros(2, np.float32)])
        if not alone:
            ft.broadcast_variables(ranks, model.variables)
        model.compile(optimizer, loss="mse")
        size = mine.stop - mine.start
        model.fit(x[mine], y[mine], batch_size=size, epochs=3, shuffle=False, verbose=0)
        found.append(b"".join(values.tobytes() for values in model.get_weights()))
    assert found[0] == found[1], "not the step of one rank"
    assert found[0] != table.tobytes() + bytes(8)
    return found
