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
_COMPRESSIONS = ("bf16", "f16", "e4m3")


@dataclass(frozen=True)
class Config:
    """What `ferry.torch.DistributedDataParallel` is given."""

    format: str = "exact"
    algorithm: str = "automatic"


_config = Config()


def set_config(*, compression: bool | str | None = None, topology: str | None = None) -> Config:
    """Settings for models that `DistributedDataParallel` wraps from now on, of this process; all
    ranks set the same. What is not given stays as it is; at first: False and "Auto".

    Args:
        compression: of f32 gradients between hosts. False: exact. True: chosen in each call by the
            time that it saves, which may be exact. "bf16", "f16", "e4m3" (8 bits, with a scale for
            each 128): always. Sums are in fp32, and inside a host gradients are never compressed.
        topology: "Hierarchical": sums inside each host, then across, then back. "Direct", "Ring",
            "Tree": as they are called. "Auto": whichever is expected to take the least time. Ring
            and tree round at every hop, so they are refused with compression.
    """
    global _config
    format = _config.format if compression is None else _format_of(compression)
    algorithm = _config.algorithm
    if topology is not None:
        if not isinstance(topology, str):
            refuse("set_config: topology", describe(topology), "a word")
        algorithm = choice("set_config: topology", topology.lower(), _TOPOLOGIES)
    if algorithm in ("ring", "tree") and format != "exact":
        refuse(
            "set_config: topology",
            f'"{algorithm.capitalize()}" with compression, which it would round at every hop',
            'compression=False, or "Auto", "Direct" or "Hierarchical"',
        )
    _config = Config(format, algorithm)
    return _config


def _format_of(compression: bool | str) -> str:
    if isinstance(compression, bool):
        return "auto" if compression else "exact"
    word = compression.lower() if isinstance(compression, str) else ""
    if word not in _COMPRESSIONS:
        expected = ", ".join(f'"{format}"' for format in _COMPRESSIONS)
        refuse(
            "set_config: compression", describe(compression), f"True, False or one of {expected}"
        )
    return word


def get_config() -> Config:
    """The settings now."""
    return _config
