"""Sizes and numbers of SMs that callers ask for before they have a buffer."""

from __future__ import annotations

import math
from typing import Any

import torch

from deep_ep.errors import refuse, require_integer, require_positive
from ferry.arguments import shown

SIZE_STEP = 2 << 20
"""Bytes, of which buffer sizes are multiples."""
MOST_BYTES = 1 << 62
"""Of a buffer: what ranks tell each other."""
TMA_STEP = 32
"""Bytes, of which rows of a grouped GEMM and tensors of a bucket are multiples."""
_NVLINK_GBS, _RDMA_GBS = 400.0, 50.0


def buffer_bytes(ranks: int, tokens: int, hidden: int, topk: int, *, fp8: bool) -> int:
    """What a dispatch and its combine bring at most: rows of every token of every rank, with their
    scales, ids and weights, and the sums. topk 0: not known, taken as none."""
    row = hidden + 4 * -(-hidden // 128) if fp8 else 2 * hidden
    received = ranks * tokens * (row + topk * (8 + 4) + 4)
    return round_up(received + tokens * (2 * hidden + 4 * topk), SIZE_STEP)


def round_up(value: int, step: int) -> int:
    """To the next multiple."""
    return -(-value // step) * step


def theoretical_sms(
    call: str,
    links: tuple[int, int, float, float],
    sm_gbs: tuple[float, float],
    least: int,
) -> int:
    """SMs that fill the links, an even number, of the current GPU's if there is one.

    links: domains, ranks of one, GB/s of a NIC and of NVLink, 0: as on an H100.
    """
    domains, ranks, rdma, nvlink = links
    for name, value in (("rdma_gbs", rdma), ("nvlink_gbs", nvlink)):
        require_positive(call, name, value, "0 or more", or_zero=True)
    for name, value in zip(("sm_read_gbs", "sm_write_gbs"), sm_gbs):
        require_positive(call, name, value, "more than 0")
    share = 1 - 1 / ranks  # of the rows go to other ranks of the domain
    gbs = (nvlink or _NVLINK_GBS) / share if share > 0 else 0.0
    if domains > 1:
        across = (rdma or _RDMA_GBS) / (1 - 1 / domains)
        gbs = min(gbs, across) if share > 0 else across
    wanted = max(least, math.ceil(gbs / min(sm_gbs)))
    sms = round_up(wanted, 2)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        sms = min(sms, torch.cuda.get_device_properties().multi_processor_count // 2 * 2)
    return sms


def size_hint(
    call: str, group: Any, sizes: tuple[int, int, int], fp8: bool, multiple_reduction: bool
) -> int:
    """sizes: tokens, hidden, top-k."""
    tokens, hidden, topk = (
        require_integer(call, name, value, 0, "0 or more")
        for name, value in zip(("num_max_tokens_per_rank", "hidden", "num_topk"), sizes)
    )
    ranks = ranks_of(call, group)
    least = buffer_bytes(ranks, tokens, hidden, topk, fp8=fp8)
    return least if multiple_reduction else buffer_bytes(ranks, tokens, 2 * hidden, topk, fp8=False)


def ranks_of(call: str, group: Any) -> int:
    """How many there are; not collective."""
    size = getattr(group, "Get_size", getattr(group, "size", None))
    if not callable(size) or isinstance(group, (type, torch.Tensor)):
        refuse(call, "group", shown(group), "a process group, or a communicator of mpi4py")
    found: int = size()
    return found
