"""Replaced words are found where they must not stand, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import words


@pytest.mark.parametrize(
    ("name", "line", "use"),
    [
        ("src/engine/a.cpp", "  if (kPatience > 0) {", "SpinDeadline"),
        ("src/engine/a.cpp", "  channel.look(stage);", "poll"),
        ("docs/guide.md", "Waits end at the next look.", "poll"),
        ("src/fabric/ofi/a.hpp", "/// The lane of a peer.", "endpoint"),
        ("src/host/a.cpp", "  pulse_.beat();", "heartbeat"),
        ("src/host/throughput/a.cpp", "  const Lane to = at(0);", "destination"),
        ("src/cuda/kernels/throughput/a.cuh", "  TokenLanes to;", "destination"),
        ("tests/cuda/a.cu", "  const std::uint64_t lie = 1;", "protocol violation"),
        ("src/cuda/latency/a.cpp", "  return at.half();", "parity"),
        ("src/core/a.hpp", "// Rows from beyond the line.", "domain"),
        ("src/cuda/domains/a.cpp", "  for (int piece = 0;", "portion"),
        ("src/host/collectives/a.cpp", "  bytes(stage_);", "staging, staging buffer"),
        ("src/protocol/a.hpp", "  FlagRow row_;", "FlagArray, array of flags"),
        ("src/host/collectives/a.hpp", "  CodePlan last{};", "formats, instead of the plan of"),
        ("include/ferry/a.hpp", "  int sms = 0;", "num_sms"),
        ("src/host/a.cpp", "  options.waits = view;", "wait_ns"),
    ],
)
def test_a_replaced_word(name: str, line: str, use: str) -> None:
    (fault,) = words.check({name: f"// first\n{line}\n"})
    assert fault.startswith(f"{name}:2: ")
    assert f": use {use}" in fault


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("src/cuda/kernels/latency/a.cuh", "const int lane = threadIdx.x % 32;"),
        ("src/core/a.cpp", "// What looks like a plan is looked up."),
        ("src/core/a.cpp", "// Rows lie where they were outlined."),
        ("src/bootstrap/a.cpp", "notice.say(rank);"),
        ("src/fabric/a.cpp", "for (const Piece& piece : pieces) {"),
        ("include/ferry/a.hpp", "  OldName<int> sms{};"),
        ("python/ferry/a.py", '@renamed_keywords(sms="num_sms", waits="wait_ns")'),
        ("tools/ferry/a.cpp", '{"--sms", "sms"}'),
    ],
)
def test_another_meaning_stays(name: str, line: str) -> None:
    assert words.check({name: line + "\n"}) == []


def test_words_of_the_glossary_are_found_in_any_style() -> None:
    assert {"rank", "LL128", "failure broadcast"} <= set(words.glossary())
    text = (
        "a staging buffer\nkStagingBuffers\nstaging_buffer_\nStagingBuffer x;\nunstaging bufferx\n"
    )
    assert len(words.places("staging buffer", {"a.cpp": text})) == 4
    assert len(words.places("row", {"a.cpp": "throw;\nkRows\nrecv_rows\nGridRow\narrow\n"})) == 3
