"""The three calls do what their documentation says."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import free_port
from rank_threads import DEADLINE, run_threads
from torch import nn

import deepep
import ferry
import ferry.torch


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    deepep.set_config(compression=False, topology="Auto")
    torch.set_num_threads(threads)


def test_settings() -> None:
    assert deepep.get_config() == deepep.Config("exact", "automatic")
    made = deepep.set_config(compression=True, topology="Hierarchical")
    assert made == deepep.get_config() == deepep.Config("auto", "hierarchical")
    # What is not given stays.
    assert deepep.set_config(compression="E4M3") == deepep.Config("e4m3", "hierarchical")
    assert deepep.set_config(topology="automatic") == deepep.Config("e4m3", "automatic")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"compression": "fp8"}, "compression: got 'fp8'; expected True, False or one of .*e4m3"),
        ({"compression": 1.5}, "compression: got 1.5"),
        ({"topology": "star"}, "topology: got 'star'"),
        ({"topology": 3}, "topology: got 3"),
        ({"topology": "Ring"}, 'topology: got "Ring" with compression'),
    ]
    for options, words in wrong:
        with pytest.raises(ferry.InvalidArgumentError, match=words):
            deepep.set_config(**options)
    assert deepep.get_config() == deepep.Config("e4m3", "automatic")  # as it was


@pytest.mark.parametrize("topology", ["Auto", "Hierarchical", "Ring", "Tree"])
def test_a_model_is_trained_as_it_is_set(topology: str) -> None:
    deepep.set_config(compression=topology not in ("Ring", "Tree"), topology=topology)
    bootstraps = ferry.threads(2)

    def one(rank: int) -> list[torch.Tensor]:
        with ferry.Collectives(bootstraps[rank], deadline=DEADLINE, memory_bytes=1 << 20) as ranks:
            asked = []
            all_reduce = ranks.all_reduce

            def spy(*arguments: Any, **options: Any) -> Any:
                asked.append(options["algorithm"])
                return all_reduce(*arguments, **options)

            ranks.all_reduce = spy  # type: ignore[method-assign]
            model = nn.Linear(80, 80)
            ddp = deepep.DistributedDataParallel(model, device_ids=[0], collectives=ranks)
            assert isinstance(ddp, ferry.torch.DistributedDataParallel)
            ddp(torch.full((2, 80), rank + 1.0)).sum().backward()
            assert set(asked) == {deepep.get_config().algorithm}
            assert model.weight.grad is not None
            assert (model.weight.grad == 3).all()  # 2 · 1 and 2 · 2
            ranks.barrier()
            return list(model.parameters())

    for mine, other in zip(*run_threads(2, one)):
        assert torch.equal(mine, other)


def test_optimize_starts_what_a_launcher_has_prepared(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os
            import deepep, torch, torch.distributed as dist
            done = deepep.optimize()
            assert done == deepep.optimize()
            cores = len(os.sched_getaffinity(0))
            assert done.threads == torch.get_num_threads() == max(1, cores // 2), done
            assert done.backend == dist.get_backend() == "ferry" in str(done), done
            model = deepep.DistributedDataParallel(torch.nn.Linear(4, 1), device_ids=[0])
            model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
            assert (model.module.weight.grad == 1).all()
            model.destroy()
            dist.destroy_process_group()
            """
        )
    )
    launched = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=environment | launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]


def test_optimize_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    done = deepep.optimize()
    assert (done.threads, done.backend) == (1, None)
    assert "hint: 100000 ranks share" in str(done) and "torchrun or ferry run" in done.hints[1]
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert deepep.optimize().threads == 2


def test_it_is_a_distribution_of_its_own() -> None:
    assert importlib.metadata.version("deepep") == deepep.__version__


@pytest.mark.parametrize("ranks", ["0", "two", "-1"])
def test_ranks_of_a_host_that_are_no_number(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(ferry.InvalidArgumentError, match=f"LOCAL_WORLD_SIZE: got '{ranks}'"):
        deepep.optimize()
