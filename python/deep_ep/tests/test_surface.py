"""What can be imported, the helpers that need no peer, and the constructor."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from rank_buffers import ThreadComm, run_buffers, run_ranks
from reference import make_job
from throughput_calls import dispatched

import deep_ep
import deep_ep.buffer
import deep_ep.utils
import deep_ep_cpp
import ferry
from deep_ep import Buffer, Config, EventHandle, EventOverlap
from deep_ep.errors import EPException


def test_the_names_that_callers_import() -> None:
    assert importlib.util.find_spec("deep_ep")
    assert deep_ep.buffer.Buffer is Buffer
    assert deep_ep.topk_idx_t == torch.int64
    assert deep_ep.utils.EventOverlap is EventOverlap
    assert deep_ep.utils.EventHandle is EventHandle
    deep_ep.utils.check_nvlink_connections(None)
    assert deep_ep_cpp.EventHandle is EventHandle and deep_ep_cpp.Config is Config
    assert deep_ep_cpp.topk_idx_t == torch.int64 and deep_ep_cpp.is_sm90_compiled()
    hint = deep_ep_cpp.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert hint == Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert deep_ep_cpp.Buffer is not Buffer


@pytest.mark.parametrize(("bits", "dtype"), [("32", "int32"), ("64", "int64"), ("16", None)])
def test_the_dtype_of_routes_is_chosen_by_a_variable(
    bits: str, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deep_ep import environment

    for name in ("TOPK_IDX_BITS", "EP_NUM_TOPK_IDX_BITS"):
        monkeypatch.setenv(name, bits)
        if dtype is None:
            with pytest.raises(ValueError, match=f"^{name}: got '16'"):
                environment.topk_idx_dtype()
        else:
            assert environment.topk_idx_dtype() == getattr(torch, dtype)
        monkeypatch.setenv(name, "0" if name.startswith("EP_") else "64")


def test_without_ferry_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['ferry'] = None; import deep_ep"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: deep_ep: Ferry is not installed" in done.stderr
    assert "pip install . ./python/deep_ep" in done.stderr


def test_config_takes_five_numbers_by_place_or_name() -> None:
    config = Config()
    assert vars(config) == {
        "num_sms": 20,
        "num_max_nvl_chunked_send_tokens": 6,
        "num_max_nvl_chunked_recv_tokens": 256,
        "num_max_rdma_chunked_send_tokens": 6,
        "num_max_rdma_chunked_recv_tokens": 258,  # rounded up to a multiple of 6
    }
    config = Config(24, 8, 300, 16, num_max_rdma_chunked_recv_tokens=129)
    assert (config.num_sms, config.num_max_rdma_chunked_recv_tokens) == (24, 144)


@pytest.mark.parametrize(
    "values",
    [
        {"num_sms": -2},
        {"num_max_nvl_chunked_send_tokens": 0},
        {"num_max_nvl_chunked_recv_tokens": 0},
        {"num_max_rdma_chunked_send_tokens": 0},
        {"num_max_rdma_chunked_recv_tokens": 0},
        {"num_max_nvl_chunked_send_tokens": 256},
        {"num_max_rdma_chunked_send_tokens": 300},
    ],
)
def test_config_refuses(values: dict[str, int]) -> None:
    for kind in (AssertionError, RuntimeError):  # callers expect one or the other
        with pytest.raises(kind, match="Config: num_"):
            Config(**values)


NO_INTEGERS = (None, "8", 24.0, [8])


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_what_is_no_integer_is_refused(value: Any) -> None:
    comm = ThreadComm(ferry.threads(1)[0])
    for call in (
        lambda: Config(value),
        lambda: Config(num_max_rdma_chunked_recv_tokens=value),
        lambda: Buffer.set_num_sms(value),
        lambda: Buffer.get_dispatch_config(value),
        lambda: Buffer.get_combine_config(value),
        lambda: Buffer.get_low_latency_rdma_size_hint(value, 7168, 8, 256),
        lambda: Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, value),
        lambda: Buffer(None, value, comm=comm),
        lambda: Buffer(None, 0, value, comm=comm),
    ):
        with pytest.raises(AssertionError, match=re.escape(f"got {value!r}; expected")):
            call()


def test_integers_of_numpy_are_taken() -> None:
    eight = np.int64(8)
    assert sizes(Config(np.int32(24))) == sizes(Config(24))
    assert sizes(Buffer.get_dispatch_config(eight)) == sizes(Buffer.get_dispatch_config(8))
    hint = Buffer.get_low_latency_rdma_size_hint(eight, eight, eight, eight)
    assert hint == Buffer.get_low_latency_rdma_size_hint(8, 8, 8, 8)
    buffer = Buffer(None, np.int64(256), comm=ThreadComm(ferry.threads(1)[0]))
    assert buffer.get_local_buffer_tensor(torch.int8, None, np.int64(6)).numel() == 250


def test_hints_of_a_config_follow_the_formulas() -> None:
    config, row = Config(20, 6, 256, 6, 128), 7168 * 2 + 8 + 128 * 8 + 512 + 512
    nvl = 10 * 8 * 5 * 4 + 10 * 8 * 256 * row
    assert config.get_nvl_buffer_size_hint(7168 * 2, 8) == -(-nvl // 128) * 128
    assert config.get_rdma_buffer_size_hint(7168 * 2, 8) == 0
    nvl = 10 * 8 * 7 * 4 + 10 * 8 * 256 * row
    assert config.get_nvl_buffer_size_hint(7168 * 2, 16) == -(-nvl // 128) * 128
    rdma = 10 * 2 * 18 * 2 * 4 + 2 * 10 * 2 * 132 * (row + 16)
    assert config.get_rdma_buffer_size_hint(7168 * 2, 16) == -(-rdma // 128) * 128
    with pytest.raises(TypeError):
        config.get_nvl_buffer_size_hint(hidden_bytes=1, num_ranks=8)  # type: ignore[call-arg]
    with pytest.raises(AssertionError, match="even"):
        Config(21).get_nvl_buffer_size_hint(128, 16)


def sizes(config: Config) -> tuple[int, ...]:
    return tuple(vars(config).values())


def test_default_configs_are_those_of_the_table() -> None:
    assert sizes(Buffer.get_dispatch_config(2)) == (20, 24, 256, 6, 132)
    assert sizes(Buffer.get_dispatch_config(8)) == (20, 6, 256, 6, 132)
    assert sizes(Buffer.get_dispatch_config(16)) == (20, 36, 288, 20, 140)
    for ranks in (24, 32, 48, 64):
        assert sizes(Buffer.get_dispatch_config(ranks)) == (20, 32, 288, 8, 128)
        assert sizes(Buffer.get_combine_config(ranks)) == (20, 1, 288, 8, 128)
    assert sizes(Buffer.get_dispatch_config(160)) == (20, 28, 720, 12, 132)
    assert sizes(Buffer.get_combine_config(2)) == (20, 10, 256, 6, 132)
    assert sizes(Buffer.get_combine_config(4)) == (20, 9, 256, 6, 132)
    assert sizes(Buffer.get_combine_config(144)) == (20, 2, 720, 8, 128)
    # Ferry serves numbers of ranks that are not in the table: as the next one.
    assert sizes(Buffer.get_dispatch_config(3)) == sizes(Buffer.get_dispatch_config(4))
    assert sizes(Buffer.get_combine_config(1)) == sizes(Buffer.get_combine_config(2))
    for ranks in (0, 161):
        for get in (Buffer.get_dispatch_config, Buffer.get_combine_config):
            with pytest.raises(AssertionError, match=f"Unsupported number of EP ranks: {ranks}"):
                get(ranks)


def test_the_number_of_sms_is_set_for_all() -> None:
    assert Buffer.num_sms == 20
    try:
        Buffer.set_num_sms(24)
        assert Buffer.get_dispatch_config(8).num_sms == Buffer.get_combine_config(8).num_sms == 24
        for wrong in (7, -2):
            with pytest.raises(AssertionError, match=f"got {wrong}; expected an even number"):
                Buffer.set_num_sms(wrong)
        assert Buffer.num_sms == 24
    finally:
        Buffer.set_num_sms(20)


def test_the_hint_of_low_latency_mode_follows_the_formula() -> None:
    capacity, hidden, ranks, experts = 128, 7168, 8, 256
    there, back = 16 + 2 * hidden, 4 * (hidden // 128) + 2 * hidden
    send = max(capacity * there, experts * capacity * back)
    one = send + experts * capacity * max(there, back) + 1024
    hint = Buffer.get_low_latency_rdma_size_hint(capacity, hidden, ranks, experts)
    assert hint == (2 * one + 128) // 128 * 128 and hint % 128 == 0
    for wrong in ((-1, 128, 8, 256), (1, -128, 8, 256), (1, 128, 0, 256), (1, 128, 8, 0)):
        with pytest.raises(AssertionError, match=r"got (-1|-128|0); expected an integer, at least"):
            Buffer.get_low_latency_rdma_size_hint(*wrong)


def test_calls_between_hosts_have_the_arguments_of_the_others() -> None:
    for name in ("dispatch", "combine"):
        call, between = getattr(Buffer, name), getattr(Buffer, f"internode_{name}")
        mine, others = (inspect.signature(one).parameters for one in (call, between))
        assert set(mine) == set(others) and len(mine) > 7
        assert all(mine[one].default == others[one].default for one in mine)


def test_two_biases_are_unpacked() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    assert Buffer._unpack_bias(None) == (None, None)
    assert Buffer._unpack_bias(one) == (one, None)
    assert Buffer._unpack_bias((one, other)) == (one, other)
    with pytest.raises(AssertionError, match="a tuple of 3"):
        Buffer._unpack_bias((one, other, one))


def test_events() -> None:
    EventHandle().current_stream_wait()
    nothing = EventOverlap()
    assert nothing.event is None and nothing.extra_tensors is None
    with pytest.raises(AssertionError, match="no event"):
        nothing.current_stream_wait()
    with nothing as same:
        assert same is nothing
    with nothing():
        pass
    captured = Buffer.capture()
    assert isinstance(captured.event, EventHandle)
    captured.current_stream_wait()
    kept = (torch.ones(1),)
    assert EventOverlap(EventHandle(), kept).extra_tensors is kept


def test_attributes_that_callers_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    monkeypatch.setenv("EP_BUFFER_DEBUG", "1")

    def body(comm: ThreadComm) -> None:
        buffer = Buffer(None, 256, 384, True, 12, comm=comm, explicitly_destroy=True)
        assert (buffer.rank, buffer.group_size) == (comm.Get_rank(), 3)
        assert buffer.group is comm
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (256, 384)
        assert buffer.low_latency_mode and buffer.explicitly_destroy and not buffer.enable_shrink
        assert buffer.nvshmem_qp_depth == 2048
        runtime = buffer.runtime
        assert runtime.is_available() and runtime.get_num_rdma_ranks() == 1
        assert runtime.get_rdma_rank() == 0 and runtime.get_root_rdma_rank(False) == 0
        assert runtime.get_root_rdma_rank(True) == buffer.rank
        assert isinstance(runtime.get_local_device_id(), int)
        runtime.sync([], [], None)
        assert runtime.get_local_ipc_handle() == runtime.get_local_nvshmem_unique_id() == b""
        buffer.destroy()
        assert buffer.runtime is None and not runtime.is_available()

    run_ranks(3, body)
    said = capfd.readouterr().out
    assert "deep_ep: rank 2 of 3: Buffer: 1 domains, local, " in said and said.count("\n") == 3


def test_ranks_of_two_hosts() -> None:
    def body(buffer: Any) -> None:
        x, ids = torch.ones(2, 16).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
        layout = list(buffer.get_dispatch_layout(ids, 16)[:4])
        layout[1] = layout[1].repeat(2)
        with pytest.raises(EPException, match=r"num_tokens_per_rdma_rank: .*expected shape \(2,\)"):
            buffer.dispatch(x, None, layout[0], layout[1], layout[3], layout[2], ids)
        assert buffer.runtime.get_num_rdma_ranks() == 2
        assert buffer.runtime.get_rdma_rank() == buffer.rank // 8
        assert buffer.runtime.get_root_rdma_rank(True) == buffer.rank % 8

    run_buffers(16, body)


def test_the_constructor_refuses() -> None:
    with pytest.raises(ValueError, match="neither group nor comm"):
        Buffer(None)
    comm = ThreadComm(ferry.threads(1)[0])
    for wrong in ({"num_nvl_bytes": 100}, {"num_rdma_bytes": -128}, {"num_nvl_bytes": 1 << 70}):
        with pytest.raises(RuntimeError, match="multiple of 128") as error:
            Buffer(None, comm=comm, **wrong)
        assert isinstance(error.value, AssertionError)
    with pytest.raises((ValueError, RuntimeError)):
        Buffer(object())
    with pytest.raises(ValueError, match="mpi4py"):
        Buffer(None, comm=object())


def test_the_constructor_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = Buffer.__init__

    def patched(self: Buffer, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(deep_ep.Buffer, "__init__", patched)
    buffer = Buffer(None, comm=ThreadComm(ferry.threads(1)[0]))
    assert made == [buffer] and buffer.group_size == 1


def test_ranks_may_ask_for_different_sizes() -> None:
    def body(comm: ThreadComm) -> None:
        buffer = Buffer(None, 2 << 20 << comm.Get_rank(), comm=comm)
        job = make_job(2)
        dispatched(buffer, "cpu", job, job.x[buffer.rank])
        assert buffer._groups.of(16, torch.device("cpu")).memory().arena_bytes == 4 << 20
        comm.allgather(None)

    run_ranks(2, body)


def test_local_buffers() -> None:
    buffer = Buffer(None, 1024, 512, comm=ThreadComm(ferry.threads(1)[0]))
    flat = buffer.get_local_buffer_tensor(torch.bfloat16)
    assert flat.shape == (512,) and flat.dtype == torch.bfloat16
    flat[3] = 7
    sized = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size((2, 8)), offset=2)
    assert sized.shape == (2, 8) and sized[0, 2] == 7
    other = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    assert other.zero_().shape == (512,)
    for wrong in ({"size": torch.Size((1025,))}, {"offset": 2048}, {"offset": -1}):
        with pytest.raises(AssertionError, match="get_local_buffer_tensor"):
            buffer.get_local_buffer_tensor(torch.int8, **wrong)


def test_a_missing_name_points_to_the_list() -> None:
    words = r"docs/deep_ep_names\.md lists what is"
    for owner, name in ((deep_ep, "NCCLBuffer"), (deep_ep.utils, "gate")):
        with pytest.raises(AttributeError, match=f"{name}.*{words}"):
            getattr(owner, name)
        assert not hasattr(owner, name)
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module("deep_ep.utils.testing")

    def body(buffer: Any) -> None:
        with pytest.raises(AttributeError, match=f"ElasticBuffer has no 'engram_pull'; {words}"):
            buffer.engram_pull(torch.zeros(1))

    run_buffers(1, body, kind=deep_ep.ElasticBuffer)
