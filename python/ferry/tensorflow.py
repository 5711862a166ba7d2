"""Ferry for TensorFlow and Keras: gradients that become means over ranks, and collectives over
eager tensors in CPU memory, which return tensors.

The first argument is a `ferry.Collectives`. Results lie in its registered memory while there is
room (`memory_bytes`). The calls of a `ferry.Group` take and bring eager tensors as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf  # type: ignore[import-not-found, import-untyped, unused-ignore]

from ferry.arguments import instance, refuse
from ferry.collectives import Collectives
from ferry.returned import Returning

_calls = Returning("tensorflow")
all_gather = _calls.all_gather
all_reduce = _calls.all_reduce
all_to_all = _calls.all_to_all
broadcast = _calls.broadcast
reduce_scatter = _calls.reduce_scatter


def mean_gradients(ranks: Collectives, gradients: Sequence[Any]) -> list[Any]:
    """Collective. Means of the ranks' gradients, all of a dtype in one exchange; eagerly or, as in
    `Model.fit`, inside a `tf.function`. None, which must be there on all ranks, stays None.
    IndexedSlices, as of an embedding, become dense: with zeros for all other rows.
    """
    instance("mean_gradients: ranks", ranks, Collectives, "a ferry.Collectives")
    dense = [tf.convert_to_tensor(one) for one in gradients if one is not None]
    if tf.executing_eagerly():
        means = all_reduce(ranks, dense, op="mean") if dense else []
    else:
        means = tf.py_function(
            lambda *values: all_reduce(ranks, list(values), op="mean"),
            dense,
            [one.dtype for one in dense],
        )
        for mean, one in zip(means, dense):
            mean.set_shape(one.shape)
    left = iter(means)
    return [None if one is None else next(left) for one in gradients]


def broadcast_variables(ranks: Collectives, variables: Iterable[Any], root: int = 0) -> None:
    """Collective. Variables of TensorFlow or Keras, the same ones on all ranks, become those of
    rank `root`: before the first step, and after a checkpoint was loaded there."""
    for variable in variables:
        variable.assign(broadcast(ranks, tf.convert_to_tensor(variable), root))


class GradientTape:
    """A `tf.GradientTape` whose `gradient` is collective and gives the means over the ranks::

        with ferry.tensorflow.GradientTape(ranks) as tape:
            loss = loss_of(model(x), y)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    tape: to wrap; None: a new one.
    """

    def __init__(self, ranks: Collectives, tape: Any = None) -> None:
        self._ranks = instance("GradientTape: ranks", ranks, Collectives, "a ferry.Collectives")
        self._tape = tf.GradientTape() if tape is None else tape

    def __enter__(self) -> GradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *rest: Any, **more: Any) -> Any:
        """Collective. As of `tf.GradientTape`."""
        found = self._tape.gradient(target, sources, *rest, **more)
        flat = tf.nest.flatten(found)
        return tf.nest.pack_sequence_as(found, mean_gradients(self._ranks, flat))


def distributed_optimizer(ranks: Collectives, optimizer: Any) -> Any:
    """A Keras optimizer like this one, with state of its own, that applies the means of the ranks'
    gradients, for `Model.compile`: each training step is collective then. For losses that are means
    over a batch, and equal batches, a step is that of one rank with all of them."""
    cls = type(optimizer)
    if not callable(getattr(cls, "apply", None)) or not hasattr(cls, "from_config"):
        refuse("distributed_optimizer: optimizer", f"a {cls.__name__}", "an optimizer of Keras 3")

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return cls.apply(self, mean_gradients(ranks, list(grads)), trainable_variables)

    distributed: Any = type(cls.__name__, (cls,), {"apply": apply, "__doc__": cls.__doc__})
    return distributed.from_config(optimizer.get_config())


__all__ = [
    "GradientTape",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broadcast_variables",
    "distributed_optimizer",
    "mean_gradients",
    "reduce_scatter",
]
