"""Models with experts over ranks inside DDP and FSDP: they train what one rank with all experts and
tokens would, and a wrapper that would mix the ranks' experts is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.__version__ < "2.7":
    pytest.skip("fully_shard of this torch takes no ignored_params", allow_module_level=True)

import data_parallel_bodies as bodies
from compiled_bodies import TRACES_ANY_BACKWARD
from expert_parallel_bodies import Experts
from rank_processes import RankProcesses
from rank_threads import run_ranks

import ferry
import ferry.torch as ft

pytestmark = pytest.mark.timeout(120)

Run = Any


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(4, "cpu", bodies.with_process_group)
    yield made
    made.stop()


@pytest.fixture
def run(processes: RankProcesses, tmp_path: Path) -> Run:
    """`run(body, ..., experts=8)` on four ranks, with a process group of torch."""
    meeting = str(tmp_path / "meeting")
    return lambda body, *arguments, **config: processes.run(body, meeting, *arguments, **config)


DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True, "broadcast_buffers": False},
]


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_ddp_trains_as_one_rank_does(run: Run, options: dict[str, Any]) -> None:
    run(bodies.ddp, options, experts=7)


def test_ddp_of_a_model_that_is_moved(run: Run) -> None:
    run(bodies.ddp_of_a_model_that_is_moved)


def test_ddp_that_adds_batches_up(run: Run) -> None:
    run(bodies.ddp_that_adds_batches_up)


@pytest.mark.parametrize("name", bodies.DDP_MISTAKES)
def test_ddp_that_would_overwrite_experts_is_refused(run: Run, name: str) -> None:
    run(bodies.refuses_ddp, name)


def test_ddp_that_is_right_without_help(run: Run) -> None:
    run(bodies.ddp_that_is_right_without_help)


def test_fsdp_trains_as_one_rank_does(run: Run) -> None:
    run(bodies.fsdp, experts=7)


def test_fsdp_of_a_model_without_memory(run: Run) -> None:
    run(bodies.fsdp_of_a_model_without_memory)


@pytest.mark.parametrize("name", bodies.FSDP_MISTAKES)
def test_fsdp_that_would_mix_experts_is_refused(run: Run, name: str) -> None:
    run(bodies.refuses_fsdp, name)


def test_fsdp_that_would_mix_experts_is_refused_by_decode(run: Run) -> None:
    run(bodies.refuses_decode_with_fsdp)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_that_would_mix_experts_is_refused(run: Run, use_orig_params: bool) -> None:
    run(bodies.refuses_fsdp1, use_orig_params)


def test_fsdp_that_is_right_without_help(run: Run) -> None:
    run(bodies.fsdp_that_is_right_without_help)


@pytest.mark.slow
def test_compiled(run: Run) -> None:
    if not TRACES_ANY_BACKWARD:
        pytest.skip("this torch may not trace a backward of sizes that follow the routes")
    run(bodies.compiled)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_groups_side_by_side(run: Run, wrapper: str) -> None:
    run(bodies.side_by_side, wrapper)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(
        ferry.InvalidArgumentError, match=r"a Linear without .*ExpertParallel; expected"
    ):
        ft.ignore_experts(torch.nn.Linear(2, 2))
    with pytest.raises(ferry.InvalidArgumentError, match=r"None .*expected a torch.nn.Mod"):
        ft.ignore_experts(None)  # type: ignore[arg-type]


def test_parameters_that_come_later_and_frozen_ones() -> None:
    """Each gradient is divided once, whenever the parameter came, and none of a group of one."""

    def body(group: ferry.Group) -> None:
        layer = ft.ExpertParallel(group, Experts(bodies.part(bodies.tables(group.experts), group)))
        (frozen,) = layer.parameters()
        frozen.requires_grad_(False)
        ft.ignore_experts(layer)
        x, ids, weights, _ = bodies.batch(0, group.rank, group.experts)
        grads = []
        for _ in range(2):
            layer.experts.tables = torch.nn.Parameter(frozen.clone())
            layer(x, ids, weights).sum().backward()
            grads.append(layer.experts.tables.grad)
        assert torch.equal(*grads)
        frozen.requires_grad_()
        layer.experts.tables = frozen
        layer(x, ids, weights).sum().backward()
        assert torch.equal(frozen.grad, grads[0])
        other = ft.ExpertParallel(group, Experts(frozen.detach()))
        other(x, ids, weights).sum().backward()
        assert torch.equal(other.experts.tables.grad / group.size, grads[0])

    for ranks in (1, 2):
        run_ranks(ranks, body, **bodies.CONFIG)
