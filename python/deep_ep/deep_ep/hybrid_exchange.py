"""What the calls of HybridEP share: routes to Ferry's, an exchange, what is kept for the answer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import ferry.torch
from deep_ep import arguments
from deep_ep.borrowed import tensor_of
from deep_ep.buffers.base import BufferBase
from deep_ep.call import with_scales
from deep_ep.errors import refuse, require, require_integer
from deep_ep.handles import Exchange
from deep_ep.hybrid_config import Configurer, HybridEpConfigInstance
from deep_ep.hybrid_handles import (
    HybridCall,
    Kept,
    config_of,
    handle_of,
    indices_to_map,
    kept_of,
)

_MOST_SLOTS = 64  # of a route of Ferry


class HybridExchange(BufferBase):
    """The half of a HybridEPBuffer that its four calls share."""

    configurer: Configurer
    group_size: int
    local_rank: int

    def _send(
        self,
        call: HybridCall,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        given: tuple[Any, ...],
        handle: tuple[Any, ...] | None,
    ) -> tuple[Kept, Tensor, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """What was kept or is kept now, rows, scales, weights of slots or of permuted rows, and the
        handle."""
        name = call.name
        arguments.check_rows(name, "hidden", hidden)
        topk_idx, topk_weights, _, probs, bits = given
        read = {"topk_idx": topk_idx, "topk_weights": topk_weights, "probs": probs}
        read |= {"routing_map": bits, "scaling_factor": scaling_factor}
        arguments.check_memory(name, **read)
        for argument, tensor in read.items():
            if tensor is not None and tensor.device != hidden.device:
                got, expected = f"a tensor of {tensor.device}", f"{hidden.device}, as hidden"
                refuse(name, argument, got, expected)
        sent = arguments.carried_rows(hidden)
        beside = scaling_factor if hidden.element_size() != 1 else None
        scales = None
        if scaling_factor is not None and beside is None:
            scales = arguments.carried_scales(name, hidden, scaling_factor)
        how: dict[str, Any] = {"scales": scales}
        if call.alignment > 0:
            how |= {"order": "expert_major", "alignment": call.alignment}
        if handle is None:
            kept, received, config = self._first(call, hidden, sent, given, how)
            made = handle_of(call, kept, len(hidden), config)
        else:
            kept, made = kept_of(name, handle, call.length), handle
            received = self._again(call, kept, sent, given, handle, how)
        exchange = kept.exchange
        x = with_scales(received, hidden.dtype, scaling_factor if beside is None else None)
        found = x if isinstance(x, tuple) else (x, None)
        if beside is not None:
            found = (found[0], _carried_beside(call, exchange, beside, how))
        weights = received.topk_weights if call.alignment == 0 else received.row_weights
        return kept, found[0], found[1], weights, made

    def _first(
        self,
        call: HybridCall,
        hidden: Tensor,
        sent: Tensor,
        given: tuple[Any, ...],
        how: dict[str, Any],
    ) -> tuple[Kept, Any, HybridEpConfigInstance]:
        """A dispatch of new routes."""
        bits, probs, topk = self._map_of(call, len(hidden), *given)
        experts = bits.shape[1]
        local = self._experts_per_rank(
            call, experts, "routing_map" if given[4] is not None else "num_of_experts"
        )
        sizes = {
            "hidden_dim": hidden.shape[1],
            "tokens": len(hidden),
            "num_of_experts_per_rank": local,
            "pad_multiple": call.alignment,
            "use_fp8": hidden.element_size() == 1,
        }
        config: HybridEpConfigInstance = self.configurer.updated(call.name, sizes, {})
        routes, weights = ferry.torch.routes_of_map(bits, topk, probs)
        group = self._group_for(experts, hidden.device)
        with _named_by_callers():
            received = group.dispatch(
                sent,
                topk_idx=routes,
                topk_weights=weights,
                row_weights=call.alignment > 0 and weights is not None,
                max_recv_rows=call.most,
                num_sms=config.num_of_blocks_dispatch_api,
                **how,
            )
        assert received.plan is not None
        assert received.raw.x is not None
        rows = received.raw.x.shape[0]
        exchange = Exchange(group, received.plan, 0, rows, worst_case=call.most > 0)
        per_expert = None
        if call.alignment > 0:
            counts = ferry.torch.expert_rows(received.topk_idx, local).long()
            step = call.alignment
            per_expert = (counts + (step - 1)).div(step, rounding_mode="floor") * step
            if not call.non_blocking:
                per_expert = per_expert.cpu()
        ids, slots = received.topk_idx, received.slot_rows
        kept = Kept(exchange, routes, ids, slots, per_expert, max(call.alignment, 1))
        return kept, received, config

    def _experts_per_rank(self, call: HybridCall, experts: int, argument: str) -> int:
        """Those of the call, or of the constructor; all ranks together have `experts`."""
        name, local = "num_local_experts", self.configurer.buffer_config.num_of_experts_per_rank
        if call.experts_per_rank is not None:
            name = "num_of_experts_per_rank"
            local = require_integer(call.name, name, call.experts_per_rank, 1, "at least 1")
        wanted = local * self.group_size
        expected = f"{wanted}, {name} = {local} on each of {self.group_size} ranks"
        require(experts == wanted, call.name, argument, f"{experts} experts", expected)
        return local

    def _again(
        self,
        call: HybridCall,
        kept: Kept,
        sent: Tensor,
        given: tuple[Any, ...],
        handle: tuple[Any, ...],
        how: dict[str, Any],
    ) -> Any:
        """A dispatch along a handle; probabilities may come with it."""
        probs = _probs_beside(call, kept, *given)
        exchange, routes = kept.exchange, kept.routes
        tokens = len(routes)
        require(
            len(sent) == tokens,
            call.name,
            "hidden",
            f"{len(sent)} rows",
            f"{tokens}, as of the handle",
        )
        good = call.most in (0, exchange.rows)
        require(
            good, call.name, "num_permuted_tokens", call.most, f"{exchange.rows}, as of the handle"
        )
        if call.alignment > 1:
            good = call.alignment == kept.alignment
            expected = f"{kept.alignment}, as of the handle"
            require(good, call.name, "pad_multiple", call.alignment, expected)
        if "alignment" in how:
            how["alignment"] = kept.alignment
        weights = None
        if probs is not None:
            own = probs.float().gather(1, routes.clamp(min=0))
            weights = torch.where(routes >= 0, own, 0.0)
        return exchange.group.dispatch(
            sent,
            exchange.plan,
            topk_weights=weights,
            row_weights=call.alignment > 0 and weights is not None,
            max_recv_rows=exchange.max_recv_rows,
            num_sms=config_of(handle).num_of_blocks_dispatch_api,
            **how,
        )

    def _map_of(
        self,
        call: HybridCall,
        tokens: int,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        experts: int | None,
        probs: Tensor | None,
        bits: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, int]:
        """The map, its probabilities and the slots of a route, the same on all ranks."""
        name = call.name
        _check_one_form(name, topk_idx, topk_weights, probs, bits)
        if bits is None:
            if topk_idx is None:
                refuse(name, "routing_map", "None", "a map, or topk_idx, or a handle")
            arguments.check_routes(name, topk_idx)
            _check_shape(name, "topk_weights", topk_weights, topk_idx.shape)
            count = require_integer(
                name, "num_of_experts", experts, 1, "at least 1, beside topk_idx"
            )
            self._experts_per_rank(call, count, "num_of_experts")  # of what size the map becomes
            _check_experts(name, topk_idx, count)
            bits, probs = indices_to_map(topk_idx, topk_weights, tokens, count)
            return bits, probs, topk_idx.shape[1]
        _check_shape(name, "probs", probs, bits.shape)
        good = bits.dtype == torch.bool and bits.dim() == 2 and len(bits) == tokens
        expected = f"torch.bool of shape ({tokens}, number of experts)"
        require(good, name, "routing_map", arguments.words(bits), expected)
        most = min(bits.shape[1], _MOST_SLOTS)
        if call.non_blocking and not bits.is_cuda and bits.numel() > 0:
            named, expected = int(bits.sum(1).max()), f"at most {_MOST_SLOTS} experts of a token"
            require(named <= most, name, "routing_map", named, expected)
        if not call.non_blocking:  # else the CPU would wait to see how many bits there are
            mine = int(bits.sum(1).max()) if tokens > 0 else 0
            said = self._groups.all_gather(struct.pack("=q", mine))
            most = max(1, *(struct.unpack("=q", one)[0] for one in said))
            expected = f"at most {_MOST_SLOTS} experts of a token"
            require(most <= _MOST_SLOTS, name, "routing_map", most, expected)
        return bits, probs, most

    def _bring_back(
        self, name: str, hidden: Tensor, weights: Tensor | None, kept: Kept
    ) -> tuple[Tensor, Tensor | None]:
        arguments.check_rows(name, "hidden", hidden)
        exchange = kept.exchange
        good = hidden.shape[0] == exchange.rows
        require(
            good, name, "hidden", f"{hidden.shape[0]} rows", f"{exchange.rows}, as dispatch gave"
        )
        how: dict[str, Any] = {}
        if kept.slot_rows is not None:
            how = {"order": "expert_major", "alignment": kept.alignment}
        sms = self.configurer.blocks.get("num_of_blocks_combine_api", 0)
        combined = exchange.group.combine(
            hidden, exchange.plan, topk_weights=weights, num_sms=sms, **how
        )
        probs = None
        if weights is not None:
            experts, back = exchange.group.experts, combined.topk_weights
            assert back is not None
            probs = ferry.torch.probs_of_routes(kept.routes, back, experts)
        return tensor_of(combined.raw.x), probs

    def _own_columns(self, local: int) -> slice:
        return slice(self.local_rank * local, (self.local_rank + 1) * local)


@contextmanager
def _named_by_callers() -> Iterator[None]:
    """Ferry's errors name the argument that the caller gave."""
    try:
        yield
    except ferry.ExhaustedError as error:
        text = str(error).replace("max_recv_rows (or out)", "num_permuted_tokens")
        error.args = (text, *error.args[1:])
        raise


