"""A quick sample of PyTorch's own tests of torch.distributed on Ferry; docs/process_group.md tells
of the rest."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.timeout(150)

SAMPLE = [
    "test_DistributedDataParallelCPU",
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_gather_complex",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_product",
    "test_all_reduce_max",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_gather",
    "test_gather_object",
    "test_get_future",
    "test_irecv",
    "test_isend",
    "test_reduce_min",
    "test_reduce_sum_twice",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv",
    "test_send_recv_with_tag",
]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the sample is of torch 2.13")
def test_torchs_own_tests_pass() -> None:
    import torch_cases

    results = torch_cases.run_all(SAMPLE)
    assert not {name: said for name, said in results.items() if said != "passed"}
