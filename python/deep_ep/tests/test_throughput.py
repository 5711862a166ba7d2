"""Throughput mode of the drop-in: every method with every argument, against the definition.

Ranks are threads of one process: a call that held the GIL while it waits would wait for ever.
"""

from __future__ import annotations

from typing import Any

import buffer_bodies
import handle_bodies
import pytest
import throughput_bodies as bodies
from rank_buffers import run_buffers

SIZES = (1, 2, 4, 8)
BODIES = [*bodies.ALL, *handle_bodies.ALL, *buffer_bodies.ALL]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_cpu(body: Any, size: int) -> None:
    run_buffers(size, lambda buffer: body(buffer, "cpu"))


@pytest.mark.parametrize(
    ("size", "some"),
    [
        (3, (bodies.layouts, handle_bodies.handle_contents, handle_bodies.saved_handles)),
        (12, (bodies.layouts, bodies.lopsided)),
        (16, (bodies.layouts, handle_bodies.handle_contents, bodies.internode_names)),
        (16, (handle_bodies.copies_of_another, *buffer_bodies.ALL)),
    ],
)
def test_other_numbers_of_ranks(size: int, some: Any) -> None:
    run_buffers(size, lambda buffer: [body(buffer, "cpu") for body in some])
