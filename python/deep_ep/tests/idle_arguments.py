"""Arguments that change nothing of what a call does, found in the sources of `deep_ep`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deep_ep
import deep_ep_cpp
import deepep
from deep_ep import hybrid_handles
from deep_ep.hybrid_config import BufferConfig, Configurer
from deep_ep.utils import math, semantic

CHECKS = ("require", "refuse", "check_dtype")
"""The beginnings of their names."""
CALLABLE = ("__init__", "__call__")
CLASSES = (Configurer, BufferConfig, deep_ep_cpp.Buffer)
"""Beside those that `deep_ep` names."""
MODULES = (
    deep_ep.comm,
    deep_ep.utils.envs,
    math,
    semantic,
    deepep.config,
    deepep.machine,
    deepep.parallel,
)
FUNCTIONS = (hybrid_handles.indices_to_map, deepep.DistributedDataParallel.__new__)
OURS = (deep_ep.EPHandle, deep_ep.HybridEpConfigInstance)
"""What calls return: callers read its fields, and whatever they set is there."""


ALWAYS = "what is asked for happens anyway"
NO_QUEUES = "there are no queue pairs"
ONE_STEP = "ranks of several hosts meet in one step"
COMPILED = "nothing is compiled at run time"

REASONS: dict[tuple[str, str], str] = {
    ("Buffer", "num_qps_per_rank"): NO_QUEUES,
    ("Runtime.sync", "device_ids, ipc_handles, root_unique_id"): "ranks have met already",
    ("Buffer", "allow_nvlink_for_low_latency_mode"): "ranks of one host use NVLink where there is "
    "one; False warns once",
    ("Buffer", "allow_nvlink_for_normal_mode"): "the same; False is refused",
    ("Buffer", "allow_mnnvl"): "a permission: which ranks share memory is found by trying",
    ("Buffer", "use_fabric"): "the same, of how memory is shared",
    ("Buffer.dispatch, internode_dispatch", "num_tokens_per_rank, num_tokens_per_rdma_rank"): ""
    "only their form is checked: counts come from the routes",
    (
        "Buffer.get_dispatch_layout, dispatch, internode_dispatch, combine, internode_combine; "
        "ElasticBuffer.dispatch, combine; EPBuffer.dispatch, combine",
        "allocate_on_comm_stream",
    ): f"{ALWAYS}; what it needs beside it is checked",
    ("Buffer.clean_low_latency_buffer", "num_max_dispatch_tokens_per_rank, hidden, num_experts"): ""
    "there is nothing to clean; they are checked",
    (
        "Buffer.low_latency_dispatch",
        "use_ue8m0_for_sf",
    ): "True is refused: scales of NVFP4 are e4m3",
    ("ElasticBuffer, EPBuffer", "deterministic"): f"{ALWAYS}: results are the same in every run",
    ("ElasticBuffer, EPBuffer", "hidden, num_topk, use_fp8_dispatch"): "only of the attribute "
    "`num_bytes`: memory grows with the calls",
    ("ElasticBuffer, EPBuffer, BucketBuffer, EngramBuffer, PPBuffer", "sl_idx"): "libfabric has no "
    "setting for it; another than the default warns once where ranks are of several domains",
    ("ElasticBuffer, EPBuffer, EngramBuffer", "num_allocated_qps"): f"{NO_QUEUES}; the most that "
    "`num_qps` may be",
    (
        "ElasticBuffer.dispatch, combine, engram_fetch; EPBuffer.dispatch, combine; "
        "EngramBuffer.fetch",
        "num_qps",
    ): f"{NO_QUEUES}; it is checked",
    ("ElasticBuffer.dispatch; EPBuffer.dispatch", "do_zero_padding"): f"{ALWAYS}; it is checked",
    ("EPBuffer.dispatch", "do_handle_copy"): "True is refused: an exchange needs no copy",
    (
        "ElasticBuffer.barrier; EPBuffer.barrier; BucketBuffer.barrier; EngramBuffer.barrier",
        "sequential",
    ): ONE_STEP,
    ("BucketBuffer.barrier", "wait_comm_stream"): "its calls run on the current stream",
    ("EPBuffer.barrier; EngramBuffer.barrier", "context_idx"): "others than None and 0 are refused:"
    " there is one group",
    (
        "EPBuffer.lb_prefetch_weights, lb_reduce_grads; BucketBuffer.all_gather; ElasticBuffer."
        "pp_send, pp_recv; PPBuffer.send, recv",
        "num_sms",
    ): "others than 0 are refused: Ferry chooses",
    ("BucketBuffer.get_theoretical_num_sms", "op, group"): "they are checked; 0, Ferry's default",
    (
        "ElasticBuffer.get_theoretical_num_sms; EPBuffer.get_theoretical_num_sms",
        "num_experts, num_topk, num_scaleout_topk",
    ): "they are checked: links decide, for any routes",
    ("ElasticBuffer.get_buffer_size_hint; EPBuffer.get_buffer_size_hint", "allow_hybrid_mode"): ""
    "rows take the same memory",
    ("ElasticBuffer.get_agrs_buffer_size_hint", "group"): "the other argument counts all ranks",
    ("ElasticBuffer.get_engram_storage_size_hint", "num_max_tokens_per_rank"): "what is fetched is "
    "torch's memory",
    ("EngramBuffer.get_storage_size_hint, get_theoretical_config", "group"): "of one rank's part",
    ("EngramBuffer", "num_gpu_bytes"): "what is fetched is torch's memory",
    ("EngramBuffer", "use_cpu_rdma_storage"): "False is refused: no rank reads the GPU memory of "
    "another one by itself",
    ("EngramBuffer", "qp_depth, restrict_rd_atomic"): NO_QUEUES,
    ("EngramBuffer", "allow_hybrid_mode"): "only what `get_logical_domain_size` says",
    ("EventOverlap", "extra_tensors"): "kept as long as the event",
    ("HybridEPBuffer", "load_cached_kernels"): COMPILED,
    (
        "HybridEPBuffer",
        "use_shared_buffer, enable_custom_allgather",
    ): "Ferry chooses its memory and how counts cross",
    ("HybridEPBuffer", "num_of_hybrid_ep_ranks_per_nvlink_domain, use_mnnvl"): "deprecated, and "
    "warn: the ranks that share memory are found",
    ("HybridEPBuffer", "num_sms_preprocessing_api, num_blocks_permute, num_blocks_unpermute"): ""
    "kept in the settings: there is no kernel of that kind",
    (
        "HybridEPBuffer.dispatch_with_permute, update_template_config; "
        "HybridEPBuffer.combine_with_unpermute; Configurer.get_default_config",
        "fuse_permute_dispatch, fuse_unpermute_combine",
    ): f"{ALWAYS}: the permutation is part of the exchange",
    (
        "Configurer.adjust_template",
        "config, fuse_permute_dispatch",
    ): "there are no stages to fit into shared memory",
    ("HybridEPBuffer.dispatch", "num_dispatched_tokens_tensor"): "not needed: the exchange counts",
    (
        "HybridEPBuffer.dispatch; HybridEPBuffer.dispatch_with_permute, combine_with_unpermute",
        "num_dispatched_tokens",
    ): "the same; `dispatch` checks it, the others warn, as deprecated",
    ("utils.envs.check_nvlink_connections", "group"): "nothing is demanded: PCIe serves, too",
}
"""({class or class.method, method, ...; ...}, {argument, ...}): why nothing is done."""
VARIABLES = {
    "`NVSHMEM_QP_DEPTH`": "only the value of `Buffer.nvshmem_qp_depth`",
    "others of `NVSHMEM_*`, `EP_NVSHMEM_ROOT_DIR`": "there is no NVSHMEM",
    "`EP_NCCL_ROOT_DIR`, `EP_REUSE_NCCL_COMM`, `EP_SUPPRESS_NCCL_CHECK`, `EP_DISABLE_GIN`, "
    "`NCCL_*`": "there is no NCCL",
    "`EP_JIT_*`, `EP_CUDA_HOME`, `EP_USE_NVIDIA_TOOLS`, `TORCH_CUDA_ARCH_LIST`": COMPILED,
    "`EP_NIC_NAME`": "`FERRY_HOST` and libfabric's own variables choose the network",
    "`EP_DEFAULT_RDMA_SL`, `EP_OVERRIDE_RDMA_SL`": "libfabric has no setting for it",
    "`EP_AVOID_RECORD_STREAM`": "results are Ferry's memory, which `record_stream` keeps out of "
    "torch's cache",
    "`EP_NUM_MAX_LOCAL_RANKS`": "there is no such limit",
}
"""Of the originals, and why they are not read."""
HEAD = """
## Arguments that change nothing

