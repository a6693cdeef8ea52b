"""Numbers of bytes on the command line, with the units that other programs have."""

from __future__ import annotations

import re

import click

_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))? ?([KMGT]?B|[KMGT]iB|)\Z", re.ASCII)
_POWERS = "KMGT"


def parse_size(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    """Return the bytes that an option names as ``200000``, ``200KB`` (thousands) or ``200KiB`` (1024 each).

    Raises:
        click.BadParameter: it names none.
    """
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
