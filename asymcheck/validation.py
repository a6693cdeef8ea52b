"""What callers pass: checked before anything is done, with errors that say what to pass instead."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

from asymcheck.config import CaptureConfig, RemoteConfig, StoreConfig
from asymcheck.errors import InvalidInputError, NotFoundError
from asymcheck.format import registry
from asymcheck.types import Part

if TYPE_CHECKING:
    import torch

_RING_BYTES_MAX = 1 << 46
"""Bytes of one file that a process can map, less room for a header."""
_SAVE_NAME = re.compile(r"save:[0-9a-f]{1,32}")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
# pathlib makes one slash of two: to write to such a name is to write beside where one wanted to.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_location(location: object) -> Path:
    """Return a location as a path; ``~`` is the home directory.

    Raises:
        InvalidInputError: it is no path, or of a kind that this version does not know.
    """
    try:
        text = os.fspath(location)  # type: ignore[call-overload]  # TypeError is the answer
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInputError(f"location {location!r:.100}: give the path of a directory")
    check_no_uri(text)
    try:
        # The catalog cannot be opened by another name, nor a ring say where its store is.
        text.encode("utf-8")
        return Path(text).expanduser()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"location {text!r:.100}: its name is not UTF-8; give another one") from error
    except RuntimeError as error:
        raise InvalidInputError(f"location {text!r:.100}: whose home directory is that? Give a path") from error


def check_no_uri(path: str | os.PathLike[str]) -> None:
    """Refuse a URI where a path is wanted, also one that has been a ``pathlib.Path``.

    Raises:
        InvalidInputError
    """
    text = os.fspath(path)
    if _URI.match(text):
        raise InvalidInputError(
            f"{text}: a path on this machine is wanted here, and that is a URI (as a pathlib.Path it has lost a "
            "slash); of a directory that is really called so, give the whole path"
        )


def check_step(step: object) -> int:
    """Return a step as an int, also one of numpy.

    Raises:
        InvalidInputError: it is no integer, or out of range.
    """
    number = _index(step)
    if number is None or not 0 <= number <= registry.STEP_MAX:
        raise InvalidInputError(f"step {step!r:.100}: give an integer from 0 to {registry.STEP_MAX}")
    return number


def _index(value: object) -> int | None:
    """Return an integer, also one of numpy, as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # TypeError is the answer
    except TypeError:
        return None


def check_which(step: object) -> int | str:
    """Return what names a checkpoint to read: a step, or ``save:`` and the first digits of a save id.

    Raises:
        InvalidInputError: it is neither.
    """
    if not isinstance(step, str):
        return check_step(step)
    if not _SAVE_NAME.fullmatch(step):
        raise InvalidInputError(f"step {step!r:.100}: give a step, or save:DIGITS, the first ones of a save id")
    return step


def check_part(part: object) -> None:
    """Refuse what names no part of a checkpoint.

    Raises:
        InvalidInputError
    """
    if not isinstance(part, Part):
        raise InvalidInputError(f"part={part!r:.100}: give Part(rank, world_size, save_id)")
    rank, size = _integer(part.rank), _integer(part.world_size)
    if rank is None or size is None or not 0 <= rank < size <= registry.WORLD_SIZE_MAX:
        raise InvalidInputError(
            f"{part}: ranks go from 0 to the world size less 1, and the world size up to {registry.WORLD_SIZE_MAX}"
        )
    if not _SAVE_ID.fullmatch(str(part.save_id)):
        raise InvalidInputError(f"{part!r:.200}: a save id has 32 hexadecimal digits, the same for all ranks")


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def check_rank(rank: object) -> int | None:
    """Return a rank as an int, also one of numpy; None stays None.

    Raises:
        InvalidInputError: it is no integer, or out of range.
    """
    if rank is None:
        return None
    number = _index(rank)
    if number is None or not 0 <= number < registry.WORLD_SIZE_MAX:
        raise InvalidInputError(f"rank {rank!r:.100}: give an integer from 0, or None")
    return number


def check_glob(pattern: object) -> None:
    """Refuse a selection of tensors that is no glob.

    Raises:
        InvalidInputError
    """
    if not isinstance(pattern, str):
        raise InvalidInputError(f"tensors={pattern!r:.100}: give one glob of dotted names, such as 'model.*'")


def check_kinds(config: StoreConfig | None) -> StoreConfig:
    """Return how a store is opened, by default as :class:`StoreConfig` has it; its values are checked by the tiers.

    Raises:
        InvalidInputError: it is something else, or ``remote`` in it is.
    """
    if config is None:
        return StoreConfig()
    if not isinstance(config, StoreConfig):
        raise InvalidInputError(f"config={config!r:.100}: give asymcheck.StoreConfig(…), or None")
    if not isinstance(config.remote, RemoteConfig):
        raise InvalidInputError(
            f"remote {config.remote!r:.100}: give asymcheck.RemoteConfig(…); a location goes to Store.open(…, remote=…)"
        )
    return config


def check_state(state: dict[str, object]) -> dict[str, object]:
    """Return what is a state to be watched.

    Raises:
        InvalidInputError: it is no dict, which a restore writes plain values into.
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


def check_capture(capture: CaptureConfig | None) -> CaptureConfig:
    """Return how captures are made, by default as :class:`CaptureConfig` has it.

    Raises:
        InvalidInputError: names the field. A proof of an unknown name would be none.
        NotFoundError: there is no folder for the ring.
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
            f"ring_folder {str(capture.ring_folder)!r} is no directory; make it, in a file system in memory, or give "
            "another"
        )
    return capture


def check_on_error(on_error: object) -> bool:
    """Tell whether what goes wrong in the background is raised; else it is a warning.

    Raises:
        InvalidInputError
    """
    if on_error not in ("raise", "warn"):
        raise InvalidInputError(f"on_error={on_error!r:.100}: give 'raise' or 'warn'")
    return on_error == "raise"


def check_device(device: str | torch.device | None) -> torch.device:
    """Return a device, the CPU by default.

    Raises:
        InvalidInputError: torch knows none of that name, or it has no memory.
    """
    import torch

    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device {device!r:.100}: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise InvalidInputError("device 'meta': tensors there have no bytes, so that nothing could be restored")
    return found


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as numbers.

    Raises:
        InvalidInputError: they are no mapping, too many, or not numbers, or have a name that could not be read again.
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
            # A lone surrogate can be written, but a reader refuses the manifest for it, and with it the checkpoint.
            str(name).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"metric {name!r:.100}: its name is not valid Unicode; give another one") from error
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidInputError(
                f"metric {name!r:.100} is {_shown(value)}, which is not a number that fits"
            ) from error
    return numbers


def _shown(value: object) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:
        # An integer of more digits than Python writes.
        return f"of type {type(value).__name__}"
