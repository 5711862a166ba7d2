"""Signals of blocks of rows that are made while a combine runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_ep.errors import refuse, require, require_integer
from deep_ep.low_latency_checks import check_tensor

_SIGNALS = (torch.int32, torch.uint32)


class Blocks(NamedTuple):
    """Signals, one for each block of so many rows of an expert; counts: rows of each expert."""

    counts: Tensor | None
    signals: Tensor | None
    rows: int
    threshold: int


def signals_of(
    call: str, blocks: Blocks, experts: Blocks, made: Any, num_sms: int
) -> dict[str, Any]:
    """What Ferry's combine takes. made: the round that it answers. One of the two has signals."""
    name, given = ("comp_signal", blocks) if experts.signals is None else ("src_signals", experts)
    if given.signals is None or (blocks.signals is not None and experts.signals is not None):
        got = "both" if given.signals is not None else "None"
        refuse(call, "comp_signal, src_signals", got, "one of the two beside overlap=True")
    local, room = made.source_token.shape
    require(num_sms == 0, call, "num_sms", num_sms, "0: CPU memory takes no SMs")
    rows = require_integer(call, "block_m", given.rows, 1, "at least 1")
    number = "threshold" if given is blocks else "src_signal_expect_value"
    threshold = _threshold(call, number, given)
    of_expert = -(-room // rows)
    check_tensor(call, name, given.signals, _SIGNALS, (local * of_expert,))
    good = not given.signals.is_cuda
    require(good, call, name, "a tensor on a GPU", "one in CPU memory: no kernel waits for blocks")
    if given.counts is not None:
        check_tensor(call, "packed_recv_count", given.counts, (torch.int32,), (local,))
        good = torch.equal(given.counts, made.counts)
        expected = f"{made.counts.tolist()}, of the dispatch"
        require(good, call, "packed_recv_count", given.counts.tolist(), expected)
    signals = given.signals.view(local, of_expert)
    return {"signals": signals, "block_rows": rows, "threshold": threshold}


def _threshold(call: str, name: str, given: Blocks) -> int:
    unsigned = isinstance(given.signals, Tensor) and given.signals.dtype == torch.uint32
    least, most = (0, 2**32 - 1) if unsigned else (-(2**31), 2**31 - 1)
    expected = f"{least} to {most}, for signals of {'uint32' if unsigned else 'int32'}"
    threshold = require_integer(call, name, given.threshold, least, expected)
    require(threshold <= most, call, name, threshold, expected)
    return threshold
