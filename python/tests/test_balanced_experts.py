"""ferry.torch.ExpertParallel with copies of busy experts, beside the same layer without."""

from __future__ import annotations

import copy
import signal
from typing import Any

import balance_bodies as bodies
import pytest
import torch
from rank_processes import forks, free_port
from rank_threads import run_threads
from torch.utils.checkpoint import checkpoint

import ferry
import ferry.torch as ft
from ferry.torch_changes import Seen


@pytest.mark.parametrize(
    ("skew", "options"),
    [(4, {}), (8, {"alignment": 4}), (4, bodies.FIXED), (8, bodies.FIXED | {"copy_rows": 1000})],
    ids=str,
)
def test_training_gives_the_same_bits(skew: int, options: dict[str, Any]) -> None:
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank], **options)
        if most := options.get("max_recv_rows"):

            def expect_all_rows(module: torch.nn.Module, given: Any) -> None:
                assert len(given[0]) == most

            pair.balanced.experts.register_forward_pre_hook(expect_all_rows)
        bodies.training(pair, skew, 6)
        pair.close()

    run_threads(bodies.RANKS, one)


def test_losses_of_a_training_in_floats() -> None:
    """Sums that are rounded in another order. A token goes through some 40 sums a step and as many
    back; each is off by 2**-24 of itself at most, and so is the loss, 6 steps later."""
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank])
        losses: list[list[float]] = []
        for layer in (pair.plain, pair.balanced):
            with torch.no_grad():
                for parameter in layer.experts.parameters():
                    parameter /= 7
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            losses.append([])
            for step in range(6):
                make = torch.Generator().manual_seed(rank)
                x = torch.randn(bodies.TOKENS, bodies.HIDDEN, generator=make)
                weights = torch.rand(bodies.TOKENS, bodies.TOPK, generator=make)
                loss = layer(x, bodies.routes(rank, step, 0.5), weights).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
        torch.testing.assert_close(losses[0], losses[1], rtol=6 * 80 * 2**-24, atol=0)
        pair.close()

    run_threads(bodies.RANKS, one)


def test_copies_are_fetched_only_when_their_experts_have_changed() -> None:
    """Also where two forwards come before the backwards: each has the weights that it used."""
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank])
        layer, balancer = pair.balanced, pair.balanced.balancer
        assert balancer is not None
        x = torch.ones(bodies.TOKENS, bodies.HIDDEN, requires_grad=True)
        weights = torch.ones(bodies.TOKENS, bodies.TOPK)

        def forward(step: int) -> tuple[int, torch.Tensor]:
            """How many copies moved on all ranks."""
            y = layer(x, bodies.routes(rank, step, 0.5), weights)
            return sum(e >= 0 for row in balancer.fetches for e in row), y.sum()

        first, y = forward(0)
        again, _ = forward(0)
        assert first > 0
        assert again == 0
        other, z = forward(3)  # another rank is busy: other copies in the slots
        assert other > 0
        y.backward()
        z.backward()
        got = [x.grad, *(p.grad for p in layer.experts.parameters())]
        x.grad = None
        for step in (0, 3):
            pair.plain(x, bodies.routes(rank, step, 0.5), weights).sum().backward()
        wanted = [x.grad, *(p.grad for p in pair.plain.experts.parameters())]
        for mine, plain in zip(got, wanted):
            assert torch.equal(mine, plain)
        some, _ = forward(4)  # the same rank is busy: some copies serve again
        assert 0 < some < sum(e >= 0 for row in balancer.table for e in row)
        forward(3)
        if rank == 1:
            with torch.no_grad():
                layer.experts.scale += 1
        changed, _ = forward(3)
        assert 0 < changed <= sum(e in (2, 3) for row in balancer.table for e in row)
        if rank == 1:
            layer.invalidate_copies()
        told, _ = forward(3)
        assert told == changed
        twin = copy.deepcopy(layer)  # collective only when it runs
        assert torch.equal(
            twin(x, bodies.routes(rank, 3, 0.5), weights),
            layer(x, bodies.routes(rank, 3, 0.5), weights),
        )
        pair.close()

    run_threads(bodies.RANKS, one)


