"""torch.compile: the operators of torch.ops.ferry, eager and compiled, on processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compiled_bodies as bodies
import pytest
import torch
from rank_processes import RankProcesses
from rank_threads import run_ranks

import ferry
import ferry.torch as ft


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(2, "cpu")
    yield processes
    processes.stop()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("worst_case", [0, 64])
@pytest.mark.parametrize("name", list(bodies.LAYERS))
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_layers_train(
    ranks: RankProcesses, backend: str | None, name: str, worst_case: int
) -> None:
    """Bits as on one rank; new sizes are no reason to compile again and again."""
    if backend == "aot_eager" and worst_case == 0 and not bodies.TRACES_ANY_BACKWARD:
        pytest.skip("this torch may not trace a backward of sizes that follow the routes")
    compiled = ranks.run(bodies.train_steps, backend, name, worst_case, experts=bodies.EXPERTS)
    assert all(count == 0 if backend is None else 1 <= count <= 2 for count in compiled)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_tokens_cross_as_fp8(ranks: RankProcesses, backend: str | None) -> None:
    ranks.run(bodies.quantised_layer, backend, experts=bodies.EXPERTS)


@pytest.mark.timeout(280)
def test_operators_pass_the_checks_of_torch(ranks: RankProcesses) -> None:
    ranks.run(bodies.checks_of_torch, experts=bodies.EXPERTS)


@pytest.mark.timeout(280)
def test_plans_end_with_their_tensors(ranks: RankProcesses) -> None:
    ranks.run(bodies.plan_keeps_nothing, experts=bodies.EXPERTS)


def test_handles_that_name_nothing_are_refused() -> None:
    def body(group: ferry.Group) -> None:
        ids = torch.zeros(2, 1, dtype=torch.int64)
        x = torch.ones(2, 16)
        with pytest.raises(
            ferry.DestroyedError, match=r"plan: group: got handle 999\d*, .*no group"
        ):
            torch.ops.ferry.plan(ids, 999_999_999)
        plan = ft.plan(group, ids)
        copied = plan._replace(tensor=plan.tensor.clone())
        assert torch.equal(ft.dispatch(group, copied, x).x, x)
        copied_of_none = copied
        del plan
        with pytest.raises(ferry.DestroyedError, match="names no plan now; expected the tensor"):
            ft.dispatch(group, copied_of_none, x)
        wrong = copied._replace(tensor=torch.tensor([group.handle]))
        with pytest.raises(ferry.InvalidArgumentError, match="plan: got the handle of a group"):
            ft.dispatch(group, wrong, x)
        with pytest.raises(ferry.InvalidArgumentError, match=r"i64 \[1\] tensor"):
            ft.dispatch(group, copied._replace(tensor=ids), x)
        kept = ft.plan(group, ids)
        with pytest.raises(ferry.InvalidArgumentError, match="tokens: got 3; expected 2"):
            ft.combine(group, kept._replace(tokens=3), x)
        with pytest.raises(ferry.InvalidArgumentError, match="group: got the handle of a plan"):
            torch.ops.ferry.plan(ids, int(kept.tensor.item()))

    run_ranks(1, body)


def test_the_operator_refuses_gradients_of_quantised_rows() -> None:
    def body(group: ferry.Group) -> None:
        x, weights = torch.ones(2, 16), torch.ones(2, 1)
        plan = ft.plan(group, torch.zeros(2, 1, dtype=torch.int64))
        common = (group.handle, 1, group.local_experts, "rank_major", 1, 0, 0, "e4m3", "f32")

        def run(x: torch.Tensor, weights: torch.Tensor) -> Any:
            return torch.ops.ferry.dispatch(x, plan.tensor, weights, *common)

        run(x, weights)
        for name in ("x", "topk_weights"):
            grad = [t.clone().requires_grad_(t is x and name == "x") for t in (x, weights)]
            grad[1].requires_grad_(name == "topk_weights")
            if torch.__version__ >= "2.5":
                with pytest.raises(
                    ferry.InvalidArgumentError, match=f"ferry::dispatch: {name}: got"
                ):
                    run(*grad)
            else:  # where torch does not tell the operator in time, its gradient refuses
                with pytest.raises(ferry.InvalidArgumentError, match="got the gradient of a call"):
                    sum(out.float().sum() for out in run(*grad) if out.requires_grad).backward()
            with torch.no_grad():
                run(*grad)
            with pytest.raises(ferry.InvalidArgumentError, match=f"torch.dispatch: {name}: got"):
                ft.dispatch(group, plan, grad[0], grad[1], format="e4m3")
            with torch.no_grad():
                ft.dispatch(group, plan, grad[0], grad[1], format="e4m3")

    run_ranks(1, body)


def test_a_group_is_not_kept_by_its_handle() -> None:
    group = ferry.Group(ferry.threads(1)[0], experts=1)
    handle = group.handle
    ids = torch.zeros(1, 1, dtype=torch.int64)
    torch.ops.ferry.plan(ids, handle)
    del group
    with pytest.raises(ferry.DestroyedError, match="names no group now"):
        torch.ops.ferry.plan(ids, handle)
