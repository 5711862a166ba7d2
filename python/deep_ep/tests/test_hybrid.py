"""`HybridEPBuffer`, on ranks that are threads of one process."""

from __future__ import annotations

import dataclasses
from functools import partial
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


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_settings(size: int) -> None:
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
            assert (buffer.rank, buffer.group_size) == (comm.Get_rank(), size)
            nodes, each = buffer.runtime.get_physical_domain_size()
            assert (buffer.node_rank, buffer.local_rank) == divmod(comm.Get_rank(), each)
            assert buffer.num_of_nodes == nodes and buffer.group is comm
            assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == each
            assert len({config, config}) == 1
            if size < 8:
                bodies.expert_major(buffer, "cpu")
            comm.allgather(None)
            buffer.explicitly_destroy = True
            buffer.destroy()

    run_ranks(size, body)


def test_more_rows_than_there_is_room_for() -> None:
    """An error on all ranks, instead of rows that are gone; the next call works."""

    def body(buffer: Any) -> None:
        x, bits = torch.ones(8, 64).bfloat16(), torch.ones(8, 6, dtype=torch.bool)
        send = partial(buffer.dispatch_with_permute, hidden=x, routing_map=bits, non_blocking=True)
        rows = 47 if buffer.rank == 1 else 48
        words = "rank 1 would receive 48 rows but gave num_permuted_tokens = 47; nothing was sent"
        with pytest.raises(ferry.ExhaustedError, match=words) as caught:
            send(num_permuted_tokens=rows)
        assert caught.value.peer == 1
        assert torch.equal(send(num_permuted_tokens=48)[0], torch.ones(48, 64).bfloat16())

    run_buffers(2, body, **HYBRID)


def test_experts_of_the_constructor() -> None:
    """A map of other experts is refused where the call does not say how many a rank has, also once
    another call had more; rows and tokens grow."""

    def body(buffer: Any) -> None:
        x = torch.ones(64, 2 * bodies.HIDDEN).bfloat16()
        six, eight = torch.ones(64, 6, dtype=torch.bool), torch.ones(64, 8, dtype=torch.bool)
        words = "routing_map: got 8 experts; expected 6, num_local_experts = 3 on each of 2 ranks"
        for _ in range(2):
            for send in (buffer.dispatch, buffer.dispatch_with_permute):
                with pytest.raises(EPException, match=words):
                    send(hidden=x, routing_map=eight)
            buffer.dispatch_with_permute(hidden=x, routing_map=eight, num_of_experts_per_rank=4)
        assert len(buffer.dispatch(x, routing_map=six)[0]) == 128
        assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == 64
        assert buffer.configurer.buffer_config.hidden_dim == 2 * bodies.HIDDEN
        with pytest.raises(EPException, match="topk_idx: got expert 6; expected less than 6"):
            buffer.dispatch(x, topk_idx=torch.full((64, 1), 6), num_of_experts=6)

    run_buffers(2, body, **HYBRID)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_deprecated_arguments_say_so(size: int) -> None:
    """Each once on each rank."""

    def body(buffer: Any) -> None:
        x, bits = torch.ones(4, 64).bfloat16(), torch.ones(4, 3 * size, dtype=torch.bool)
        got = buffer.dispatch_with_permute(hidden=x, routing_map=bits, use_host_meta=True)
        buffer.dispatch_with_permute(hidden=x, handle=got[4], num_dispatched_tokens=4)
        buffer.combine_with_unpermute(hidden=got[0], handle=got[4], num_dispatched_tokens=4)

    old = {"use_mnnvl": False, "num_of_hybrid_ep_ranks_per_nvlink_domain": 1}
    with pytest.warns(DeprecationWarning) as said:
        run_buffers(size, body, **HYBRID, **old)
    for words in (
        "HybridEPBuffer: use_mnnvl is",
        "HybridEPBuffer: num_of_hybrid_ep_ranks_per_nvlink_domain is",
        "dispatch_with_permute: use_host_meta is",
        "dispatch_with_permute: num_dispatched_tokens is",
        "combine_with_unpermute: num_dispatched_tokens is",
    ):
        assert sum(str(one.message).startswith(words) for one in said) == size, words


