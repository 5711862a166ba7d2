"""The CUDA engine from Python, and the same bodies on the host engine, which shows that they test.

Ranks are processes, because ranks that share a GPU must be; one test has them as threads, each with
a GPU of its own. Run on a machine with GPUs: pytest -m gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compiled_bodies
import exchange_bodies as bodies
import gpu_bodies
import numpy as np
import pytest
import quantised_bodies
import torch
from exchange_case import EXPERTS
from gpus import GPUS, needs_gpu
from rank_processes import RankProcesses, free_port, kept
from rank_threads import run_ranks

import ferry
from ferry.streams import chosen_gpu, stream_handle

gpu = pytest.mark.gpu
ON_GPUS = [
    pytest.param("cuda", size, marks=[gpu, needs_gpu], id=f"cuda-{size}") for size in (1, 2, 4)
]
ANYWHERE = [pytest.param("cpu", 2, id="cpu-2"), *ON_GPUS]
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """`pool(device, size)`: processes that stay from test to test."""
    with kept(RankProcesses) as get:
        yield get


@pytest.mark.parametrize("worst_case", [0, 160])
@pytest.mark.parametrize("order", ["rank_major", "expert_major"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("device", "size"), ANYWHERE)
def test_exchange(
    pool: Any, device: str, size: int, dtype: str, order: str, worst_case: int
) -> None:
    rows = worst_case * 3 if order == "expert_major" else worst_case  # slots, padded
    pool(device, size).run(bodies.exchange, dtype, order, rows)


@pytest.mark.parametrize(("device", "size"), ANYWHERE)
def test_own_output(pool: Any, device: str, size: int) -> None:
    pool(device, size).run(bodies.exchange, "float32", "rank_major", 0, True)


EITHER = (
    bodies.biases_and_own_output,
    bodies.memory_goes_back,
    bodies.results_outlive_the_group,
    bodies.the_others_go_on_when_a_rank_leaves,
    *quantised_bodies.ALL,
)


@pytest.mark.parametrize("body", EITHER, ids=lambda body: body.__name__)
@pytest.mark.parametrize(("device", "size"), ANYWHERE)
def test_on_either_engine(pool: Any, device: str, size: int, body: Any) -> None:
    pool(device, size).run(body)


@pytest.mark.parametrize("body", gpu_bodies.ALL, ids=lambda body: body.__name__)
@pytest.mark.parametrize(("device", "size"), ON_GPUS)
def test_on_gpus(pool: Any, device: str, size: int, body: Any) -> None:
    pool(device, size).run(body)


@pytest.mark.parametrize("worst_case", [0, 64])
@pytest.mark.parametrize(("device", "size"), ANYWHERE)
def test_gradients(pool: Any, device: str, size: int, worst_case: int) -> None:
    pool(device, size).run(bodies.gradients, worst_case, experts=compiled_bodies.EXPERTS)


@pytest.mark.parametrize("worst_case", [0, 64])
@pytest.mark.parametrize("name", list(compiled_bodies.LAYERS))
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize(("device", "size"), ON_GPUS[1:2])
def test_compiled(
    pool: Any, device: str, size: int, backend: str | None, name: str, worst_case: int
) -> None:
    processes = pool(device, size)
    config: dict[str, Any] = {"experts": compiled_bodies.EXPERTS, "deadline": 100.0}
    processes.run(compiled_bodies.train_steps, backend, name, worst_case, **config)


@gpu
@needs_gpu
def test_cupy(pool: Any) -> None:
    pytest.importorskip("cupy")
    pool("cuda", 2).run(gpu_bodies.cupy_arrays)


@gpu
@pytest.mark.skipif(GPUS < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("bound", [True, False])
def test_nccl_process_group(pool: Any, bound: bool) -> None:
    pool("cuda", 2).run(gpu_bodies.nccl, free_port(), bound)


@gpu
@pytest.mark.skipif(GPUS < 2, reason="ranks as threads take a GPU each")
def test_ranks_as_threads() -> None:
    bootstraps = ferry.threads(2)

    def one(rank: int) -> None:
        torch.cuda.set_device(rank)
        for dtype in ("float32", "bfloat16"):
            torch.ones(1, device=f"cuda:{rank}").to(getattr(torch, dtype)).float().mul_(2).cpu()
        with ferry.Group(bootstraps[rank], experts=EXPERTS, backend="cuda", deadline=30.0) as group:
            assert group.device == f"cuda:{rank}"
            bodies.exchange(group, "bfloat16", "rank_major", 0)
            group.barrier()

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(one, rank) for rank in range(2)]:
            done.result()


@gpu
@needs_gpu
def test_choice_of_a_gpu() -> None:
    def made(device: Any) -> str:
        boot = ferry.threads(1)[0]
        with ferry.Group(boot, experts=1, backend="cuda", device=device) as group:
            assert f", {group.device}>" in repr(group)
            return group.device

    last = f"cuda:{GPUS - 1}"
    assert made(GPUS - 1) == made(last) == made(torch.device(last)) == last
    assert made(None) == made("cuda") == f"cuda:{torch.cuda.current_device()}"
    hint = ferry.Group.memory_hint(experts=1, ranks=1, backend="cuda")
    with ferry.Group(ferry.threads(1)[0], experts=1, backend="cuda") as group:
        assert group.memory() == hint
    with pytest.raises(ferry.InvalidArgumentError, match=f"device: got {GPUS}"):
        made(GPUS)


# Without GPUs.


def test_a_host_group_takes_no_gpu_words() -> None:
    def body(group: ferry.Group) -> None:
        assert group.device == "cpu"
        plan = group.plan(torch.zeros(2, 1, dtype=torch.int64))
        with pytest.raises(
            ferry.InvalidArgumentError, match=r"x: got a tensor on device meta; .*cpu"
        ):
            group.dispatch(torch.ones(2, 16, device="meta"), plan)
        for stream in (0, "side", torch.zeros(1)):
            with pytest.raises(ferry.InvalidArgumentError, match=r"stream: got .*host engine"):
                group.dispatch(torch.ones(2, 16), plan, stream=stream)
        group.dispatch(torch.ones(2, 16), plan, num_sms=3)  # there are none to give
        with pytest.raises(
            ferry.InvalidArgumentError, match="num_sms: got -1; expected at least 0"
        ):
            group.dispatch(torch.ones(2, 16), plan, num_sms=-1)
        group.record_stream(torch.ones(2))
        ferry.torch.record_stream(torch.ones(2))

    run_ranks(1, body)


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "gpu", 1.5, -1, True, torch.device("cpu")])
def test_devices_that_are_none(device: Any) -> None:
    with pytest.raises(ferry.InvalidArgumentError, match="Group: device: got"):
        chosen_gpu(device)


def test_devices_and_streams_in_all_their_words() -> None:
    for device in (3, "cuda:3", torch.device("cuda:3"), np.int64(3)):
        assert chosen_gpu(device) == 3
    if not torch.cuda.is_available():
        assert chosen_gpu(None) == chosen_gpu("cuda") == -1  # the runtime's own choice

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 77)

    assert stream_handle("stream", 5, 0) == 5
    assert stream_handle("stream", Stream(), 0) == 77
    for wrong in (True, -1, 2**64, "x", 1.0):
        with pytest.raises(ferry.InvalidArgumentError, match=r"^stream: got "):
            stream_handle("stream", wrong, 0)


def test_device_is_for_gpus() -> None:
    with pytest.raises(
        ferry.InvalidArgumentError, match=r"Group: device: got 0 .*backend=\"cuda\""
    ):
        ferry.Group(ferry.threads(1)[0], experts=1, device=0)


@pytest.mark.skipif(ferry.has_cuda, reason="this build has the CUDA engine")
def test_a_build_without_the_engine_says_so() -> None:
    with pytest.raises(ferry.UnsupportedError, match="FERRY_CUDA=ON"):
        ferry.Group(ferry.threads(1)[0], experts=1, backend="cuda", device=0)
    with pytest.raises(ferry.UnsupportedError, match="FERRY_CUDA=ON"):
        ferry.Stream.of_cuda(0, 0)


@pytest.mark.skipif(not ferry.has_cuda, reason="this build has the host engine only")
def test_the_stream_of_each_thread_is_refused() -> None:
    with pytest.raises(ferry.InvalidArgumentError, match="got cudaStreamPerThread"):
        ferry.Stream.of_cuda(2, 0)


def test_streams_of_workers_have_no_handle() -> None:
    stream = ferry.Stream()
    assert stream.device is None and stream.cuda_stream is None
