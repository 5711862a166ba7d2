"""ferry.tensorflow: a training step over two ranks is that of one rank with the whole batch, bit
for bit: all values are small multiples of powers of two, so every sum is exact."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import tensorflow_bodies as bodies
from rank_processes import DEADLINE, RankProcesses
from rank_threads import run_threads

import ferry

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
ft: Any = ferry.tensorflow

pytestmark = pytest.mark.timeout(120)


def on_ranks(body: Any) -> list[Any]:
    bootstraps = ferry.threads(2)

    def one(rank: int) -> Any:
        with ferry.Collectives(bootstraps[rank], deadline=DEADLINE, memory_bytes=1 << 20) as ranks:
            result = body(ranks)
            ranks.barrier()
            return result

    return run_threads(2, one)


def test_keras_trains_as_one_rank_does() -> None:
    processes = RankProcesses(2, "cpu", bodies.with_collectives)
    try:
        first, second = processes.run(bodies.fit)
    finally:
        processes.stop()
    assert first == second


def test_a_tape_gives_means() -> None:
    start, x, y = bodies.data()

    def body(ranks: ferry.Collectives) -> Any:
        table, unused = tf.Variable(start), tf.Variable([1.0])
        mine = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        with ft.GradientTape(ranks) as tape:
            loss = tf.reduce_mean((x[mine] @ table - y[mine]) ** 2)
        dense, nothing = tape.gradient(loss, [table, unused])
        assert nothing is None
        with ft.GradientTape(ranks, tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.gather(table, [ranks.rank, 3]))
        sparse = tape.gradient(loss, table)
        return dense.numpy(), sparse.numpy()

    table = tf.Variable(start)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ table - y) ** 2)
    expected = tape.gradient(loss, table).numpy()
    rows = np.zeros_like(start)
    rows[[0, 1]], rows[3] = 0.5, 1
    for dense, sparse in on_ranks(body):
        assert (dense == expected).all() and (sparse == rows).all()


def test_variables_start_as_those_of_a_root() -> None:
    def body(ranks: ferry.Collectives) -> None:
        variables = [
            tf.Variable(np.full((2, 3), ranks.rank, np.float32)),
            tf.Variable(ranks.rank, dtype=tf.int64),
            tf.Variable([float(ranks.rank)], dtype=tf.bfloat16),
        ]
        ft.broadcast_variables(ranks, variables, root=1)
        assert all((variable.numpy() == 1).all() for variable in variables)

    on_ranks(body)


def test_what_is_no_optimizer_is_refused() -> None:
    (bootstrap,) = ferry.threads(1)
    with ferry.Collectives(bootstrap, memory_bytes=0) as ranks:
        with pytest.raises(ferry.InvalidArgumentError, match="optimizer: got a int"):
            ft.distributed_optimizer(ranks, 3)
        with pytest.raises(ferry.InvalidArgumentError, match="ranks: got 3"):
            ft.GradientTape(3)
