"""send and recv from Python: arrays, streams, what differs, what is refused. The rest is tested in
C++."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import DEADLINE

import ferry

RANKS = 3


def on_ranks(body: Callable[[ferry.Collectives], Any], **config: Any) -> None:
    """`body(collectives)` on ranks that are threads."""
    bootstraps = ferry.threads(RANKS)

    def one(rank: int) -> None:
        with ferry.Collectives(
            bootstraps[rank], deadline=DEADLINE, memory_bytes=1 << 20, **config
        ) as ranks:
            body(ranks)
            ranks.barrier()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(one, range(RANKS)))


@pytest.mark.parametrize("domain_size", [0, 2])
def test_all_send_before_they_receive(domain_size: int) -> None:
    def body(ranks: ferry.Collectives) -> None:
        stream = ferry.Stream()
        after, before = (ranks.rank + 1) % RANKS, (ranks.rank - 1) % RANKS
        for x, got in [
            (np.full((3, 4), ranks.rank, np.float64).view(np.int64), np.zeros((3, 4), np.int64)),
            (torch.full((70_000,), ranks.rank), torch.zeros(70_000, dtype=torch.int64)),
        ]:
            expected = x - ranks.rank + before if isinstance(x, torch.Tensor) else None
            sent = ranks.send(x, after, tag=7, stream=stream)
            ranks.recv(got, before, tag=7, stream=stream).wait()
            sent.wait()
            if expected is not None:
                assert torch.equal(got, expected)
            else:
                assert (got.view(np.float64) == before).all()

    on_ranks(body, domain_size=domain_size)


def test_a_stream_keeps_arrays() -> None:
    def body(ranks: ferry.Collectives) -> None:
        if ranks.rank == 2:
            return
        stream = ferry.Stream()
        if ranks.rank == 0:
            event = ranks.send(np.arange(500_000), 1, stream=stream)
            gc.collect()
            event.wait()
        else:
            got = np.zeros(500_000, np.int64)
            ranks.recv(got, 0)
            assert (got == np.arange(500_000)).all()
        stream.synchronize()

    on_ranks(body)


def test_sizes_that_differ_are_named_on_both_sides() -> None:
    def body(ranks: ferry.Collectives) -> None:
        if ranks.rank == 2:
            return
        x = np.ones(5 - ranks.rank, np.float32)
        with pytest.raises(
            ferry.MismatchError,
            match=r"rank 0 sends 20 bytes to rank 1 \(tag 0\), "
            "which expects 16 bytes",
        ) as caught:
            ranks.send(x, 1) if ranks.rank == 0 else ranks.recv(x, 0)
        assert caught.value.peer == 1 - ranks.rank

    on_ranks(body)


def test_what_cannot_be_is_refused_with_words() -> None:
    def body(ranks: ferry.Collectives) -> None:
        x = np.ones(4, np.float32)
        frozen = np.ones(4, np.float32)
        frozen.flags.writeable = False
        for call, words in [
            (lambda: ranks.send(x, RANKS), "send: peer: got 3"),
            (lambda: ranks.recv(x, ranks.rank), "recv: peer: got"),
            (lambda: ranks.recv(frozen, (ranks.rank + 1) % RANKS), "recv: x: "),
            (lambda: ranks.send(x, 0, tag=1 << 40), "send: tag: got"),
            (lambda: ranks.send(np.ones((4, 4))[:, 1], 0), "send: x: got an array with strides"),
        ]:
            with pytest.raises(ferry.InvalidArgumentError, match=words):
                call()

    on_ranks(body)
