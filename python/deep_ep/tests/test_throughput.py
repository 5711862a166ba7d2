"""Throughput mode of the drop-in: every method with every argument, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import throughput_bodies as bodies
from rank_buffers import run_buffers

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", bodies.ALL, ids=lambda body: body.__name__)
def test_on_cpu(body: Any, size: int) -> None:
    run_buffers(size, lambda buffer: body(buffer, "cpu"))
