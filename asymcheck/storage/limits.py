"""Validation of StoreConfig and RemoteConfig: values outside these limits make stores unreadable or saves endless."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from asymcheck.config import COMPRESSIONS, MIB, RemoteConfig, StoreConfig
from asymcheck.errors import InvalidInputError
from asymcheck.format import registry
from asymcheck.format.pack import ENTRY_DTYPE

# Half of the capacity of a pack index if every frame has one block.
_PACK_BYTES_MAX = registry.PACK_INDEX_BYTES_MAX // ENTRY_DTYPE.itemsize * registry.BLOCK_BYTES // 2

_STORE: dict[str, tuple[float, float]] = {
    "partition_bytes": (registry.BLOCK_BYTES, registry.PARTITION_BYTES_MAX),
    "bundle_below_bytes": (0, registry.PARTITION_BYTES_MAX),
    "deferred_bytes_min": (registry.BLOCK_BYTES, registry.PARTITION_BYTES_MAX // 2),
    "deferred_bytes_max": (2 * registry.BLOCK_BYTES, registry.PARTITION_BYTES_MAX),
    "inline_bytes": (0, registry.INLINE_BYTES_MAX),
    "inline_total_bytes": (0, registry.MANIFEST_BYTES_MAX // 4),
    "slots": (1, 1024),
    "pack_bytes": (1, _PACK_BYTES_MAX),
    "pool_bytes": (0, math.inf),
    "repack_waste": (0, 1),
    "catalog_map_bytes": (MIB, 1 << 46),
    "catalog_readers": (1, 1 << 20),
    "lock_timeout_s": (0, math.inf),
    "read_lock_timeout_s": (0, math.inf),
    "commit_attempts": (1, math.inf),
}
_REMOTE: dict[str, tuple[float, float]] = {
    "attempts": (1, 1000),
    "pack_bytes": (1, 1 << 40),
    "encoded_bytes": (1, 1 << 40),
    "uploads": (1, 256),
    "reads": (1, 256),
    "piece_bytes": (registry.BLOCK_BYTES, 1 << 30),
    "gap_bytes": (0, 1 << 30),
    "deadline_s": (1e-3, 1e12),
    "grace_s": (0, 1e12),
    "retry_s": (0, 1e12),
    "lease_s": (0.1, 86_400),
}
_CHECKED_OTHERWISE = {"compression", "remote", "client", "options", "bytes_per_s", "read_back"}


def check_config(config: StoreConfig) -> None:
    """Raise InvalidInputError, naming the field, if a store cannot work with ``config``."""
    _check_bounds(config, _STORE)
    for name in ("partition_bytes", "deferred_bytes_min", "deferred_bytes_max"):
        if getattr(config, name) % registry.BLOCK_BYTES:
            raise InvalidInputError(f"{name} {getattr(config, name)}: give a multiple of {registry.BLOCK_BYTES}")
    if config.deferred_bytes_max < 2 * config.deferred_bytes_min:
        # Otherwise a size could be too large for one partition and too small for two.
        raise InvalidInputError(
            f"deferred_bytes_max {config.deferred_bytes_max}: give at least twice deferred_bytes_min, "
            f"{config.deferred_bytes_min}"
        )
    if config.bundle_below_bytes > config.partition_bytes:
        raise InvalidInputError(
            f"bundle_below_bytes {config.bundle_below_bytes}: give at most partition_bytes, {config.partition_bytes}"
        )


def check_remote(config: RemoteConfig) -> None:
    """Raise InvalidInputError, naming the field, if a remote location cannot work with ``config``."""
    if config.client not in (None, "hdfs-native", "libhdfs"):
        raise InvalidInputError(f"client {config.client!r}: give 'hdfs-native', 'libhdfs' or None")
    options: object = config.options
    words = [word for item in options.items() for word in item] if isinstance(options, Mapping) else [options]
    if not all(isinstance(word, str) for word in words):
        raise InvalidInputError(f"options {config.options!r:.100}: give a mapping of strings to strings")
    _check_bounds(config, _REMOTE)
    if config.bytes_per_s is not None and (type(config.bytes_per_s) is not int or config.bytes_per_s < 1):
        raise InvalidInputError(f"bytes_per_s {config.bytes_per_s!r}: give an integer from 1, or None")


def _check_bounds(config: StoreConfig | RemoteConfig, bounds: Mapping[str, tuple[float, float]]) -> None:
    if config.compression not in COMPRESSIONS:
        raise InvalidInputError(f"compression {config.compression!r}: give {', '.join(map(repr, COMPRESSIONS))}")
    for field in dataclasses.fields(config):
        if field.name not in _CHECKED_OTHERWISE:
            value = getattr(config, field.name)
            if value is None and field.default is None:
                continue
            least, most = bounds[field.name]
            kinds = (int, float) if isinstance(field.default, float) else (int,)
            if type(value) not in kinds or not least <= value <= most:
                kind = "a number" if float in kinds else "an integer"
                raise InvalidInputError(f"{field.name} {value!r}: give {kind} from {least} to {most}")
