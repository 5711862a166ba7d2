"""How a Buffer ends when something went wrong: destroyed after an error, after a peer was killed,
not at all. Nobody hangs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_buffers import ThreadComm, run_ranks
from rank_processes import free_port
from reference import make_job
from throughput_calls import dispatched

import deep_ep
import ferry

HERE = Path(__file__).parent
HELPERS = [str(HERE), str(HERE.parents[1] / "tests")]

BEGIN = """
    import os, signal, sys
    import torch
    import deep_ep
    sys.path[:0] = {path!r}
    from rank_buffers import ThreadComm
    import ferry
    from reference import make_job
    from throughput_calls import dispatched
    torch.set_num_threads(1)
    boot = ferry.tcp(rank={rank}, size={size}, port={port}, secret="a test's", deadline=20)
    comm = ThreadComm(boot)
    how = dict(low_latency_mode=True, explicitly_destroy=True)
    buffer = deep_ep.Buffer(None, comm=comm, **how)
    job = make_job({size}, tokens_of=(5, 4))
    x, idx = job.x[buffer.rank], job.topk_idx[buffer.rank]
    weights = job.topk_weights[buffer.rank]
    got = dispatched(buffer, "cpu", job, x)
    sent = buffer.low_latency_dispatch(x, idx, 16, job.experts, return_recv_hook=True)
    buffer.low_latency_dispatch(x, idx, 16, job.experts)
"""

WARNING = (
    "deep_ep: rank 0: Buffer made with explicitly_destroy=True was dropped without destroy()\n"
)


def run(size: int, *ends: str) -> list[subprocess.CompletedProcess[str]]:
    """Ranks as processes, each with its end."""
    port, children = free_port(), []
    for rank, end in zip(range(size), ends):
        begin = BEGIN.format(path=HELPERS, rank=rank, size=size, port=port)
        code = textwrap.dedent(begin) + textwrap.dedent(end)
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen([sys.executable, "-c", code], **pipes))
    done = []
    try:
        for child in children:
            out, err = child.communicate()
            done.append(subprocess.CompletedProcess("", child.returncode, out, err))
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return done


def test_a_peer_is_killed() -> None:
    """It is named, in both modes; then destroy returns, and so does the interpreter."""
    survivor = """
        for call in (
            lambda: [dispatched(buffer, "cpu", job, x) for _ in range(100)],
            lambda: [buffer.combine(got[0], got[4]) for _ in range(100)],
            lambda: [buffer.low_latency_dispatch(x, idx, 16, job.experts) for _ in range(100)],
        ):
            try:
                call()
            except RuntimeError as error:
                assert "rank 1" in str(error), error
            else:
                raise SystemExit("nothing was raised")
        buffer.destroy()
        buffer.destroy()
        print("over")
    """
    survivor, killed = run(2, survivor, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (survivor.returncode, survivor.stdout) == (0, "over\n"), survivor.stderr
    assert killed.returncode == -9


def leave(buffer: Any) -> None:
    """When all have made their last call. Who goes first may end the others' commit."""
    with suppress(ferry.PeerFailedError, ferry.PeerLeftError):
        buffer.commit(buffer.view().step + 1)
    buffer.destroy()


