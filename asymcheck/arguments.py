"""What callers pass: checked before anything is done, with errors that say what to pass instead."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from asymcheck.errors import InvalidInputError
from asymcheck.format import registry


def check_location(location: object) -> Path:
    """Return a location as a path; ``~`` is the home directory.

    Raises:
        InvalidInputError: it is no path, or of a kind that this version does not know.
    """
    try:
        text = os.fspath(location)  # type: ignore[call-overload]  # TypeError is the answer
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text:
        raise InvalidInputError(f"location {location!r:.100}: give the path of a directory")
    if "://" in text:
        raise InvalidInputError(f"location {text!r}: this version stores in directories of a local drive; give a path")
    return Path(text).expanduser()


def check_step(step: object) -> int:
    """Return a step as an int, also one of numpy.

    Raises:
        InvalidInputError: it is no integer, or out of range.
    """
    try:
        number = None if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]  # TypeError is the answer
    except TypeError:
        number = None
    if number is None or not 0 <= number <= registry.STEP_MAX:
        raise InvalidInputError(f"step {step!r:.100}: give an integer from 0 to {registry.STEP_MAX}")
    return number


def check_glob(pattern: object) -> None:
    """Refuse a selection of tensors that is no glob.

    Raises:
        InvalidInputError
    """
    if not isinstance(pattern, str):
        raise InvalidInputError(f"tensors={pattern!r:.100}: give one glob of dotted names, such as 'model.*'")


def check_device(device: str | torch.device | None) -> torch.device:
    """Return a device, the CPU by default.

    Raises:
        InvalidInputError: torch knows none of that name.
    """
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device {device!r:.100}: {str(error).splitlines()[0]}") from error


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as numbers.

    Raises:
        InvalidInputError: they are no mapping, too many, or not numbers.
    """
    if not isinstance(metrics, Mapping):
        raise InvalidInputError(
            f"metrics {metrics!r:.100}: give a mapping of names to numbers, such as {{'loss': 3.2}}"
        )
    if len(metrics) > registry.METRICS_MAX:
        raise InvalidInputError(f"{len(metrics)} metrics: at most {registry.METRICS_MAX} fit")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidInputError(f"metric {name!r} is {value!r}, which is not a number") from error
    return numbers
