"""`python -m ferry`, and what the script `ferry` calls: the command of this installation."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Runs the command with the arguments of this process; returns the exit code."""
    if sys.argv[1:2] == ["top"]:
        from ferry import top

        return top.main(sys.argv[2:])
    from ferry import _ferry

    if not hasattr(_ferry, "command"):
        print("ferry: this installation has no command (FERRY_TOOLS=OFF)", file=sys.stderr)
        return 1
    # As in a program that is not Python's: Python handles or ignores these.
    for name in ("SIGINT", "SIGPIPE", "SIGXFSZ"):  # Windows has the first alone
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    return _ferry.command([b"ferry", *map(os.fsencode, sys.argv[1:])])


if __name__ == "__main__":
    sys.exit(main())
