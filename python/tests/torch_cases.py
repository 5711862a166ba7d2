"""PyTorch's own tests of torch.distributed (torch/testing/_internal/distributed), as they come, on
`init_process_group("ferry")`.

    python python/tests/torch_cases.py [PATTERN]    runs those whose names match, and counts

Ranks are processes that stay: each takes one test after the other, in one process group.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
import traceback
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_meeting import process_group

RANKS = 4
_AT_ONCE = 20  # tests of one process group
LATE = 20.0  # seconds; a test that reaches it has failed


def module() -> Any:
    """Theirs, told that Ferry is a backend like others."""
    os.environ["BACKEND"] = "ferry"
    os.environ.setdefault("WORLD_SIZE", str(RANKS))
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        # Theirs need only its class.
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_distributed import DistTestCases

    import ferry.torch  # noqa: F401

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("ferry")
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def names(pattern: str = "") -> list[str]:
    """Of their tests."""
    base = module().DistributedTest._DistTestBase
    return [name for name in dir(base) if name.startswith("test_") and re.search(pattern, name)]


def with_group(boot: Any, where: Any, body: Any, arguments: Any, config: Any) -> Any:
    """`body`, with the default process group and the folder that their barriers use."""
    meeting, *rest = arguments
    os.environ["TEMP_DIR"] = meeting + ".files"
    for folder in ("barrier", "test_dir", "init_dir"):
        Path(os.environ["TEMP_DIR"], folder).mkdir(parents=True, exist_ok=True)
    module()
    with process_group("ferry", meeting, boot, LATE):
        return body(*rest)


def run_in_turn(wanted: list[str]) -> list[tuple[str, str]]:
    """What became of each: "passed", "skipped: …" or "failed: …". Ends after one that failed or
    destroyed the process group."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    theirs = module()

    class Case(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        pass

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    results: list[tuple[str, str]] = []
    for name in wanted:
        case = Case(name)
        case.rank = dist.get_rank()
        case.file_name = os.path.join(os.environ["TEMP_DIR"], "init_dir", name)
        try:
            getattr(case, name)()
            result = "passed"
        except unittest.SkipTest as skip:
            result = f"skipped: {skip}"
        except SystemExit as skip:
            result = f"skipped: {reasons.get(skip.code, skip.code)}"
        except BaseException as error:
            text = traceback.format_exc(limit=-4)
            result = f"failed: {type(error).__name__}: {error}\n{text}"
        results.append((name, result))
        if result.startswith("failed") or not dist.is_initialized():
            break
    return results


def run_all(wanted: list[str], say: Callable[[str], None] = lambda line: None) -> dict[str, str]:
    """Each of them, on new ranks after one that failed; says what became of it."""
    from rank_processes import RankProcesses

    results: dict[str, str] = {}
    ranks = RankProcesses(RANKS, "cpu", with_group, (__name__,))
    while wanted := [name for name in wanted if name not in results]:
        part = wanted[:_AT_ONCE]
        with tempfile.TemporaryDirectory() as folder:
            try:
                by_rank = [dict(rows) for rows in ranks.run(run_in_turn, folder + "/m", part)]
            except AssertionError as error:  # a rank ended, or did not
                by_rank = [{part[0]: f"failed: {error}"}]
        for name in part:
            said = [rows[name] for rows in by_rank if name in rows]
            if said:
                results[name] = next((s for s in said if s.startswith("failed")), said[0])
                say(f"{name}: {results[name]}")
                if results[name].startswith("failed"):
                    ranks.stop()
    ranks.stop()
    return results


if __name__ != "__main__":
    module()  # which takes seconds: once, in the process whose forks the ranks are


def main() -> None:
    wanted = names(sys.argv[1] if len(sys.argv) > 1 else "")
    results = run_all(wanted, lambda line: print(line, flush=True))
    for word in ("passed", "skipped", "failed"):
        print(word, sum(result.startswith(word) for result in results.values()))


if __name__ == "__main__":
    import torch_cases

    torch_cases.main()
