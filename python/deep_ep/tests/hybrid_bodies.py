"""Bodies of tests of `HybridEPBuffer`: `body(buffer, device)` on every rank, which checks its own
results against the definition, from the inputs of all ranks, in plain torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from throughput_calls import same
from torch import Tensor

from deep_ep.errors import EPException
from deep_ep.hybrid_ep_buffer import indices_to_map

HIDDEN = 256
TOKENS = (13, 0, 7, 29, 1, 18, 5, 11)  # of the ranks, in turn


@dataclass
class Case:
    """Inputs of every rank."""

    ranks: int
    experts: int
    hidden: list[Tensor]
    bits: list[Tensor]  # bool [T, E]
    probs: list[Tensor]  # f32 [T, E], 0 where there is no bit
    scales: list[Tensor]  # f32 [T, H / 128]


@cache
def make(ranks: int, seed: int, local: int = 3, one_byte: bool = False) -> Case:
    """Rows of any number of bits, none among them. Ranks that are threads share them."""
    random = torch.Generator().manual_seed(seed)
    case = Case(ranks, ranks * local, [], [], [], [])
    for rank in range(ranks):
        tokens = TOKENS[rank % len(TOKENS)]
        bits = torch.zeros(tokens, case.experts, dtype=torch.bool)
        for token in range(tokens):
            named = torch.randperm(case.experts, generator=random)[: token % 5]
            bits[token, named] = True
        x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
        case.hidden.append((x.float() * 50).to(torch.uint8) if one_byte else x)
        case.bits.append(bits)
        probs = torch.rand(bits.shape, generator=random)
        case.probs.append(torch.where(bits, probs, 0.0))
        case.scales.append(torch.rand(tokens, HIDDEN // 128, generator=random))
    return case


def local_of(case: Case, rank: int) -> slice:
    local = case.experts // case.ranks
    return slice(rank * local, (rank + 1) * local)


def arrived(case: Case, rank: int, of: list[Tensor]) -> Tensor:
    """The rows of what each rank has, [T, ..], of the tokens that name an expert of this rank."""
    own = local_of(case, rank)
    return torch.cat([one[bits[:, own].any(1)] for one, bits in zip(of, case.bits)])


def permuted(case: Case, rank: int, of: list[Tensor], step: int) -> Tensor:
    """By ascending expert, zero rows behind each one's."""
    rows, bits = arrived(case, rank, of), arrived(case, rank, case.bits)[:, local_of(case, rank)]
    parts = []
    for expert in range(bits.shape[1]):
        part = rows[bits[:, expert]]
        padding = part.new_zeros(-len(part) % step, *part.shape[1:])
        parts += [part, padding]
    return torch.cat(parts)


def permuted_probs(case: Case, rank: int, of: list[Tensor], step: int) -> Tensor:
    bits = arrived(case, rank, case.bits)[:, local_of(case, rank)]
    probs = arrived(case, rank, of)[:, local_of(case, rank)]
    parts = []
    for expert in range(bits.shape[1]):
        part = probs[bits[:, expert], expert]
        parts += [part, part.new_zeros(-len(part) % step)]
    return torch.cat(parts)


