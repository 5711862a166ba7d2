"""`make lint` and `make format`: every check that needs no build.

lint.py          checks; exit status 1 if one fails; the last line is "lint: N passed, M failed"
lint.py --fix    writes the formats instead (clang-format, ruff)
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_headers
import check_includes
import structure
import words

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CPP = {".hpp", ".cpp", ".cu", ".cuh", ".inc"}


def files() -> list[Path]:
    """The project's files, relative to the root: what git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        names = [Path(name) for name in done.stdout.split("\0") if name]
    else:  # a source archive
        skip = {"build", ".venv", "dist", "__pycache__", "_build", "_doxygen"}
        names = [f.relative_to(ROOT) for f in ROOT.rglob("*") if not skip & set(f.parts)]
    return sorted(name for name in names if (ROOT / name).is_file())


def run(*command: str | Path) -> str:
    """Empty if the command succeeds, else its output."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or "failed"


def cpp_format() -> str:
    """One line for each file that is not formatted as `make format` would."""
    sources = [name for name in files() if name.suffix in CPP]
    words = run(BIN / "clang-format", "--style=file", "--dry-run", "-Werror", *sources)
    if not words:
        return ""
    places = Counter(re.findall(r"^([^\s:]+):\d+:\d+: error", words, re.MULTILINE))
    return "\n".join(f"{n}: {count} places" for n, count in places.items()) or words


def python_format() -> str:
    """One line for each file that is not formatted as `make format` would."""
    return run(BIN / "ruff", "format", "--check", "--output-format=concise", "--preview", ".")


def shell_syntax() -> str:
    faults = []
    for name in files():
        head = (ROOT / name).read_bytes()[:64].split(b"\n")[0]
        if name.suffix == ".sh" or (head.startswith(b"#!") and b"bash" in head):
            faults.append(run("bash", "-n", name))
        if head.startswith(b"#!") and not (ROOT / name).stat().st_mode & 0o100:
            faults.append(f"{name}: starts with #! and is not executable")
    return "\n".join(fault for fault in faults if fault)


def text_hygiene() -> str:
    """UTF-8, no trailing blanks, no tabs but in Makefiles, one newline at the end."""
    faults = []
    kinds = CPP | {".py", ".pyi", ".sh", ".md", ".cmake", ".toml", ".txt", ".json", ".yml"}
    for name in files():
        if name.suffix not in kinds and name.name != "Makefile":
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            faults.append(f"{name}: ends without a newline, or with an empty line")
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip():
                faults.append(f"{name}:{number}: trailing blanks")
            if "\t" in line and name.name != "Makefile":
                faults.append(f"{name}:{number}: a tab")
    return "\n".join(faults)


def include_arrows() -> str:
    return "\n".join(str(fault) for fault in check_includes.check(ROOT))


def headers_alone() -> str:
    return "\n".join(check_headers.check(ROOT))


def shape() -> str:
    return "\n".join(structure.check(ROOT))


def replaced_words() -> str:
    return "\n".join(words.check(words.texts(ROOT, files())))


CHECKS: dict[str, Callable[[], str]] = {
    "clang-format": cpp_format,
    "ruff check": lambda: run(BIN / "ruff", "check", "--quiet", "--output-format=concise", "."),
    "ruff format": python_format,
    "include arrows": include_arrows,
    "structure": shape,
    "headers compile alone": headers_alone,
    "shell syntax": shell_syntax,
    "text hygiene": text_hygiene,
    "words": replaced_words,
}


def fix() -> int:
    sources = [name for name in files() if name.suffix in CPP]
    faults = [
        run(BIN / "clang-format", "--style=file", "-i", *sources),
        run(BIN / "ruff", "check", "--fix", "--quiet", "."),
        run(BIN / "ruff", "format", "--preview", "--quiet", "."),
    ]
    print("\n".join(fault for fault in faults if fault), end="")
    return 1 if any(faults) else 0


def main() -> int:
    if "--fix" in sys.argv[1:]:
        return fix()
    failed = 0
    for name, check in CHECKS.items():
        start = time.monotonic()
        fault = check()
        seconds = time.monotonic() - start
        print(f"{'FAIL' if fault else 'ok':4}  {name} ({seconds:.1f} s)", flush=True)
        if fault:
            failed += 1
            print(textwrap.indent(fault, "      "), flush=True)
    if failed:
        print("`make format` mends the formats.")
    print(f"lint: {len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