@pytest.mark.parametrize("why", ["routes", "mismatch"])
def test_a_refused_batch_does_not_hide_that_experts_have_changed(why: str) -> None:
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank])
        scale = pair.balanced.experts.scale
        x = torch.ones(bodies.TOKENS, bodies.HIDDEN)
        ids, weights = bodies.routes(rank, 0, 0.5), torch.ones(bodies.TOKENS, bodies.TOPK)
        pair.balanced(x, ids, weights)
        with torch.no_grad():
            for layer in (pair.plain, pair.balanced):
                layer.experts.scale += 1
        scale.requires_grad_(why != "mismatch" or rank != 1)
        with pytest.raises((ferry.InvalidArgumentError, ferry.MismatchError)):
            pair.balanced(x, ids + bodies.EXPERTS * (why == "routes"), weights)
        scale.requires_grad_()
        assert torch.equal(pair.balanced(x, ids, weights), pair.plain(x, ids, weights))
        pair.close()

    run_threads(bodies.RANKS, one)


def test_experts_that_raise_on_some_ranks_before_copies_arrive() -> None:
    """All ranks give the batch up, and plan the next ones alike."""
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank])
        layer, weights = pair.balanced, torch.ones(bodies.TOKENS, bodies.TOPK)
        x = torch.ones(bodies.TOKENS, bodies.HIDDEN)
        assert layer._copies is not None
        run = layer._copies.run

        def stop(*given: Any) -> None:
            if rank % 2 == 0:
                run(*given)
            raise InterruptedError

        layer._copies.run = stop
        with pytest.raises(InterruptedError):
            layer(x, bodies.routes(rank, 0, 0.5), weights)
        layer._copies.run = run
        for step in (1, 3):
            ids = bodies.routes(rank, step, 0.5)
            assert torch.equal(layer(x, ids, weights), pair.plain(x, ids, weights))
        pair.close()

    run_threads(bodies.RANKS, one)


def _rank(rank: int, port: int, victim: int, calls: int, during: bool, words: Any) -> None:
    torch.set_num_threads(1)
    boot = ferry.tcp(rank=rank, size=bodies.RANKS, port=port, secret="of a test", deadline=30)
    pair = bodies.Pair(boot)
    layer, balancer = pair.balanced, pair.balanced.balancer
    assert balancer is not None
    x = torch.ones(bodies.TOKENS, bodies.HIDDEN)
    weights = torch.ones(bodies.TOKENS, bodies.TOPK)
    if rank == victim:
        bodies.die_in_call(calls, during)
    done = 0
    try:
        y = layer(x, bodies.routes(rank, 0, 0.5), weights)
        done = 1
        y.sum().backward()
        done = 2
    except (ferry.PeerFailedError, ferry.PeerLeftError, ferry.DeadlineExceededError) as error:
        # The same batch once more: which of its copies are believed to be there?
        every = [balancer.counts(bodies.routes(r, 0, 0.5)) for r in range(bodies.RANKS)]
        balancer.plan(torch.stack(every))
        fetched = balancer.fetches != balancer.table
        graded = any(p.grad is not None for p in layer.experts.parameters())
        words.put((rank, error.peer, done, fetched, len(layer._copies._tensors), graded))


# A layer has two parameters: one call each brings weights, one each takes gradients.
@pytest.mark.parametrize(("calls", "during"), [(1, False), (2, False), (2, True), (3, True)])
def test_a_rank_dies_while_copies_or_gradients_move(calls: int, during: bool) -> None:
    """The others name it, and use no copy or gradient of which they may have a part."""
    victim, port = 3, free_port()
    context = forks()
    words = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, port, victim, calls, during, words))
        for rank in range(bodies.RANKS)
    ]
    for process in processes:
        process.start()
    said = [words.get(timeout=90) for _ in range(bodies.RANKS - 1)]
    for process in processes:
        process.join()
    assert processes[victim].exitcode == -signal.SIGKILL
    assert sorted(rank for rank, *_ in said) == [r for r in range(bodies.RANKS) if r != victim]
    for rank, peer, done, fetched, tensors, graded in said:
        assert peer == victim, f"rank {rank} names {peer}"
        assert done == (0 if calls < 3 else 1)
        assert fetched == (calls == 3)
        assert tensors == (0 if calls < 3 else 2)
        assert not graded


