"""The default process group of torch for the ranks of a test, which meet at a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@contextmanager
def process_group(backend: str, meeting: str, boot: Any, seconds: float) -> Iterator[None]:
    """`boot` only says which rank of how many this is; a body may destroy the group itself."""
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=boot.rank,
        world_size=boot.size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
