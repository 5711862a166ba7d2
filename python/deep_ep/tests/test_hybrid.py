"""`HybridEPBuffer`, on ranks that are threads of one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import hybrid_bodies as bodies
import pytest
import torch
from rank_buffers import ThreadComm, run_buffers, run_ranks

import deep_ep
import ferry
from deep_ep.errors import EPException

HYBRID: dict[str, Any] = {
    "kind": deep_ep.HybridEPBuffer,
    "hidden_dim": bodies.HIDDEN,
    "max_num_of_tokens_per_rank": 32,
    "num_local_experts": 3,
}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("body", bodies.ALL, ids=lambda body: body.__name__)
def test_on_cpu(body: Any, size: int) -> None:
    run_buffers(size, lambda buffer: body(buffer, "cpu"), **HYBRID)


def test_maps() -> None:
    bodies.maps()


def test_settings() -> None:
    """Every argument of the constructor, and what a call's settings keep of them."""
    some = {
        "hidden_dim": 256,
        "max_num_of_tokens_per_rank": 20,
        "num_local_experts": 2,
        "use_fp8": True,
        "num_sms_dispatch_api": 16,
        "num_sms_combine_api": 12,
        "num_sms_preprocessing_api": 108,
        "num_blocks_permute": 3,
        "num_blocks_unpermute": 4,
        "load_cached_kernels": True,
        "use_shared_buffer": False,
        "enable_custom_allgather": True,
        "num_of_hybrid_ep_ranks_per_nvlink_domain": 2,
        "use_mnnvl": True,
    }

    def body(comm: ThreadComm) -> None:
        for buffer in (
            deep_ep.HybridEPBuffer(comm, **some),  # type: ignore[arg-type]
            deep_ep.HybridEPBuffer(comm, *some.values()),  # type: ignore[arg-type]
        ):
            whole = buffer.configurer.buffer_config
            assert (whole.hidden_dim, whole.num_of_experts_per_rank) == (256, 2)
            assert whole.max_num_of_tokens_per_rank == 20 and whole.is_valid()
            config = buffer.update_template_config()
            assert isinstance(config, deep_ep.HybridEpConfigInstance) and config.is_valid(True)
            assert config.token_data_type == "UINT8"
            assert config.num_of_blocks_dispatch_api == 16
            assert config.num_of_blocks_combine_api == 12
            assert config.num_of_blocks_preprocessing_api == 108
            assert (config.num_of_blocks_permute, config.num_of_blocks_unpermute) == (3, 4)
            config = buffer.update_template_config(
                512, 33, 5, 128, False, True, num_of_stages_dispatch_api=7
            )
            assert (
                dataclasses.asdict(config).items()
                >= {
                    "hidden_dim": 512,
                    "max_num_of_tokens_per_rank": 48,
                    "num_of_experts_per_rank": 5,
                    "pad_multiple": 128,
                    "token_data_type": "UINT16",
                    "num_of_stages_dispatch_api": 7,
                }.items()
            )
            assert whole.max_num_of_tokens_per_rank == 48 and whole.hidden_dim == 512
            buffer.configurer.adjust_template(config)
            buffer.empty_jit_cache()
            assert (buffer.rank, buffer.group_size) == (comm.Get_rank(), 2)
            assert (buffer.local_rank, buffer.node_rank) == (comm.Get_rank(), 0)
            assert buffer.num_of_nodes == 1 and buffer.group is comm
            assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == 2
            assert len({config, config}) == 1
            bodies.expert_major(buffer, "cpu")
            comm.allgather(None)

    run_ranks(2, body)


def test_more_rows_than_there_is_room_for() -> None:
    """An error on the rank that they come to, instead of rows that are gone."""

    def body(buffer: Any) -> None:
        x, bits = torch.ones(8, 64).bfloat16(), torch.ones(8, 2, dtype=torch.bool)
        with pytest.raises(ferry.ExhaustedError):
            buffer.dispatch_with_permute(
                hidden=x, routing_map=bits, num_permuted_tokens=15, non_blocking=True
            )

    run_buffers(1, body, **HYBRID)


def test_deprecated_arguments_say_so() -> None:
    def body(buffer: Any) -> None:
        x, bits = torch.ones(4, 64).bfloat16(), torch.ones(4, 2, dtype=torch.bool)
        with pytest.warns(DeprecationWarning, match="use_host_meta"):
            got = buffer.dispatch_with_permute(hidden=x, routing_map=bits, use_host_meta=True)
        with pytest.warns(DeprecationWarning, match="num_dispatched_tokens"):
            buffer.dispatch_with_permute(hidden=x, handle=got[4], num_dispatched_tokens=4)
        with pytest.warns(DeprecationWarning, match="num_dispatched_tokens"):
            buffer.combine_with_unpermute(hidden=got[0], handle=got[4], num_dispatched_tokens=4)

    run_buffers(1, body, **HYBRID)


def test_routes_that_are_no_handles() -> None:
    """Seen in CPU memory: other routes beside a handle; more bits than a route of Ferry holds."""

    def body(buffer: Any) -> None:
        x, bits = torch.ones(4, 64).bfloat16(), torch.eye(4, 80, dtype=torch.bool)
        handle = buffer.dispatch_with_permute(hidden=x, routing_map=bits)[4]
        with pytest.raises(EPException, match="routing_map: got other routes"):
            buffer.dispatch_with_permute(hidden=x, routing_map=~bits, handle=handle)
        for how in ({}, {"non_blocking": True, "num_permuted_tokens": 400}):
            with pytest.raises(EPException, match="routing_map: got 79; expected at most 64"):
                buffer.dispatch_with_permute(hidden=x, routing_map=~bits, **how)

    run_buffers(1, body, **HYBRID)
