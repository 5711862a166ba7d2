"""Arrays of JAX and TensorFlow in CPU memory: read where they lie, made of Ferry's memory, and
never written, as nobody may write them.

Both give NumPy arrays of their memory, in the dtypes of ml_dtypes, and take DLPack tensors.
"""

from __future__ import annotations

import sys

from ferry import _ferry
from ferry.arguments import refuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np

_NAMES = {"jax": "JAX", "tensorflow": "TensorFlow"}
_CODES = {_ferry.Dtype.e4m3: "float8_e4m3fn", _ferry.Dtype.e5m2: "float8_e5m2"}


def framework_of(value: Any) -> str | None:
    """ "jax" or "tensorflow", or None."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, getattr(jax, "Array", ())):
        return "jax"
    tensorflow = sys.modules.get("tensorflow")
    kinds = tuple(
        kind
        for name in ("Tensor", "Variable")
        if isinstance(kind := getattr(tensorflow, name, None), type)
    )
    return "tensorflow" if isinstance(value, kinds) else None


def as_numpy(name: str, value: Any, writable: bool) -> tuple[np.ndarray[Any, Any], str] | None:
    """The memory of an array of JAX or TensorFlow, and which of them it is of; None: of neither."""
    import numpy as np

    framework = framework_of(value)
    if framework is None:
        return None
    words = _NAMES[framework]
    if writable:
        refuse(
            name,
            f"an array of {words}, which nobody may write",
            f"a NumPy array or a torch tensor; collectives of ferry.{framework} return the result",
        )
    if framework == "jax" and isinstance(value, sys.modules["jax"].core.Tracer):
        refuse(name, "a value that JAX traces", "an array: make the call outside jax.jit")
    if framework == "tensorflow" and isinstance(value, sys.modules["tensorflow"].Variable):
        value = value.value()
    if framework == "tensorflow" and not hasattr(value, "numpy"):
        refuse(name, "a symbolic tensor", "an eager one: make the call outside tf.function")
    places = value.device if framework == "tensorflow" else sorted(map(str, value.devices()))
    if framework == "tensorflow":
        on_cpu = "CPU" in places
    else:
        on_cpu = {device.platform for device in value.devices()} == {"cpu"} and len(places) == 1
    if not on_cpu:
        refuse(name, f"an array of {words} on {places}", "one in CPU memory")
    return np.asarray(value), framework


def array_of(tensor: _ferry.Tensor, framework: str) -> Any:
    """Ferry's memory as an array; shares it where the framework lets it: fp8 of TensorFlow is a
    copy, and i64 of JAX without `jax_enable_x64` an int32 copy."""
    if framework == "jax":
        import jax  # type: ignore[import-not-found, unused-ignore]

        made = jax.dlpack.from_dlpack(tensor)
        code = _CODES.get(tensor.dtype)
        return made if code is None else made.view(getattr(jax.numpy, code))
    import tensorflow as tf  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if tensor.dtype in _CODES:
        import ml_dtypes

        return tf.constant(tensor.numpy().view(getattr(ml_dtypes, _CODES[tensor.dtype])))
    return tf.experimental.dlpack.from_dlpack(tensor.dlpack())


def array_from_numpy(values: np.ndarray[Any, Any], framework: str) -> Any:
    """The same of NumPy's memory, which nobody writes any more."""
    bf16 = values.dtype.name == "bfloat16"
    if bf16:
        values = values.view("uint16")
    elif values.dtype.kind == "V":  # another dtype of ml_dtypes
        module: Any = sys.modules[framework]
        return module.numpy.array(values) if framework == "jax" else module.constant(values)
    if framework == "jax":
        import jax  # type: ignore[import-not-found, unused-ignore]

        made = jax.dlpack.from_dlpack(values)
        return made.view(jax.numpy.bfloat16) if bf16 else made
    import tensorflow as tf  # type: ignore[import-not-found, import-untyped, unused-ignore]

    made = tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    return tf.bitcast(made, tf.bfloat16) if bf16 else made
