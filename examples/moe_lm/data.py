"""Real text for the demo: the source files of the Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

BYTES = 256

# Installed packages are not the standard library; distributions differ in which tests they ship;
# `encodings` and `pydoc_data` are generated tables rather than text.
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
_MOST_BYTES = 8 << 20
_HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """The text, one byte a token (int64), split by file into two parts that share no file."""

    train: torch.Tensor
    held_out: torch.Tensor
    files: int
    root: Path


def load_corpus(root: Path | None = None) -> Corpus:
    """Read `*.py` under `root` (default: this Python's standard library) in sorted order.

    Every tenth file is held out. Reading stops before the file that would pass 8 MiB.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = files = 0
    for name in names:
        content = (root / name).read_bytes()
        if total + len(content) > _MOST_BYTES:
            break
        parts[files % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1].append(content)
        total += len(content)
        files += 1
    train, held_out = (_as_tokens(b"".join(part)) for part in parts)
    if len(held_out) < 100_000:
        raise RuntimeError(
            f"too little text: {files} Python files, {total} bytes under {root}; "
            "install the standard library's sources (Debian, Ubuntu: libpython3-stdlib)"
        )
    return Corpus(train, held_out, files, root)


def batch_at(text: torch.Tensor, step: int, batch: int, context: int, seed: int) -> torch.Tensor:
    """The global batch of a step: `[batch, context + 1]` bytes from random places of `text`.

    Depends on nothing but the arguments, so every rank can cut its own share out of it.
    """
    generator = np.random.default_rng([seed, step])
    starts = torch.from_numpy(generator.integers(0, len(text) - context - 1, batch))
    return text[starts[:, None] + torch.arange(context + 1)]


def windows(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """`[count, context + 1]` bytes: windows spread evenly over the whole of `text`."""
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
    return text[starts[:, None] + torch.arange(context + 1)]


def bigram_loss(train: torch.Tensor, scored: torch.Tensor) -> tuple[float, float]:
    """Mean loss in nats of a byte-bigram model counted on `train`, on the windows `scored`.

    Smoothing: P(b | a) = (n(a, b) + s · P(b)) / (n(a) + s), P(b) the byte's share of the text with
    one added to each count. `s` is the best of a few on `scored` itself, which favours the bigram.
    Returns (loss, s).
    """
    pairs = torch.bincount(train[:-1] * BYTES + train[1:], minlength=BYTES * BYTES)
    pairs = pairs.reshape(BYTES, BYTES).double()
    single = torch.bincount(train, minlength=BYTES).double() + 1
    single /= single.sum()
    before, after = scored[:, :-1], scored[:, 1:]
    losses = []
    for strength in (0.1, 1.0, 10.0, 100.0):
        joint = pairs + strength * single
        table = joint / joint.sum(dim=1, keepdim=True)
        losses.append((-table.log()[before, after].mean().item(), strength))
    return min(losses)


def _as_tokens(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
