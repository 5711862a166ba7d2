"""ferry.torch.ExpertParallel against a layer whose experts are all here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import expert_parallel_bodies as bodies
import pytest
import torch
from compiled_bodies import TRACES_ANY_BACKWARD
from gpus import needs_gpu
from rank_processes import RankProcesses
from rank_threads import run_ranks, run_threads

import ferry
import ferry.torch as ft

OPTIONS: list[dict[str, int]] = [{}, {"alignment": 4}, {"max_recv_rows": 64}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 4])
def test_training_step(ranks: int, dtype: torch.dtype, options: dict[str, int]) -> None:
    run_ranks(ranks, lambda group: bodies.train(group, dtype, options), **bodies.CONFIG)


def test_training_step_in_fp8() -> None:
    run_ranks(3, bodies.train_in_fp8, **bodies.CONFIG)


@pytest.mark.parametrize("form", ["as_is", "e4m3"])
@pytest.mark.parametrize("batched", [False, True])
def test_decode_step(form: str, batched: bool) -> None:
    run_ranks(4, lambda group: bodies.decode(group, form, batched), **bodies.CONFIG)


@pytest.fixture(scope="module")
def gpus() -> Iterator[Any]:
    processes = RankProcesses(4, "cuda")
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def three_gpus() -> Iterator[RankProcesses]:
    processes = RankProcesses(3, "cuda")
    yield processes
    processes.stop()


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("leaves", ["forward", "backward", "sum_copies"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_again_after_a_rank_left(
    three_gpus: RankProcesses, device: str, leaves: str
) -> None:
    """With experts elsewhere than before."""
    config = bodies.CONFIG | {"experts": 3 * bodies.SLOTS, "deadline": 20}
    if device == "cuda":
        three_gpus.run(bodies.go_on_without_rank_0, leaves, **config)
        return
    bootstraps = ferry.threads(3)

    def rank(number: int) -> None:
        with ferry.Group(bootstraps[number], **config) as group:
            bodies.go_on_without_rank_0(group, leaves)

    run_threads(3, rank)


def test_placements_that_do_not_fit() -> None:
    experts = bodies.Experts(torch.zeros(4, bodies.HIDDEN))
    with ferry.Group(ferry.threads(1)[0], experts=4) as group:
        good = ferry.ExpertPlacement(experts=3, ranks=1, slots=4)
        with pytest.raises(ferry.InvalidArgumentError, match="4 places in all"):
            ft.ExpertParallel(
                group, experts, placement=ferry.ExpertPlacement(experts=3, ranks=1, slots=3)
            )
        with pytest.raises(ferry.InvalidArgumentError, match="decode_tokens=8; expected both 0"):
            ft.ExpertParallel(group, experts, placement=good, decode_tokens=8)
        without = ft.ExpertParallel(group, experts)
        for call in (without.held, without.sum_copies):
            with pytest.raises(ferry.InvalidArgumentError, match="a module without placement"):
                call()
        with pytest.raises(ferry.InvalidArgumentError, match="module without placement"):
            without.placement = good
        layer = ft.ExpertParallel(group, experts, placement=good)
        assert copy.deepcopy(layer).placement is good
        with pytest.raises(ferry.InvalidArgumentError, match="entry for each slot"):
            layer.held(torch.zeros(3, 8))


@pytest.mark.timeout(280)
@pytest.mark.parametrize("differs", ["placement", "parameters", "frozen"])
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_differ_learn_of_it(
    three_gpus: RankProcesses, device: str, differs: str
) -> None:
    """All of them, before a wrong value; then the group goes on."""
    config = bodies.CONFIG | {"experts": 3 * bodies.SLOTS, "deadline": 20}
    if device == "cuda":
        three_gpus.run(bodies.ranks_that_differ, differs, **config)
    else:
        run_ranks(3, lambda group: bodies.ranks_that_differ(group, differs), **config)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_without_copies_learns_that_others_have_some(
    three_gpus: RankProcesses, device: str
) -> None:
    if device == "cuda":
        three_gpus.run(bodies.a_rank_without_copies, experts=6)
    else:
        run_ranks(3, bodies.a_rank_without_copies, experts=6)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(280)
def test_on_gpus(gpus: RankProcesses) -> None:
    for options in OPTIONS:
        gpus.run(bodies.train, torch.bfloat16, options, **bodies.CONFIG)
    gpus.run(bodies.train_in_fp8, **bodies.CONFIG)
    for form in ("as_is", "e4m3"):
        for batched in (False, True):
            gpus.run(bodies.decode, form, batched, **bodies.CONFIG)


def test_refusals() -> None:
    with ferry.Group(ferry.threads(1)[0], experts=bodies.EXPERTS) as group:
        experts = bodies.Experts(bodies.tables(torch.float32))
        x, ids, weights = bodies.inputs(0, torch.float32)
        with pytest.raises(ferry.InvalidArgumentError, match="decode_tokens"):
            ft.ExpertParallel(group, experts).decode(x, ids, weights)
        with pytest.raises(ferry.InvalidArgumentError, match=r"experts: got .*; expected a torch"):
            ft.ExpertParallel(group, lambda rows, offsets: rows)  # type: ignore[arg-type]
        with pytest.raises(ferry.InvalidArgumentError, match="format"):
            ft.ExpertParallel(group, experts, format="fp8")
        small = ft.ExpertParallel(group, experts, decode_tokens=2)
        with pytest.raises(
            ferry.InvalidArgumentError, match="5 tokens; expected at most the capacity, 2"
        ):
            small.decode(x, ids, weights)
        with pytest.raises(ferry.InvalidArgumentError, match="meanwhile"):
            small.decode(x, ids, weights, meanwhile=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["as_is", "e4m3"])
def test_compiled(form: str) -> None:
    """The layer compiles in whole, with new sizes and without them."""
    if not TRACES_ANY_BACKWARD:
        pytest.skip("this torch may not trace a backward of sizes that follow the routes")
    with ferry.Group(ferry.threads(1)[0], experts=bodies.EXPERTS) as group:
        layer = ft.ExpertParallel(group, bodies.Experts(bodies.tables(torch.float32)), format=form)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        for rank in (0, 3):
            x, ids, weights = bodies.inputs(rank, torch.float32)
            results = []
            for run in (layer, compiled):
                leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
                y = run(leaves[0], ids, leaves[1])
                y.sum().backward()
                results.append((y.detach(), leaves[0].grad, leaves[1].grad))
            for eager, own in zip(*results):
                assert torch.equal(eager, own)


def test_compiled_decode() -> None:
    """One operator."""
    with ferry.Group(ferry.threads(1)[0], **bodies.CONFIG) as group:
        layer = bodies.layer_of(group, torch.bfloat16, decode_tokens=max(bodies.TOKENS))

        @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
        def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return layer.decode(x * 1, ids, weights) + 1

        for rank in (0, 3):
            given = bodies.inputs(rank, torch.bfloat16)
            wanted = bodies.dense(*given, bodies.tables(torch.bfloat16)) + 1
            assert torch.equal(step(*given), wanted)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies(copied: Any) -> None:
    """A copy has the group of the original and experts of its own."""
    with ferry.Group(ferry.threads(1)[0], **bodies.CONFIG) as group:
        own, others = bodies.tables(torch.float32), bodies.tables(torch.float32) + 1
        layer = bodies.layer_of(group, torch.float32, decode_tokens=max(bodies.TOKENS))
        other = copied(layer)
        assert other.group is group
        if copied is copy.copy:
            other.experts = bodies.Experts(others)
        else:
            with torch.no_grad():
                other.experts.tables += 1
        given = bodies.inputs(0, torch.float32)
        for one, of in ((layer, own), (other, others)):
            wanted = bodies.dense(*given, of)
            assert torch.equal(one(*given).detach(), wanted)
            assert torch.equal(one.decode(*given), wanted)
        assert other._exchanges is layer._exchanges


def test_decode_takes_what_forward_takes() -> None:
    """Rows with gaps, and experts that answer in another dtype than that of the tokens."""
    with ferry.Group(ferry.threads(1)[0], **bodies.CONFIG) as group:
        layer = bodies.layer_of(group, torch.float32, decode_tokens=max(bodies.TOKENS))
        x, ids, weights = bodies.inputs(0, torch.bfloat16)
        gaps = torch.stack([x, x], 2)[:, :, 0], ids, torch.stack([weights, weights], 2)[:, :, 0]
        assert not gaps[0].is_contiguous() and not gaps[2].is_contiguous()
        wanted = bodies.dense(x, ids, weights, bodies.tables(torch.bfloat16))
        compiled = torch.compile(layer.decode, backend="aot_eager", fullgraph=True)
        for run in (layer, layer.decode, lambda *all: layer.decode(*all, lambda: None), compiled):
            y = run(*gaps).detach()
            assert (y.dtype, y.stride()) == (x.dtype, x.stride())
            assert torch.equal(y, wanted)
