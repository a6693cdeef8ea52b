"""Validation of arguments of the public interface, before anything is written.

Every function raises InvalidInputError, which names the argument, for a value that it does not accept.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asymcheck.config import CaptureConfig, Grace, check_type
from asymcheck.errors import InvalidInputError, NotFoundError, StaleStateWarning, warn_user
from asymcheck.format import registry
from asymcheck.types import Part

if TYPE_CHECKING:
    import torch

_STEP = re.compile(r"[0-9]{1,18}", re.ASCII)
_SAVE_NAME = re.compile(r"save:[0-9a-f]{1,32}")
_BEST_NAME = re.compile(r"best:(.+?)(?::(min|max))?")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
# One slash suffices, because pathlib.Path("hdfs://host") is "hdfs:/host".
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_location(location: object) -> Path:
    """Return a location as a path; ``~`` is the home directory."""
    try:
        text = os.fspath(location)  # type: ignore[call-overload]  # TypeError is the answer
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInputError(f"location {location!r:.100}: give the path of a directory")
    check_no_uri(text)
    try:
        # LMDB needs a UTF-8 path, and a ring stores the path of its store.
        text.encode("utf-8")
        return Path(text).expanduser()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"location {text!r:.100}: the path is not UTF-8; give another one") from error
    except RuntimeError as error:
        raise InvalidInputError(f"location {text!r:.100}: this user has no home directory; give a path") from error


def check_no_uri(path: str | os.PathLike[str]) -> None:
    """Refuse a URI, also one converted to ``pathlib.Path``, where a path is required."""
    text = os.fspath(path)
    if _URI.match(text):
        raise InvalidInputError(
            f"{text}: this is a URI, but a local path is required. For a directory with this name, give the absolute "
            "path"
        )


def _integer(value: object, least: int, end: int) -> int | None:
    """Return an integer from ``least`` to below ``end``, also a numpy integer, as an int; None for anything else."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # TypeError is the answer
    except TypeError:
        return None
    return number if least <= number < end else None


def check_step(step: object) -> int:
    """Return a step as an int; numpy integers are allowed."""
    number = _integer(step, 0, registry.STEP_MAX + 1)
    if number is None:
        raise InvalidInputError(f"step {step!r:.100}: give an integer from 0 to {registry.STEP_MAX}")
    return number


def check_which(step: object) -> int | str:
    """Return the selection of a checkpoint: a step, ``save:`` and the first digits of a save id, or ``best:METRIC``."""
    if not isinstance(step, str):
        return check_step(step)
    if not _SAVE_NAME.fullmatch(step) and not _BEST_NAME.fullmatch(step):
        raise InvalidInputError(
            f"step {step!r:.100}: give an integer, save:DIGITS (the start of a save id), best:METRIC or best:METRIC:max"
        )
    return step


def metric_and_sign(which: str) -> tuple[str, int] | None:
    """Return the metric of ``best:METRIC`` with 1, or -1 if the highest is the best; None for ``save:DIGITS``."""
    match = _BEST_NAME.fullmatch(which)
    return match and (match[1], -1 if match[2] == "max" else 1)


def parse_which(text: str) -> int | str:
    """Return the selection of a checkpoint from text, as :func:`check_which`."""
    return check_which(int(text) if _STEP.fullmatch(text) else text)


def check_part(part: object) -> None:
    """Refuse an invalid part of a checkpoint."""
    if not isinstance(part, Part):
        raise InvalidInputError(f"part={part!r:.100}: give Part(rank, world_size, save_id)")
    are_integers = {type(part.rank), type(part.world_size)} == {int}
    if not are_integers or not 0 <= part.rank < part.world_size <= registry.WORLD_SIZE_MAX:
        raise InvalidInputError(
            f"{part}: the rank must be less than the world size, and the world size at most {registry.WORLD_SIZE_MAX}"
        )
    if not _SAVE_ID.fullmatch(str(part.save_id)):
        raise InvalidInputError(f"{part!r:.200}: a save id has 32 hexadecimal digits, the same for all ranks")


def check_rank(rank: object, name: str = "rank", lowest: int = 0) -> int | None:
    """Return a rank, or a number of ranks, as an int; None stays None."""
    number = None if rank is None else _integer(rank, lowest, registry.WORLD_SIZE_MAX)
    if number is None and rank is not None:
        raise InvalidInputError(f"{name} {rank!r:.100}: give an integer from {lowest}, or None")
    return number


def check_glob(pattern: object) -> None:
    """Refuse a selection of tensors that is not a glob."""
    if not isinstance(pattern, str):
        raise InvalidInputError(f"tensors={pattern!r:.100}: give one glob of dotted names, such as 'model.*'")


def check_state(state: dict[str, object]) -> dict[str, object]:
    """Return the state of a Checkpointer: a dict, into which a restore can write plain values.

    Warns:
        StaleStateWarning: a part is a copy of an optimizer's state.
    """
    if type(state) is not dict:
        raise InvalidInputError(f"state: give a dict such as {{'model': model}}, not {type(state).__name__}")
    for key, part in state.items():
        if isinstance(part, dict) and part.keys() == {"state", "param_groups"} and not part["state"]:
            warn_user(
                f"state[{key!r}] looks like optimizer.state_dict() before the first step: a copy without moments, "
                "which later steps and restores do not connect with the optimizer. Give the optimizer itself",
                StaleStateWarning,
            )
    return state


def check_flag(name: str, value: object) -> bool:
    """Return a bool."""
    if type(value) is not bool:
        raise InvalidInputError(f"{name}={value!r:.100}: give True or False")
    return value


def check_grace(value: object) -> Grace | None:
    """Return the notice of preemption that ``save_on_signal`` asks for; None for none."""
    if isinstance(value, Grace):
        return value
    if type(value) is not bool:
        raise InvalidInputError(f"save_on_signal={value!r:.100}: give True, False or asymcheck.Grace(…)")
    return Grace() if value else None


def check_capture(value: object) -> CaptureConfig:
    """Return the configuration of captures, by default ``CaptureConfig()``.

    Raises:
        NotFoundError: the folder of the ring does not exist.
    """
    if value is None:
        return CaptureConfig()
    capture = check_type("capture", value, CaptureConfig)
    if not os.path.isdir(capture.ring_folder):
        raise NotFoundError(
            f"ring_folder {str(capture.ring_folder)!r} is not a directory; create it in a file system in memory, or "
            "give another one"
        )
    return capture


def check_device(device: str | torch.device | None) -> torch.device:
    """Return a device that torch knows and that has memory, the CPU by default."""
    import torch

    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device {device!r:.100}: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise InvalidInputError("device 'meta': its tensors have no data; give another device")
    return found


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as floats. Their names must be valid Unicode, and their number is limited."""
    if not isinstance(metrics, Mapping):
        raise InvalidInputError(
            f"metrics {metrics!r:.100}: give a mapping of names to numbers, such as {{'loss': 3.2}}"
        )
    if len(metrics) > registry.METRICS_MAX:
        raise InvalidInputError(f"{len(metrics)} metrics: give at most {registry.METRICS_MAX}")
    numbers = {}
    for name, value in metrics.items():
        try:
            # A reader would refuse a manifest with a lone surrogate.
            str(name).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"metric {name!r:.100}: its name is not valid Unicode; give another one") from error
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidInputError(
                f"metric {name!r:.100} is {_shown(value)}: give a number, such as loss.item()"
            ) from error
    return numbers


def _shown(value: object) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:
        # An integer of more digits than Python writes.
        return f"of type {type(value).__name__}"
