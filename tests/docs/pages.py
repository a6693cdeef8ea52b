"""Run the blocks of a page in a new folder, and compare their output.

In a page (README.md, docs/*.md)

- a ```python block is run; all such blocks of a page share their names. The ```output block right after it must contain
  the printed text. After a comment ``<!-- file: NAME -->`` the block is written to that file instead;
- a ```console block has commands, lines that begin with ``$ `` (and continue in lines with ``> ``), each followed by
  its output. A status other than 0 is its last line, as ``[status 6]``;
- a ```text block is only shown.

``python -m tests.docs.pages [--update] [PAGE …]``. With ``--update``, all outputs of a page with a wrong output are
rewritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_KINDS = ("python", "console", "output", "text", "diff")
_BLOCK = re.compile(
    r"(?:^<!-- file: (?P<file>\S+) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_TIMEOUT_S = 60

_VARYING = (
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?\b"), "<time>"),
    (re.compile(r"\b[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(r"(?<![\w.])-?\d+(\.\d+)? ([KMGT]i)?B(/s)?\b"), "<size>"),
    (re.compile(r"(?<![\w.])-?\d+(\.\d+)? (ms|s|min|h)\b"), "<span>"),
    (re.compile(r"(?<![\w.])[-+]?\d+(\.\d+)?%"), "<share>"),
    (re.compile(r"(?<![\w.])[-+]?\d+(\.\d+(e[-+]?\d+)?|e[-+]?\d+)(?![\w.])"), "<number>"),
    (re.compile(r"\bprocess \d+\b"), "process <id>"),
    (re.compile(r"[─━]+"), "─"),
    (re.compile(r"\s+"), " "),
)
"""Text that differs between runs or machines, with the placeholder for the comparison."""


class PageError(AssertionError):
    """A page shows a wrong output, or cannot be run."""


@dataclasses.dataclass
class Block:
    """A fenced block of a page."""

    kind: str
    body: str
    start: int
    """Offset of the body in the page's text."""
    end: int
    line: int
    file: str | None = None


def pages() -> list[Path]:
    """Return the pages: README.md and the files in docs/, not in its subfolders."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page.

    Raises:
        PageError: a block is of no known kind, or a fence is left over.
    """
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body"))
        if match["kind"] not in _KINDS:
            raise PageError(f"line {line}: a block of kind {match['kind']!r}; use one of {', '.join(_KINDS)}")
        found.append(Block(match["kind"], match["body"], match.start("body"), match.end("body"), line, match["file"]))
    if len(re.findall("^```", text, re.MULTILINE)) != 2 * len(found):
        raise PageError("a fence ``` without its other half, or indented")
    return found


def normal(output: str) -> list[str]:
    """Return the lines of an output, with varying text replaced."""
    lines = []
    for line in output.splitlines():
        for pattern, replacement in _VARYING:
            line = pattern.sub(replacement, line)  # noqa: PLW2901 - step by step
        if line.strip():
            lines.append(line.strip())
    return lines