def _carried_beside(
    call: HybridCall, exchange: Exchange, scales: Tensor, how: dict[str, Any]
) -> Tensor:
    """Scales beside rows of more than one byte, as rows of their own."""
    good = scales.dim() == 2 and scales.dtype == torch.float32
    words = arguments.words(scales)
    require(good, call.name, "scaling_factor", words, "torch.float32 of two dimensions")
    columns = scales.shape[1]
    rows = torch.nn.functional.pad(scales, (0, -columns % 4)).contiguous()
    plain = {name: value for name, value in how.items() if name != "scales"}
    made = exchange.group.dispatch(
        rows, exchange.plan, max_recv_rows=exchange.max_recv_rows, **plain
    )
    found: Tensor = tensor_of(made.raw.x)[:, :columns].contiguous()
    return found


def _check_one_form(name: str, topk_idx: Any, topk_weights: Any, probs: Any, bits: Any) -> None:
    """Routes are a map with probabilities, or indices with weights."""
    if bits is not None:
        both = topk_idx is not None or topk_weights is not None
        require(not both, name, "topk_idx, topk_weights", "a tensor", "None beside routing_map")
    elif topk_idx is not None:
        require(probs is None, name, "probs", "a tensor", "topk_weights beside topk_idx")


def _check_experts(call: str, topk_idx: Tensor, count: int) -> None:
    if not topk_idx.is_cuda and topk_idx.numel() > 0:  # else the CPU would wait for it
        most = int(topk_idx.max())
        require(most < count, call, "topk_idx", f"expert {most}", f"less than {count}")


