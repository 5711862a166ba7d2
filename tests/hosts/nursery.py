"""Ranks on hosts, forked from one process: what takes long to import is imported once.

    nursery.py < JOB      a line of JSON: program, arguments, imports, and of each rank: namespace,
                          boot_id (a file, or ""), log, variables

Ends when all ranks have ended; with 0 if all did. When one fails the others are killed.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from namespace import enter, use_boot_id


def run(job: dict[str, Any], rank: dict[str, Any]) -> None:
    """As the program would run on its host."""
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    enter(rank["namespace"])
    if rank["boot_id"]:
        use_boot_id(rank["boot_id"])
    os.environ.update(rank["variables"])
    program = Path(job["program"])
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program), *job["arguments"]]
    runpy.run_path(str(program), run_name="__main__")


def child(job: dict[str, Any], rank: dict[str, Any]) -> int:
    code = 1
    try:
        run(job, rank)
        code = 0
    except SystemExit as left:
        code = 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    job = json.loads(sys.stdin.readline())
    for name in job["imports"]:
        importlib.import_module(name)
    children = set()
    for rank in job["ranks"]:
        pid = os.fork()
        if pid == 0:
            os._exit(child(job, rank))
        children.add(pid)
    failed = False
    while children:
        pid, status = os.wait()
        children.discard(pid)
        if status != 0 and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)


if __name__ == "__main__":
    main()
