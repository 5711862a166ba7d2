"""ferry.torch.DistributedDataParallel: gradients that are the means of those of the ranks, bit for
bit, and torch's DDP with the hook of Ferry, beside torch's own over Gloo."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data_parallel_bodies
import distributed_bodies as bodies
import pytest
import torch
from expert_parallel_bodies import Experts
from rank_processes import RankProcesses
from rank_threads import DEADLINE, run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ferry
import ferry.torch as ft

RANKS = 3
Body = Callable[[ferry.Collectives], Any]


def on_ranks(body: Body, ranks: int = RANKS) -> list[Any]:
    """`body(collectives)` on ranks that are threads; each has its own seed."""
    bootstraps = ferry.threads(ranks)

    def one(rank: int) -> Any:
        config: Any = {"deadline": DEADLINE, "memory_bytes": 1 << 20}
        with ferry.Collectives(bootstraps[rank], **config) as all_ranks:
            result = body(all_ranks)
            all_ranks.barrier()
            return result

    return run_threads(ranks, one)


def model_of(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 4))


def batch_of(seed: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def mean_of(gradients: list[Tensor]) -> Tensor:
    """The definition: fp32, ascending ranks, one rounding."""
    total = torch.zeros_like(gradients[0], dtype=torch.float32)
    for one in gradients:
        total += one.float()
    return (total / len(gradients)).to(gradients[0].dtype)


def own_gradients(model: nn.Module, *batches: Tensor) -> list[Tensor]:
    """Of a rank by itself, added up over its batches."""
    alone = copy.deepcopy(model)
    for x in batches:
        alone(x).pow(2).sum().backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def assert_means(model: nn.Module, expected: list[list[Tensor]]) -> None:
    """expected: the gradients of each rank by itself."""
    for parameter, *gradients in zip(model.parameters(), *expected):
        assert torch.equal(parameter.grad, mean_of(gradients))  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 0.002, 4])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_means_of_the_ranks(
    bucket_cap_mb: float, set_to_none: bool, dtype: torch.dtype
) -> None:
    def body(ranks: ferry.Collectives) -> list[Tensor]:
        model = model_of(ranks.rank).to(memory_format=torch.contiguous_format)
        model[2].to(dtype)
        model[1].register_forward_hook(lambda _, __, y: y.to(dtype))
        model[2].register_forward_hook(lambda _, __, y: y.float())
        ddp = ft.DistributedDataParallel(model, ranks, bucket_cap_mb=bucket_cap_mb)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
        for step in range(3):
            batches = [batch_of(RANKS * step + rank) for rank in range(RANKS)]
            expected = [own_gradients(model, x) for x in batches]
            optimizer.zero_grad(set_to_none)
            ddp(batches[ranks.rank]).pow(2).sum().backward()
            assert_means(model, expected)
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert ranks._raw.is_registered(parameter.grad.data_ptr())
            optimizer.step()
        assert ddp.steps == 3 and ddp.busy_seconds > 0
        return [parameter.detach() for parameter in model.parameters()]

    first, *others = on_ranks(body)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(4, "cpu", data_parallel_bodies.with_process_group)
    yield made
    made.stop()


def test_it_trains_as_torch_does_over_gloo(processes: RankProcesses, tmp_path: Path) -> None:
    processes.run(bodies.beside_gloo, str(tmp_path / "meeting"))


def test_a_backward_that_failed_leaves_nothing_for_the_hook(
    processes: RankProcesses, tmp_path: Path
) -> None:
    processes.run(bodies.hook_after_a_failure, str(tmp_path / "meeting"))


class Branches(nn.Module):
    """A linear layer for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, used: list[int]) -> dict[str, Tensor]:
        for index in used:
            x = self.layers[index](x)
        return {"y": x}


@pytest.mark.parametrize("finds", [True, False])
def test_what_a_rank_does_not_use_counts_as_zeros(finds: bool) -> None:
    def body(ranks: ferry.Collectives) -> None:
        ddp = ft.DistributedDataParallel(
            Branches(), ranks, bucket_cap_mb=1e-4, find_unused_parameters=finds
        )
        layers: Any = ddp.module.layers
        for used in ([0, 1], [1, 3], [3, 0]):  # layer 2 never
            ddp.zero_grad()
            mine = used if ranks.rank != 1 else used[:1]
            ddp(batch_of(ranks.rank), mine)["y"].sum().backward()
            everyone = torch.empty(RANKS, 8)
            alone = copy.deepcopy(ddp.module)
            alone(batch_of(ranks.rank), mine)["y"].sum().backward()
            for index, layer in enumerate(layers):
                own = alone.layers[index].bias.grad  # type: ignore[union-attr, index]
                ranks.all_gather(torch.zeros(8) if own is None else own, everyone)
                if index in used or not finds:
                    assert torch.equal(layer.bias.grad, mean_of(list(everyone)))
                else:
                    assert layer.bias.grad is None and layer.weight.grad is None

    on_ranks(body)


