"""Ferry carries Mixture-of-Experts tokens to their experts and back.

NumPy arrays, torch tensors and what else speaks DLPack, on CPUs and (backend="cuda") on GPUs, go in
and come out without copies, and so do arrays of JAX and TensorFlow in CPU memory. `ferry.torch`
adds autograd and torch.compile; `ferry.jax` and `ferry.tensorflow` add collectives that return
their results.
"""

from __future__ import annotations

import atexit as _atexit
import warnings as _warnings

from ferry import _ferry
from ferry._ferry import (
    CompressionStats,
    Event,
    GroupView,
    MemoryStats,
    NetworkStats,
    NicStats,
    Plan,
    Stream,
    TimeStats,
)
from ferry.bootstrap import (
    Bootstrap,
    from_all_gather,
    from_environment,
    from_group,
    from_mpi,
    from_store,
    tcp,
    threads,
)
from ferry.errors import (
    DeadlineExceededError,
    DestroyedError,
    Error,
    EvictedError,
    ExhaustedError,
    InvalidArgumentError,
    MismatchError,
    PeerFailedError,
    PeerLeftError,
    RefusedError,
    SystemCallError,
    UnsupportedError,
    WaitInterruptedError,
)
from ferry.errors import renamed_class as _renamed_class
from ferry.group import Group
from ferry.logs import set_log
from ferry.metrics import serve_metrics
from ferry.results import Combined, Received

# As checkers of types know it; here and elsewhere `typing`, which takes 5 ms, is not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ferry import jax as jax
    from ferry import tensorflow as tensorflow
    from ferry import torch as torch
    from ferry.collectives import Choice, Collectives, Window
    from ferry.etcd import EtcdStore
    from ferry.experts import BatchBalancer, ExpertPlacement
    from ferry.latency import LatencyCombined, LatencyExchange, LatencyReceived
    from ferry.vault import Vault

__version__ = _ferry.version
#: Whether this build has the CUDA engine, for `Group(..., backend="cuda")`.
has_cuda: bool = _ferry.has_cuda

# Work that still waits for a peer on some stream must not keep the interpreter from ending.
_atexit.register(_ferry.interpreter_ends)

#: Modules, by their names here, that are imported when first asked for: `import ferry` stays short.
_ON_DEMAND = {
    "BatchBalancer": "experts",
    "Choice": "collectives",
    "Collectives": "collectives",
    "EtcdStore": "etcd",
    "ExpertPlacement": "experts",
    "LatencyCombined": "latency",
    "LatencyExchange": "latency",
    "LatencyReceived": "latency",
    "Vault": "vault",
    "Window": "collectives",
}
_MODULES = {"jax", "tensorflow", "torch", *_ON_DEMAND.values()}

#: Names of earlier releases, which go with the next one; exceptions: ferry.errors.
_RENAMED_STATS: dict[str, type] = {
    "MemoryUse": MemoryStats,
    "NetworkUse": NetworkStats,
    "NicUse": NicStats,
    "TimeUse": TimeStats,
}


def __getattr__(name: str) -> Any:
    where = name if name in _MODULES else _ON_DEMAND.get(name)
    if where is not None:
        import importlib

        try:
            module = importlib.import_module(f"ferry.{where}")
        except ModuleNotFoundError as error:
            if error.name != where:  # the framework is there, but something that it needs is not
                raise
            message = f"ferry.{where} needs {where}, which is not installed: pip install {where}"
            raise AttributeError(message, name=name) from error
        if name in _MODULES:
            return module
        value = globals()[name] = getattr(module, name)
        return value
    if name in _RENAMED_STATS:
        new = _RENAMED_STATS[name]
        message = f"ferry.{name} is deprecated; use ferry.{new.__name__}"
        _warnings.warn(message, DeprecationWarning, stacklevel=2)
        return new
    return _renamed_class(name, __name__)


def __dir__() -> list[str]:
    """Without the frameworks, one of which may not be installed: `help` imports what is here."""
    return sorted({*globals(), *_ON_DEMAND})


__all__ = [
    "BatchBalancer",
    "Bootstrap",
    "Choice",
    "Collectives",
    "Combined",
    "CompressionStats",
    "DeadlineExceededError",
    "DestroyedError",
    "Error",
    "EtcdStore",
    "Event",
    "EvictedError",
    "ExhaustedError",
    "ExpertPlacement",
    "Group",
    "GroupView",
    "InvalidArgumentError",
    "LatencyCombined",
    "LatencyExchange",
    "LatencyReceived",
    "MemoryStats",
    "MismatchError",
    "NetworkStats",
    "NicStats",
    "PeerFailedError",
    "PeerLeftError",
    "Plan",
    "Received",
    "RefusedError",
    "Stream",
    "SystemCallError",
    "TimeStats",
    "UnsupportedError",
    "Vault",
    "WaitInterruptedError",
    "Window",
    "from_all_gather",
    "from_environment",
    "from_group",
    "from_mpi",
    "from_store",
    "has_cuda",
    "serve_metrics",
    "set_log",
    "tcp",
    "threads",
]