def _check_shape(call: str, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """torch's gather and scatter take a larger one, and use a part of it."""
    good = tensor is None or (tensor.shape == shape and tensor.is_floating_point())
    require(good, call, name, arguments.words(tensor), f"torch.float32 of shape {tuple(shape)}")


def _probs_beside(
    call: HybridCall,
    kept: Kept,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    experts: int | None,
    probs: Tensor | None,
    bits: Tensor | None,
) -> Tensor | None:
    """Probabilities that travel along a handle. Routes that are given again must be its own, which
    is looked at in CPU memory alone."""
    _check_one_form(call.name, topk_idx, topk_weights, probs, bits)
    whole = kept.exchange.group.experts
    require(experts in (None, whole), call.name, "num_of_experts", experts, f"{whole}, as then")
    if topk_idx is not None:
        arguments.check_routes(call.name, topk_idx)
        _check_experts(call.name, topk_idx, whole)
        _check_shape(call.name, "topk_weights", topk_weights, topk_idx.shape)
        bits, probs = indices_to_map(topk_idx, topk_weights, len(topk_idx), whole)
    elif topk_weights is not None:
        refuse(call.name, "topk_weights", "a tensor", "topk_idx beside it, or probs")
    if bits is not None and not bits.is_cuda:
        own, _ = indices_to_map(kept.routes, None, len(kept.routes), whole)
        expected = "those of the handle"
        require(torch.equal(bits, own), call.name, "routing_map", "other routes", expected)
    _check_shape(call.name, "probs", probs, (len(kept.routes), whole))
    return probs
