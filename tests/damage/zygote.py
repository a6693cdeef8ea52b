"""Children that may die: forked from a process that has imported torch, which reports how they ended.

A damaged catalog can kill the process that maps it, and a hostile file must not. Only another process can observe both.
A fork of a prepared process takes milliseconds, and a new interpreter takes seconds.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """End of a child."""

    value: Any
    """Returned value of the function, through JSON; None if it did not return."""
    error: str
    """Traceback of the exception that ended the function; empty if there was none."""
    signal: int
    """Signal that killed the child; 0 if there was none."""
    timed_out: bool
    """Whether the child was killed by the timeout."""
    stderr: str
    """End of the standard error, for instance a failed assertion of a C library."""

    @property
    def returned(self) -> bool:
        """Whether the function returned."""
        return not (self.error or self.signal or self.timed_out)

    def __str__(self) -> str:
        if self.timed_out:
            return f"timed out {self.stderr}"
        if self.signal:
            return f"killed by {signal.Signals(self.signal).name} {self.stderr}"
        return self.error or f"returned {self.value!r}"


class Zygote:
    """The prepared process. Use it in a ``with`` block."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.damage.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
        )

    def run(self, function: str, timeout_s: float = 60.0, **arguments: object) -> Outcome:
        """Call ``package.module:name`` with JSON arguments in a fork of the prepared process."""
        assert self._process.stdin
        assert self._process.stdout
        job = {"function": function, "arguments": arguments, "timeout_s": timeout_s}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)


def limit_memory(extra_bytes: int) -> None:
    """Limit new mappings of the calling child to ``extra_bytes``; further allocations fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def unlimit_memory() -> None:
    """Undo :func:`limit_memory`."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _serve() -> None:
    import pyarrow as pa
    import torch

    torch.set_num_threads(1)
    importlib.import_module("asymcheck")
    # Arrow looks up its functions at their first use, which takes longer than most jobs.
    pa.table({"key": [1]}).group_by("key", use_threads=False).aggregate([("key", "min")])
    answers = os.fdopen(os.dup(1), "w")
    # Output of a child must not mix with the answers.
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        # Import in the parent, once for all children.
        module, _, name = job["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        answers.write(json.dumps(_in_child(function, job["arguments"], job["timeout_s"])) + "\n")
        answers.flush()


def _in_child(function: Callable[..., object], arguments: dict[str, object], timeout_s: float) -> dict[str, object]:
    answer, answer_end = os.pipe()
    errors, errors_end = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.dup2(errors_end, 2)
        code = 1
        with contextlib.suppress(BaseException):
            code = _child(function, arguments, answer_end)
        os._exit(code)
    os.close(answer_end)
    os.close(errors_end)
    pidfd = os.pidfd_open(child)
    try:
        texts, timed_out = _read_until_dead([answer, errors], pidfd, timeout_s)
        if timed_out:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        for descriptor in (answer, errors, pidfd):
            os.close(descriptor)
    sent = json.loads(texts[0]) if texts[0].endswith(b"\n") else {"value": None, "error": ""}
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if not killed_by and not texts[0].endswith(b"\n"):
        sent["error"] = f"the child ended with status {os.WEXITSTATUS(status)} and no answer"
    stderr = texts[1][-600:].decode(errors="replace").strip()
    return {**sent, "signal": killed_by, "timed_out": timed_out, "stderr": stderr}


def _read_until_dead(pipes: list[int], pidfd: int, timeout_s: float) -> tuple[list[bytes], bool]:
    """Read pipes until the child has ended; do not wait for a grandchild that holds the other ends."""
    texts = [bytearray() for _ in pipes]
    deadline = time.monotonic() + timeout_s
    alive = True
    while True:
        left = max(0.0, deadline - time.monotonic()) if alive else 0.0
        ready, _, _ = select.select([*pipes, pidfd] if alive else pipes, [], [], left)
        if alive and not ready:
            return list(map(bytes, texts)), True
        alive = alive and pidfd not in ready
        got = [(text, os.read(pipe, 1 << 16)) for text, pipe in zip(texts, pipes, strict=True) if pipe in ready]
        for text, data in got:
            text.extend(data)
        if not alive and not any(data for _, data in got) and pidfd not in ready:
            return list(map(bytes, texts)), False


def _child(function: Callable[..., object], arguments: dict[str, object], answer_end: int) -> int:
    try:
        sent = {"value": function(**arguments), "error": ""}
    except BaseException:  # noqa: BLE001 - whatever it is, the test is told
        sent = {"value": None, "error": traceback.format_exc()}
    with os.fdopen(answer_end, "w") as stream:
        stream.write(json.dumps(sent) + "\n")
    return 0


if __name__ == "__main__":
    _serve()
