"""Makes docs/compatibility.md: runs the replays of frameworks here and records how they ended.

    python python/deep_ep/tests/compatibility.py cpu     in CPU memory
    python python/deep_ep/tests/compatibility.py cuda    on this machine's GPUs
    python python/deep_ep/tests/compatibility.py page    write the page anew from what is recorded

docs/compatibility.json holds the records. test_compatibility.py fails when a replay is not in it,
has changed since it was recorded in CPU memory, or when the page says something else.
"""

from __future__ import annotations

import datetime
import hashlib
import inspect
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RECORDS = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
RANKS = 4
TESTS = {
    "cpu": ["test_replays.py::test_four_ranks"],
    "cuda": ["-m", "gpu", "test_process_ranks.py::test_replays_on_gpus"],
}

HEAD = """\
# Compatibility

<!-- Written by python/deep_ep/tests/compatibility.py from compatibility.json; do not edit. -->

These programs call `deep_ep` and run on Ferry's without a change. What is listed was run: a
*replay* makes the framework's calls in the order and with the arguments of the release named, and
compares every value with a dense reference. Replays are tests (`python/deep_ep/tests/replay_*.py`):
`make test` runs all of them in CPU memory, and fails when this page does not say what they are.

| framework | release | its files | how to choose it there |
| --- | --- | --- | --- |
"""
RUNS = """
## What was run

{ranks} ranks each. "Earlier form": the replay has changed since that run.

| framework | replay | what it does | CPU | GPU |
| --- | --- | --- | --- | --- |
"""
MACHINES = """
## Where

| | machine | torch | Ferry | date |
| --- | --- | --- | --- | --- |
"""
END = """
"V2" are frameworks that import `ElasticBuffer`, "hybrid" those that import `HybridEPBuffer`
([V2 and later](deep_ep_v2.md)).
"""


def modules() -> tuple[ModuleType, ...]:
    import replay_automodel
    import replay_deepep
    import replay_deepep_v25
    import replay_lmdeploy
    import replay_mega_moe
    import replay_megatron
    import replay_megatron_hybrid
    import replay_megatron_v2
    import replay_sglang
    import replay_sglang_v2
    import replay_torchtitan
    import replay_torchtitan_v2
    import replay_vllm
    import replay_vllm_v2
    import replay_xtuner

    serving = (replay_vllm, replay_sglang, replay_lmdeploy)
    training = (replay_megatron, replay_automodel, replay_xtuner, replay_torchtitan)
    later = (replay_vllm_v2, replay_sglang_v2, replay_torchtitan_v2, replay_megatron_v2)
    return (
        *serving,
        *training,
        replay_deepep,
        *later,
        replay_megatron_hybrid,
        replay_mega_moe,
        replay_deepep_v25,
    )


def replays() -> list[Callable[[Any, str], None]]:
    """All replays, for 4 ranks."""
    return [replay for module in modules() for replay in module.ALL]


def fingerprint(module: ModuleType) -> str:
    """Of the file that makes the calls: it changes when the calls do."""
    return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:16]


def what(replay: Callable[[Any, str], None]) -> str:
    """The first paragraph of its docstring, on one line."""
    return " ".join((inspect.getdoc(replay) or "").split("\n\n")[0].split())


def machine(device: str) -> str:
    if device == "cuda":
        import torch

        count = torch.cuda.device_count()
        return f"{count} × {torch.cuda.get_device_name()}"
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0].strip() if names else platform.machine()


def run(device: str) -> dict[str, str]:
    """How each replay ended: "passed", "failed" or "skipped"."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", *TESTS[device]],
            cwd=HERE,
            check=False,
        )
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    results = {}
    for case in cases:
        name = re.findall(r"\[(.*)\]", case.get("name", ""))[0]
        ended = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        results[name] = {(): "passed", ("skipped",): "skipped"}.get(tuple(ended), "failed")
    return results


def record(device: str) -> None:
    import torch

    import ferry

    results = run(device)
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    records[device] = {
        "machine": machine(device),
        "torch": torch.__version__,
        "ferry": ferry.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "replays": {
            replay.__name__: {
                "result": results.get(replay.__name__, "not run"),
                "fingerprint": fingerprint(module),
            }
            for module in modules()
            for replay in module.ALL
        },
    }
    RECORDS.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n")


def result(records: dict[str, Any], device: str, module: ModuleType, name: str) -> str:
    run_there = records.get(device, {})
    entry = run_there.get("replays", {}).get(name)
    if entry is None or entry["result"] in ("not run", "skipped"):
        return "not run"
    earlier = "" if entry["fingerprint"] == fingerprint(module) else ", earlier form"
    return f"{entry['result']}, {run_there['date']}{earlier}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def page(records: dict[str, Any]) -> str:
    text = HEAD
    for module in modules():
        one = module.FRAMEWORK
        files = ", ".join(f"`{file}`" for file in one.files.split(", "))
        text += row(one.name, one.release, files, one.choice)
    text += RUNS.format(ranks=RANKS)
    for module in modules():
        for replay in module.ALL:
            name = replay.__name__
            ends = (result(records, device, module, name) for device in TESTS)
            text += row(module.FRAMEWORK.name, f"`{name}`", what(replay), *ends)
    text += MACHINES
    for device, there in records.items():
        kind = {"cpu": "CPU", "cuda": "GPU"}[device]
        text += row(kind, there["machine"], there["torch"], there["ferry"], there["date"])
    return text + END


def main() -> None:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
    if len(sys.argv) != 2 or sys.argv[1] not in (*TESTS, "page"):
        sys.exit(f"usage: {Path(sys.argv[0]).name} {'|'.join((*TESTS, 'page'))}")
    if sys.argv[1] != "page":
        record(sys.argv[1])
    PAGE.write_text(page(json.loads(RECORDS.read_text())))


if __name__ == "__main__":
    main()
