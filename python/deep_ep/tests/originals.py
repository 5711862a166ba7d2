"""What the originals of this package are called by: names, arguments and defaults of each release.

    python python/deep_ep/tests/originals.py record RELEASE FOLDER   read a release's sources anew
    python python/deep_ep/tests/originals.py page                    write the page anew

docs/deep_ep_names.json holds the record, the names that are not here with the reason ("gaps"), and
what differs on purpose, as where two releases contradict each other ("differs");
docs/deep_ep_names.md shows all of it. test_originals.py fails when an argument is missing or has
another default, when a name is neither here nor a gap, and when the page says something else.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import idle_arguments
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RECORD = ROOT / "docs" / "deep_ep_names.json"
PAGE = ROOT / "docs" / "deep_ep_names.md"

FILES = {
    "1.2.1": {"deep_ep": ("buffer.py", "utils.py")},
    "2.1.0": {
        "deep_ep": ("buffers/legacy.py", "buffers/elastic.py"),
        "deep_ep.utils.event": ("utils/event.py",),
        "deep_ep.utils.envs": ("utils/envs.py",),
        "deep_ep.utils.comm": ("utils/comm.py",),
        "deep_ep.utils.gate": ("utils/gate.py",),
        "deep_ep.utils.math": ("utils/math.py",),
        "deep_ep.utils.refs": ("utils/refs.py",),
        "deep_ep.utils.semantic": ("utils/semantic.py",),
        "deep_ep.utils.testing": ("utils/testing.py",),
    },
    "2.5.0": {
        "deep_ep": (
            "buffers/ep.py",
            "buffers/allocator.py",
            "buffers/base.py",
            "buffers/bucket.py",
            "buffers/engram.py",
            "buffers/pp.py",
        ),
        "deep_ep.comm": ("comm/barrier.py", "comm/handle.py", "comm/stream.py"),
        "deep_ep.utils.envs": ("utils/envs.py",),
        "deep_ep.utils.event": ("utils/event.py",),
        "deep_ep.utils.testing": ("utils/testing.py",),
    },
    "hybrid-ep": {"deep_ep.hybrid_ep_buffer": ("hybrid_ep_buffer.py",)},
    "nvfp4": {"deep_ep": ("buffer.py",)},
}
"""Which files of each release define what is imported from which module. The release hybrid-ep is
a branch of DeepEP without a number, nvfp4 one of a fork (its pull request 341)."""

ELSEWHERE = {"1.2.1": {"check_nvlink_connections": "deep_ep.utils"}}
"""Functions that a release has in another module than its classes."""

HEAD = """\
# Names of DeepEP

<!-- Written by python/deep_ep/tests/originals.py from deep_ep_names.json; do not edit. -->

Every name that DeepEP's releases offer to callers, with its arguments and defaults as that release
has them, and whether `deep_ep` over Ferry has it. A test compares the signatures with this list, so
"yes" means every argument, in the same place, with the same default. [Coming from
DeepEP](deep_ep.md) says what differs behind the names.
"""


def signature_of(node: ast.FunctionDef) -> str:
    """Its arguments but `self`, with their defaults."""
    for one in ast.walk(node.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    words = ast.unparse(node.args)
    return words.removeprefix("self").removeprefix(", ")


def read(source: str) -> Iterator[tuple[str, str]]:
    """(name, arguments) of the functions, classes and methods of a file that callers see."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, signature_of(node)
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        made = [one for one in methods if one.name == "__init__"]
        yield node.name, signature_of(made[0]) if made else ""
        for one in methods:
            marks = {ast.unparse(mark) for mark in one.decorator_list}
            if not one.name.startswith("_") and "property" not in marks:
                yield f"{node.name}.{one.name}", signature_of(one)


def record(release: str, folder: Path) -> None:
    """Reads a release's sources, the folder of its package."""
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {"releases": {}}
    found: dict[str, dict[str, str]] = {}
    for module, files in FILES[release].items():
        for file in files:
            for name, words in read((folder / file).read_text()):
                place = ELSEWHERE.get(release, {}).get(name, module)
                found.setdefault(place, {})[name] = words
    records["releases"][release] = found
    records["releases"] = {one: records["releases"][one] for one in sorted(records["releases"])}
    RECORD.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def names(records: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(release, module, name, arguments) of everything recorded."""
    for release, modules in records["releases"].items():
        for module, found in modules.items():
            for name, words in found.items():
                yield release, module, name, words


def gap(records: dict[str, Any], module: str, name: str) -> str | None:
    """Why a name is not here, or its class, or its module; None: it is."""
    whole = f"{module}.{name}"
    for listed, reason in records["gaps"].items():
        if whole == listed or whole.startswith(f"{listed}."):
            return str(reason)
    return None


def ours(module: str, name: str) -> Any:
    """What this package has by that name; AttributeError or ImportError: nothing."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def differences(found: Any, words: str) -> list[str]:
    """What an original's arguments have that ours do not. Further ones of ours need a default."""
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def original({words}): pass", scope)  # of our own record
    wanted = inspect.signature(scope["original"]).parameters
    mine = dict(inspect.signature(found).parameters)
    mine.pop("self", None)
    wrong = []
    for place, (name, one) in enumerate(wanted.items()):
        own = mine.get(name)
        if own is None:
            wrong.append(f"no {name}")
        elif own.kind != one.kind or (
            one.kind == one.POSITIONAL_OR_KEYWORD and list(mine).index(name) != place
        ):
            wrong.append(f"{name} in another place")
        elif repr(own.default) != repr(one.default):
            wrong.append(f"{name} with another default")
    wrong += [
        f"{name} is required"
        for name, one in mine.items()
        if name not in wanted and one.default is one.empty and one.kind < one.VAR_KEYWORD
        if one.kind != one.VAR_POSITIONAL
    ]
    return wrong


def page(records: dict[str, Any]) -> str:
    text = HEAD
    for release, modules in records["releases"].items():
        text += f"\n## {release}\n\n| name | arguments | here |\n| --- | --- | --- |\n"
        for module, found in modules.items():
            prefix = "" if module == "deep_ep" else f"{module.removeprefix('deep_ep.')}."
            for name, words in found.items():
                reason = gap(records, module, name)
                arguments = f"`{words}`" if words else ""
                here = "yes" if reason is None else f"no: {reason}"
                differs = records["differs"].get(f"{release}:{module}.{name}")
                if differs is not None:
                    here = f"yes, but {differs['why']}"
                text += f"| `{prefix}{name}` | {arguments} | {here} |\n"
    return text + idle_arguments.page()


def main() -> None:
    if sys.argv[1:2] == ["record"] and len(sys.argv) == 4 and sys.argv[2] in FILES:
        record(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:] != ["page"]:
        sys.exit(f"usage: {Path(sys.argv[0]).name} record {'|'.join(FILES)} FOLDER | page")
    PAGE.write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
