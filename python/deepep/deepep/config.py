"""Settings of models that are wrapped later."""

from __future__ import annotations

from dataclasses import dataclass

from ferry.arguments import choice, describe, refuse

_TOPOLOGIES = {
    "auto": "automatic",
    "direct": "direct",
    "hierarchical": "hierarchical",
    "ring": "ring",
    "tree": "tree",
}
_COMPRESSIONS = {"bf16": "bf16", "f16": "f16", "e4m3": "e4m3"}


@dataclass(frozen=True)
class Config:
    """What `ferry.torch.DistributedDataParallel` is given."""

    format: str = "exact"
    algorithm: str = "automatic"


_config = Config()


def set_config(*, compression: bool | str = False, topology: str = "auto") -> Config:
    """Settings for models that `DistributedDataParallel` wraps from now on, of this process; all
    ranks set the same. What is not named goes back to its default.

    Args:
        compression: of f32 gradients between hosts. False: exact. True: chosen in each call by the
            time that it saves, which may be exact. "bf16", "f16", "e4m3" (8 bits, with a scale for
            each 128): always. Sums are in fp32, and inside a host gradients are never compressed.
        topology: "Hierarchical": sums inside each host, then across, then back. "Direct", "Ring",
            "Tree": as they are called. "Auto": whichever is expected to take the least time.
    """
    global _config
    if isinstance(compression, bool):
        format = "auto" if compression else "exact"
    elif isinstance(compression, str):
        format = choice("set_config: compression", compression.lower(), _COMPRESSIONS)
    else:
        refuse("set_config: compression", describe(compression), "True, False or a format")
    if not isinstance(topology, str):
        refuse("set_config: topology", describe(topology), "a word")
    _config = Config(format, choice("set_config: topology", topology.lower(), _TOPOLOGIES))
    return _config


def get_config() -> Config:
    """The settings now."""
    return _config
