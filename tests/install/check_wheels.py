"""The wheels of `make wheels`, where nothing but Python is: bare roots of distributions, made by
mmdebstrap, without a compiler; and, for aarch64, under an emulator. A plain pytest does not collect
them:

    make test STAGES=wheels

Skipped, with the reason, where no root can be made: that takes root (or unshare), mmdebstrap and a
mirror. Roots are kept in build/roots.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "wheels"))
import building  # noqa: E402  # of `make wheels`

DIST = ROOT / "dist"
ROOTS = ROOT / "build" / "roots"
MACHINE = platform.machine()
#: Debian's names of machines.
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
#: Of a distribution: its Python.
PYTHON = {"bookworm": "3.11", "trixie": "3.13"}
#: An older distribution than Debian's archive has, and what its packages are signed with.
UBUNTU = ("bionic",)
UBUNTU_SITE = "http://archive.ubuntu.com/ubuntu"
UBUNTU_KEYS = f"{UBUNTU_SITE}/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
UBUNTU_KEYS_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"

pytestmark = pytest.mark.timeout(1800)


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def wheel_for(python: str, machine: str, folder: Path = DIST) -> Path:
    tag = "cp311-cp311" if python == "3.11" else "cp312-abi3"
    found = list(folder.glob(f"ferry_moe-*-{tag}-*_{machine}.whl"))
    if not found:
        pytest.skip(f"no wheel {tag} for {machine} in {folder}: make wheels says why")
    return found[0]


def ten_lines() -> str:
    """Of the README."""
    page = (ROOT / "README.md").read_text().split("## Ten lines of Python")[1]
    match = re.search(r"```python\n(.*?)```", page, re.S)
    assert match
    return match[1]


def make_root(suite: str, machine: str, variant: str, packages: str, more: str = "") -> Path:
    root = ROOTS / f"{suite}-{machine}{more}"
    stamp = root / "made"
    if stamp.exists():
        return root
    if not shutil.which("mmdebstrap"):
        pytest.skip("no mmdebstrap (apt install mmdebstrap): no root can be made")
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    command = ["mmdebstrap", f"--variant={variant}", f"--include={packages}"]
    command += [f"--architectures={DEBIAN[machine]}"]
    command += from_ubuntu(suite, root) if suite in UBUNTU else [suite, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mmdebstrap {suite}: {done.stderr[-500:]}")
    stamp.write_text(suite)
    return root


def from_ubuntu(suite: str, root: Path) -> list[str]:
    """What mmdebstrap needs to be told of an archive that Debian does not know, and of its keys."""
    keyring = ROOTS / "ubuntu-keyring.deb"
    try:
        with urllib.request.urlopen(UBUNTU_KEYS, timeout=60) as answer:
            keyring.write_bytes(answer.read(1 << 20))
    except OSError as error:
        pytest.skip(f"{UBUNTU_KEYS}: {error}")
    assert hashlib.sha256(keyring.read_bytes()).hexdigest() == UBUNTU_KEYS_SHA256
    run("dpkg-deb", "-x", keyring, ROOTS / "ubuntu-keyring")
    keys = ROOTS / "ubuntu-keyring/usr/share/keyrings/ubuntu-archive-keyring.gpg"
    return [f"--keyring={keys}", suite, str(root), f"deb {UBUNTU_SITE} {suite} main universe"]


def numpy_for(python: str, machine: str, folder: Path) -> None:
    """The wheels that ours depends on."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", folder]
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in (17, 27, 28)]
    run(*command, f"--python-version={python}", *platforms, "numpy")


ENTER = ["unshare", "--mount", "--pid", "--fork", "sh", "-ec"]
#: What the package clients of this machine are told.
CLIENTS = re.compile(r"(PIP|SSL|CURL|REQUESTS)_\w+|\w+_proxy", re.I)


def run_inside(root: Path, script: str, environment: dict[str, str]) -> str:
    """Runs a script of sh in a root, with /proc and this machine's /dev; both are gone after it."""
    may = subprocess.run([*ENTER, "mount -t tmpfs none /mnt"], capture_output=True, check=False)
    if may.returncode != 0:
        pytest.skip("unshare and mount are not allowed here: no root can be entered")
    (root / "script").write_text(f"set -e\nmount -t proc proc /proc\n{script}")
    enter = f"mount --rbind /dev {root}/dev && exec chroot {root} sh /script"
    return run(*ENTER, enter, env={"PATH": os.environ["PATH"], "HOME": "/root", **environment})


