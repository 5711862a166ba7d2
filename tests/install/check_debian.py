"""The Debian packages of `make deb`, in a bare root of the distribution that they were built on:
installed by apt, the command runs four ranks, and a project of its own finds the library. A plain
pytest does not collect them:

    make test STAGES=debian

Skipped, with the reason, where no root can be made (check_wheels.py).
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from check_wheels import DIST, MACHINE, ROOT, make_root, run, run_inside

CONSUMER = ROOT / "tests" / "install" / "consumer"

INSTALL = """
dpkg --install /debs/*.deb
ferry run -n 4 -- sh -c 'echo rank $RANK is here'
ferry doctor
test -s /usr/share/man/man1/ferry.1.gz
cmake -S /consumer -B /tmp/consumer -DWANTED_VERSION=$(ferry --version | cut -d' ' -f2)
cmake --build /tmp/consumer
/tmp/consumer/consumer
dpkg --remove ferry-moe libferry-moe-dev
test ! -e /usr/bin/ferry
"""


def packages() -> list[Path]:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[MACHINE]
    found = sorted(DIST.glob(f"*ferry-moe*_{machine}.deb"))
    assert [path.name.split("_")[0] for path in found] == ["ferry-moe", "libferry-moe-dev"], found
    return found


def test_apt_knows_what_they_need() -> None:
    for package in packages():
        needs = run("dpkg-deb", "--field", package, "Depends", "Recommends", "Version")
        assert re.search(r"^Version: \d+\.\d+\.\d+$", needs, re.M), needs
        assert ("libc6" in needs) == (package.name.startswith("ferry-moe")), needs
        assert "libfabric1" in needs, needs


def test_a_bare_root_installs_them_and_builds_against_them() -> None:
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    needs = run("dpkg-deb", "--field", packages()[0], "Depends")
    names = [re.split(r"[ (]", need.strip())[0] for need in needs.split(",")]
    tools = ["g++", "cmake", "make"]
    root = make_root(suite, MACHINE, "minbase", ",".join(names + tools), "-deb")
    for name in ("debs", "consumer"):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "debs").mkdir()
    for package in packages():
        shutil.copy(package, root / "debs")
    shutil.copytree(CONSUMER, root / "consumer")
    said = run_inside(root, INSTALL, {})
    for rank in range(4):
        assert f"[{rank}] rank {rank} is here" in said, said
    assert "libfabric" in said, said
