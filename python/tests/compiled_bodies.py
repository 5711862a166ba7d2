"""What the ranks of test_compile.py and test_gpu.py do: a layer of experts, eager and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from exchange_reference import experts_of

import ferry
import ferry.torch as ft

HIDDEN, TOPK, EXPERTS = 16, 3, 7

# Whether torch traces a backward whose sizes follow the routes. 2.4 does not; between, unknown.
TRACES_ANY_BACKWARD = torch.__version__ >= "2.13"


def inputs(group: ferry.Group, seed: int, tokens: int | None = None) -> tuple[torch.Tensor, ...]:
    """Tokens, routes and weights of this rank: small integers, whose sums are exact."""
    rng = np.random.default_rng([seed, group.rank])
    count = int(rng.integers(2, 12)) if tokens is None else tokens
    x = torch.from_numpy(rng.integers(-4, 5, (count, HIDDEN)).astype(np.float32))
    ids = torch.from_numpy(rng.integers(-1, EXPERTS, (count, TOPK)))
    w = torch.from_numpy(rng.integers(-2, 3, (count, TOPK)).astype(np.float32))
    return tuple(tensor.to(group.device) for tensor in (x, ids, w))


def expected(
    ids: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """y = x · Σ_k w_k, with the gradients of Σ y²/2; without weights they are 1."""
    x = x.detach().clone().requires_grad_()
    given = None if w is None else w.detach().clone().requires_grad_()
    slots = torch.ones(ids.shape, device=x.device) if given is None else given
    y = x * torch.where(ids >= 0, slots, 0.0).sum(1, keepdim=True)
    y.pow(2).sum().mul(0.5).backward()
    assert x.grad is not None
    return y.detach(), x.grad, None if given is None else given.grad


def rank_major(
    group: ferry.Group, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, worst_case: int = 0
) -> torch.Tensor:
    plan = ft.plan(group, ids)
    got = ft.dispatch(group, plan, x, topk_weights=w, max_recv_rows=worst_case)
    assert got.topk_weights is not None
    rows = got.x * got.topk_weights.sum(1, keepdim=True)
    return ft.combine(group, plan, rows, max_recv_rows=worst_case)


def expert_major(
    group: ferry.Group, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, worst_case: int = 0
) -> torch.Tensor:
    """The weights do not travel: the sum over slots is Ferry's."""
    layout: dict[str, Any] = {"order": "expert_major", "alignment": 4}
    layout["max_recv_rows"] = worst_case
    plan = ft.plan(group, ids)
    got = ft.dispatch(group, plan, x, **layout)
    assert got.slot_rows is not None and got.expert_offsets is not None
    return ft.combine(group, plan, got.x * 1.0, **layout)


LAYERS = {"rank_major": rank_major, "expert_major": expert_major}


def train_steps(group: ferry.Group, backend: str | None, name: str, worst_case: int) -> int:
    """Three steps with other sizes each, against one rank that does it all. Returns how often the
    layer was compiled."""
    torch._dynamo.reset()
    layer = LAYERS[name]
    compiled = 0

    def counting(graph: Any, examples: Any) -> Any:
        nonlocal compiled
        compiled += 1
        found = torch._dynamo.backends.registry.lookup_backend(backend)
        return found(graph, examples)

    if backend is not None:
        layer = torch.compile(layer, backend=counting, fullgraph=True)
    for step in range(3):
        x, ids, w = inputs(group, 10 + step)
        x.requires_grad_()
        w.requires_grad_(name == "rank_major")
        y = layer(group, x, ids, w, worst_case)
        y.pow(2).sum().mul(0.5).backward()
        y_ref, x_ref, w_ref = expected(ids, x, w if name == "rank_major" else None)
        assert torch.equal(y.detach(), y_ref), step
        assert x.grad is not None and torch.equal(x.grad, x_ref), step
        if w_ref is not None:
            assert w.grad is not None and torch.equal(w.grad, w_ref), step
    return compiled


def quantised_layer(group: ferry.Group, backend: str | None) -> None:
    """A layer whose tokens cross as fp8, without gradients: as on one rank with rounded tokens."""

    def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        plan = ft.plan(group, ids)
        got = ft.dispatch(group, plan, x, format="e4m3", scale_format="f32_pow2")
        assert got.scales is not None
        rows = got.x.to(torch.float32) * got.scales
        return ft.combine(group, plan, rows.bfloat16())

    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    for step in range(3):
        x, ids, _ = inputs(group, step)
        y = run(x.bfloat16(), ids)
        # Small integers times a power of two are e4m3 exactly.
        blocks = [experts_of(rank, group.size, EXPERTS) for rank in range(group.size)]
        went = [((ids >= b.start) & (ids < b.stop)).any(1, keepdim=True) for b in blocks]
        assert torch.equal(y, (x * torch.stack(went).sum(0)).bfloat16()), step


def plan_keeps_nothing(group: ferry.Group) -> None:
    """What a compiled step leaves behind: no plan."""
    import gc

    from ferry import handles

    train_steps(group, "aot_eager", "rank_major", 0 if TRACES_ANY_BACKWARD else 64)
    gc.collect()
    assert not [thing for thing in handles._alive.values() if isinstance(thing, ferry.Plan)]


def checks_of_torch(group: ferry.Group) -> None:
    """torch's own test of an operator: schema, fake tensors, autograd, AOT dispatch."""
    x, ids, w = inputs(group, 3, tokens=5)
    plan = ft.plan(group, ids)
    common = (group.handle, TOPK, group.local_experts)
    for layout in (("rank_major", 1, 0, 0), ("expert_major", 4, 200, 0)):
        torch.library.opcheck(
            torch.ops.ferry.dispatch.default,
            (x.clone().requires_grad_(), plan.tensor, w.clone().requires_grad_(), *common, *layout),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
    for layout in (("rank_major", 1, 0, 0), ("expert_major", 4, 200, 0)):
        torch.library.opcheck(
            torch.ops.ferry.dispatch.default,
            (x, plan.tensor, w, *common, *layout, "e4m3", "f32"),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
    rows = torch.ops.ferry.dispatch(x, plan.tensor, w, *common, "rank_major", 1, 0, 0)[0]
    torch.library.opcheck(
        torch.ops.ferry.combine.default,
        (rows.clone().requires_grad_(), plan.tensor, group.handle, 5, "rank_major", 1, 0, 0),
    )
