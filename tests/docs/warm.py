"""A process that has imported torch and asymcheck, and runs blocks of pages in forks.

A new interpreter takes seconds to import torch, and the pages have some sixty commands. A fork runs the same
``asymcheck.cli.main`` or the same script, in a separate process that may be killed by a signal.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(address: str, *modules: str) -> None:
    """Import ``modules``, too, and serve on the socket ``address`` until standard input ends."""
    import torch

    # The first optimizer of a process imports torch._dynamo, which takes a second.
    for name in ("asymcheck.cli.main", "torch.distributed.run", "torch._dynamo", *modules):
        importlib.import_module(name)
    torch.set_num_threads(
        1
    )  # Each page must compute in the same way, and a fork must not wait for threads that it lacks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The exit status of a handler is not needed.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin not in (ready := select.select([sys.stdin, listening], [], [])[0]):
            assert ready
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _leave(functools.partial(_handle, connection))
            connection.close()


def _handle(connection: socket.socket) -> int:
    """Handle the request of one client: a command, or the Python blocks of a page."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    job: dict[str, Any] = json.loads(data)
    os.chdir(job["folder"])
    if not descriptors:
        return _session(connection)
    child = os.fork()
    if child == 0:
        connection.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(job["environment"])
        _leave(lambda: _command(job["words"]))
    _, status = os.waitpid(child, 0)
    connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
    return 0


def _command(words: list[str]) -> int:
    """Run ``asymcheck …``, ``python SCRIPT.py …`` or ``python -m torch.distributed.run …``."""
    sys.argv = list(words)
    if words[0] == "asymcheck":
        importlib.import_module("asymcheck.cli.main").main()
        return 0
    if words[1] == "-m":
        # The launcher forks the ranks, so that they do not import torch again.
        launcher: Any = importlib.import_module(words[2])
        launcher.run_script_path = _rank
        launcher.main(["--run-path", "--start-method", "fork", *words[3:]])
        return 0
    sys.argv = words[1:]
    sys.path.insert(0, str(Path(words[1]).resolve().parent))
    warnings.simplefilter("error")
    runpy.run_path(words[1], run_name="__main__")
    return 0


def _rank(script: str, *words: str) -> None:
    """Run a script as one rank, and return at its end, because the launcher waits for a return value."""
    leave, os._exit = os._exit, sys.exit  # type: ignore[assignment]  # until the return
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            leave(1)
    finally:
        os._exit = leave


def _session(connection: socket.socket) -> int:
    """Run one block after another in one namespace; send the output of each, and whether it failed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    warnings.simplefilter("error")
    with connection.makefile("rw") as stream:
        stream.write("\n")
        stream.flush()
        for line in stream:
            printed, failure = io.StringIO(), ""
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                try:
                    exec(compile(json.loads(line), "page", "exec"), names)  # noqa: S102 - the page is ours
                except BaseException:  # noqa: BLE001 - told to the page's test
                    failure = traceback.format_exc()
            stream.write(json.dumps([printed.getvalue(), failure]) + "\n")
            stream.flush()
    return 0


def _leave(work: Callable[[], int]) -> None:
    """End this fork with the status of ``work``, as an interpreter would."""
    status = 1
    try:
        status = work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - printed, as an interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