def counts(case: Case, rank: int, step: int) -> list[int]:
    bits = arrived(case, rank, case.bits)[:, local_of(case, rank)]
    found: list[int] = (-(-bits.sum(0) // step) * step).tolist()
    return found


def summed(case: Case, source: int, times: bool) -> Tensor:
    """What comes back where each expert answers with its row: rows of a rank added up in fp32 and
    rounded, then the ranks. times: the rows were multiplied by their bits of a rank before."""
    x, bits = case.hidden[source].float(), case.bits[source]
    total = torch.zeros(len(x), HIDDEN)
    for rank in range(case.ranks):
        each = bits[:, local_of(case, rank)].sum(1)
        part = torch.zeros_like(total)
        if times:
            part = (x * each[:, None]).bfloat16().float()
        else:
            for k in range(int(each.max()) if len(each) else 0):
                part += torch.where((each > k)[:, None], x, 0.0)
            part = part.bfloat16().float()
        total += torch.where((each > 0)[:, None], part, 0.0)
    return total.bfloat16()


def domain_of(buffer: Any, case: Case) -> slice:
    """The experts of the ranks of this rank's domain."""
    each = buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
    columns = each * (case.experts // case.ranks)
    return slice(buffer.node_rank * columns, (buffer.node_rank + 1) * columns)


def routes_of(case: Case, rank: int, by_index: bool, device: str, probs: bool) -> dict[str, Any]:
    """The arguments of routes, as a map or as indices."""
    bits, weights = case.bits[rank], case.probs[rank]
    if not by_index:
        how: dict[str, Any] = {"routing_map": bits.to(device)}
        return how | ({"probs": weights.to(device)} if probs else {})
    ids = torch.full((len(bits), 4), -1)
    for token, row in enumerate(bits):
        named = row.nonzero().flatten()
        ids[token, 4 - len(named) :] = named.flip(0)  # in any place and order
    how = {"topk_idx": ids.to(device), "num_of_experts": case.experts}
    if probs:
        chosen = torch.where(ids >= 0, weights.gather(1, ids.clamp(min=0)), 5.0)
        how["topk_weights"] = chosen.to(device)
    return how


def rank_major(buffer: Any, device: str) -> None:
    """`dispatch` and `combine`, with and without what may travel along; then along the handle."""
    rank, ranks = buffer.rank, buffer.group_size
    for by_index, probs, one_byte in itertools.product((False, True), repeat=3):
        case, words = make(ranks, 3, one_byte=one_byte), (by_index, probs, one_byte)
        x, scales = case.hidden[rank].to(device), case.scales[rank].to(device)
        routes = routes_of(case, rank, by_index, device, probs)
        got = buffer.dispatch(hidden=x, scaling_factor=scales, **routes)
        own = local_of(case, rank)
        rows = arrived(case, rank, case.hidden)
        same(got[0], rows, device, words)
        same(got[2], arrived(case, rank, case.scales), device, words)
        handle = got[3]
        assert len(handle) == 7 and int(handle[3]) == len(rows) and handle[5] == len(x)
        same(handle[4], arrived(case, rank, case.bits)[:, own].contiguous(), device, words)
        dense = torch.zeros(len(rows), case.experts)
        dense[:, own] = arrived(case, rank, case.probs)[:, own]
        dense = dense[:, domain_of(buffer, case)].contiguous()
        assert (got[1] is None) == (not probs)
        if probs:
            same(got[1], dense, device, words)
        again = buffer.dispatch(
            x,
            handle=handle,
            num_dispatched_tokens_tensor=handle[3],
            num_dispatched_tokens=len(rows),
            probs=case.probs[rank].to(device),
        )
        same(again[0], rows, device, words)
        same(again[1], dense, device, words)
        assert again[2] is None and again[3] is handle
        same_way = buffer.dispatch(x, handle=handle, **routes)
        same(same_way[0], rows, device, words)
        assert (same_way[1] is None) == (not probs)
        if probs:
            same(same_way[1], dense, device, words)
        if one_byte:
            continue
        times = arrived(case, rank, case.bits)[:, own].sum(1, keepdim=True).to(device)
        answer = (got[0].float() * times).bfloat16()
        y, back = buffer.combine(answer, got[1], handle)
        same(y, summed(case, rank, True), device, words)
        assert (back is None) == (not probs)
        if probs:
            same(back, case.probs[rank], device, words)
        assert buffer.combine(answer, handle=handle)[1] is None


def expert_major(buffer: Any, device: str) -> None:
    """`dispatch_with_permute` and `combine_with_unpermute`, with padding, as many rows as arrive or
    more, fused or not, which is the same."""
    rank, ranks = buffer.rank, buffer.group_size
    fused = itertools.cycle((False, True))
    for by_index, probs, step, blocking in itertools.product(
        (False, True), (False, True), (None, 1, 8), (True, False)
    ):
        words = (by_index, probs, step, blocking)
        case = make(ranks, 4)
        pad, fuse = step or 1, next(fused)
        rows = permuted(case, rank, case.hidden, pad)
        most = None if blocking else -(-1000 // pad) * pad
        x, scales = case.hidden[rank].to(device), case.scales[rank].to(device)
        got = buffer.dispatch_with_permute(
            hidden=x,
            scaling_factor=scales,
            pad_multiple=step,
            num_of_experts_per_rank=case.experts // ranks,
            num_permuted_tokens=most,
            non_blocking=not blocking,
            fuse_permute_dispatch=fuse,
            use_fp8=False,
            **routes_of(case, rank, by_index, device, probs),
        )
        n = len(rows)
        assert len(got[0]) == (n if blocking else most), words
        same(got[0][:n], rows, device, words)
        same(got[2][:n], permuted(case, rank, case.scales, pad), device, words)
        assert got[3].dtype == torch.int64 and got[3].tolist() == counts(case, rank, pad), words
        assert got[3].device.type == ("cpu" if blocking else device)
        assert (got[1] is None) == (not probs)
        if probs:
            same(got[1][:n], permuted_probs(case, rank, case.probs, pad), device, words)
            assert not got[1][n:].any()
        handle = got[4]
        assert len(handle) == 11 and not handle[-1].any() and handle[8] == len(x)
        answer = got[0].clone()
        answer[n:] = 0
        y, back = buffer.combine_with_unpermute(
            hidden=answer,
            probs=got[1],
            handle=handle,
            pad_multiple=step,
            fuse_unpermute_combine=fuse,
        )
        same(y, summed(case, rank, False), device, words)
        assert (back is None) == (not probs)
        if probs:
            same(back, case.probs[rank], device, words)
        again = buffer.dispatch_with_permute(
            hidden=x,
            handle=handle,
            pad_multiple=step,
            num_permuted_tokens=len(got[0]),
            probs=case.probs[rank].to(device),
        )
        same(again[0][:n], rows, device, words)
        same(again[1][:n], permuted_probs(case, rank, case.probs, pad), device, words)
        assert again[3] is got[3] and again[4] is handle


def layers_in_flight(buffer: Any, device: str) -> None:
    """Several handles, answered in the order of a backward; bytes with scales; many experts."""
    rank, ranks = buffer.rank, buffer.group_size
    cases = [make(ranks, seed, local) for seed, local in ((5, 2), (6, 40), (7, 2))]
    layers = [
        buffer.dispatch_with_permute(
            hidden=case.hidden[rank].to(device),
            routing_map=case.bits[rank].to(device),
            num_of_experts_per_rank=case.experts // ranks,
        )
        for case in cases
    ]
    for case, got in reversed(list(zip(cases, layers))):
        same(got[0], permuted(case, rank, case.hidden, 1), device)
        y, _ = buffer.combine_with_unpermute(hidden=got[0], handle=got[4])
        same(y, summed(case, rank, False), device)
    case = make(ranks, 8, one_byte=True)
    values, _, scales, _, _ = buffer.dispatch_with_permute(
        hidden=case.hidden[rank].to(device),
        routing_map=case.bits[rank].to(device),
        scaling_factor=case.scales[rank].to(device),
        use_fp8=True,
        pad_multiple=4,
    )
    same(values, permuted(case, rank, case.hidden, 4), device)
    kept = permuted(case, rank, [torch.ones(len(x), 1) for x in case.hidden], 4)[:, 0] > 0
    wanted = permuted(case, rank, case.scales, 4)
    same(scales[kept.to(device)], wanted[kept], device)
    wide = make(ranks, 9, 80 // ranks + 1)
    got = buffer.dispatch_with_permute(
        hidden=wide.hidden[rank].to(device),
        routing_map=wide.bits[rank].to(device),
        num_of_experts_per_rank=wide.experts // ranks,
        num_permuted_tokens=600,
        non_blocking=True,
    )
    rows = permuted(wide, rank, wide.hidden, 1)
    same(got[0][: len(rows)], rows, device)


def refusals(buffer: Any, device: str) -> None:
    """Before anything moves, on every rank alike."""
    case = make(buffer.group_size, 10)
    rank = buffer.rank
    x, bits = case.hidden[rank].to(device), case.bits[rank].to(device)
    got = buffer.dispatch_with_permute(hidden=x, routing_map=bits)
    flat = buffer.dispatch(x, routing_map=bits)
    permute, back = buffer.dispatch_with_permute, buffer.combine_with_unpermute
    buffer.print_memory_usage()
    if not buffer.explicitly_destroy:
        with pytest.raises(AssertionError, match="explicitly_destroy"):
            buffer.destroy()
    with pytest.raises(EPException, match="num_dispatched_tokens: got -1"):
        buffer.dispatch(x, handle=flat[3], num_dispatched_tokens=-1)
    wrong_map, handle, rows = bits.int(), got[4], got[0]
    for call, words in (
        (lambda: permute(hidden=x), "routing_map: got None"),
        (lambda: permute(hidden=x, routing_map=wrong_map), r"routing_map: got torch\.int32"),
        (
            lambda: permute(hidden=x, topk_idx=bits.long()),
            "num_of_experts: got None; expected at least 1, beside topk_idx",
        ),
        (
            lambda: permute(hidden=x, routing_map=bits[:, 1:]),
            rf"routing_map: got {case.experts - 1} experts; expected {case.experts}, num_local_exp",
        ),
        (
            lambda: buffer.dispatch(x, topk_idx=bits.long(), num_of_experts=2 * case.experts),
            rf"num_of_experts: got {2 * case.experts} experts; expected {case.experts}",
        ),
        (
            lambda: permute(hidden=x, routing_map=bits, num_of_experts_per_rank=0),
            "num_of_experts_per_rank: got 0; expected at least 1",
        ),
        (
            lambda: permute(hidden=x, routing_map=bits, topk_idx=bits.long()),
            "topk_idx, topk_weights: got a tensor; expected None beside routing_map",
        ),
        (
            lambda: permute(hidden=x, topk_idx=bits.long(), probs=bits.float(), num_of_experts=9),
            "probs: got a tensor; expected topk_weights",
        ),
        (
            lambda: permute(hidden=x, handle=handle, topk_weights=bits.float()),
            "topk_weights: got a tensor; expected topk_idx",
        ),
        (
            lambda: permute(hidden=x, handle=handle, num_of_experts=77),
            "num_of_experts: got 77",
        ),
        (lambda: permute(hidden=x, routing_map=bits, non_blocking=True), "num_permuted_tokens"),
        (
            lambda: permute(hidden=x, routing_map=bits, num_permuted_tokens=5, pad_multiple=4),
            "num_permuted_tokens: got 5; expected a multiple of 4",
        ),
        (lambda: permute(hidden=x, routing_map=bits, use_fp8=True), "use_fp8: got True"),
        (
            lambda: permute(hidden=x, routing_map=bits, num_of_experts_per_rank=99),
            f"routing_map: got {case.experts} experts; expected .* num_of_experts_per_rank = 99",
        ),
        (lambda: permute(hidden=x, handle=(1, 2)), "handle: got a tuple; expected"),
        (lambda: permute(hidden=x, handle=flat[3]), "handle: got a tuple"),
        (
            lambda: permute(hidden=torch.cat([x, x, x[:1], x[:0]]), handle=handle),
            r"hidden: got \d+ rows; expected",
        ),
        (lambda: back(hidden=rows, handle=None), "handle: got a NoneType"),
        (lambda: back(hidden=rows, handle=handle, pad_multiple=7), "pad_multiple: got 7"),
        (
            lambda: back(hidden=torch.cat([rows, rows.new_zeros(1, HIDDEN)]), handle=handle),
            r"hidden: got \d+ rows; expected",
        ),
        (lambda: back(hidden=rows, handle=handle, probs=rows), "probs: got"),
        (lambda: buffer.combine(flat[0], rows, flat[3]), "probs: got"),
        (lambda: buffer.update_template_config(nothing=1), "nothing: got 1; expected a field"),
        (lambda: buffer.update_template_config(hidden_dim=0), "hidden_dim: got 0"),
    ):
        if "rows" in words and len(x) == 0:
            continue
        with pytest.raises(EPException, match=words):
            call()


def maps() -> None:
    """Of a helper that needs no buffer."""
    ids = torch.tensor([[2, 0], [-1, 1], [-1, -1]])
    bits, probs = indices_to_map(ids, torch.tensor([[0.5, 2.0], [9, 3], [9, 9]]), 3, 4)
    assert bits.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert probs is not None
    assert probs.tolist() == [[2, 0, 0.5, 0], [0, 3, 0, 0], [0, 0, 0, 0]]
    assert indices_to_map(ids, None, 3, 4)[1] is None


ALL = [rank_major, expert_major, layers_in_flight, refusals]
"""For every device."""