def test_gradients_add_up_without_sync() -> None:
    def body(ranks: ferry.Collectives) -> None:
        model = model_of(0)
        ddp = ft.DistributedDataParallel(model, ranks)
        for first in (0, 10):
            batches = [[batch_of(first + rank), batch_of(50 + rank)] for rank in range(RANKS)]
            expected = [own_gradients(model, *pair) for pair in batches]
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batches[ranks.rank][0]).pow(2).sum().backward()
            (alone,) = [own_gradients(model, batches[ranks.rank][0])]
            assert all(map(torch.equal, [p.grad for p in model.parameters()], alone))
            ddp(batches[ranks.rank][1]).pow(2).sum().backward()
            assert_means(model, expected)
        assert ddp.steps == 2

    on_ranks(body)


def test_all_start_from_rank_0_and_buffers_follow_it() -> None:
    def body(ranks: ferry.Collectives) -> None:
        torch_model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        for tensor in torch_model.state_dict().values():
            tensor.fill_(ranks.rank + 1)
        ddp = ft.DistributedDataParallel(torch_model, ranks)
        state = ddp.state_dict()
        assert list(state) == [f"module.{name}" for name in torch_model.state_dict()]
        assert all((tensor == 1).all() for tensor in state.values())
        before = torch_model[1].running_mean.clone()
        ddp(batch_of(ranks.rank)).sum().backward()
        own = torch_model[1].running_mean.clone()
        with torch.no_grad():
            ddp.eval()(batch_of(ranks.rank))
        assert torch.equal(torch_model[1].running_mean, own)
        everyone = torch.empty(RANKS, 4)
        ranks.all_gather(own, everyone)
        assert not torch.equal(everyone[0], everyone[1]) and not torch.equal(own, before)
        ddp.eval()(batch_of(ranks.rank)).sum().backward()
        assert torch.equal(torch_model[1].running_mean, everyone[0])

    on_ranks(body)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    def body(ranks: ferry.Collectives) -> None:
        model = model_of(0)

        def forward(x: Tensor) -> Tensor:
            x = model[1](model[0](x))
            x = checkpoint(model[2], x, use_reentrant=use_reentrant)
            return model[3](x)  # type: ignore[no-any-return]

        whole = nn.ModuleList([model])
        whole.forward = forward  # type: ignore[assignment, method-assign]
        ddp = ft.DistributedDataParallel(whole, ranks, bucket_cap_mb=1e-6)
        for step in range(2):
            ddp.zero_grad()
            expected = [own_gradients(model, batch_of(step + rank)) for rank in range(RANKS)]
            ddp(batch_of(step + ranks.rank)).pow(2).sum().backward()
            assert_means(model, expected)
            assert ddp.steps == step + 1

    on_ranks(body)


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_refused() -> None:
    def body(ranks: ferry.Collectives) -> None:
        layer = nn.Linear(8, 8)

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Tensor:
                x = checkpoint(self.layer, x, use_reentrant=True)
                return checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[no-any-return]

        ddp = ft.DistributedDataParallel(Twice(), ranks, bucket_cap_mb=1e-6)
        with pytest.raises(ferry.InvalidArgumentError, match=r"second gradient of 'layer\.\w+'"):
            ddp(batch_of(0).requires_grad_()).sum().backward()

    on_ranks(body)


def test_other_backwards_exchange_nothing() -> None:
    """`autograd.grad`, and a backward that fails on all ranks; the next one is whole again."""

    def body(ranks: ferry.Collectives) -> None:
        model = model_of(0)
        ddp = ft.DistributedDataParallel(model, ranks, bucket_cap_mb=1e-6)
        expected = [own_gradients(model, batch_of(rank)) for rank in range(RANKS)]
        x = batch_of(ranks.rank).requires_grad_()
        torch.autograd.grad(ddp(x).pow(2).sum(), x)
        assert ddp.steps == 0

        def fail(_: Tensor) -> None:
            raise ValueError("on purpose")

        hook = model[1].register_full_backward_hook(lambda *_: fail(x))
        with pytest.raises(ValueError, match="on purpose"):
            ddp(x).pow(2).sum().backward()
        hook.remove()
        ddp.zero_grad()
        ddp(x).pow(2).sum().backward()
        assert_means(model, expected)
        assert ddp.steps == 1

    on_ranks(body)


