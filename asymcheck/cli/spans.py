"""Spans of time on the command line."""

from __future__ import annotations

import re

import click

_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d|)\Z")
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400}


def parse_span(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    """Return the seconds that an option names as ``90``, ``90s``, ``30min``, ``3.5h`` or ``2d``.

    Raises:
        click.BadParameter: it names none.
    """
    found = _SPAN.match(text)
    seconds = 0.0 if found is None else float(found[1]) * _SECONDS[found[2]]
    if seconds <= 0:
        raise click.BadParameter(f"{text!r} is no span of time; give seconds, or a number with s, min, h or d")
    return seconds
