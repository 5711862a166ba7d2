"""Results are Ferry's own memory and inputs are read where they lie."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from rank_threads import run_ranks

import ferry


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_received_rows_are_registered_memory(framework: str) -> None:
    def body(group: ferry.Group) -> Any:
        x: Any = np.ones((4, 16), np.float32)
        if framework == "torch":
            x = torch.from_numpy(x)
        plan = group.plan(np.tile([0, 4], (4, 1)))
        got = group.dispatch(x, plan)
        assert not group.is_registered(x)
        assert group.is_registered(got.x)
        address = got.x.data_ptr() if framework == "torch" else got.x.ctypes.data
        assert group.is_registered(address)
        got.x[:] = 7  # what peers will read, in place
        return group.combine(got.x, plan).x

    for y in run_ranks(2, body):
        assert (y == 14).all()


def test_memory_goes_back_when_the_last_array_is_dropped() -> None:
    def body(group: ferry.Group) -> None:
        plan = group.plan(np.zeros((8, 1), np.int64))
        before = group.memory().arena_used_bytes
        got = group.dispatch(np.ones((8, 1024), np.float32), plan)
        x = got.x
        del got
        held = group.memory().arena_used_bytes
        view = x[2:4, :3]
        del x
        if group.rank == 0:
            assert held > before
            assert group.memory().arena_used_bytes >= 8 * 4096
            assert view.tolist() == [[1.0] * 3] * 2
        del view
        assert group.memory().arena_used_bytes == before

    run_ranks(2, body)


def test_arrays_outlive_the_group() -> None:
    def body(group: ferry.Group) -> Any:
        plan = group.plan(np.zeros((2, 1), np.int64))
        ones = torch.ones(2, 16)
        return ones, group.dispatch(ones, plan)

    for rank, (ones, got) in enumerate(run_ranks(2, body)):
        gc.collect()
        assert torch.equal(got.x, ones.repeat(2, 1) if rank == 0 else ones[:0])


def test_empty_is_registered_and_of_the_framework_asked_for() -> None:
    def body(group: ferry.Group) -> None:
        like = torch.zeros(1)
        made = [
            (group.empty((3, 16), "bf16"), np.ndarray, np.uint16),
            (group.empty((3, 16), ml_dtypes.bfloat16), np.ndarray, ml_dtypes.bfloat16),
            (group.empty((3, 16), np.float32), np.ndarray, np.float32),
            (group.empty((3, 16), "f16", like="torch"), torch.Tensor, torch.float16),
            (group.empty((3, 16), "e4m3", like=like), torch.Tensor, torch.float8_e4m3fn),
            (group.empty([3, 16], torch.bfloat16), torch.Tensor, torch.bfloat16),
            (group.empty((2, 3, 16), torch.int64), torch.Tensor, torch.int64),
        ]
        for tensor, kind, dtype in made:
            assert isinstance(tensor, kind)
            assert tensor.dtype == dtype
            assert tuple(tensor.shape)[-2:] == (3, 16)
            assert group.is_registered(tensor)
        with pytest.raises(ferry.ExhaustedError):
            group.empty((1 << 20, 1 << 10), "f32")

    run_ranks(1, body)


def test_inputs_of_a_stream_are_kept_until_it_is_done() -> None:
    def body(group: ferry.Group) -> Any:
        stream = ferry.Stream()
        routes = np.zeros((4, 1), np.int64)
        x = np.full((4, 1024), group.rank + 1, np.float32)
        kept = weakref.ref(x)
        plan = group.plan(routes, stream=stream)
        got = group.dispatch(x, plan, stream=stream)
        del x, routes
        done = kept() is None  # may only be dropped early if the work is done
        ready = got.event.ready()
        assert ready or not done
        got.event.wait()
        stream.synchronize()
        assert kept() is None
        return got.x

    first, second = run_ranks(2, body)
    assert (first[:4] == 1).all()
    assert (first[4:] == 2).all()
    assert len(second) == 0
