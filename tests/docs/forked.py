"""Python programs forked from one process that has imported torch: to import it takes longer than
most programs, and each rank of each would.

    forked.py serve FD MODULE...    imports the modules, serves the socket FD until stdin ends
    forked.py run SOCKET PROGRAM    as `python PROGRAM`, in a fork of the server that ends with it
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any


def ask(path: str, program: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        job = {"program": program, "where": os.getcwd(), "variables": dict(os.environ)}
        socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
        code = server.recv(1)
    return code[0] if code else 1


def watch(child: int, ended: int, client: socket.socket) -> None:
    """Tells the client how its program ended, or kills the program when the client is gone."""
    ready = select.select([client, ended], [], [])[0]
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended in ready:
        client.send(bytes([code if code >= 0 else 1]))


def answer(client: socket.socket) -> dict[str, Any]:
    """Returns in the process that is to run the program; the one that watches it ends here."""
    message, (*files,), *_ = socket.recv_fds(client, 1 << 20, 3)
    ended, open_while_running = os.pipe()
    child = os.fork()
    if child == 0:
        client.close()
        os.close(ended)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        job: dict[str, Any] = json.loads(message)
        return job
    for file in (open_while_running, *files):
        os.close(file)
    watch(child, ended, client)
    os._exit(0)


def serve(listener: socket.socket) -> dict[str, Any]:
    watching: list[int] = []
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        client = listener.accept()[0]
        watching = [pid for pid in watching if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        watching.append(os.fork())
        if watching[-1] == 0:
            listener.close()
            return answer(client)
        client.close()
    for pid in watching:
        os.waitpid(pid, 0)
    os._exit(0)


def end() -> None:
    """As an interpreter ends, without a look at all that the imports made: half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    gc.collect()  # what the program made
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    if sys.argv[1] == "run":
        sys.exit(ask(*sys.argv[2:]))
    for name in sys.argv[3:]:
        __import__(name)
    gc.freeze()  # a collection in a fork would copy every page that the imports filled
    job = serve(socket.socket(fileno=int(sys.argv[2])))
    os.chdir(job["where"])
    os.environ.clear()
    os.environ.update(job["variables"])
    sys.argv = [job["program"]]
    sys.path[0] = os.path.dirname(job["program"])
    runpy.run_path(job["program"], run_name="__main__")
    end()


if __name__ == "__main__":
    main()
