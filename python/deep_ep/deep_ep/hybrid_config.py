"""Settings of HybridEP, as callers read and set them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from deep_ep.errors import refuse, require, require_flags, require_integer
from ferry.arguments import shown

_TOKEN_STEP = 16


@dataclass
class BufferConfig:
    """What a buffer was made for; rows and tokens grow with the calls."""

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    num_of_ranks_per_node: int = 1
    num_of_nodes: int = 1
    token_data_type: str = "UINT16"
    num_of_blocks_preprocessing_api: int = 0
    num_of_blocks_dispatch_api: int = 0
    num_of_blocks_combine_api: int = 0
    num_of_tokens_per_chunk_dispatch_api: int = 0
    num_of_tokens_per_chunk_combine_api: int = 0
    num_of_dispatch_chunks: int = 0
    num_of_combine_chunks: int = 0

    def is_valid(self) -> bool:
        """Sizes that rows can have."""
        return self.hidden_dim > 0 and self.max_num_of_tokens_per_rank >= 0


@dataclass(eq=False)  # callers keep it in sets and compare objects
class HybridEpConfigInstance:
    """What one call was made with. Ferry uses `num_of_blocks_dispatch_api` and
    `num_of_blocks_combine_api`, how many SMs move rows on GPUs, and `pad_multiple`; the other
    settings of kernels are kept as they are set."""

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    num_of_ranks_per_node: int = 1
    num_of_nodes: int = 1
    pad_multiple: int = 0
    num_of_tokens_per_chunk_preprocessing_api: int = 0
    num_of_threads_per_block_preprocessing_api: int = 0
    num_of_blocks_preprocessing_api: int = 0
    num_of_blocks_permute: int = 0
    num_of_blocks_unpermute: int = 0
    token_data_type: str = "UINT16"
    num_of_stages_dispatch_api: int = 0
    num_of_stages_permute_block_dispatch_api: int = 0
    num_of_in_flight_s2g_dispatch_api: int = 0
    num_of_in_flight_s2g_permute_block_dispatch_api: int = 0
    num_of_additional_in_flight_s2g_dispatch_api: int = 0
    num_of_tokens_per_chunk_dispatch_api: int = 0
    num_of_blocks_dispatch_api: int = 0
    forward_dispatch_api: bool = True
    device_side_sync_dispatch_api: bool = True
    num_of_stages_g2s_combine_api: int = 0
    num_of_stages_s2g_combine_api: int = 0
    num_of_tokens_per_chunk_combine_api: int = 0
    num_of_tokens_per_group_combine_api: int = 0
    num_of_blocks_combine_api: int = 0
    num_of_additional_in_flight_s2g_combine_api: int = 0
    backward_combine_api: bool = True
    device_side_sync_combine_api: bool = True

    def is_valid(self, fuse_permute_dispatch: bool = False) -> bool:
        """Sizes that rows can have; fused or not is the same."""
        return self.hidden_dim > 0 and self.num_of_experts_per_rank > 0


_NAMES = {one.name for one in fields(HybridEpConfigInstance)}


@dataclass
class Configurer:
    """The sizes of a buffer, and the settings of a call. SMs: of `dispatch`, `combine` and the
    others; 0: a default."""

    buffer_config: BufferConfig
    blocks: dict[str, int] = field(default_factory=dict)

    def get_default_config(self, fuse_permute_dispatch: bool = False) -> HybridEpConfigInstance:
        """Of a call that says nothing."""
        require_flags("get_default_config", fuse_permute_dispatch=fuse_permute_dispatch)
        whole = self.buffer_config
        shared = (one.name for one in fields(BufferConfig) if one.name in _NAMES)
        made = HybridEpConfigInstance(**{name: getattr(whole, name) for name in shared})
        for name, count in self.blocks.items():
            setattr(made, name, count)
        return made

    def adjust_template(
        self, config: HybridEpConfigInstance, fuse_permute_dispatch: bool = False
    ) -> None:
        """Leaves it as it is: Ferry has no stages to fit into shared memory."""
        require_flags("adjust_template", fuse_permute_dispatch=fuse_permute_dispatch)

    def updated(self, call: str, given: dict[str, Any], further: dict[str, Any]) -> Any:
        """A call's settings: those of `update_template_config`, None where it says nothing, and
        fields by name. The buffer's own rows and tokens grow with them, its experts do not."""
        config, whole = self.get_default_config(), self.buffer_config
        for name in ("hidden_dim", "num_of_experts_per_rank"):
            if given[name] is not None:
                setattr(config, name, require_integer(call, name, given[name], 1, "at least 1"))
        whole.hidden_dim = max(config.hidden_dim, whole.hidden_dim)
        tokens = given["tokens"]
        if tokens is not None:
            tokens = require_integer(call, "num_of_tokens_per_rank", tokens, 0, "0 or more")
            tokens = -(-tokens // _TOKEN_STEP) * _TOKEN_STEP
            whole.max_num_of_tokens_per_rank = max(tokens, whole.max_num_of_tokens_per_rank)
            config.max_num_of_tokens_per_rank = whole.max_num_of_tokens_per_rank
        if given["pad_multiple"] is not None:
            step = require_integer(call, "pad_multiple", given["pad_multiple"], 0, "0 or more")
            config.pad_multiple = step
        if given["use_fp8"] is not None:
            require_flags(call, use_fp8=given["use_fp8"])
            config.token_data_type = "UINT8" if given["use_fp8"] else "UINT16"
        for name, value in further.items():
            if name not in _NAMES:
                refuse(call, name, shown(value), "a field of HybridEpConfigInstance")
            setattr(config, name, _of_its_kind(call, name, value))
        require(config.is_valid(), call, "config", config, "hidden_dim and experts of at least 1")
        return config


def _of_its_kind(call: str, name: str, value: Any) -> Any:
    """What a field can hold: a number, True or False, or a word, as its default."""
    kind = type(getattr(HybridEpConfigInstance, name))
    if kind is int:
        return require_integer(call, name, value, 0, "0 or more")
    if kind is bool:
        require_flags(call, **{name: value})
        return bool(value)
    require(isinstance(value, kind), call, name, shown(value), "a string")
    return value
