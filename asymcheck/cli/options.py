"""Command decorator, shared options, option parsers and shell completion of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import click
from click.shell_completion import CompletionItem

from asymcheck.cli import exit_status, output
from asymcheck.config import DEFAULT_RUN, RING_FOLDER, RING_FOLDER_VARIABLE, StoreConfig
from asymcheck.errors import AsymcheckError, InvalidInputError
from asymcheck.policies.retention import Best
from asymcheck.store import Store
from asymcheck.validation import parse_which

_F = TypeVar("_F", bound=Callable[..., object])

_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))? ?([KMGT]?B|[KMGT]iB|)\Z", re.ASCII)
_POWERS = "KMGT"
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d|)\Z", re.ASCII)
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"([0-9]{1,6})(min|[shdw])\Z", re.ASCII)
_BEST = re.compile(r"(.+):([0-9]{1,9})(?::(min|max))?\Z", re.ASCII)

# click would report a directory without permission to read as an invalid command line.
store_argument = click.argument("store", type=click.Path(readable=False))
ring_folder_option = click.option(
    "--ring-folder",
    type=click.Path(path_type=Path),
    default=RING_FOLDER,
    envvar=RING_FOLDER_VARIABLE,
    show_default=True,
    help="Folder of the ring files, as in CaptureConfig(ring_folder=...).",
)
target_option = click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="Output: *.safetensors, *.pt (.pth, .bin), or a folder in the layout of Hugging Face.",
)
show_remote_option = click.option("--remote", help="Also show which checkpoints are at this remote location.")


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a command."""

    document: object  # document that ``--json`` prints
    show: Callable[[], None]  # callback that prints the result as text
    status: int = exit_status.OK


class ReportCommand(click.Command):
    """A command with ``--json``."""

    report: Callable[..., Report]  # function that the command calls


def command(short_help: str) -> Callable[[Callable[..., Report]], ReportCommand]:
    """Turn a function that returns a report into a command with ``--json``."""

    def decorate(function: Callable[..., Report]) -> ReportCommand:
        @functools.wraps(function)
        def run(*, as_json: bool, **options: object) -> int:
            report = function(**options)
            if as_json:
                output.print_json(report.document)
            else:
                report.show()
            return report.status

        command = click.command(cls=ReportCommand, epilog=exit_status.HELP, short_help=short_help)(run)
        command.report = function
        json_help = "Print one JSON document instead of text."
        command.params.append(click.Option(["--json", "as_json"], is_flag=True, help=json_help))
        for parameter in command.params:
            values = _VALUES.get(parameter.name or "")
            if values is not None:
                parameter.shell_complete = functools.partial(_complete, values)  # type: ignore[method-assign]  # for this parameter only
        return command

    return decorate


def open_existing(store: str, config: StoreConfig | None = None, remote: str | None = None) -> Store:
    """Open a store for reading and writing, without creating one.

    Raises:
        StoreNotFoundError: no store is at this path.
    """
    with Store.open(store, read_only=True):
        pass
    return Store.open(store, config=config, remote=remote)


def ring_options(command: _F) -> _F:
    """Add ``--tier`` and ``--ring-folder`` to a command."""
    choice = click.Choice(["local", "memory"])
    tier_help = "local: durable checkpoints in the store. memory: captures in memory (ring files)."
    return click.option("--tier", type=choice, default="local", show_default=True, help=tier_help)(
        ring_folder_option(command)
    )


def parse_checkpoint(text: str) -> int | str:
    """Parse a step, ``save:DIGITS`` for one save of a step, or ``best:METRIC``."""
    try:
        return parse_which(text)
    except InvalidInputError as error:
        raise click.BadParameter(str(error)) from error


step_option = click.option(
    "--step",
    metavar="STEP",
    type=parse_checkpoint,
    help="Checkpoint to use: a step, save:DIGITS for one save of a step, or best:METRIC for the lowest value of this "
    "metric (best:METRIC:max: the highest) [default: newest consistent checkpoint].",
)


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``200000``, ``200KB`` (powers of 1000) or ``200KiB`` (powers of 1024)."""
    match = _SIZE.match(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; give bytes, or a number with KB, MB, GB, KiB, MiB or GiB")
    whole, fraction, unit = match.groups()
    factor: int = (1024 if "i" in unit else 1000) ** (_POWERS.find(unit[:1]) + 1 if unit else 0)
    # Integer arithmetic, because a float would lose bytes of large sizes.
    count: int = int(whole) * factor + int(fraction or 0) * factor // 10 ** len(fraction or "")
    if count < 1:
        raise click.BadParameter(f"{text!r} is less than one byte")
    return count


def parse_duration(text: str) -> float:
    """Parse a duration in seconds: ``90``, ``90s``, ``30min``, ``3.5h`` or ``2d``."""
    match = _DURATION.match(text)
    seconds = 0.0 if match is None else float(match[1]) * _SECONDS[match[2]]
    if seconds <= 0:
        raise click.BadParameter(f"{text!r} is not a duration; give seconds, or a number with s, min, h or d")
    return seconds


def parse_best(text: str) -> Best:
    """Parse metric, count and direction: ``loss:3`` or ``accuracy:1:max``."""
    match = _BEST.match(text)
    if match is None or int(match[2]) < 1:
        raise click.BadParameter(f"{text!r}: give a metric and a count, such as loss:3 or accuracy:1:max")
    return match[1], int(match[2]), "max" if match[3] == "max" else "min"


def parse_age(text: str) -> timedelta:
    """Parse an age: ``12h``, ``7d`` or ``2w``."""
    match = _AGE.match(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration; give a number with s, min, h, d or w, such as 7d")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def _complete(
    values: Callable[[Store, str], Iterator[CompletionItem]], ctx: click.Context, incomplete: str
) -> list[CompletionItem]:
    if all(parameter.name != "store" for parameter in ctx.command.params):
        return []
    # click leaves the arguments unparsed if the command line ends with an option without its value.
    location = ctx.params.get("store") or next(iter(ctx.args), None)
    if location is None:
        return []
    # An error message would damage the command line that is being completed.
    with contextlib.suppress(AsymcheckError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Store.open(location, read_only=True) as store:
            items = values(store, ctx.params.get("run") or DEFAULT_RUN)
            return [item for item in items if str(item.value).startswith(incomplete)]
    return []


def _steps(store: Store, run: str) -> Iterator[CompletionItem]:
    for checkpoint in reversed(store.checkpoints(run)):
        yield CompletionItem(str(checkpoint.step), help=output.age(checkpoint.created_ns))


def _runs(store: Store, _run: str) -> Iterator[CompletionItem]:
    yield from map(CompletionItem, store.runs())


def _parts(store: Store, run: str) -> Iterator[CompletionItem]:
    _, tensors = store.tensors(run=run)
    yield from map(CompletionItem, dict.fromkeys(tensor.name.split(".")[0] for tensor in tensors))


_VALUES = {"step": _steps, "a": _steps, "b": _steps, "run": _runs, "part": _parts}
"""Values of the parameters that name a step, a run or a part of a store."""