def test_experts_that_differ_are_left_out() -> None:
    bootstraps = ferry.threads(RANKS)

    def body(ranks: ferry.Collectives) -> None:
        with ferry.Group(bootstraps[ranks.rank], experts=8, memory_bytes=1 << 20) as group:
            tables = data_parallel_bodies.part(data_parallel_bodies.tables(8), group)
            model = nn.ModuleList([ft.ExpertParallel(group, Experts(tables)), nn.Linear(256, 1)])
            model.forward = lambda x, *routes: model[1](x).sum() + model[0](x, *routes).sum()  # type: ignore
            ddp = ft.DistributedDataParallel(model, ranks)
            assert torch.equal(model[0].experts.tables, tables)
            with pytest.raises(ferry.InvalidArgumentError, match=r"without .*ExpertParallel"):
                ft.DistributedDataParallel(model[0].experts, ranks)
            x, ids, weights, _ = data_parallel_bodies.batch(0, group.rank, 8)
            ddp(x, ids, weights).backward()
            assert not ranks._raw.is_registered(model[0].experts.tables.grad.data_ptr())
            assert ranks._raw.is_registered(model[1].weight.grad.data_ptr())
            group.barrier()

    on_ranks(body)


def test_a_rank_that_leaves_is_named_by_the_backward() -> None:
    bootstraps = ferry.threads(RANKS)

    def one(rank: int) -> None:
        ranks = ferry.Collectives(bootstraps[rank], deadline=DEADLINE, memory_bytes=1 << 20)
        ddp = ft.DistributedDataParallel(model_of(0), ranks)
        loss = ddp(batch_of(rank)).sum()
        if rank != 1:
            with pytest.raises(ferry.PeerLeftError, match="rank 1"):
                loss.backward()
        ranks.destroy()

    run_threads(RANKS, one)


def test_it_makes_collectives_of_its_own(processes: RankProcesses, tmp_path: Path) -> None:
    processes.run(bodies.collectives_of_its_own, str(tmp_path / "meeting"))


def test_what_cannot_be_is_refused_with_words() -> None:
    def body(ranks: ferry.Collectives) -> None:
        wrong: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
            ("module: got on rank 1 other", lambda: nn.Linear(8, 4 + (ranks.rank == 1)), {}),
            ("got 'weight' of dtype torch.float64", lambda: nn.Linear(8, 4).double(), {}),
            ("got 'weight' on meta", lambda: nn.Linear(8, 4, device="meta"), {}),
            ("got no parameter that requires", lambda: nn.Linear(8, 4).requires_grad_(False), {}),
            ("module: got 3", lambda: 3, {}),  # type: ignore[arg-type, return-value]
            ("format: got 'f64'", lambda: nn.Linear(8, 4), {"format": "f64"}),
            ("algorithm: got 'star'", lambda: nn.Linear(8, 4), {"algorithm": "star"}),
            (
                'format: got "e4m3" with algorithm "ring"',
                lambda: nn.Linear(8, 4),
                {"format": "e4m3", "algorithm": "ring"},
            ),
            ("bucket_cap_mb: got 0", lambda: nn.Linear(8, 4), {"bucket_cap_mb": 0}),
            ("bucket_cap_mb: got inf", lambda: nn.Linear(8, 4), {"bucket_cap_mb": math.inf}),
            ("device_ids: got [0]", lambda: nn.Linear(8, 4), {"device_ids": [0]}),
            ("static_graph: got True", lambda: nn.Linear(8, 4), {"static_graph": True}),
        ]
        for words, make, options in wrong:
            with pytest.raises(ferry.InvalidArgumentError) as caught:
                ft.DistributedDataParallel(make(), ranks, **options)
            assert words in str(caught.value), caught.value
        sparse = ft.DistributedDataParallel(nn.Embedding(4, 2, sparse=True), ranks)
        with pytest.raises(ferry.InvalidArgumentError, match=r"'weight' of layout torch\.sparse"):
            sparse(torch.tensor([1])).sum().backward()

    on_ranks(body)


def test_a_model_is_wrapped_once_at_a_time() -> None:
    def body(ranks: ferry.Collectives) -> None:
        model = model_of(0)
        options: Any = {"device_ids": None, "gradient_as_bucket_view": True}
        ddp = ft.DistributedDataParallel(model, ranks, **options)
        for wrapped in (ddp, model, nn.Sequential(model)):
            with pytest.raises(ferry.InvalidArgumentError, match=r"module: got .*wrapped|its `mod"):
                ft.DistributedDataParallel(wrapped, ranks)
        with pytest.raises(TypeError, match="'buckets'"):
            ft.DistributedDataParallel(model_of(0), ranks, buckets=3)
        ddp.destroy()
        with pytest.raises(ferry.DestroyedError, match="forward"):
            ddp(batch_of(0))
        again = ft.DistributedDataParallel(model, ranks)
        expected = [own_gradients(model, batch_of(rank)) for rank in range(RANKS)]
        again.zero_grad()
        again(batch_of(ranks.rank)).pow(2).sum().backward()
        assert_means(model, expected)

    on_ranks(body)
