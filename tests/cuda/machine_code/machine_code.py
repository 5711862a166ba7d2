"""What the compiler makes of the kernels: rules over PTX and over what ptxas says.

Every rule is a function from a Compiled to a list of complaints; machine_code_test.py applies them
to the kernels and shows that each can fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

# What the build gives nvcc, as far as it changes code (cmake/FerryCuda.cmake).
FLAGS = ("-std=c++20", "--fmad=false", "-O3")
# Kernels that meet peers, those that move rows in bulk where the GPU can, and those that may not
# touch local memory because they are waited for.
MEETING = ("plan_kernel", "dispatch_kernel", "combine_kernel", "barrier_kernel")
# Those whose messages tell of memory: they come behind what was done to it before.
OFFERING = ("dispatch_kernel", "combine_kernel", "barrier_kernel")
BULK = ("dispatch_kernel", "combine_kernel")
FORBIDDEN = {
    "trap": r"^\s*(@%?\w+\s+)?trap;",
    "printf": r"\bvprintf\b",
    "flush of subnormals": r"\.ftz\b",
    "approximate arithmetic": r"\.(approx|full)\.(ftz\.)?f(32|64)\b",
    "NVLink multicast": r"\bmultimem\b",
}


@dataclass
class Compiled:
    """One source for one architecture."""

    source: str
    architecture: int
    ptx: str
    spills: dict[str, int] = field(default_factory=dict)  # entry: bytes stored and loaded again

    def entries(self) -> dict[str, str]:
        """Body of every kernel; functions that were not inlined count as part of each."""
        pieces = re.split(r"^(?=(?:\.\w+\s+)*\.(?:entry|func)\b)", self.ptx, flags=re.MULTILINE)
        functions = "".join(piece for piece in pieces if re.match(r"(?:\.\w+\s+)*\.func\b", piece))
        found = {}
        for piece in pieces:
            name = re.match(r"(?:\.\w+\s+)*\.entry\s+(\w+)", piece)
            if name:
                found[name.group(1)] = piece + functions
        return found

    def of(self, kernels: tuple[str, ...]) -> dict[str, str]:
        # In a mangled name the length stands before the name: no kernel is part of another's name.
        words = [f"{len(kernel)}{kernel}" for kernel in kernels]
        return {n: body for n, body in self.entries().items() if any(w in n for w in words)}


def instructions(ptx: str) -> str:
    """Without comments, and without the debug sections at the end."""
    return re.sub(r"//[^\n]*", "", ptx.split(".section\t.debug")[0])


def meets_at_system_scope(compiled: Compiled) -> list[str]:
    return [
        f"{name}: no {what}"
        for name, body in compiled.of(MEETING).items()
        for what in ("ld.acquire.sys", "st.release.sys")
        if not re.search(rf"\b{re.escape(what)}\b", instructions(body))
    ]


MESSAGE_STORE = r"\bst\.relaxed\.sys\.global\.v2\.u64\b"
MESSAGE_LOAD = r"\bld\.acquire\.sys\.global\.v2\.u64\b"
SYSTEM_FENCE = r"\bfence\.acq_rel\.sys\b"


def swaps_tagged_words(compiled: Compiled) -> list[str]:
    complaints = []
    for name, body in compiled.of(MEETING).items():
        text = instructions(body)
        store = re.search(MESSAGE_STORE, text)
        if not store:
            complaints.append(f"{name}: posts no message")
        if not re.search(MESSAGE_LOAD, text):
            complaints.append(f"{name}: takes no message")
        offers = bool(compiled.of(OFFERING).get(name))
        if store and offers and not re.search(SYSTEM_FENCE, text[: store.start()]):
            complaints.append(f"{name}: posts a message without a fence before it")
    return complaints


def moves_in_bulk(compiled: Compiled) -> list[str]:
    complaints = []
    for name, body in compiled.of(BULK).items():
        bulk = "cp.async.bulk." in instructions(body)
        if bulk != (compiled.architecture >= 90):
            complaints.append(f"{name}: cp.async.bulk {'found' if bulk else 'not found'}")
    return complaints


def never_spills(compiled: Compiled) -> list[str]:
    return [f"{name}: spills {n} bytes" for name, n in compiled.spills.items() if n > 0]


def nothing_forbidden(compiled: Compiled) -> list[str]:
    text = instructions(compiled.ptx)
    return [w for w, pattern in FORBIDDEN.items() if re.search(pattern, text, re.MULTILINE)]


RULES = (meets_at_system_scope, swaps_tagged_words, moves_in_bulk, never_spills, nothing_forbidden)


def read_spills(said: str) -> dict[str, int]:
    """From what `ptxas -v` says."""
    found = {}
    name = ""
    for line in said.splitlines():
        entry = re.search(r"Function properties for (\w+)", line)
        if entry:
            name = entry.group(1)
        count = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if count and name:
            found[name] = int(count.group(1)) + int(count.group(2))
    return found


def compile_source(
    nvcc: str, root: Path, source: Path, architectures: tuple[int, ...], *extra: str
) -> list[Compiled]:
    """PTX for the first architecture, which the assembler then takes for each of them."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        includes = (f"-I{root / 'src'}", f"-I{root / 'include'}")

        def run(*command: str | Path) -> str:
            done = subprocess.run(
                [nvcc, *map(str, command)], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise RuntimeError(f"{source.name}: {' '.join(done.args)}\n{done.stderr[-2000:]}")
            return done.stderr + done.stdout

        run(*FLAGS, *includes, f"-arch=compute_{architectures[0]}", "-ptx", source, "-o", ptx)
        text = ptx.read_text()
        assemble = (*extra, "-Xptxas=-v", "-cubin", ptx, "-o", os.devnull)
        return [
            Compiled(source.name, sm, text, read_spills(run(f"-arch=sm_{sm}", *assemble)))
            for sm in architectures
        ]


def asked_architectures(source: Path, root: Path) -> set[int]:
    """What a source and all that it includes of ours compare __CUDA_ARCH__ with."""
    seen: set[Path] = set()
    left = [source]
    while left:
        file = left.pop()
        if file in seen or not file.exists():
            continue
        seen.add(file)
        left += [root / "src" / name for name in re.findall(r'#include "(.+)"', file.read_text())]
    texts = [file.read_text() for file in seen]
    return {int(n) for t in texts for n in re.findall(r"__CUDA_ARCH__\s*[<>=]+\s*(\d+)", t)}
