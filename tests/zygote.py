"""Fork many processes from one that has imported torch.

A child opens its stores itself, like a separate process, and only the time of the imports is saved. A child may die: a
damaged catalog can kill the process that maps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PATIENCE_S = 60.0


@dataclasses.dataclass
class Child:
    """A forked process that runs one function."""

    zygote: Zygote
    pid: int
    output: Path
    """File with its stdout and stderr."""
    status: int | None = None
    """Exit status, negative for a signal; None until the child was waited for."""

    def kill(self) -> None:
        """Send SIGKILL; the process id is not reused until :meth:`wait`."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def has_ended(self, limit_s: float = 0.0) -> bool:
        """Return whether the child ends within that time."""
        if self.status is not None:
            return True
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], limit_s)[0])
        finally:
            os.close(descriptor)

    def wait(self) -> int:
        """Return the exit status, negative for a signal."""
        if self.status is None:
            self.status = int(str(self.zygote.ask(do="wait", pid=self.pid)["status"]))
        return self.status

    def finish(self) -> None:
        """Wait, and fail with the child's traceback unless it ended with status 0."""
        status = self.wait()
        assert status == 0, f"child ended with {status}:\n{self.output.read_text()}"

    def wait_killed(self) -> None:
        """Wait, and fail unless SIGKILL ended the child."""
        status = self.wait()
        assert status == -signal.SIGKILL, f"child ended with {status}:\n{self.output.read_text()}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a call in a child."""

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
    """The parent of all children. Not thread-safe."""

    def __init__(self, folder: Path, *imports: str) -> None:
        """Start the parent, with these modules imported; children's output goes to ``folder``."""
        self._folder = folder
        self._number = 0
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment,
            text=True,
        )

    def ask(self, **request: object) -> dict[str, object]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply: dict[str, object] = json.loads(self._process.stdout.readline() or '{"error": "the zygote is gone"}')
        assert "error" not in reply, reply["error"]
        return reply

    def start(self, function: Callable[..., None], **arguments: object) -> Child:
        """Run ``function``, of the top level of a module, in a new process, with ``arguments`` as JSON."""
        self._number += 1
        return self._start(self._folder / f"child-{self._number}.txt", function, arguments)

    def start_program(self, module: str, words: Sequence[object], environment: dict[str, str], output: Path) -> Child:
        """Run ``python -m module words...`` in a new process, with its output in ``output``."""
        return self._start(output, run_program, {"words": [module, *map(str, words)], "environment": environment})

    def start_ranks(self, count: int, module: str, words: Sequence[object], folder: Path) -> list[Child]:
        """Run ``python -m module words...`` on ``count`` ranks, with the environment of torchrun."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # Use one thread each, and do not wait for a missing network.
        common |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = []
        for rank in range(count):
            names = {**common, "RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
            ranks.append(self.start_program(module, words, environment, folder / f"output-{rank}.txt"))
        return ranks

    def run_ranks(self, count: int, module: str, words: Sequence[object], folder: Path) -> None:
        """Run a program on several ranks as :meth:`start_ranks` does, and wait for all."""
        for rank in self.start_ranks(count, module, words, folder):
            rank.finish()

    def run_script(self, source: str, *words: object) -> subprocess.CompletedProcess[str]:
        """Run ``python -c source words...`` in a new process, and wait for its end."""
        self._number += 1
        output, errors = (self._folder / f"script-{self._number}.{kind}" for kind in ("out", "err"))
        arguments = {"source": source, "words": [*map(str, words)]}
        status = self._start(output, run_source, arguments, errors).wait()
        return subprocess.CompletedProcess([], status, output.read_text(), errors.read_text())

    def call(self, function: str, timeout_s: float = PATIENCE_S, **arguments: object) -> Outcome:
        """Call ``package.module:name`` with JSON arguments in a new process, which may die."""
        # Import in the parent, once for all children.
        self.ask(do="import", module=function.partition(":")[0])
        self._number += 1
        output, errors, answer = (self._folder / f"call-{self._number}.{kind}" for kind in ("out", "err", "json"))
        job = {"function": function, "arguments": arguments, "answer": str(answer)}
        child = self._start(output, run_function, job, errors)
        timed_out = not child.has_ended(timeout_s)
        if timed_out:
            child.kill()
        status = child.wait()
        text = answer.read_text() if answer.exists() else ""
        sent = json.loads(text) if text.endswith("\n") else {"value": None, "error": ""}
        if status >= 0 and not text:
            sent["error"] = f"the child ended with status {status} and no answer"
        stderr = errors.read_text(errors="replace")[-600:].strip()
        return Outcome(**sent, signal=max(-status, 0), timed_out=timed_out, stderr=stderr)

    def _start(
        self, output: Path, function: Callable[..., None], arguments: dict[str, object], errors: Path | None = None
    ) -> Child:
        reply = self.ask(
            do="start",
            module=function.__module__,
            function=function.__qualname__,
            arguments=arguments,
            # Variables that a fixture has set for the clients of a location.
            environment={name: value for name, value in os.environ.items() if name.startswith("AWS_")},
            output=str(output),
            errors=str(errors or output),
        )
        return Child(self, int(str(reply["pid"])), output)

    def close(self) -> None:
        """End the parent, and every remaining child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: the condition did not hold in time.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain for {what}"
        time.sleep(0.002)


def run_program(words: list[str], environment: dict[str, str]) -> None:
    """Run as the program with this name and these arguments, in exactly this environment."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def run_source(source: str, words: list[str]) -> None:
    """Run as the program with this source and these arguments."""
    sys.argv = ["-c", *words]
    # Stored classes are found by the name of their module.
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), vars(program))  # noqa: S102 - a script of a test


def run_function(function: str, arguments: dict[str, object], answer: str) -> None:
    """Call ``package.module:name``, and write its value or its traceback as a line of JSON."""
    module, _, name = function.partition(":")
    try:
        sent = {"value": getattr(importlib.import_module(module), name)(**arguments), "error": ""}
    except BaseException:  # noqa: BLE001 - whatever it is, the test is told
        sent = {"value": None, "error": traceback.format_exc()}
    Path(answer).write_text(json.dumps(sent) + "\n")


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # Output of imported modules must not mix with the answers.
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    # The first optimizer of a process imports this module, which takes a second.
    importlib.import_module("torch._dynamo")
    # Arrow looks up its functions at their first use, which takes longer than many children.
    importlib.import_module("pyarrow").table({"a": [1]}).group_by("a", use_threads=False).aggregate([("a", "min")])
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            pid = _fork(request)
            alive.add(pid)
            reply = {"pid": pid}
        elif request["do"] == "import":
            importlib.import_module(request["module"])
            reply = {}
        else:
            alive.discard(request["pid"])
            _, status = os.waitpid(request["pid"], 0)
            reply = {"status": os.waitstatus_to_exitcode(status)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(request: dict[str, object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        out = os.open(str(request["output"]), flags, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out if request["errors"] == request["output"] else os.open(str(request["errors"]), flags, 0o644), 2)
        os.environ.update(request["environment"])  # type: ignore[call-overload]  # a JSON object
        module = importlib.import_module(str(request["module"]))
        getattr(module, str(request["function"]))(**request["arguments"])  # type: ignore[arg-type]  # a JSON object
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code)
    except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
