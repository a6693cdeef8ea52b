"""Replacement for ``asymcheck`` and ``python`` on PATH while a page runs; the warm process does the work."""

import json
import os
import socket
import sys


def main(address: str, interpreter: str, words: list[str]) -> int:
    """Run ``words`` in the warm process, with this process's folder, files and environment; end with its status."""
    is_launcher = words[1:3] == ["-m", "torch.distributed.run"]
    if words[0] == "python" and not (is_launcher or (len(words) > 1 and words[1].endswith(".py"))):
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
