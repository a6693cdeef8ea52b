"""Output of the commands: tables, sizes, times, JSON and progress bars."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from asymcheck.inspect.disk_usage import CheckpointBytes
from asymcheck.inspect.documents import jsonable
from asymcheck.types import Checkpoint, counted, readable_size

# Output into a pipe or file is neither cut nor wrapped.
_PIPE_WIDTH = 10_000
_TABLE_WIDTH = 80
_MINUTE = 60
_LIST_ITEM = "\n  "
_SAVE_SHOWN = 12
_NAMES_SHOWN = 3
size = readable_size
count = counted
_DURATION_UNITS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def printable(text: str) -> str:
    """Escape control characters, because names from files could control the terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def console() -> Console:
    """Return a console on the current standard output."""
    return Console(
        width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=not sys.stdout.isatty()
    )


def print_table(rows: Sequence[Mapping[str, object]], *, numbers: Collection[str] = ()) -> None:
    """Print rows as a table, without the columns that are None in every row.

    Args:
        rows: the rows, each a mapping of headings to cells.
        numbers: headings of the columns to align on the right, and never to wrap.
    """
    headings = [heading for heading in rows[0] if any(row[heading] is not None for row in rows)] if rows else []
    target = console()
    # On a narrow terminal, rich would make columns one character wide. The terminal wraps the lines instead.
    target.width = max(target.width, _TABLE_WIDTH)
    cells = [[printable(str(row[heading])) for row in rows] for heading in headings]
    widths = [max(map(cell_len, (heading, *column))) for heading, column in zip(headings, cells, strict=True)]
    if _fits(widths, target.width) and target.encoding.startswith("utf"):
        # rich takes half a millisecond for a row, and a run may have 10,000 checkpoints. It replaces what another
        # encoding lacks.
        columns = [
            [_aligned(cell, width, right=heading in numbers) for cell in (heading, *column)]
            for heading, column, width in zip(headings, cells, widths, strict=True)
        ]
        head, *lines = (f" {'  '.join(line)}".rstrip() for line in zip(*columns, strict=True))
        rule = f" {'─' * (sum(widths) + 2 * len(widths) - 2)}"
        click.echo("\n".join(["", click.style(head, bold=True), rule, *lines, ""]))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for heading in headings:
        # Columns are folded instead of cut, because names of tensors differ at their ends.
        is_number = heading in numbers
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for line in zip(*cells, strict=True):
        table.add_row(*map(Text, line))
    target.print(table)


def _fits(widths: Sequence[int], width: int) -> bool:
    return 0 < sum(widths) + 2 * len(widths) <= width


def _aligned(cell: str, width: int, *, right: bool) -> str:
    padding = " " * (width - cell_len(cell))
    return padding + cell if right else cell + padding


def print_entry(heading: str, details: Sequence[str]) -> None:
    """Print a heading with indented lines below it, wrapped to the terminal."""
    click.secho(printable(heading.replace(_LIST_ITEM, " ")), bold=True)
    indent = " " * 4
    for line in details:
        text = printable(line.replace(_LIST_ITEM, " "))
        click.echo(
            textwrap.fill(
                text, console().width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
        )


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print one JSON document, on one line if ``indent`` is None.

    Dataclasses become objects; NaN and infinities become null.
    """
    click.echo(json.dumps(jsonable(value), indent=indent, allow_nan=False))


def note(text: str) -> None:
    """Print a message on standard error."""
    # Lists in messages are indented lines. Any other line break belongs to a name, and is escaped.
    lines = _LIST_ITEM.join(map(printable, text.split(_LIST_ITEM)))
    click.echo(f"asymcheck: {lines}", err=True)


def short_save_id(save_id: str) -> str:
    """Return the first digits of a save id, enough for ``save:DIGITS``."""
    return save_id[:_SAVE_SHOWN]


def identity_columns(items: Sequence[Checkpoint | CheckpointBytes]) -> list[dict[str, object]]:
    """Return the columns that identify checkpoints, with the save ids if a step was saved several times."""
    is_repeated = len({(item.run, item.step, item.generation) for item in items}) < len(items)
    return [
        {
            "run": item.run,
            "step": item.step,
            "generation": item.generation,
            "save": short_save_id(item.save_id) if is_repeated else None,
        }
        for item in items
    ]


def status(item: Checkpoint | CheckpointBytes) -> str:
    """Return why a restore does not choose a checkpoint, or nothing for a complete checkpoint on the line."""
    if not item.complete:
        return "incomplete or damaged"
    if item.on_line is None:
        return "unknown: a head record is lost"
    return "" if item.on_line else "abandoned"


def timestamp(nanoseconds: int) -> str:
    """Format a time in UTC."""
    when = dt.datetime.fromtimestamp(nanoseconds / 1e9, tz=dt.timezone.utc)
    return when.strftime("%Y-%m-%d %H:%M:%S")


def duration(nanoseconds: int) -> str:
    """Format a duration, for example ``3 h 20 min``."""
    sign, seconds = ("-", -nanoseconds / 1e9) if nanoseconds < 0 else ("", nanoseconds / 1e9)
    if round(seconds, 1) < _MINUTE:
        return f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    for length, unit, part, smaller in _DURATION_UNITS:
        if whole >= length:
            rest = whole % length // part
            return f"{sign}{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{sign}{whole} s"


def age(nanoseconds: int) -> str:
    """Format the time since a moment, for example ``3 h ago``."""
    passed = time.time_ns() - nanoseconds
    whole = passed // 10**9
    for length, unit, _, _ in _DURATION_UNITS:
        if whole >= length:
            return f"{whole // length} {unit} ago"
    return f"{whole} s ago" if passed >= 0 else "in the future"


def shape(sizes: Sequence[int]) -> str:
    """Format a shape, for example ``64×16``."""
    return "×".join(map(str, sizes)) or "scalar"


def metrics(values: Mapping[str, float], shown: int) -> str:
    """Format the first ``shown`` metrics of a checkpoint."""
    first = list(values.items())[:shown]
    return ", ".join(f"{name} {value:.6g}" for name, value in first) + (" …" if len(values) > shown else "")


def abbreviated(names: Sequence[str]) -> str:
    """Return the first names of a list."""
    return ", ".join(map(printable, names[:_NAMES_SHOWN])) + (" …" if len(names) > _NAMES_SHOWN else "")


@contextlib.contextmanager
def progress(title: str, *, counts_bytes: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if standard error is a terminal; yield its callback ``(done, total)``, in bytes or parts."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *((DownloadColumn(binary_units=True), TransferSpeedColumn()) if counts_bytes else (MofNCompleteColumn(),)),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
