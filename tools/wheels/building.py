"""What wheels for all systems share: environments that build, sources, and the call of pip."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
SETUP = ROOT / "tools" / "setup"


def run(*command: str | Path, cwd: Path = ROOT, log: str = "", **variables: str) -> str:
    """What it prints, which is also in build/wheels/LOG.log while it runs; ends this program, with
    the end of it, when the command fails."""
    words = [str(word) for word in command]
    with (WORK / f"{log}.log").open("w+") if log else tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(words, cwd=cwd, env=os.environ | variables, stdout=out, stderr=out)
        code = wait_for(child, out.fileno())
        out.seek(0)
        said = out.read()
    if code != 0:
        print(*said.splitlines()[-60:], sep="\n", file=sys.stderr)
        sys.exit(f"wheels: failed: {' '.join(words)}")
    return said


def wait_for(child: subprocess.Popen[bytes], out: int) -> int:
    """The exit status. Shows the last line of what the command says meanwhile: on a terminal in
    place, in a pipe a line each ten seconds."""
    start, terminal = time.monotonic(), sys.stdout.isatty()
    while True:
        try:
            code = child.wait(1 if terminal else 10)
        except subprocess.TimeoutExpired:
            said = os.pread(out, 4096, max(0, os.fstat(out).st_size - 4096))
            last = said.decode(errors="replace").rstrip().rpartition("\n")[2].strip()
            words = f"wheels: ... {time.monotonic() - start:.0f} s: {last[:80]}"
            before, end = ("\r\x1b[K", "") if terminal else ("", "\n")
            print(f"{before}{words}", end=end, flush=True)
            continue
        if terminal:
            print("\r\x1b[K", end="", flush=True)
        return code


def environment_of(python: Path) -> Path:
    """A virtual environment on it with what builds; returns its Python."""
    name = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2], end='')")
    folder = WORK / f"venv-{name}"
    pins = "".join((SETUP / f"requirements-{n}.txt").read_text() for n in ("build", "wheels"))
    stamp = folder / "pins"
    if not stamp.exists() or stamp.read_text() != pins:
        run(python, "-m", "venv", "--clear", folder)
        files = [f"-r{SETUP}/requirements-{n}.txt" for n in ("build", "wheels")]
        pip = (folder / "bin/python", "-m", "pip", "install", "-q")
        run(*pip, "-c", SETUP / "constraints.txt", *files)
        stamp.write_text(pins)
    return folder / "bin/python"


def fetch_source(package: str, folder: Path) -> Path:
    """The archive of a package's sources as the distribution has them, by apt with its checks of
    signatures; lists and settings of this machine stay as they are."""
    lists = WORK / "apt"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    format_ = "deb-src $(SITE) $(RELEASE) $(COMPONENT)"
    targets = run("apt-get", "indextargets", "--format", format_, "Created-By: Packages")
    own = re.compile(r".*(debian|ubuntu).* (main|universe)")
    sources = {line for line in targets.splitlines() if own.fullmatch(line)}
    (WORK / "sources.list").write_text("\n".join(sorted(sources)) + "\n")
    apt = ["apt-get", "-q", f"-oDir::Etc::SourceList={WORK}/sources.list"]
    apt += ["-oDir::Etc::SourceParts=/dev/null", f"-oDir::State::Lists={lists}"]
    apt += ["-oAPT::Sandbox::User=root"]
    run(*apt, "update")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run(*apt, "source", "--download-only", "--tar-only", package, cwd=folder)
    (archive,) = (path for path in folder.glob("*.orig.tar.*") if path.suffix != ".asc")
    print(f"wheels: {package} from {archive.name}")
    return archive


def make_sdist(python: Path) -> tuple[Path, Path]:
    """The sdist, and the folder that it is unpacked in: the wheels are built from it."""
    fresh = WORK / "sdist"
    shutil.rmtree(fresh, ignore_errors=True)
    run(python, "-m", "build", "--sdist", "--no-isolation", "--outdir", fresh, ROOT, log="sdist")
    (archive,) = fresh.iterdir()
    run("tar", "-xf", archive, "-C", fresh)
    (unpacked,) = (path for path in fresh.iterdir() if path.is_dir())
    sources = WORK / "ferry"
    update(sources, unpacked)
    return archive, sources


def update(folder: Path, new: Path) -> None:
    """Makes `folder` what `new` is; files that are the same keep their times, so their objects."""
    wanted = {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder) not in wanted:
            path.unlink()
    for name in wanted:
        old = folder / name
        if not old.exists() or not filecmp.cmp(old, new / name, shallow=False):
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(new / name, old)


def minor_of(python: Path) -> str:
    return run(python, "-c", "import sys; print(sys.version_info[1], end='')")


def build_wheel(
    python: Path, sources: Path, name: str, defines: dict[str, object], **variables: str
) -> Path:
    """One wheel, as the compiler leaves it."""
    objects = WORK / name
    (objects / "CMakeCache.txt").unlink(missing_ok=True)  # of another Python; objects stay
    out = WORK / "plain"
    shutil.rmtree(out, ignore_errors=True)
    settings = [f"cmake.define.{key}={value}" for key, value in defines.items()]
    settings += [f"build-dir={objects}", "cmake.build-type=Release", "install.strip=false"]
    command = [python, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", out]
    run(
        *command,
        *(f"--config-settings={setting}" for setting in settings),
        sources,
        log=f"{name}-3.{minor_of(python)}",
        VIRTUAL_ENV=str(python.parents[1]),
        **variables,
    )
    (wheel,) = out.iterdir()
    return wheel
