"""`python -m ferry`: the command `ferry` of this installation."""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path


def command() -> Path:
    """Where it is: beside this interpreter, or where pip has put it."""
    beside = Path(sysconfig.get_path("scripts")) / "ferry"
    if beside.exists():
        return beside
    for file in metadata.files("ferry-moe") or []:
        if file.name == "ferry":
            return Path(str(file.locate()))
    sys.exit("python -m ferry: this installation has no command `ferry` (FERRY_TOOLS=OFF)")


if __name__ == "__main__":
    path = str(command())
    os.execv(path, [path, *sys.argv[1:]])
