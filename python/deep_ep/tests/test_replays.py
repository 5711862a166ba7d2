"""The call sequences of frameworks, replayed, with values compared, in CPU memory. On GPUs:
test_process_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
import replay_deepep
import replay_megatron
import replay_megatron_hybrid
from compatibility import replays
from rank_buffers import run_buffers


@pytest.mark.parametrize("replay", replays(), ids=lambda replay: replay.__name__)
def test_four_ranks(replay: Any) -> None:
    run_buffers(4, lambda buffer: replay(buffer, "cpu"), num_nvl_bytes=1 << 20)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    "replay",
    (*replay_megatron.ALL, *replay_megatron_hybrid.ALL),
    ids=lambda replay: replay.__name__,
)
def test_other_numbers_of_ranks(replay: Any, ranks: int) -> None:
    run_buffers(ranks, lambda buffer: replay(buffer, "cpu"), num_nvl_bytes=1 << 20)


@pytest.mark.parametrize("replay", replay_deepep.ALL, ids=lambda replay: replay.__name__)
def test_eight_ranks(replay: Any) -> None:
    run_buffers(8, lambda buffer: replay(buffer, "cpu"))


def test_several_hosts() -> None:
    run_buffers(16, lambda buffer: replay_deepep.throughput_program(buffer, "cpu"))