def test_what_is_refused() -> None:
    (boot,) = ferry.threads(1)
    wrong = ferry.InvalidArgumentError
    with ferry.Collectives(boot) as ranks, ferry.Group(boot, experts=4) as group:
        experts = bodies.Experts(0)

        def layer(**options: Any) -> ft.ExpertParallel:
            return ft.ExpertParallel(group, experts, **{"collectives": ranks} | options)

        with pytest.raises(wrong, match=r"collectives: got None .* with balance a ferry.Coll"):
            layer(balance=2, collectives=None)
        with pytest.raises(wrong, match="max_recv_rows: got 12; expected more than 12"):
            layer(balance=2, max_recv_rows=12, alignment=4)
        with pytest.raises(wrong, match="decode_experts"):
            layer(balance=2, decode_tokens=3, decode_experts=experts)
        with pytest.raises(wrong, match="copy_rows"):
            layer(balance=2, copy_rows=-1)
        with pytest.raises(wrong, match=r"balance: got a group of 4 experts on 1 ranks"):
            layer(balance=4)
        x, ids, weights = torch.ones(3, 16), torch.zeros(3, 2).long(), torch.ones(3, 2)
        with pytest.raises(wrong, match=r"got 5, 0 of them .* at least 6: rank 0 has 6 rows"):
            layer(balance=2, max_recv_rows=5)(x, ids, weights)
        grown = r"scale of shape \(2, 16\); expected \[3, \.\.\.\], .* experts=n \+ 1 for n"
        with pytest.raises(wrong, match=grown):
            layer(balance=1)(x, ids, weights)
        experts.none = torch.nn.Parameter(torch.zeros(2, 0))
        with pytest.raises(wrong, match=r"none of shape \(2, 0\)"):
            layer(balance=2)(x, ids, weights)
        del experts.none
        experts.register_buffer("seen", torch.zeros(2))
        with pytest.raises(wrong, match=r"a buffer seen with an entry for each expert"):
            layer(balance=2)(x, ids, weights)
        del experts.seen
        with pytest.raises(wrong, match=r"topk_idx"):
            layer(balance=2)(x, ids.tolist(), weights)
        with pytest.raises(wrong, match=r"scale of torch\.float64"):
            experts.double()
            layer(balance=2)(x, ids, weights)


def test_a_new_parameter_is_not_taken_for_the_one_whose_memory_it_has() -> None:
    old = torch.nn.Parameter(torch.ones(4))
    seen = Seen(old)
    new = torch.nn.Parameter(old.detach())
    assert (new.data_ptr(), new._version) == (old.data_ptr(), old._version)
    assert seen.is_still(old) and not seen.is_still(new)
    with torch.no_grad():
        old += 1
    assert not seen.is_still(old)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_step_of_a_fused_optimizer_is_seen(kind: Any) -> None:
    """torch does not count its writes in `_version`."""
    trained, frozen = torch.nn.Parameter(torch.ones(4)), torch.ones(4)
    seen = Seen(trained), Seen(frozen)
    trained.grad = torch.ones(4)
    kind([trained], lr=0.1, fused=True).step()
    assert not torch.equal(trained, frozen)
    assert not seen[0].is_still(trained)
    assert seen[1].is_still(frozen)


def test_an_inference_tensor_has_always_changed_and_swaps_are_seen() -> None:
    with torch.inference_mode():
        made = torch.ones(4)
    assert not Seen(made).is_still(made)
    one, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))
    seen = Seen(one)
    torch.utils.swap_tensors(one, other)
    assert not seen.is_still(one)


