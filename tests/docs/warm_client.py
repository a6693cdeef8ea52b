"""Replacement for ``asymcheck`` and ``python`` on PATH while a page runs; the warm process does the work."""

import json
import os
import socket
import sys
from pathlib import Path


def _can_fork(words: list[str]) -> bool:
    """Return whether the words run a script, or ranks that end in the usual way."""
    if words[:2] != ["-m", "torch.distributed.run"]:
        return bool(words) and words[0].endswith(".py")
    # The launcher waits for the return value of a forked rank, and os._exit() leaves none.
    return "os._exit(" not in Path(next(word for word in words if word.endswith(".py"))).read_text()


def main(address: str, interpreter: str, words: list[str]) -> int:
    """Run ``words`` in the warm process, with this process's folder, files and environment; end with its status."""
    if words[0] == "python" and not _can_fork(words[1:]):
        os.execv(interpreter, [interpreter, *words[1:]])  # noqa: S606 - a module or an option: the real one
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        job = {"folder": os.getcwd(), "words": words, "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(job).encode()], [0, 1, 2])
        status: int = json.loads(connection.recv(64) or b"70")
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