Every other argument has an effect. A test looks for arguments that a call does not read, or only
checks or keeps, and fails where one is not here.

| call | arguments | why |
| --- | --- | --- |
"""
SETTINGS = """
Of `HybridEpConfigInstance`, `num_of_blocks_dispatch_api`, `num_of_blocks_combine_api`,
`pad_multiple` and the sizes count; the other fields are settings of kernels that Ferry does not
have, and keep what is given.

## Environment variables that change nothing

[Coming from DeepEP](deep_ep.md#environment-variables) lists those that are read.

| variable | why |
| --- | --- |
"""


def calls() -> Iterator[tuple[str, Any]]:
    """("Class.call", function) or ("module.function", function) of what callers see."""
    classes = [one for name in deep_ep.__all__ if inspect.isclass(one := getattr(deep_ep, name))]
    for cls in (*classes, *CLASSES):
        for name, one in inspect.getmembers(cls, inspect.isfunction):
            generated = name == "__init__" and dataclasses.is_dataclass(cls)
            seen = name in CALLABLE or not name.startswith(("_", "require_"))
            if seen and cls not in OURS and not generated:
                yield f"{cls.__name__}.{name}", one
    for module in MODULES:
        for name, one in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and one.__module__ == module.__name__:
                yield f"{module.__name__.removeprefix('deep_ep.')}.{name}", one
    for one in FUNCTIONS:
        yield one.__qualname__, one


def idle_arguments() -> set[tuple[str, str]]:
    """(call, argument): the call reads it nowhere, or only to refuse what is wrong, or only to keep
    it in an attribute that no line of the package reads."""
    roots = [Path(str(package.__file__)).parent for package in (deep_ep, deepep)]
    trees = [ast.parse(file.read_text()) for root in roots for file in root.rglob("*.py")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if _loads(node, ast.Attribute)}
    return {(name, argument) for name, one in calls() for argument in idle_of(one, read)}


def idle_of(call: Any, read: set[str]) -> set[str]:
    """Its arguments that do nothing. read: the attributes that the package reads."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(call)))
    at_work = set(_at_work(ast.parse(source).body[0], read))
    return set(inspect.signature(call).parameters) - at_work - {"self"}


def _loads(node: ast.AST, kind: type[ast.AST]) -> bool:
    return isinstance(node, kind) and isinstance(getattr(node, "ctx", None), ast.Load)


def _at_work(node: ast.AST, read: set[str]) -> Iterator[str]:
    """Names that are loaded, but for checks and for what is kept unread."""
    for one in ast.iter_child_nodes(node):
        value = one.value if isinstance(one, ast.Expr) else None
        if isinstance(value, ast.Call) and getattr(value.func, "id", "").startswith(CHECKS):
            continue
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], (ast.Attribute, ast.Tuple)):
            yield from _kept(one.targets[0], one.value, read)
            continue
        if isinstance(one, ast.Name) and _loads(one, ast.Name):
            yield one.id
        yield from _at_work(one, read)


