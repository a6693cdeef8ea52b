"""Validation of arguments of the public interface, before anything is written."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

from asymcheck.config import CaptureConfig, Grace, StoreConfig
from asymcheck.errors import InvalidInputError, NotFoundError
from asymcheck.format import registry
from asymcheck.types import Part

if TYPE_CHECKING:
    import torch

_RING_BYTES_MAX = 1 << 46
"""Maximum size of a file that a process can map."""
_SAVE_NAME = re.compile(r"save:[0-9a-f]{1,32}")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
# One slash suffices, because pathlib.Path("hdfs://host") is "hdfs:/host".
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_location(location: object) -> Path:
    """Return a location as a path; ``~`` is the home directory.

    Raises:
        InvalidInputError: the location is not a path.
    """
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
    """Refuse a URI, also one converted to ``pathlib.Path``, where a path is required.

    Raises:
        InvalidInputError
    """
    text = os.fspath(path)
    if _URI.match(text):
        raise InvalidInputError(
            f"{text}: this is a URI, but a local path is required. For a directory with this name, give the absolute "
            "path"
        )


def check_step(step: object) -> int:
    """Return a step as an int; numpy integers are allowed.

    Raises:
        InvalidInputError: the step is not an integer, or out of range.
    """
    number = _index(step)
    if number is None or not 0 <= number <= registry.STEP_MAX:
        raise InvalidInputError(f"step {step!r:.100}: give an integer from 0 to {registry.STEP_MAX}")
    return number


def _index(value: object) -> int | None:
    """Return an integer, also a numpy integer, as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # TypeError is the answer
    except TypeError:
        return None


def check_which(step: object) -> int | str:
    """Return the selection of a checkpoint: a step, or ``save:`` and the first digits of a save id.

    Raises:
        InvalidInputError: the selection is neither.
    """
    if not isinstance(step, str):
        return check_step(step)
    if not _SAVE_NAME.fullmatch(step):
        raise InvalidInputError(f"step {step!r:.100}: give a step, or save:DIGITS with the first digits of a save id")
    return step


def check_part(part: object) -> None:
    """Refuse an invalid part of a checkpoint.

    Raises:
        InvalidInputError
    """
    if not isinstance(part, Part):
        raise InvalidInputError(f"part={part!r:.100}: give Part(rank, world_size, save_id)")
    rank, size = _integer(part.rank), _integer(part.world_size)
    if rank is None or size is None or not 0 <= rank < size <= registry.WORLD_SIZE_MAX:
        raise InvalidInputError(
            f"{part}: the rank must be less than the world size, and the world size at most {registry.WORLD_SIZE_MAX}"
        )
    if not _SAVE_ID.fullmatch(str(part.save_id)):
        raise InvalidInputError(f"{part!r:.200}: a save id has 32 hexadecimal digits, the same for all ranks")


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def check_rank(rank: object) -> int | None:
    """Return a rank as an int; None stays None.

    Raises:
        InvalidInputError: the rank is not an integer, or out of range.
    """
    if rank is None:
        return None
    number = _index(rank)
    if number is None or not 0 <= number < registry.WORLD_SIZE_MAX:
        raise InvalidInputError(f"rank {rank!r:.100}: give an integer from 0, or None")
    return number


def check_glob(pattern: object) -> None:
    """Refuse a selection of tensors that is not a glob.

    Raises:
        InvalidInputError
    """
    if not isinstance(pattern, str):
        raise InvalidInputError(f"tensors={pattern!r:.100}: give one glob of dotted names, such as 'model.*'")


def check_kinds(config: StoreConfig | None) -> StoreConfig:
    """Return ``config``, by default ``StoreConfig()``.

    Raises:
        InvalidInputError: ``config`` has another type.
    """
    if config is None:
        return StoreConfig()
    if not isinstance(config, StoreConfig):
        raise InvalidInputError(f"config={config!r:.100}: give asymcheck.StoreConfig(…), or None")
    return config


