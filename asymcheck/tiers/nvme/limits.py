"""What a configuration may say: values beyond these would make stores that cannot be read, or never finish a save."""

from __future__ import annotations

import dataclasses
import math

from asymcheck.config import COMPRESSIONS, MIB, StoreConfig
from asymcheck.errors import InvalidInputError
from asymcheck.format import registry
from asymcheck.format.pack import ENTRY_DTYPE

# Half of what fits into a pack's index when every frame has a single block.
_PACK_BYTES_MAX = registry.PACK_INDEX_BYTES_MAX // ENTRY_DTYPE.itemsize * registry.BLOCK_BYTES // 2

_BOUNDS: dict[str, tuple[float, float]] = {
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


_CHECKED_ELSEWHERE = {"compression", "remote"}
"""Above, and when a remote location is opened."""


def check_config(config: StoreConfig) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        InvalidInputError: names the field.
    """
    if config.compression not in COMPRESSIONS:
        raise InvalidInputError(f"compression {config.compression!r}: give {', '.join(map(repr, COMPRESSIONS))}")
    for field in dataclasses.fields(config):
        if field.name in _CHECKED_ELSEWHERE:
            continue
        value = getattr(config, field.name)
        least, most = _BOUNDS[field.name]
        kinds = (int, float) if isinstance(field.default, float) else (int,)
        if type(value) not in kinds or not least <= value <= most:
            kind = "a number" if float in kinds else "an integer"
            raise InvalidInputError(f"{field.name} {value!r}: give {kind} from {least} to {most}")
    for name in ("partition_bytes", "deferred_bytes_min", "deferred_bytes_max"):
        if getattr(config, name) % registry.BLOCK_BYTES:
            raise InvalidInputError(f"{name} {getattr(config, name)}: give a multiple of {registry.BLOCK_BYTES}")
    if config.deferred_bytes_max < 2 * config.deferred_bytes_min:
        # Else what is too much for one partition could be too little for two.
        raise InvalidInputError(
            f"deferred_bytes_max {config.deferred_bytes_max}: give at least twice deferred_bytes_min, "
            f"{config.deferred_bytes_min}"
        )
    if config.bundle_below_bytes > config.partition_bytes:
        raise InvalidInputError(
            f"bundle_below_bytes {config.bundle_below_bytes}: give at most partition_bytes, {config.partition_bytes}"
        )
