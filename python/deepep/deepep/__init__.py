"""Data-parallel training over Ferry in three calls::

deepep.set_config(compression=True, topology="Hierarchical")
deepep.optimize()
model = deepep.DistributedDataParallel(model, device_ids=[0])
"""

from __future__ import annotations

try:
    import ferry.torch as _ferry_torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "deepep needs Ferry and torch: pip install . ./python/deepep in the root of Ferry's sources"
    ) from error

from deepep.config import Config, get_config, set_config
from deepep.machine import Optimized, optimize
from deepep.parallel import DistributedDataParallel

__version__ = "0.1.0"
__all__ = [
    "Config",
    "DistributedDataParallel",
    "Optimized",
    "get_config",
    "optimize",
    "set_config",
]