INSIDE = """
for tool in cc gcc g++ clang cmake; do ! command -v $tool || exit 9; done
rm -rf /venv; python3 -m venv /venv
/venv/bin/pip install -q --no-index --find-links /wheels ferry-moe
cd /tmp
/venv/bin/ferry run -n 4 -- /venv/bin/python /ten.py
/venv/bin/ferry doctor
"""


def installed_and_run(root: Path, wheel: Path, python: str, script: str = INSIDE) -> str:
    """What the ten lines on four ranks and `ferry doctor` said."""
    shutil.rmtree(root / "wheels", ignore_errors=True)
    (root / "wheels").mkdir()
    shutil.copy(wheel, root / "wheels")
    numpy_for(python, MACHINE, root / "wheels")
    (root / "ten.py").write_text(ten_lines())
    start = time.monotonic()
    said = run_inside(root, script, {})
    seconds = time.monotonic() - start
    print(f"{root.name}: {seconds:.0f} s from pip install to the end of doctor\n{said}")
    ten_lines_said(said)
    assert "libfabric" in said
    return said


def ten_lines_said(said: str) -> None:
    """On four ranks."""
    for rank in range(4):
        assert re.search(rf"\[{rank}\] rank {rank}: \d+ rows came, y is \(16, 128\)", said), said


@pytest.mark.parametrize("suite", PYTHON)
def test_a_bare_root_installs_and_runs_the_wheel(suite: str) -> None:
    root = make_root(suite, MACHINE, "minbase", "python3,python3-venv")
    installed_and_run(root, wheel_for(PYTHON[suite], MACHINE), PYTHON[suite])


@pytest.mark.parametrize("suite", PYTHON)
def test_the_wheel_with_the_cuda_engine_works_without_a_gpu(suite: str) -> None:
    """On the host engine, and whoever asks for the other one is told why there is none."""
    wheel = wheel_for(PYTHON[suite], MACHINE, DIST / "cuda")
    root = make_root(suite, MACHINE, "minbase", "python3,python3-venv")
    script = (
        INSIDE
        + """
/venv/bin/pip list | grep ferry-moe
/venv/bin/python -c '
import ferry
assert ferry.has_cuda
try:
    ferry.Group(ferry.threads(1)[0], experts=1, backend="cuda")
except ferry.Error as error:
    print("refused:", error)
'
"""
    )
    said = installed_and_run(root, wheel, PYTHON[suite], script)
    assert "engines        host, cuda (for sm_" in said, said
    assert re.search(r"ferry-moe +\d+\.\d+\.\d+\+cu\d+", said), said
    assert re.search(r"refused: .*(GPU|driver)", said), said


def test_the_oldest_glibc_that_the_wheel_names() -> None:
    """Ubuntu 18.04 has glibc 2.27 and no Python that is new enough: one is compiled there from the
    sources that this machine's distribution has."""
    wheel = wheel_for("3.11", MACHINE)
    root = make_root("bionic", MACHINE, "minbase", "libexpat1,libffi6,libstdc++6,zlib1g")
    if not (root / "opt/python/bin/python3.11").exists():
        packages = "gcc,make,libc6-dev,libffi-dev,zlib1g-dev"
        build = make_root("bionic", MACHINE, "minbase", packages, "-build")
        building.WORK.mkdir(parents=True, exist_ok=True)
        building.fetch_source("python3.11", build / "source")
        said = run_inside(build, COMPILE_PYTHON, {"JOBS": os.environ.get("JOBS", "2")})
        print(said[-300:])
        shutil.copytree(build / "opt/python", root / "opt/python", symlinks=True)
    script = INSIDE.replace("python3 -m venv", "/opt/python/bin/python3.11 -m venv")
    assert script != INSIDE
    script = "ldd --version | head -1\n" + script
    said = installed_and_run(root, wheel, "3.11", script)
    glibc = re.search(r"GLIBC[^\n]* (\d+)\.(\d+)\n", said)
    assert glibc, said[:200]
    assert f"manylinux_{glibc[1]}_{glibc[2]}_" in wheel.name


