"""Which checkpoint, on the command line."""

from __future__ import annotations

import re

import click

from asymcheck.arguments import check_which
from asymcheck.errors import InvalidInputError

_STEP = re.compile(r"[0-9]{1,18}", re.ASCII)


def parse_which(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | str | None:
    """Return the step that an option names, or one save of a step as ``save:DIGITS``.

    Raises:
        click.BadParameter: it names none.
    """
    if text is None:
        return None
    try:
        return check_which(int(text) if _STEP.fullmatch(text) else text)
    except InvalidInputError as error:
        raise click.BadParameter(str(error)) from error