def _kept(target: ast.AST, value: ast.AST, read: set[str]) -> Iterator[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, its in zip(target.elts, value.elts):
            yield from _kept(each, its, read)
    elif not isinstance(target, ast.Attribute) or target.attr in read:
        yield from _at_work(ast.Expr(value), read)


def listed() -> Iterator[tuple[str, str]]:
    """(call, argument) of the reasons, as `idle_arguments` names them, that are there."""
    there = {name: set(inspect.signature(one).parameters) for name, one in calls()}
    for places, arguments in REASONS:
        for place in places.split("; "):
            cls, _, methods = place.partition(".")
            names = [f"{cls}.{one}" for one in methods.split(", ")]
            if not methods:
                names = [f"{one}.__init__" for one in place.split(", ")]
            elif place in there:
                names = [place]
            for name in names:
                for argument in arguments.split(", "):
                    if argument in there[name]:
                        yield name, argument


def page() -> str:
    """The part of docs/deep_ep_names.md."""
    text = HEAD
    for (places, arguments), why in REASONS.items():
        text += f"| {_code(places)} | {_code(arguments)} | {why} |\n"
    text += SETTINGS
    for names, why in VARIABLES.items():
        text += f"| {names} | {why} |\n"
    return text


def _code(words: str) -> str:
    return "; ".join(
        ", ".join(f"`{one}`" for one in part.split(", ")) for part in words.split("; ")
    )