COMPILE_PYTHON = """
cd /source && tar -xf *.orig.tar.* && cd */
./configure --prefix=/opt/python --with-ensurepip=no >/dev/null
make -j$JOBS >/dev/null 2>&1
make install >/dev/null 2>&1
/opt/python/bin/python3.11 -c 'import zlib, ctypes, ensurepip'
"""


@pytest.mark.skipif(MACHINE != "x86_64", reason="for machines that are not Arm64 themselves")
def test_the_wheel_for_arm64_under_an_emulator(tmp_path: Path) -> None:
    """`ferry run` and its four ranks are emulated, each by an emulator of its own."""
    emulator = shutil.which("qemu-aarch64")
    if not emulator:
        pytest.skip("no qemu-aarch64 (apt install qemu-user)")
    wheel = wheel_for("3.11", "aarch64")
    packages = "python3,python3.11-minimal,libpython3.11-stdlib,libstdc++6"
    root = make_root("bookworm", "aarch64", "extract", packages)
    numpy_for("3.11", "aarch64", tmp_path)
    for each in (*tmp_path.glob("*.whl"), wheel):
        shutil.unpack_archive(each, tmp_path / "guest", "zip")
    python = [emulator, "-L", str(root), "-E", f"PYTHONPATH={tmp_path}/guest"]
    python.append(str(root / "usr/bin/python3.11"))
    (tmp_path / "ten.py").write_text(ten_lines())
    said = run(*python, "-m", "ferry", "run", "-n", "4", "--", *python, "ten.py", cwd=tmp_path)
    ten_lines_said(said)
    said = run(*python, "-m", "ferry", "--version", cwd=tmp_path)
    assert said.startswith("ferry 0."), said


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_the_steps_of_the_dockerfile(cuda: bool) -> None:
    """In a root like its base image; then what `docker run` would start. No Docker is needed."""
    wheel_for("3.11", MACHINE, DIST / "cuda" if cuda else DIST)
    root = make_root("bookworm", MACHINE, "minbase", "ca-certificates", "-docker")
    text = (ROOT / "Dockerfile").read_text()
    steps = re.findall(r"^(FROM|ARG|RUN|COPY|ENV|CMD) (.*)$", text, re.M)
    script = ""
    for step, words in steps:
        if step in ("ARG", "ENV") and not words.startswith("BASE="):
            given = words.replace("FERRY_CUDA=0", f"FERRY_CUDA={int(cuda)}")  # --build-arg
            script += f"export {given}\n"
        elif step == "RUN":
            script += f"( {words} )\n"
        elif step == "COPY":
            assert words == "dist /usr/src/ferry"
            script += "rm -rf /usr/src/ferry /opt/ferry; cp -r /context/dist /usr/src/ferry\n"
        elif step == "CMD":
            script += " ".join(json.loads(words)) + "\n"
    script += "cd /tmp; ferry run -n 4 -- python /ten.py\n"
    (root / "ten.py").write_text(ten_lines())
    shutil.rmtree(root / "context", ignore_errors=True)
    shutil.copytree(DIST, root / "context/dist")
    certificates = Path("etc/ssl/certs/ca-certificates.crt")
    shutil.copyfile(Path("/") / certificates, root / certificates)
    told = {name: value for name, value in os.environ.items() if CLIENTS.fullmatch(name)}
    said = run_inside(root, script, told | {"PIP_FIND_LINKS": ""})
    assert "[3] rank 3:" in said and "libfabric" in said, said
    assert ("host, cuda (for sm_" in said) == cuda, said


def test_wheels_carry_no_libraries_and_need_no_newer_glibc() -> None:
    """What auditwheel says is in the name; here, that only glibc's own libraries are needed."""
    wheels = list(DIST.rglob("*linux*.whl"))
    if not wheels:
        pytest.skip("no wheels in dist/: make wheels")
    import zipfile

    for wheel in wheels:
        named = re.search(r"-manylinux_2_(\d+)_(x86_64|aarch64)\.whl$", wheel.name)
        assert named and int(named[1]) <= 28, wheel
        with zipfile.ZipFile(wheel) as archive:
            modules = [name for name in archive.namelist() if ".so" in name]
            assert len(modules) == 1 and modules[0].startswith("ferry/_ferry."), modules
            assert "ferry/_ferry.pyi" in archive.namelist()
            (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
            assert b"ferry = ferry.__main__:main" in archive.read(points)