def commands_of(body: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with its expected output."""
    found: list[list[str]] = []
    for line in body.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append([line, ""])
        elif not found:
            raise PageError(f"a console block begins with {line!r}, no command")
        elif line.startswith("> ") and not found[-1][1]:
            found[-1][0] += line
        else:
            found[-1][1] += line
    return [(command, output) for command, output in found]


class Warm:
    """The prepared process, and the folder with its commands ``asymcheck`` and ``python``."""

    def __init__(self, scratch: Path, *modules: str) -> None:
        """Start the process, with ``modules`` imported; it keeps its files in ``scratch``."""
        self._address = str(scratch / "socket")
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # If DeepSpeed is installed, accelerate imports it, and it prints the detected accelerator.
        self._environment = {**os.environ, "PYTHONPATH": python_path, "DS_ACCELERATOR": "cpu"}
        self._environment.pop("COLUMNS", None)
        # As on a terminal: output before a kill is not lost.
        self._environment["PYTHONUNBUFFERED"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.warm", self._address, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=self._environment,
        )
        folder = scratch / "bin"
        folder.mkdir()
        for name in ("asymcheck", "python"):
            script = folder / name
            client = shlex.join([sys.executable, "-SE", str(Path(__file__).parent / "warm_client.py")])
            script.write_text(f'#!/bin/sh\nexec {client} {self._address} {sys.executable} {name} "$@"\n')
            script.chmod(0o755)
        # Add the programs of this environment.
        places = [str(folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self._environment["PATH"] = os.pathsep.join(places)

    def __enter__(self) -> Warm:
        assert self._process.stdout
        if self._process.stdout.readline() != b"ready\n":
            raise PageError("the prepared process did not start; its error is above")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, command: str, folder: Path) -> str:
        """Run a command in bash; return its output, and its status if it is not 0."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
        lines = [line.rstrip() for line in done.stdout.decode(errors="replace").splitlines()]
        output = "\n".join(lines).strip("\n")
        status = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return "\n".join(filter(None, [output, f"[status {status}]" if status else ""]))

    @contextlib.contextmanager
    def session(self, folder: Path) -> Iterator[Session]:
        """Yield a session for the Python blocks of a page."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(self._address)
            connection.sendall(json.dumps({"folder": str(folder)}).encode())
            yield Session(connection)


class Session:
    """Python blocks that run one after another, in one namespace."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rw")
        self._stream.readline()

    def run(self, source: str) -> tuple[str, str]:
        """Run a block; return its output, and the traceback if it failed."""
        self._stream.write(json.dumps(source) + "\n")
        self._stream.flush()
        printed, failure = json.loads(self._stream.readline() or '["", "the interpreter died"]')
        return printed.strip("\n"), failure


def run_page(text: str, warm: Warm, folder: Path) -> tuple[str, list[str]]:
    """Run a page in ``folder``; return its text with what was printed now, and what is wrong, one message a place.

    Raises:
        PageError: a block cannot be run, or a Python block failed.
    """
    blocks = blocks_of(text)
    changes: list[tuple[int, int, str]] = []
    problems: list[str] = []
    with warm.session(folder) as session:
        for number, block in enumerate(blocks):
            if block.file is not None:
                (folder / block.file).write_text(block.body)
            elif block.kind == "python":
                printed, failure = session.run(block.body)
                if failure:
                    raise PageError(f"line {block.line}: the block failed:\n{failure}")
                after = blocks[number + 1] if number + 1 < len(blocks) else None
                shown = after.body if after and after.kind == "output" else ""
                if normal(printed) != normal(shown):
                    problems.append(_difference(block.line, "the block", shown, printed))
                if after and after.kind == "output":
                    changes.append((after.start, after.end, printed + "\n"))
            elif block.kind == "console":
                changes.append((block.start, block.end, _run_console(block, warm, folder, problems)))
    for start, end, new in reversed(changes):
        text = text[:start] + new + text[end:]
    return text, problems


def _run_console(block: Block, warm: Warm, folder: Path, problems: list[str]) -> str:
    """Run a block's commands; return the block with their output."""
    parts = []
    for command, shown in commands_of(block.body):
        source = "\n".join(line[2:] for line in command.splitlines())
        output = warm.run(source, folder)
        if normal(output) != normal(shown):
            problems.append(_difference(block.line, f"$ {source}", shown, output))
        parts.append(command + (f"{output}\n\n" if output else ""))
    return "".join(parts).rstrip("\n") + "\n"


def _difference(line: int, what: str, shown: str, output: str) -> str:
    return f"line {line}: {what}\n--- the page shows\n{shown.strip()}\n--- it printed\n{output}\n"


def main(words: list[str]) -> int:
    """Run pages; with ``--update``, write the outputs into them."""
    update = "--update" in words
    chosen = [Path(word).resolve() for word in words if word != "--update"] or pages()
    status = 0
    with tempfile.TemporaryDirectory() as scratch, Warm(Path(scratch)) as warm:
        for page in chosen:
            folder = Path(scratch) / page.stem
            folder.mkdir()
            try:
                text, problems = run_page(page.read_text(), warm, folder)
            except PageError as error:
                text, problems, status = "", [str(error)], 1
            if update and text and problems:
                page.write_text(text)
            status = status or int(bool(problems) and not update)
            sys.stdout.write("".join(f"{page.name}: {problem}\n" for problem in problems) or f"{page.name}: as shown\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
