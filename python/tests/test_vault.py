"""Versions of tensors that are kept for ranks that are lost. Killed ranks: tests/reliability, and
test_elastic_training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import vault_bodies
from gpus import needs_gpu
from rank_processes import RankProcesses
from rank_threads import run_ranks, run_threads
from test_processes import environment, finish, start

import ferry


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankProcesses]:
    processes = RankProcesses(3, "cuda")
    yield processes
    processes.stop()


ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])


@pytest.mark.timeout(280)
@pytest.mark.parametrize("device", ["cpu", ON_GPUS])
def test_a_rank_that_left_is_there_for_the_others(gpus: RankProcesses, device: str) -> None:
    if device == "cuda":
        gpus.run(vault_bodies.a_rank_leaves)
        return
    bootstraps = ferry.threads(3)

    def rank(number: int) -> None:
        with ferry.Group(bootstraps[number], experts=3, deadline=20, memory_bytes=1 << 20) as group:
            vault_bodies.a_rank_leaves(group)

    run_threads(3, rank)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(280)
def test_streams_of_gpus(gpus: RankProcesses) -> None:
    gpus.run(vault_bodies.on_other_streams)


def test_a_domain_that_left_is_there_for_the_others() -> None:
    bootstraps = ferry.threads(4)

    def rank(number: int) -> None:
        try:
            group = ferry.Group(
                bootstraps[number], experts=4, deadline=20, domain_size=2, network="ofi"
            )
        except ferry.UnsupportedError as error:
            pytest.skip(str(error))
        mine = np.full(5, number)
        no_rows = np.empty((0, 3))
        vault = ferry.Vault(group, ferry.Vault.bytes_of({number: mine, 4: no_rows}))
        vault.recover()
        vault.put(0, {number: mine})
        group.commit(1)
        vault.put(1, {number: mine + 10} | ({4: no_rows} if number == 3 else {}))
        with contextlib.suppress(ferry.PeerLeftError):
            group.barrier()
        if number >= 2:
            group.destroy()
            return
        while group.view().ranks != [0, 1]:
            with pytest.raises(ferry.PeerLeftError):
                while True:
                    group.barrier()
            group.regroup()
        assert vault.recover([2, 3] if number == 0 else iter([2])) == 1
        assert vault.keys() == [0, 1, 2, 3, 4]
        for key in (0, 1, 2):
            vault.get(key, mine)
            assert (mine == key + 10).all()
        for wrong in ([2.5], None, 2):
            with pytest.raises(ferry.InvalidArgumentError, match="recover: wanted"):
                vault.recover(wrong)  # type: ignore[arg-type]
        assert vault.recover([4]) == 1  # nothing else: no bytes come
        vault.get(4, no_rows)
        group.barrier()
        group.destroy()

    run_threads(4, rank)


def test_bad_arguments_are_refused() -> None:
    def body(group: ferry.Group) -> None:
        x = np.zeros((4, 4), np.float32)
        for group_of in (None, group._raw):
            with pytest.raises(ferry.InvalidArgumentError, match="Vault: group"):
                ferry.Vault(group_of, 1)  # type: ignore[arg-type]
        with pytest.raises(ferry.InvalidArgumentError, match="Vault: version_bytes"):
            ferry.Vault(group, -1)
        vault = ferry.Vault(group, ferry.Vault.bytes_of({0: x}))
        vault.recover()
        for wrong, words in (
            ([x], "expected a dict"),
            ({"w": x}, "put: key"),
            ({0: "x"}, "key 0, tensor 0: got .*NumPy or torch"),
            ({0: x.T[1:]}, "key 0, tensor 0: got strides"),
            ({0: np.array([None])}, "key 0, tensor 0: got dtype object"),
        ):
            with pytest.raises(ferry.InvalidArgumentError, match=words):
                vault.put(0, wrong)  # type: ignore[arg-type]
        with pytest.raises(ferry.ExhaustedError, match="version_bytes"):
            vault.put(0, {0: [x, x]})
        with pytest.raises(ferry.InvalidArgumentError, match="put: step"):
            vault.put(-1, {})
        vault.put(0, {0: x})
        assert vault.recover() == 0
        x.flags.writeable = False
        with pytest.raises(ferry.InvalidArgumentError, match=r"get: key 0, tensor 0.*read"):
            vault.get(0, x)
        with pytest.raises(ferry.InvalidArgumentError, match=r"put: stream: .*backend host"):
            vault.put(0, {0: x}, stream=ferry.Stream())

    run_ranks(1, body)


def test_tensors_that_are_not_their_bytes_are_refused() -> None:
    torch = pytest.importorskip("torch")
    record = np.zeros(2, [("a", "<i4"), ("b", "<f4")])
    quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    for tensor, words in (
        (np.zeros(3, ">f4"), "dtype >f4.*byte order"),
        (record, "dtype.*'a'.*fields"),
        (np.ma.array([1, 2, 3], "u1", mask=[0, 1, 0]), "masked"),
        (quantised, "quint8.*int_repr"),
        (torch.tensor([1 + 2j]).conj(), "conjugate.*resolve_conj"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "negative.*resolve_neg"),
        (torch.eye(3).to_sparse(), "sparse_coo.*dense"),
        (torch.eye(3).to_sparse_csr(), "sparse_csr.*dense"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested.*dense"),
    ):
        with pytest.raises(
            ferry.InvalidArgumentError, match=f"bytes_of: key 7, tensor 1: .*{words}"
        ):
            ferry.Vault.bytes_of({7: [np.zeros(1), tensor]})
    assert ferry.Vault.bytes_of({7: np.zeros(2, "datetime64[s]")}) == 64 + 128 + 64


def test_keys_beside_recover_in_another_thread() -> None:
    bootstraps = ferry.threads(2)
    entered = threading.Event()

    def rank(number: int) -> None:
        group = ferry.Group(bootstraps[number], experts=2, deadline=20, memory_bytes=1 << 20)
        vault = ferry.Vault(group, 1000)
        vault.recover()
        if number == 0:
            first = threading.Thread(target=lambda: (entered.set(), vault.recover()))
            first.start()
            entered.wait()
            time.sleep(0.2)  # until it waits for rank 1, which needs the interpreter
            assert vault.keys() == []
            first.join()
        else:
            entered.wait()
            time.sleep(0.4)
            vault.recover()
        group.barrier()
        group.destroy()

    run_threads(2, rank)


def test_groups_that_cannot_regroup_have_none() -> None:
    def body(group: ferry.Group) -> None:
        with pytest.raises(ferry.UnsupportedError, match="Vault"):
            ferry.Vault(group, 64)

    run_ranks(2, body, domain_size=1, network="sim")


STAYS = """
import signal
boot = ferry.from_environment()
group = ferry.Group(boot, experts=3, elastic="vault", deadline=20, memory_bytes=1 << 16)
vault = ferry.Vault(group, 4096)
if not boot.joins:
    assert vault.recover() is None
    for step in range(3):
        if step > 0:
            group.commit(step)
        vault.put(step, {group.rank: np.full(4, 10 * group.rank + step)})
    group.barrier()
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.barrier()
    except ferry.PeerFailedError:
        view = group.regroup()
    while view.lost:
        view = group.regroup() if group.commit(view.step + 1) else group.view()
assert vault.recover() == 2
for rank in range(3):
    got = np.zeros(4, np.int64)
    vault.get(rank, got)
    assert (got == 10 * rank + 2).all(), (rank, got)
group.barrier()
print("good")
"""


def test_versions_stay_when_the_place_of_their_keeper_is_taken_before_a_recover() -> None:
    variables = environment(3)
    children = [start(STAYS, **each) for each in variables]
    assert children[0].wait(60) == -9
    joins = start(STAYS, **variables[0], FERRY_JOIN="1")
    for status, out, err in finish([joins, *children[1:]]):
        assert (status, out) == (0, "good\n"), err