def test_a_layer_is_used_without_gradients_converted_and_trained() -> None:
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank])
        make = torch.Generator().manual_seed(rank)
        x = torch.randint(-2, 3, (bodies.TOKENS, bodies.HIDDEN), generator=make).float()
        weights = torch.ones(bodies.TOKENS, bodies.TOPK)
        for step, dtype in enumerate((torch.bfloat16, torch.float32)):
            ids = bodies.routes(rank, step, 1.0)
            for layer in (pair.plain, pair.balanced):
                layer.to(dtype)
                with torch.inference_mode():
                    layer(x.to(dtype), ids, weights)
        made = [
            bodies.step(layer, x, bodies.routes(rank, 2, 1.0), weights)
            for layer in (pair.plain, pair.balanced)
        ]
        for one, other in zip(*made):
            assert torch.equal(one, other)
        pair.close()

    run_threads(bodies.RANKS, one)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_compute_a_batch_again_as_it_was(use_reentrant: bool) -> None:
    """Two forwards come before the backwards, with other copies in the slots."""
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank])
        make = torch.Generator().manual_seed(rank)
        weights = torch.ones(bodies.TOKENS, bodies.TOPK)
        made: list[list[torch.Tensor]] = []
        xs = [torch.randint(-2, 3, (bodies.TOKENS, bodies.HIDDEN), generator=make) for _ in "ab"]
        for layer in (pair.plain, pair.balanced):
            leaves = [x.float().requires_grad_() for x in xs]
            results = [
                checkpoint(
                    layer, x, bodies.routes(rank, step, 0.5), weights, use_reentrant=use_reentrant
                )
                for x, step in zip(leaves, (0, 3))
            ]
            for y in reversed(results):
                (y * torch.arange(bodies.HIDDEN)).sum().backward()
            grads = [leaf.grad for leaf in (*leaves, *layer.experts.parameters())]
            made.append([*(y.detach() for y in results), *(g for g in grads if g is not None)])
        assert len(made[0]) == len(made[1]) == 6
        for plain, balanced in zip(*made):
            assert torch.equal(plain, balanced)
        pair.close()

    run_threads(bodies.RANKS, one)


