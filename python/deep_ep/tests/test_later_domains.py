"""V2, V2.5 and HybridEP where ranks are of several domains, as those of several hosts are: virtual
domains of two ranks, on threads. Rows hold small whole numbers, so sums are exact whatever way a
row crosses."""

from __future__ import annotations

from functools import partial
from typing import Any

import elastic_bodies
import hybrid_bodies
import low_latency_calls
import mask_bodies
import pytest
import replay_deepep_v25
import replay_megatron_hybrid
import replay_sglang_v2
import replay_torchtitan_v2
import replay_vllm_v2
import test_bucket
import test_elastic
import test_ep
import test_gathering
import test_hybrid
import test_low_latency
import test_pipeline
import torch
from elastic_calls import MOST, dispatched
from rank_buffers import ThreadComm, run_buffers, run_ranks
from reference import arrived, make_job

import deep_ep
import ferry
from deep_ep import errors

REPLAYS = (
    *replay_vllm_v2.ALL,
    *replay_sglang_v2.ALL,
    *replay_torchtitan_v2.ALL,
    *replay_megatron_hybrid.ALL,
    *replay_deepep_v25.ALL,
)


def in_domains(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for name in ("Group", "Collectives"):
        made = getattr(ferry, name)
        kind = made.func if isinstance(made, partial) else made
        monkeypatch.setattr(ferry, name, partial(kind, domain_size=size))


@pytest.fixture(autouse=True)
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    in_domains(monkeypatch, 2)


@pytest.mark.parametrize("kind", [deep_ep.ElasticBuffer, deep_ep.EPBuffer])
@pytest.mark.parametrize(("hybrid", "crossing"), [(True, "hierarchical"), (False, "direct")])
def test_how_tokens_cross(kind: Any, hybrid: bool, crossing: str) -> None:
    """Without hybrid mode for each rank; and a service level, which nobody sets, warns once."""

    def body(buffer: Any) -> None:
        ids = torch.arange(4).expand(4, 4).contiguous()
        x = torch.ones(4, 16).bfloat16()
        handle = buffer.dispatch(x, topk_idx=ids, num_experts=4, num_max_tokens_per_rank=4)[3]
        assert handle._exchange.plan.crossing() == crossing
        assert torch.equal(buffer.combine(x.repeat(4, 1), handle)[0], 4 * x)

    errors._warned.clear()
    with pytest.warns(UserWarning, match=f"{kind.__name__}: sl_idx: got 7; the service") as said:
        run_buffers(4, body, kind=kind, allow_hybrid_mode=hybrid, sl_idx=7)
    assert len(said) == 1


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.__name__)
def test_replays(replay: Any) -> None:
    run_buffers(4, lambda buffer: replay(buffer, "cpu"))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("EPBuffer", elastic_bodies.deferred_dispatches),
        ("ElasticBuffer", elastic_bodies.handles_put_together),
        ("EPBuffer", elastic_bodies.counted),
        ("EPBuffer", elastic_bodies.copies_of_experts),
        ("HybridEPBuffer", hybrid_bodies.layers_in_flight),
        ("HybridEPBuffer", hybrid_bodies.rank_major),
        ("HybridEPBuffer", hybrid_bodies.expert_major),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_sixteen_ranks_of_two_hosts(kind: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_domains(monkeypatch, 8)
    sizes: dict[str, Any] = {}
    if kind == "HybridEPBuffer":
        sizes = {"hidden_dim": hybrid_bodies.HIDDEN, "max_num_of_tokens_per_rank": 32}
        sizes["num_local_experts"] = 3
    run_buffers(16, lambda buffer: body(buffer, "cpu"), kind=getattr(deep_ep, kind), **sizes)


@pytest.mark.parametrize(
    "body",
    [
        low_latency_calls.rows_in_the_combine_buffer,
        low_latency_calls.counts_are_added_to_statistics,
        low_latency_calls.between_dispatch_and_combine,
        low_latency_calls.every_format_and_end,
        low_latency_calls.rows_of_nvfp4,
        low_latency_calls.rows_come_back_in_ten_bits,
        low_latency_calls.waits_are_added,
    ],
    ids=lambda body: body.__name__,
)
def test_low_latency_of_two_hosts(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_domains(monkeypatch, 8)
    run_buffers(16, lambda buffer: body(buffer, "cpu"), low_latency_mode=True)


def test_masks_and_rows_made_meanwhile_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_domains(monkeypatch, 8)
    test_low_latency.test_masks_on_cpu(mask_bodies.halves_apart_and_together, 16)
    for whole in (False, True):
        test_low_latency.test_rows_that_are_made_meanwhile(16, whole, False)


def test_sixteen_ranks_of_two_hosts_give_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """What crosses directly is rounded once, as on one host."""
    in_domains(monkeypatch, 8)
    for module in (test_elastic, test_ep):
        module.test_every_argument_of_the_constructor(16)
    test_bucket.test_several_groups_share_the_storage(16)
    test_hybrid.test_settings(16)
    test_hybrid.test_deprecated_arguments_say_so(16)


def test_tables_of_several_hosts_are_refused() -> None:
    words = "window: got ranks in 2 domains; expected one: over a network no rank's memory is read"

    def body(comm: ThreadComm) -> None:
        with pytest.raises(ferry.UnsupportedError, match=words):
            deep_ep.EngramBuffer(comm, 0, 1 << 20, True, 1, 1).set_config([4], 16, 2, 1)
        with pytest.raises(ferry.UnsupportedError, match=words):
            deep_ep.ElasticBuffer(comm, num_cpu_bytes=1 << 20).engram_write(torch.zeros(4, 16))
        comm.allgather(None)

    run_ranks(4, body)


def test_rings_and_gathers_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_domains(monkeypatch, 8)
    test_pipeline.test_around_the_ring(16)
    test_gathering.test_sessions(16)


def test_how_sixteen_ranks_of_two_hosts_ask_meet_and_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_domains(monkeypatch, 8)

    def body(comm: ThreadComm) -> None:
        ends = {"explicitly_destroy": True}
        elastic, later = (kind(comm, **ends) for kind in (deep_ep.ElasticBuffer, deep_ep.EPBuffer))
        bucket = deep_ep.BucketBuffer(comm, 1 << 12, **ends)
        hybrid = deep_ep.HybridEPBuffer(comm, 16, 8, 1)
        hybrid.explicitly_destroy = True
        assert hybrid.update_template_config(16, 8, 1).hidden_dim == 16
        hybrid.empty_jit_cache()
        for buffer in (elastic, later):
            assert buffer.get_theoretical_num_qps(4) == 65
            buffer.barrier(False, True, False)
        assert bucket.get_theoretical_num_sms("all_gather") == 0
        for buffer in (elastic, later, bucket, hybrid):
            buffer.print_memory_usage()
            buffer.destroy()
            with pytest.raises(AssertionError, match="destroyed"):
                buffer.print_memory_usage()

    run_ranks(16, body)
    said = capsys.readouterr().out.splitlines()
    assert sorted(int(line.split()[2][:-1]) for line in said) == sorted([*range(16)] * 4)


def test_sizes_and_handles_of_domains() -> None:
    def body(comm: ThreadComm) -> None:
        rank = comm.Get_rank()
        for kind in (deep_ep.ElasticBuffer, deep_ep.EPBuffer):
            buffer = kind(comm, num_max_tokens_per_rank=MOST)
            assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (2, 2)
            assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (2, 2)
            assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, 2)
            flat = kind(comm, allow_hybrid_mode=False)
            assert flat.get_physical_domain_size() == (2, 2)
            assert flat.get_logical_domain_size() == (1, 4)
            assert flat.num_allocated_qps == 17 and flat.get_theoretical_num_qps(100) == 9
            some, fewer = (buffer.get_theoretical_num_sms(16, 3, rdma_gbs=one) for one in (400, 40))
            assert fewer < some  # a slow NIC needs fewer
            job = make_job(4, seed=17)
            handle = dispatched(buffer, "cpu", job, job.x[rank])[3]
            there = arrived(job, rank)
            per_rank = torch.bincount(there.source, minlength=4)
            pairs = per_rank.view(2, 2).sum(0).cumsum(0).int()
            assert torch.equal(handle.psum_num_recv_tokens_per_scaleup_rank, pairs)
            source = handle.recv_src_metadata[:, 0].long()
            assert torch.equal(source, there.source * MOST + there.token)
        comm.allgather(None)

    run_ranks(4, body)


@pytest.mark.parametrize(("size", "domain"), [(2, 1), (4, 2), (8, 4), (16, 8)])
def test_a_bucket_between_domains_in_bf16(
    size: int, domain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of small whole numbers are exact in bf16."""
    in_domains(monkeypatch, domain)

    def body(comm: ThreadComm) -> None:
        rank = comm.Get_rank()
        buffer = deep_ep.BucketBuffer(comm, 1 << 14)
        x = buffer.storage.view(torch.float32)
        for precision in ("fp32", "bf16"):
            x.copy_(torch.arange(len(x)) % 8 + rank)
            part = buffer.reduce_scatter(x, precision).wait()
            whole = torch.arange(len(x)) % 8 * size + size * (size - 1) / 2
            assert torch.equal(part, whole.view(size, -1)[rank])
        assert torch.equal(buffer.all_gather(part).wait(), whole)
        x.fill_(rank)
        assert (buffer.all_reduce(x).wait() == size * (size - 1) / 2).all()
        with buffer.session():
            assert (buffer.all_reduce(torch.ones(8)).wait() == size).all()
        buffer.barrier()
        comm.allgather(None)

    run_ranks(size, body)
