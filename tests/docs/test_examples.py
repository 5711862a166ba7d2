"""The code in README.md and the pages of docs/ runs as it stands there.

Every fenced block marked `python` or `cpp` is run: Python as a program, C++ compiled against a
fresh install and run. An HTML comment on the line before the fence says otherwise:

    <!-- test: ranks=4 -->        run under `ferry run -n 4 --`
    <!-- test: elastic=2:4 -->    run under `ferry run --elastic 2:4 --restarts 3 --`
    <!-- test: survive=3:4 -->    run under `ferry run --elastic 3:4 --`: nobody takes a place
    <!-- test: continue -->       goes on from the block before it (Python)
    <!-- test: needs=mpi4py -->   skipped where this Python module is missing
    <!-- test: compile -->        compile only
    <!-- test: file=program.py -->  not run by itself: a file for the `shell` blocks that follow
    <!-- test: shell=hosts -->    a block of `sh` to run; skipped without network namespaces
    <!-- test: skip: reason -->   not a program; say why
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n`]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S
)
MARK = re.compile(r"<!-- test: (?P<mark>.*?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    mark: str
    code: str
    files: tuple[tuple[str, str], ...] = ()  # names and contents

    @property
    def ranks(self) -> int:
        found = re.fullmatch(r"ranks=(\d+)", self.mark)
        return int(found[1]) if found else 0

    @property
    def elastic(self) -> str:
        return self.mark.removeprefix("elastic=") if self.mark.startswith("elastic=") else ""

    @property
    def survive(self) -> str:
        return self.mark.removeprefix("survive=") if self.mark.startswith("survive=") else ""

    @property
    def starts_ranks(self) -> bool:
        return bool(self.ranks or self.elastic or self.survive)

    @property
    def needs(self) -> str:
        return self.mark.removeprefix("needs=") if self.mark.startswith("needs=") else ""


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page to be run, in order; `continue` joins a block to the one before."""
    blocks: list[Block] = []
    files: list[tuple[str, str]] = []
    for found in FENCE.finditer(text):
        before = MARK.search(text[: found.start()])
        mark = before["mark"] if before else ""
        if found["language"] not in (("python", "cpp", "sh") if mark else ("python", "cpp")):
            continue
        line = text.count("\n", 0, found.start()) + 1
        indent = len(found["indent"])
        code = "".join(row[indent:] or "\n" for row in found["body"].splitlines(keepends=True))
        known = r"|compile|continue|ranks=\d+|(elastic|survive)=\d+:\d+"
        known += r"|needs=\w+|file=\S+|shell=hosts|skip: .+"
        if not re.fullmatch(known, mark):
            raise ValueError(f"{page}:{line}: unknown mark '{mark}'")
        if mark == "continue":
            last = blocks.pop()
            code = last.code + code
            blocks.append(Block(page, last.line, last.language, last.mark, code))
        elif mark.startswith("file="):
            files.append((mark.removeprefix("file="), code))
        else:
            with_files = tuple(files) if mark.startswith("shell=") else ()
            blocks.append(Block(page, line, found["language"], mark, code, with_files))
    return blocks