def check_state(state: dict[str, object]) -> dict[str, object]:
    """Return the state of a Checkpointer.

    Raises:
        InvalidInputError: the state is not a dict, into which a restore can write plain values.
    """
    if type(state) is not dict:
        raise InvalidInputError(f"state: give a dict such as {{'model': model}}, not {type(state).__name__}")
    return state


def check_wait_target(target: object, *, pushes: bool) -> None:
    """Refuse an unknown target of ``wait()``, and ``"remote"`` if nothing is pushed.

    Raises:
        InvalidInputError
    """
    if target not in ("memory", "local", "remote"):
        raise InvalidInputError(f"wait({target!r:.100}): give 'memory', 'local' or 'remote'")
    if target == "remote" and not pushes:
        raise InvalidInputError("wait('remote'): nothing is pushed; give Checkpointer(…, push=asymcheck.Push(…))")


def check_flag(name: str, value: object) -> bool:
    """Return a bool, or refuse another value.

    Raises:
        InvalidInputError
    """
    if type(value) is not bool:
        raise InvalidInputError(f"{name}={value!r:.100}: give True or False")
    return value


def check_grace(value: object) -> Grace | None:
    """Return the notice of preemption that ``save_on_signal`` asks for; None for none.

    Raises:
        InvalidInputError
    """
    if isinstance(value, Grace):
        return value
    if type(value) is not bool:
        raise InvalidInputError(f"save_on_signal={value!r:.100}: give True, False or asymcheck.Grace(…)")
    return Grace() if value else None


def check_capture(capture: CaptureConfig | None) -> CaptureConfig:
    """Return ``capture``, by default ``CaptureConfig()``.

    Raises:
        InvalidInputError: a field is invalid; the error names it.
        NotFoundError: the folder of the ring does not exist.
    """
    if capture is None:
        return CaptureConfig()
    if not isinstance(capture, CaptureConfig):
        raise InvalidInputError(f"capture={capture!r:.100}: give asymcheck.CaptureConfig(…), or None")
    hints = get_type_hints(CaptureConfig)
    for name in ("proof", "schedule"):
        known = get_args(hints[name])
        if getattr(capture, name) not in known:
            raise InvalidInputError(f"{name} {getattr(capture, name)!r:.100}: give {', '.join(map(repr, known))}")
    ring_bytes, staging_bytes = _integer(capture.ring_bytes), _integer(capture.staging_bytes)
    if capture.ring_bytes is not None and (ring_bytes is None or not 1 <= ring_bytes <= _RING_BYTES_MAX):
        raise InvalidInputError(
            f"ring_bytes {capture.ring_bytes!r:.100}: give an integer from 1 to {_RING_BYTES_MAX}, or None"
        )
    if staging_bytes is None or staging_bytes < 0:
        raise InvalidInputError(f"staging_bytes {capture.staging_bytes!r:.100}: give an integer from 0")
    if not isinstance(capture.ring_folder, (str, Path)):
        raise InvalidInputError(f"ring_folder {capture.ring_folder!r:.100}: give the path of a directory")
    if not os.path.isdir(capture.ring_folder):
        raise NotFoundError(
            f"ring_folder {str(capture.ring_folder)!r} is not a directory; create it in a file system in memory, or "
            "give another one"
        )
    return capture


def check_on_error(on_error: object) -> bool:
    """Return whether errors of background work are raised; otherwise they are warnings.

    Raises:
        InvalidInputError
    """
    if on_error not in ("raise", "warn"):
        raise InvalidInputError(f"on_error={on_error!r:.100}: give 'raise' or 'warn'")
    return on_error == "raise"


def check_device(device: str | torch.device | None) -> torch.device:
    """Return a device, the CPU by default.

    Raises:
        InvalidInputError: torch does not know the device, or it has no memory.
    """
    import torch

    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device {device!r:.100}: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise InvalidInputError("device 'meta': its tensors have no data; give another device")
    return found


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as floats.

    Raises:
        InvalidInputError: metrics are not a mapping of names to numbers, are too many, or a name is invalid.
    """
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