class _Scales(torch.nn.Module):
    """What autograd saves has as many rows as came, so that no shape tells of other copies."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.arange(2 * rank + 1.0, 2 * rank + 3.0)[:, None])

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        of_rows = self.scale.repeat_interleave(torch.diff(offsets), 0)
        return rows[: offsets[-1]] * of_rows


@pytest.mark.parametrize("last_first", [True, False])
def test_checkpoints_of_two_batches_with_the_same_counts(last_first: bool) -> None:
    """They have the same copies, though the slots held others in between."""
    bootstraps = ferry.threads(3)
    wide, hot = [7, 7, 0, 6, 0, 0], [16, 0, 0, 0, 0, 4]

    def one(rank: int) -> None:
        ranks = ferry.Collectives(bootstraps[rank], deadline=20)
        group = ferry.Group(bootstraps[rank], experts=9, deadline=20)
        options: dict[str, Any] = {"balance": 1, "collectives": ranks, "copy_rows": 0}
        layer = ft.ExpertParallel(group, _Scales(rank), **options)
        assert layer.balancer is not None
        xs, results, tables, wanted = [], [], [], []
        for k, counts in enumerate((wide, hot, wide)):
            ids = torch.repeat_interleave(torch.arange(6), torch.tensor(counts))[:, None]
            xs.append(torch.ones(20, 16, requires_grad=True))
            y = checkpoint(layer, xs[-1], ids, torch.ones(20, 1), use_reentrant=False)
            results.append(y.mul_(k + 1))  # in place, as on any result
            tables.append(layer.balancer.table)
            wanted.append((ids + 1) * (k + 1.0) * torch.ones(16))
        assert tables[0] == tables[2] != tables[1]
        if last_first:
            sum(results).sum().backward()
        else:
            for y in results:
                y.sum().backward()
        for x, grad in zip(xs, wanted):
            assert torch.equal(x.grad, grad)
        named = sum((k + 1.0) * torch.tensor(c) for k, c in enumerate((wide, hot, wide)))
        grad = layer.experts.scale.grad.flatten()
        assert torch.equal(grad, 3 * 16 * named[2 * rank : 2 * rank + 2])
        ranks.barrier()
        group.destroy()

    run_threads(3, one)


class _Odd(torch.nn.Module):
    """Each row is scaled and moved."""

    def __init__(self, names: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return rows * self.a.flatten()[:1] + self.b.flatten()[:1]


@pytest.mark.parametrize(
    ("odd", "word"),
    [
        ("copy_rows", "calls it with copy_rows=(60|0), this rank with copy_rows=(60|0);"),
        ("rows", r"calls it with max_recv_rows \(less padding\)=[89]0, this"),
        ("slots", "calls it with balance=[12], this rank with balance=[12]; all"),
        ("slots alone", "with balance=[12], this"),  # the experts of rank 0 do not fit its slots
        ("balance", r"0 without any, 1 with balance\) is [01] on rank"),
        ("names", "with gradients: b"),
        ("more", "3 parameters"),
        ("dtype", "bfloat16"),
        ("shape", r"\(5, 2, 8\)"),
        ("frozen", "without gradients: a"),
        ("no_grad", "without gradients: a"),
    ],
)
def test_ranks_that_differ_are_refused_everywhere(odd: str, word: str) -> None:
    bootstraps = ferry.threads(2)

    def one(rank: int) -> None:
        ranks = ferry.Collectives(bootstraps[rank], deadline=20)
        group = ferry.Group(bootstraps[rank], experts=12, deadline=20)
        its = odd if rank == 1 else ""
        slots = 2 if odd.startswith("slots") and rank == 0 else 1
        experts = _Odd(
            {"names": "ba", "more": "abc"}.get(its, "ab"),
            torch.bfloat16 if its == "dtype" else torch.float32,
            (6 - (1 if odd == "slots alone" else slots), *((2, 8) if its == "shape" else (8, 2))),
        )
        experts.a.requires_grad_(its != "frozen")
        copy_rows = 60 if its == "copy_rows" else 0
        slots = 0 if its == "balance" else slots
        layer = ft.ExpertParallel(
            group,
            experts,
            balance=slots,
            collectives=ranks,
            copy_rows=copy_rows,
            max_recv_rows=0 if odd != "rows" else 80 + 10 * rank,
        )
        with (
            pytest.raises(ferry.MismatchError, match=word),
            torch.set_grad_enabled(its != "no_grad"),
        ):
            layer(torch.ones(40, 16), torch.ones(40, 1).long(), torch.ones(40, 1))
        ranks.barrier()
        group.destroy()

    run_threads(2, one)


def test_decode_is_balanced_too() -> None:
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank], decode_tokens=bodies.TOKENS)
        bodies.decoding(pair)
        pair.close()

    run_threads(bodies.RANKS, one)


def test_chance_moves_nothing() -> None:
    """Copies that cost more than they save are not made; skew pays for them."""
    bootstraps = ferry.threads(bodies.RANKS)

    def one(rank: int) -> None:
        pair = bodies.Pair(bootstraps[rank], copy_rows=10)
        balancer = pair.balanced.balancer
        assert balancer is not None
        x = torch.ones(bodies.TOKENS, bodies.HIDDEN)
        weights = torch.ones(bodies.TOKENS, bodies.TOPK)
        for share, copies in ((0.0, False), (0.8, True), (0.0, False)):
            ids = bodies.routes(rank, 0, share)
            assert torch.equal(pair.balanced(x, ids, weights), pair.plain(x, ids, weights))
            assert any(e >= 0 for row in balancer.table for e in row) == copies
        pair.close()

    run_threads(bodies.RANKS, one)
