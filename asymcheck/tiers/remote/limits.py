"""What the configuration of remote locations may say."""

from __future__ import annotations

import math
from collections.abc import Mapping

from asymcheck.config import COMPRESSIONS, RemoteConfig
from asymcheck.errors import InvalidInputError
from asymcheck.format import registry

_CLIENTS = (None, "hdfs-native", "libhdfs")
_WHOLE: dict[str, tuple[float, float]] = {
    "attempts": (1, 1000),
    "pack_bytes": (1, 1 << 40),
    "encoded_bytes": (1, 1 << 40),
    "uploads": (1, 256),
    "reads": (1, 256),
    "piece_bytes": (registry.BLOCK_BYTES, 1 << 30),
    "gap_bytes": (0, 1 << 30),
}


def check_remote(config: RemoteConfig) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        InvalidInputError: names the field.
    """
    if config.client not in _CLIENTS:
        raise InvalidInputError(f"client {config.client!r}: give 'hdfs-native', 'libhdfs' or None")
    if config.compression not in COMPRESSIONS:
        raise InvalidInputError(f"compression {config.compression!r}: give {', '.join(map(repr, COMPRESSIONS))}")
    options: object = config.options
    words = [word for item in options.items() for word in item] if isinstance(options, Mapping) else [options]
    if not all(isinstance(word, str) for word in words):
        raise InvalidInputError(f"options {config.options!r:.100}: give a mapping of strings to strings")
    for name, (least, most) in _WHOLE.items():
        value = getattr(config, name)
        if type(value) is not int or not least <= value <= most:
            raise InvalidInputError(f"{name} {value!r}: give an integer from {least} to {most}")
    if config.bytes_per_s is not None and (type(config.bytes_per_s) is not int or config.bytes_per_s < 1):
        raise InvalidInputError(f"bytes_per_s {config.bytes_per_s!r}: give an integer from 1, or None")
    for name in ("deadline_s", "grace_s", "retry_s"):
        value = getattr(config, name)
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or value < 0 or (name == "deadline_s" and value == 0):
            raise InvalidInputError(f"{name} {value!r}: give a number of seconds")
