"""Commands that return reports, the options that commands share, and the parsers of their values."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import click

from asymcheck.cli import exit_status, output
from asymcheck.config import RING_FOLDER, RING_FOLDER_VARIABLE
from asymcheck.errors import InvalidInputError
from asymcheck.policies.retention import Best
from asymcheck.store import Store
from asymcheck.validation import check_which

_F = TypeVar("_F", bound=Callable[..., object])

_STEP = re.compile(r"[0-9]{1,18}", re.ASCII)
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))? ?([KMGT]?B|[KMGT]iB|)\Z", re.ASCII)
_POWERS = "KMGT"
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d|)\Z", re.ASCII)
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400}
_AGE = re.compile(r"([0-9]{1,6})(min|[shdw])\Z", re.ASCII)
_UNITS = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_BEST = re.compile(r"(.+):([0-9]{1,9})(?::(min|max))?\Z", re.ASCII)

store_argument = click.argument("store", type=click.Path())
ring_folder_option = click.option(
    "--ring-folder",
    type=click.Path(path_type=Path),
    default=RING_FOLDER,
    envvar=RING_FOLDER_VARIABLE,
    show_default=True,
    help="Where rings lie: the ring_folder of the training's CaptureConfig.",
)
places_option = click.option("--remote", default=None, help="Also say which checkpoints lie in this location.")


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a command."""

    document: object
    """Printed by ``--json``."""
    show: Callable[[], None]
    """Prints the result as text."""
    status: int = exit_status.OK
    """Exit status."""


def command(short_help: str) -> Callable[[Callable[..., Report]], click.Command]:
    """Make a command of a function that returns its report; add ``--json``."""

    def decorate(function: Callable[..., Report]) -> click.Command:
        @functools.wraps(function)
        def run(*, as_json: bool, **options: object) -> int:
            report = function(**options)
            if as_json:
                output.print_json(report.document)
            else:
                report.show()
            return report.status

        made = click.command(epilog=exit_status.HELP, short_help=short_help)(run)
        what = "Print one JSON document instead of text."
        made.params.append(click.Option(["--json", "as_json"], is_flag=True, help=what))
        return made

    return decorate


def open_existing(store: str, remote: str | None = None) -> Store:
    """Open a store for reading and writing, which would make a new one where none exists.

    Raises:
        StoreNotFoundError: none exists.
    """
    with Store.open(store, read_only=True):
        pass
    return Store.open(store, remote=remote)


def ring_options(command: _F) -> _F:
    """Add ``--tier`` and ``--ring-folder`` to a command."""
    choice = click.Choice(["nvme", "dram"])
    what = "nvme: what is durable; dram: what lies in memory, in rings."
    return click.option("--tier", type=choice, default="nvme", show_default=True, help=what)(
        ring_folder_option(command)
    )


def parse_which(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | str | None:
    """Return the step that an option names, or one save of a step as ``save:DIGITS``."""
    if text is None:
        return None
    try:
        return check_which(int(text) if _STEP.fullmatch(text) else text)
    except InvalidInputError as error:
        raise click.BadParameter(str(error)) from error


step_option = click.option(
    "--step",
    metavar="STEP",
    callback=parse_which,
    default=None,
    help="Which checkpoint: a step, or save:DIGITS of one save of it [default: the newest consistent one].",
)


def parse_size(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    """Return the bytes that an option names as ``200000``, ``200KB`` (thousands) or ``200KiB`` (1024 each)."""
    if text is None:
        return None
    found = _SIZE.match(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no size; give bytes, or a number with KB, MB, GB, KiB, MiB or GiB")
    whole, fraction, unit = found.groups()
    factor: int = (1024 if "i" in unit else 1000) ** (_POWERS.find(unit[:1]) + 1 if unit else 0)
    # In integers: a float would be bytes off.
    count: int = int(whole) * factor + int(fraction or 0) * factor // 10 ** len(fraction or "")
    if count < 1:
        raise click.BadParameter(f"{text!r} is less than one byte")
    return count


def parse_span(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    """Return the seconds that an option names as ``90``, ``90s``, ``30min``, ``3.5h`` or ``2d``."""
    found = _SPAN.match(text)
    seconds = 0.0 if found is None else float(found[1]) * _SECONDS[found[2]]
    if seconds <= 0:
        raise click.BadParameter(f"{text!r} is no span of time; give seconds, or a number with s, min, h or d")
    return seconds


def parse_best(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Best | None:
    """Return the metric, the number and the direction that an option names as ``loss:3`` or ``accuracy:1:max``."""
    if text is None:
        return None
    found = _BEST.match(text)
    if found is None or int(found[2]) < 1:
        raise click.BadParameter(f"{text!r}: give a metric and how many, such as loss:3, or accuracy:1:max")
    return found[1], int(found[2]), "max" if found[3] == "max" else "min"


def parse_age(_ctx: click.Context, _param: click.Parameter, text: str | None) -> timedelta | None:
    """Return the span of time that an option names as ``12h``, ``7d`` or ``2w``."""
    if text is None:
        return None
    found = _AGE.match(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no span of time; give a number with s, min, h, d or w, such as 7d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