def all_blocks() -> list[Block]:
    built = (ROOT / "docs" / "_build", ROOT / "docs" / "_doxygen")
    pages = [
        p
        for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        if not any(folder in p.parents for folder in built)
    ]
    return [
        block
        for page in pages
        for block in blocks_of(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"))
        if not block.mark.startswith("skip")
    ]


# Where the command `ferry` is: of the package, or of a build.
PLACES = f"{Path(sys.executable).parent}{os.pathsep}{ROOT / 'build/host/tools/ferry'}"


def run(command: list[str], where: Path) -> str:
    done = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, "PATH": f"{PLACES}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def under_ferry(block: Block, command: list[str]) -> list[str]:
    if not block.starts_ranks:
        return command
    ferry = shutil.which("ferry", path=PLACES)
    assert ferry, "the command `ferry` is not built: make package"
    if block.elastic:
        return [ferry, "run", "--elastic", block.elastic, "--restarts", "3", "--", *command]
    if block.survive:
        return [ferry, "run", "--elastic", block.survive, "--", *command]
    return [ferry, "run", "-n", str(block.ranks), "--", *command]


def run_in_shell(block: Block, where: Path) -> None:
    allowed = subprocess.run(["unshare", "-rnm", "true"], capture_output=True, check=False)
    if allowed.returncode != 0 or shutil.which("ip") is None:
        pytest.skip("no network namespaces here, or no `ip` (iproute2)")
    if ctypes.util.find_library("fabric") is None:
        pytest.skip("no libfabric here")
    for name, content in block.files:
        (where / name).write_text(content, encoding="utf-8")
    run(["bash", "-e", "-c", block.code], where)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the C++ library, from the build of the preset `host`."""
    build = ROOT / "build" / "host"
    assert (build / "CMakeCache.txt").exists(), "not built: cmake --preset host, and build it"
    prefix = tmp_path_factory.mktemp("prefix")
    run(["cmake", "--install", str(build), "--prefix", str(prefix)], ROOT)
    return prefix


@pytest.fixture(scope="session")
def with_torch() -> Iterator[list[str]]:
    """How to start Python with a program that imports torch; one thread a rank, as `ferry run`."""
    forked = str(Path(__file__).with_name("forked.py"))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener:
            listener.bind(path)
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, forked, "serve", str(listener.fileno()), "torch._dynamo"],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        yield [sys.executable, "-I", "-S", forked, "run", path]
        server.communicate()


@pytest.mark.parametrize("block", all_blocks(), ids=lambda block: f"{block.page}:{block.line}")
def test_block(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if block.needs and importlib.util.find_spec(block.needs) is None:
        pytest.skip(f"{block.needs} is not installed")
    if block.language == "sh":
        run_in_shell(block, tmp_path)
        return
    if block.language == "python":
        program = tmp_path / "block.py"
        program.write_text(block.code, encoding="utf-8")
        if block.mark == "compile":
            compile(block.code, block.page, "exec")
        else:
            python = [sys.executable]
            if block.starts_ranks and "import torch" in block.code:
                python = request.getfixturevalue("with_torch")
            run(under_ferry(block, [*python, str(program)]), tmp_path)
        return
    prefix: Path = request.getfixturevalue("installed")
    (tmp_path / "block.cpp").write_text(block.code, encoding="utf-8")
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Werror"]
    compiler += ["-I", str(prefix / "include"), "block.cpp"]
    if block.mark == "compile":
        run([*compiler, "-fsyntax-only"], tmp_path)
        return
    library = next(prefix.rglob("libferry.a"))
    run([*compiler, "-o", "block", str(library), "-pthread"], tmp_path)
    run(under_ferry(block, [str(tmp_path / "block")]), tmp_path)


def test_a_forked_program_fails_as_one_that_is_started(
    with_torch: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "block.py"
    program.write_text("import sys, torch; print(sys.argv); sys.exit('a reason')")
    done = subprocess.run([*with_torch, program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "a reason\n")
    assert done.stdout == f"['{program}']\n"
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    assert subprocess.run([*with_torch, program], check=False).returncode != 0


def test_a_forked_program_ends_with_the_one_that_asked(
    with_torch: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "block.py"
    program.write_text("import time; print('here', flush=True); time.sleep(600)")
    asked = subprocess.Popen([*with_torch, program], stdout=subprocess.PIPE, text=True)
    assert asked.stdout is not None
    assert asked.stdout.readline() == "here\n"
    asked.kill()
    assert asked.stdout.read() == ""  # comes when nobody holds the pipe any more
    asked.wait()


def test_a_shell_block_gets_the_files_before_it() -> None:
    page = "<!-- test: file=a.py -->\n```python\n1\n```\n```sh\nls\n```\n"
    (block,) = blocks_of("page.md", page + "<!-- test: shell=hosts -->\n```sh\ncat a.py\n```\n")
    assert (block.code, block.files) == ("cat a.py\n", (("a.py", "1\n"),))


PAGE = """
# A page
<!-- test: ranks=2 -->
```python
a = 1
```
between
<!-- test: continue -->
```python
b = 2
```
- in a list
  ```cpp
  int main() {}
  ```
<!-- test: skip: a fragment -->
```cpp
foo();
```
```text
not code
```
"""


def test_blocks_are_found() -> None:
    python, cpp, skipped = blocks_of("page.md", PAGE)
    assert (python.code, python.ranks, python.line) == ("a = 1\nb = 2\n", 2, 4)
    assert (cpp.code, cpp.language, cpp.mark) == ("int main() {}\n", "cpp", "")
    assert skipped.mark == "skip: a fragment"


def test_a_block_says_which_module_it_needs() -> None:
    (block,) = blocks_of("page.md", "<!-- test: needs=mpi4py -->\n```python\n1\n```\n")
    assert (block.needs, block.ranks) == ("mpi4py", 0)


def test_an_unknown_mark_is_refused() -> None:
    with pytest.raises(ValueError, match=r"page.md:2: unknown mark 'runn'"):
        blocks_of("page.md", "<!-- test: runn -->\n```python\n1\n```\n")


def test_there_is_something_to_run() -> None:
    languages = {block.language for block in all_blocks()}
    assert languages == {"python", "cpp", "sh"}, "README.md shows Python and C++"
