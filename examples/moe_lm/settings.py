"""The numbers of the demo: model, data and training, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What every rank must agree on. The same settings give the same run on any number of ranks."""

    seed: int = 7

    # Model.
    width: int = 128
    layers: int = 2
    heads: int = 4
    filter_taps: int = 4
    experts: int = 16
    top_k: int = 2
    expert_width: int = 256

    # Data. `batch` sequences of `context` bytes over all ranks together, in `shares` equal parts
    # of which a rank takes as many as every other.
    batch: int = 16
    shares: int = 4
    context: int = 128
    held_out_windows: int = 512
    quick_windows: int = 32

    # Training.
    steps: int = 250
    warm_up: int = 60
    learning_rate: float = 6e-3
    weight_decay: float = 0.01
    balance_rate: float = 0.05
    evaluate_every: int = 25
