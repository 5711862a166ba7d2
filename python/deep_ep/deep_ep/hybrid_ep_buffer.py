"""`HybridEPBuffer`: dispatch and combine with the permutation to experts in them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import ferry.torch
from deep_ep import arguments
from deep_ep.errors import require, require_flags, require_integer
from deep_ep.gradients import without_gradients
from deep_ep.hybrid_config import BufferConfig, Configurer, HybridEpConfigInstance
from deep_ep.hybrid_exchange import HybridExchange
from deep_ep.hybrid_handles import HybridCall, indices_to_map, kept_of, rows_of
from ferry.arguments import INT32_MAX, whole_number

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"]


class HybridEPBuffer(HybridExchange):
    """R ranks that exchange tokens with experts, with routing maps for routes.

    Making one is collective. Calls run on the current stream. The permutation to experts and back
    is always part of the exchange, whether a call asks for that or not.

    Args:
        group: a process group of torch.distributed, of any backend, or a communicator of mpi4py.
        hidden_dim, max_num_of_tokens_per_rank, use_fp8: what the buffer is for; calls may have
            other sizes, and the buffer grows with them.
        num_local_experts: the experts of a rank, where a call does not say num_of_experts_per_rank.
        num_sms_dispatch_api, num_sms_combine_api: SMs that move rows on GPUs; None: a default.
        num_sms_preprocessing_api, num_blocks_permute, num_blocks_unpermute: kept in the settings:
            there is no kernel of that kind.
        load_cached_kernels, use_shared_buffer, enable_custom_allgather: taken, and without effect:
            nothing is compiled, and Ferry chooses its memory.
        num_of_hybrid_ep_ranks_per_nvlink_domain, use_mnnvl: deprecated, as in the original, and
            warn; Ferry finds domains.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        super().__init__()
        call = "HybridEPBuffer"
        for name, given in (
            ("num_of_hybrid_ep_ranks_per_nvlink_domain", num_of_hybrid_ep_ranks_per_nvlink_domain),
            ("use_mnnvl", use_mnnvl),
        ):
            if given is not None:
                text = f"{call}: {name} is deprecated: the ranks that share memory are found"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
        require_flags(
            call,
            use_fp8=use_fp8,
            load_cached_kernels=load_cached_kernels,
            use_shared_buffer=use_shared_buffer,
            enable_custom_allgather=enable_custom_allgather,
            use_mnnvl=use_mnnvl,
        )
        dim, tokens, experts = (
            require_integer(call, name, value, least, f"at least {least}")
            for name, value, least in (
                ("hidden_dim", hidden_dim, 1),
                ("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0),
                ("num_local_experts", num_local_experts, 1),
            )
        )
        blocks = {
            "num_of_blocks_dispatch_api": num_sms_dispatch_api,
            "num_of_blocks_combine_api": num_sms_combine_api,
            "num_of_blocks_preprocessing_api": num_sms_preprocessing_api,
            "num_of_blocks_permute": num_blocks_permute,
            "num_of_blocks_unpermute": num_blocks_unpermute,
        }
        numbers = {
            name: require_integer(call, name, value, 0, "0 or more, or None")
            for name, value in blocks.items()
            if value is not None
        }
        self._meet(group)
        everyone = self._groups.everyone
        self.rank, self.group_size = everyone.rank, everyone.size
        self.num_of_nodes, per_node = self.runtime.get_physical_domain_size()
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = per_node
        self.node_rank, self.local_rank = divmod(self.rank, per_node)
        kind = "UINT8" if use_fp8 else "UINT16"
        whole = BufferConfig(dim, tokens, experts, per_node, self.num_of_nodes, kind)
        self.configurer = Configurer(whole, numbers)

    def empty_jit_cache(self) -> None:
        """There is none: nothing is compiled at run time."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """The settings of a call; None: the buffer's. kwargs: fields of the settings by name."""
        require_flags("update_template_config", fuse_permute_dispatch=fuse_permute_dispatch)
        given = {
            "hidden_dim": hidden_dim,
            "tokens": num_of_tokens_per_rank,
            "num_of_experts_per_rank": num_local_experts,
            "pad_multiple": pad_multiple,
            "use_fp8": use_fp8,
        }
        made: HybridEpConfigInstance = self.configurer.updated(
            "update_template_config", given, kwargs
        )
        return made

    @without_gradients
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple[Any, ...] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Collective. Sends each token once to every rank that holds one of its experts.

        Args:
            hidden: [T, H]. scaling_factor: f32 [T, any], carried along.
            routing_map: bool [T, E], with probs f32 [T, E] or None; or topk_idx [T, K], -1 =
                unused, with topk_weights [T, K] or None and num_of_experts.
            num_dispatched_tokens: as many as arrive, if it is given; it and its tensor are not
                needed.
            handle: of an earlier dispatch, to send the same way again.

        Returns [N, H], the probabilities of this domain's experts f32 [N, E / domains] (0 where
        another rank has the expert) or None, the scales or None, and the handle. Rows come in
        ascending source rank, then token.
        """
        given = (topk_idx, topk_weights, num_of_experts, probs, routing_map)
        call = HybridCall("dispatch", 7, 0, 0)
        kept, x, scales, weights, made = self._send(call, hidden, scaling_factor, given, handle)
        rows = kept.exchange.rows
        if num_dispatched_tokens is not None:
            expected = f"{rows}, which arrived"
            good = whole_number(num_dispatched_tokens) == rows
            require(good, "dispatch", "num_dispatched_tokens", num_dispatched_tokens, expected)
        dense = None
        if weights is not None:
            local = kept.exchange.group.local_experts
            mine = ferry.torch.probs_of_routes(kept.topk_idx, weights, local)
            dense = weights.new_zeros(rows, local * self.num_of_hybrid_ep_ranks_per_nvlink_domain)
            dense[:, self._own_columns(local)] = mine
        return x, dense, scales, made

    @without_gradients
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Collective. Adds up the rows of each token, as `Buffer.combine` does: [T, H]; and brings
        back probs [N, E / domains]: f32 [T, E] or None."""
        kept = kept_of("combine", handle, 7)
        weights = None
        if probs is not None:
            local, ids = kept.exchange.group.local_experts, kept.topk_idx
            wanted = (len(ids), local * self.num_of_hybrid_ep_ranks_per_nvlink_domain)
            arguments.check_memory("combine", probs=probs)
            good = tuple(probs.shape) == wanted and probs.dtype == torch.float32
            expected = f"torch.float32 of shape {wanted}"
            require(good, "combine", "probs", arguments.words(probs), expected)
            own = probs[:, self._own_columns(local)]
            weights = torch.where(ids >= 0, own.gather(1, ids.clamp(min=0)), 0.0)
        return self._bring_back("combine", hidden, weights, kept)

    @without_gradients
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Any, ...]]:
        """Collective. The same with a row for each token and expert, in blocks of ascending local
        expert.

        Args:
            hidden, scaling_factor, routing_map, probs, topk_idx, topk_weights, num_of_experts,
                handle: as of `dispatch`.
            num_of_experts_per_rank: E / R; None: num_local_experts of the constructor.
            use_fp8: whether rows are of one byte.
            pad_multiple: rows of an expert, with zero rows behind them, are a multiple of it.
            num_permuted_tokens: how many rows come back, whatever arrives; where more would come to
                a rank, all ranks raise, and nothing is sent.
            non_blocking: the CPU waits for nothing; needs num_permuted_tokens.

        Returns [M, H], probabilities f32 [M] (0 for padding) or None, scales or None, the rows of
        each local expert with padding, i64 [L], in CPU memory unless non_blocking, and the handle.
        """
        name = "dispatch_with_permute"
        for old, value in (
            ("num_dispatched_tokens", num_dispatched_tokens),
            ("use_host_meta", use_host_meta),
        ):
            if value is not None:
                warnings.warn(f"{name}: {old} is deprecated", DeprecationWarning, stacklevel=3)
        require_flags(
            name,
            use_host_meta=use_host_meta,
            non_blocking=non_blocking,
            use_fp8=use_fp8,
            fuse_permute_dispatch=fuse_permute_dispatch,
        )
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        step = _step(name, pad_multiple)
        most = rows_of(name, num_permuted_tokens, non_blocking, step)
        arguments.check_rows(name, "hidden", hidden)
        one_byte = hidden.element_size() == 1
        good = use_fp8 is None or bool(use_fp8) == one_byte
        require(good, name, "use_fp8", use_fp8, f"{one_byte}, as of {hidden.dtype}")
        given = (topk_idx, topk_weights, num_of_experts, probs, routing_map)
        call = HybridCall(name, 11, max(step, 1), most, non_blocking, num_of_experts_per_rank)
        kept, x, scales, weights, made = self._send(call, hidden, scaling_factor, given, handle)
        assert kept.tokens_per_expert is not None
        return x, weights, scales, kept.tokens_per_expert, made

    @without_gradients
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Collective. Adds up the rows of each token, [T, H]: those of a rank in ascending expert,
        rounded, then the ranks; and brings back probs [M]: f32 [T, E] or None. pad_multiple: None,
        or that of the dispatch."""
        name = "combine_with_unpermute"
        require_flags(name, fuse_unpermute_combine=fuse_unpermute_combine)
        if num_dispatched_tokens is not None:
            text = f"{name}: num_dispatched_tokens is deprecated"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
        kept = kept_of(name, handle, 11)
        good = pad_multiple is None or max(_step(name, pad_multiple), 1) == kept.alignment
        expected = f"{kept.alignment}, as of the dispatch, or None"
        require(good, name, "pad_multiple", pad_multiple, expected)
        if probs is not None:
            arguments.check_memory(name, probs=probs)
            good = tuple(probs.shape) == (kept.exchange.rows,) and probs.dtype == torch.float32
            expected = f"torch.float32 of shape ({kept.exchange.rows},)"
            require(good, name, "probs", arguments.words(probs), expected)
        return self._bring_back(name, hidden, probs, kept)


def _step(call: str, pad_multiple: Any) -> int:
    """The number of rows, 0 for None."""
    if pad_multiple is None:
        return 0
    expected = f"0 to {INT32_MAX}, or None"
    step = require_integer(call, "pad_multiple", pad_multiple, 0, expected)
    require(step <= INT32_MAX, call, "pad_multiple", step, expected)
    return step
