"""Rules of retention on the command line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import timedelta

import click

from asymcheck.policies.retention import Best, Retention

_SPAN = re.compile(r"([0-9]{1,6})(min|[shdw])\Z", re.ASCII)
_UNITS = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_BEST = re.compile(r"(.+):([0-9]{1,9})(?::(min|max))?\Z", re.ASCII)


def keep_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of retention to a command, which gets what they say as ``retention``: None without a rule.

    Raises:
        click.UsageError: abandoned checkpoints are to go, but nothing says what stays.
    """

    @functools.wraps(command)
    def with_retention(
        *,
        keep_last: int | None,
        keep_every: int | None,
        keep_best: Best | None,
        keep_for: timedelta | None,
        drop_abandoned: bool,
        **others: object,
    ) -> None:
        retention = None
        if (keep_last, keep_every, keep_best, keep_for) != (None,) * 4:
            retention = Retention(keep_last, keep_every, keep_best, keep_for, keep_abandoned=not drop_abandoned)
        elif drop_abandoned:
            raise click.UsageError("--drop-abandoned goes with a rule that says what stays, such as --keep-last")
        command(retention=retention, **others)

    for option in reversed(_OPTIONS):
        with_retention = option(with_retention)
    return with_retention


def _best(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Best | None:
    if text is None:
        return None
    found = _BEST.match(text)
    if found is None or int(found[2]) < 1:
        raise click.BadParameter(f"{text!r}: give a metric and how many, such as loss:3, or accuracy:1:max")
    return found[1], int(found[2]), "max" if found[3] == "max" else "min"


def _span(_ctx: click.Context, _param: click.Parameter, text: str | None) -> timedelta | None:
    if text is None:
        return None
    found = _SPAN.match(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no span of time; give a number with s, min, h, d or w, such as 7d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


_OPTIONS = (
    click.option("--keep-last", type=click.IntRange(min=1), help="Keep the newest so many checkpoints of a run."),
    click.option("--keep-every", type=click.IntRange(min=1), help="Keep those whose step is a multiple of this."),
    click.option("--keep-best", metavar="METRIC:N[:max]", callback=_best, help="Keep the N with the least METRIC."),
    click.option("--keep-for", metavar="SPAN", callback=_span, help="Keep those saved within, for instance, 7d."),
    click.option("--drop-abandoned", is_flag=True, help="Keep what is not on the line by --keep-for only."),
)