def answer(buffer: Any, topk_idx: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Tokens of ones in low-latency mode, whose experts double them, and the call that combines."""
    x = torch.ones(len(topk_idx), 256).bfloat16()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 6, 8, use_fp8=False)

    def combined() -> torch.Tensor:
        weights = torch.ones(topk_idx.shape)
        y: torch.Tensor = buffer.low_latency_combine(2 * rows, topk_idx, weights, handle)[0]
        return y

    return combined, combined()


@pytest.mark.parametrize("domain_size", [0, 2])
@pytest.mark.parametrize("kind", ["Buffer", "ElasticBuffer"])
def test_the_others_go_on_when_a_rank_leaves(
    kind: str, domain_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the groups that all have, and new ones; docs/deep_ep.md has a rank killed."""
    if domain_size:
        made = partial(ferry.Group, domain_size=domain_size, network="ofi")
        monkeypatch.setattr(ferry, "Group", made)
    routes = torch.arange(6).reshape(6, 1)
    x = torch.arange(6.0).expand(64, 6).t().to(torch.bfloat16).contiguous()

    def exchange(buffer: Any, experts: int, topk_idx: torch.Tensor) -> Any:
        if kind == "ElasticBuffer":
            how = {"num_experts": experts, "num_max_tokens_per_rank": 6}
            rows, _, _, handle, _ = buffer.dispatch(x[: len(topk_idx)], topk_idx, **how)
        else:
            per_rank, _, per_expert, there, _ = buffer.get_dispatch_layout(topk_idx, experts)
            layout = (per_rank, None, there, per_expert, topk_idx)
            rows, _, _, counts, handle, _ = buffer.dispatch(x[: len(topk_idx)], None, *layout)
            assert sum(counts) == len(rows)
        return (rows, handle), buffer.combine(rows, handle)[0]

    def to_ranks(buffer: Any, ranks: list[int]) -> torch.Tensor:
        if kind == "ElasticBuffer":  # has no dispatch without experts
            return x.repeat(len(ranks), 1)
        there = torch.zeros(6, 3, dtype=torch.bool)
        there[:, ranks] = True
        sizes = 6 * there[0].int()
        rows, _, _, counts, *_ = buffer.dispatch(x, None, sizes, None, there, sizes)
        assert counts == [6 * len(ranks)]
        return rows

    def rank(comm: ThreadComm) -> None:
        options = {"low_latency_mode": True} if kind == "Buffer" else {}
        buffer = getattr(deep_ep, kind)(comm, explicitly_destroy=True, **options)
        domains = buffer.runtime.get_physical_domain_size()[0]
        assert domains == (2 if domain_size else 1)
        for experts in (6, 12, 9):
            old, y = exchange(buffer, experts, routes)
            assert torch.equal(y, x)
        assert torch.equal(to_ranks(buffer, [0, 1, 2]), x.repeat(3, 1))
        if kind == "Buffer":
            late, y = answer(buffer, torch.tensor([[0, 3, 6]]))
            assert (y == 6).all()
        else:
            buffer.agrs_set_config(1 << 10, 1)
        comm.allgather(None)
        if comm.Get_rank() == 1:
            buffer.destroy()
            return
        with pytest.raises((ferry.PeerLeftError, ferry.PeerFailedError), match="rank 1"):
            while True:
                exchange(buffer, 9, routes)
        if comm.Get_rank() == 2:  # as if rank 1 had died when this one did not have the group yet
            buffer._groups._of_all.popitem()
        assert buffer.regroup() == [0, 2]
        view = buffer.view()
        assert (view.ranks, view.lost, view.step) == ([0, 2], [1], 0)
        for experts, there in ((6, [0, 1, 4, 5]), (12, [0, 1, 2, 3, 8]), (9, [0, 2, 6]), (10, [9])):
            _, y = exchange(buffer, experts, torch.tensor(there).reshape(-1, 1))
            assert torch.equal(y, x[: len(there)])
        with pytest.raises(RuntimeError, match=r"a plan of epoch 1|destroyed"):
            buffer.combine(*old)
        assert buffer.commit(5) is False and buffer.view().step == 5
        if kind == "Buffer":
            new, y = answer(buffer, torch.tensor([[0, -1, 7]]))
            assert (y == 4).all() and torch.equal(new(), y)
            with pytest.raises(RuntimeError, match="got one from before regroup"):
                late()
            with pytest.raises(RuntimeError, match=r"got expert 4, of .* lost; .*ranks \[0, 2\]"):
                answer(buffer, torch.tensor([[0, 4, 7]]))
        else:
            with pytest.raises(RuntimeError, match="agrs_set_config before it"):
                buffer.create_agrs_session()
            with pytest.raises(ferry.UnsupportedError, match=r"ranks \[1\] are lost"):
                buffer.agrs_set_config(1 << 10, 1)
        with pytest.raises(ferry.InvalidArgumentError, match="expert 2 of rank 1"):
            exchange(buffer, 6, routes)
        assert buffer.regroup() == [0, 2]  # nothing has failed, and all call it
        assert torch.equal(to_ranks(buffer, [0, 2]), x.repeat(2, 1))
        leave(buffer)

    run_ranks(3, rank)


@pytest.mark.parametrize("domain_size", [0, 2])
def test_masks_after_a_regroup(domain_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is lost stays masked, whatever the caller says; a rank that was left out is back."""
    if domain_size:
        made = partial(ferry.Group, domain_size=domain_size, network="ofi")
        monkeypatch.setattr(ferry, "Group", made)

    answered = threading.Barrier(3)

    def masked(buffer: Any) -> list[int]:
        status = torch.zeros(4, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        found: list[int] = status.tolist()
        return found

    def rank(comm: ThreadComm) -> None:
        how = {"low_latency_mode": True, "enable_shrink": True, "explicitly_destroy": True}
        buffer = deep_ep.Buffer(comm, **how)
        ids = torch.tensor([[0, 3, 6]])  # of ranks 0, 1 and 3
        late, y = answer(buffer, ids)
        assert (y == 6).all()
        comm.allgather(None)
        if comm.Get_rank() == 1:
            buffer.destroy()
            return
        with pytest.raises((ferry.PeerLeftError, ferry.PeerFailedError), match="rank 1"):
            while True:
                buffer.commit(buffer.view().step + 1)
        assert buffer.regroup() == [0, 2, 3]
        buffer.clean_low_latency_buffer(6, 256, 8)
        for _ in range(3):
            new, y = answer(buffer, ids)
            assert (y == 4).all() and masked(buffer) == [0, 1, 0, 0]
        assert (new() == 4).all() and (late() == 4).all()
        with pytest.raises(ferry.InvalidArgumentError, match="got 1, which was lost"):
            buffer.low_latency_update_mask_buffer(1, False)
        buffer.low_latency_clean_mask_buffer()
        assert (answer(buffer, ids)[1] == 4).all() and masked(buffer) == [0, 1, 0, 0]
        answered.wait(20)  # who is masked within a call is evicted from it
        if buffer.rank != 3:  # which is late
            buffer.low_latency_update_mask_buffer(3, True)
            assert (answer(buffer, ids)[1] == 2).all() and masked(buffer) == [0, 1, 0, 1]
        buffer.regroup()
        assert (answer(buffer, ids)[1] == 4).all() and masked(buffer) == [0, 1, 0, 0]
        leave(buffer)

    run_ranks(4, rank)


@pytest.mark.parametrize("kind", ["Buffer", "ElasticBuffer", "EPBuffer"])
def test_all_are_left(kind: str) -> None:
    """Of sixteen ranks, with a group of their experts."""
    x, ids = torch.ones(2, 16).bfloat16(), torch.tensor([[0], [15]])

    def rank(comm: ThreadComm) -> None:
        buffer = getattr(deep_ep, kind)(comm)
        if kind == "Buffer":
            per_rank, _, per_expert, there, _ = buffer.get_dispatch_layout(ids, 16)
            layout = (per_rank, None, there, per_expert, ids)
        for _ in range(2):
            if kind == "Buffer":
                rows = buffer.dispatch(x, None, *layout)[0]
            else:
                rows = buffer.dispatch(x, ids, num_experts=16, num_max_tokens_per_rank=2)[0]
            assert len(rows) == (16 if comm.Get_rank() in (0, 15) else 0)
            assert buffer.regroup() == buffer.view().ranks == list(range(16))
            assert not buffer.commit(buffer.view().step + 1)
        comm.allgather(None)

    run_ranks(16, rank)


def test_the_interpreter_ends() -> None:
    """With a hook that nobody called and results that were not combined: of a rank that did not
    destroy its Buffer, which it is told, and then of one that did."""
    forgot, left = run(2, "", "import time; time.sleep(0.3); buffer.destroy()")
    assert (forgot.returncode, forgot.stdout) == (left.returncode, left.stdout) == (0, "")
    assert left.stderr == "" and forgot.stderr in ("", WARNING)


@pytest.mark.parametrize("mode", ["throughput", "low-latency"])
def test_destroy_while_another_thread_waits(mode: str) -> None:
    """The call that waits for a rank which never comes ends with an error, long before its
    deadline."""

    def body(comm: ThreadComm) -> None:
        how = {"low_latency_mode": True, "explicitly_destroy": True}
        buffer = deep_ep.Buffer(None, comm=comm, **how)
        job = make_job(2)
        x, idx = job.x[buffer.rank], job.topk_idx[buffer.rank]
        calls = {
            "throughput": lambda: dispatched(buffer, "cpu", job, x),
            "low-latency": lambda: buffer.low_latency_dispatch(x, idx, 16, job.experts),
        }
        calls[mode]()  # its group is there
        comm.allgather(None)
        if buffer.rank == 0:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(calls[mode])
                with pytest.raises(FutureTimeout):
                    waiting.result(0.1)
                buffer.destroy()
                with pytest.raises(RuntimeError, match="destroyed"):
                    waiting.result(20)
        comm.allgather(None)
        buffer.destroy()

    run_ranks(2, body)


def test_destroy_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call failed on one rank and waited in vain on the other; both leave, results stay."""
    monkeypatch.setenv("FERRY_DEADLINE", "0.5")

    def body(comm: ThreadComm) -> None:
        how = {"low_latency_mode": True, "explicitly_destroy": True}
        buffer = deep_ep.Buffer(None, comm=comm, **how)
        job = make_job(2)
        x = job.x[buffer.rank]
        got = dispatched(buffer, "cpu", job, x)
        kept = got[0].clone()
        comm.allgather(None)
        for _ in range(2):  # a Buffer whose group failed stays failed
            if buffer.rank == 0:
                with pytest.raises(RuntimeError, match="rank 1"):
                    buffer.combine(got[0], got[4])
            else:
                with pytest.raises(AssertionError):
                    buffer.combine(got[0][1:], got[4])
        buffer.destroy()
        with pytest.raises(RuntimeError, match="destroy"):
            dispatched(buffer, "cpu", job, x)
        assert got[0].equal(kept)
        comm.allgather(None)

    run_ranks(2, body)