def test_routes_that_are_no_handles() -> None:
    """Seen in CPU memory: other routes beside a handle; more bits than a route of Ferry holds."""

    def body(buffer: Any) -> None:
        x, bits = torch.ones(4, 64).bfloat16(), torch.eye(4, 80, dtype=torch.bool)
        send = partial(buffer.dispatch_with_permute, num_of_experts_per_rank=80)
        handle = send(hidden=x, routing_map=bits)[4]
        with pytest.raises(EPException, match="routing_map: got other routes"):
            buffer.dispatch_with_permute(hidden=x, routing_map=~bits, handle=handle)
        for how in ({}, {"non_blocking": True, "num_permuted_tokens": 400}):
            with pytest.raises(EPException, match="routing_map: got 79; expected at most 64"):
                send(hidden=x, routing_map=~bits, **how)

    run_buffers(1, body, **HYBRID)


def test_weights_of_other_shapes_are_refused() -> None:
    """torch would use a part of them."""

    def body(buffer: Any) -> None:
        x, routes = torch.ones(4, 64).bfloat16(), torch.tensor([[0, 2]] * 4)
        handle = buffer.dispatch(x, topk_idx=routes, num_of_experts=3)[3]
        for weights in (torch.ones(4, 3), torch.ones(5, 2), torch.ones(3)):
            with pytest.raises(EPException, match=r"topk_weights: got .*shape \(4, 2\)"):
                buffer.dispatch(x, topk_idx=routes, topk_weights=weights, num_of_experts=3)
        with pytest.raises(EPException, match=r"topk_weights: got .*shape \(4, 2\)"):
            buffer.dispatch(x, topk_idx=routes, topk_weights=torch.ones(4, 3), handle=handle)
        with pytest.raises(EPException, match=r"probs: got .*shape \(4, 3\)"):
            buffer.dispatch(x, probs=torch.ones(4, 5), handle=handle)
        with pytest.raises(EPException, match="probs: got an object of type int"):
            buffer.combine(x, 3, handle)
        with pytest.raises(EPException, match="hidden: got an object of type int"):
            buffer.dispatch_with_permute(hidden=3, topk_idx=routes, num_of_experts=3)

    run_buffers(1, body, **HYBRID)


def test_settings_are_settings() -> None:
    """In a handle, and by name."""

    def body(buffer: Any) -> None:
        x = torch.ones(8, bodies.HIDDEN)
        bits = torch.ones(8, 3, dtype=torch.bool)
        found = buffer.dispatch_with_permute(hidden=x, routing_map=bits, pad_multiple=16)
        handle = found[-1]
        with pytest.raises(EPException, match="handle: got a tuple of 11"):
            buffer.dispatch_with_permute(hidden=x, handle=(*handle[:9], "x", handle[10]))
        update = buffer.update_template_config
        for name, wrong in (
            ("num_of_blocks_dispatch_api", -1),
            ("num_of_blocks_combine_api", "x"),
            ("forward_dispatch_api", 7),
            ("token_data_type", 5),
        ):
            with pytest.raises(EPException, match=f"{name}: got"):
                update(**{name: wrong})

    run_buffers(1, body, **HYBRID)


def test_tensors_of_other_devices_and_kinds() -> None:
    """A tensor of no memory brought weights of anything."""

    def body(buffer: Any) -> None:
        x = torch.ones(8, bodies.HIDDEN)
        bits, probs = torch.ones(8, 3, dtype=torch.bool), torch.rand(8, 3)
        ids, weights = torch.zeros(8, 1, dtype=torch.int64), torch.rand(8, 1)
        by_map = {"routing_map": bits, "probs": probs, "scaling_factor": torch.ones(8, 1)}
        by_ids = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": 3}
        for call in (buffer.dispatch, partial(buffer.dispatch_with_permute)):
            for given in (by_map, by_ids):
                handle = call(hidden=x, **given)[-1]
                for name, one in given.items():
                    if isinstance(one, torch.Tensor):
                        for wrong in (one.to("meta"), one.to_sparse()):
                            with pytest.raises((EPException, ferry.Error), match=f": {name}: got"):
                                call(hidden=x, **given | {name: wrong})
            for name, given in (("probs", by_map), ("topk_weights", by_ids)):
                with pytest.raises(EPException, match=f"{name}: got torch.int64"):
                    call(hidden=x, **given | {name: given[name].long()})
            with pytest.raises(EPException, match="topk_idx: got expert 9; expected less than 3"):
                call(hidden=x, handle=handle, **by_ids | {"topk_idx": ids + 9})
            again = call(hidden=x, handle=call(hidden=x, **by_map)[-1], probs=probs.double())
            assert torch.equal(again[1].sum(), call(hidden=x, **by_map)[1].sum())

    run_buffers(1, body, **HYBRID)
