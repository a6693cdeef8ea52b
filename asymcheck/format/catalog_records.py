"""Encode and decode keys and values of the catalog (SPEC.md §B3.1).

Every value ends in a sum8 over its key and the rest of the value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from asymcheck.errors import StructureError
from asymcheck.format.digest import sum8
from asymcheck.format.layout import ManifestName, checkpoint_name
from asymcheck.format.record import canonical_json, integer, is_canonical, parse_id, parse_json, string, strings
from asymcheck.types import CheckpointRef, Location, Owner, PackId, SaveId

PARTITION = struct.Struct("<16sQQQ16sBBB5s8s")
PACK = struct.Struct("<B7sQQ8s")
_SIZE = struct.Struct("<Q")


def seal(key: bytes, body: bytes) -> bytes:
    """Append the checksum over ``key`` and ``body`` to ``body``."""
    return body + sum8(key + body)


def unseal(key: bytes, value: bytes) -> bytes | None:
    """Return the body of a value, or None if the checksum is wrong. Readers ignore such an entry."""
    body, own_sum = value[:-8], value[-8:]
    return body if own_sum == sum8(key + body) else None


def encode_location(digest: bytes, location: Location) -> bytes:
    """Return the value of a partition entry."""
    place = location.pack_id, location.offset, location.stored_length, location.plain_length
    encoding = location.base_digest, location.kind, location.codec, location.digest_algorithm
    return seal(digest, PARTITION.pack(*place, *encoding, bytes(5), bytes(8))[:-8])


def decode_location(digest: bytes, value: bytes) -> Location | None:
    """Return the location of a partition, or None for a damaged entry."""
    body = unseal(digest, value)
    if body is None or len(value) != PARTITION.size:
        return None
    pack_id, offset, stored, plain, base, kind, codec, algorithm, reserved, _ = PARTITION.unpack(value)
    if any(reserved):
        return None
    return Location(PackId(pack_id), offset, stored, plain, kind, codec, algorithm, base)


def encode_pack_entry(pack_id: bytes, state: int, frame_count: int, pack_length: int) -> bytes:
    """Return the value of a pack entry."""
    return seal(pack_id, PACK.pack(state, bytes(7), frame_count, pack_length, bytes(8))[:-8])


def decode_pack_state(pack_id: bytes, value: bytes) -> int | None:
    """Return the state number of a pack, or None for a damaged entry."""
    if len(value) != PACK.size or unseal(pack_id, value) is None:
        return None
    state, reserved, _, _, _ = PACK.unpack(value)
    return None if any(reserved) else int(state)


def manifest_key(run: str, ref: CheckpointRef, name: ManifestName) -> bytes:
    """Return the key of a manifest entry."""
    return f"{run}/{checkpoint_name(ref)}/{name}".encode("ascii")


def encode_manifest_entry(key: bytes, size: int) -> bytes:
    """Return the value of a manifest entry, which is the file size in bytes."""
    return seal(key, _SIZE.pack(size))


def pin_key(save_id: SaveId, rank: int) -> bytes:
    """Return the key of a pin."""
    return save_id + struct.pack("<I", rank)


def encode_pin(key: bytes, owner: Owner, packs: Sequence[PackId]) -> bytes:
    """Return the value of a pin: its owner and the pinned packs."""
    return seal(key, canonical_json({"owner": vars(owner), "packs": sorted(pack.hex() for pack in packs)}))


def decode_pin(key: bytes, value: bytes) -> tuple[Owner, list[PackId]] | None:
    """Return the owner and the pinned packs, or None for a damaged entry."""
    body = unseal(key, value)
    if body is None:
        return None
    try:
        fields = parse_json(body, "pin")
        if not isinstance(fields, dict) or not is_canonical(fields, body):
            return None
        packs = [PackId(parse_id(pack, "pin")) for pack in strings(fields, "packs", "pin")]
        return owner_from_json(fields.get("owner"), "pin"), packs
    except StructureError:
        return None


def owner_from_json(value: object, where: str) -> Owner:
    """Read the JSON form of an owner."""
    if not isinstance(value, dict):
        raise StructureError(f"{where}: owner is not an object")
    return Owner(
        pid=integer(value, "pid", where),
        start_ticks=integer(value, "start_ticks", where),
        boot_id=string(value, "boot_id", where),
        pid_namespace=string(value, "pid_namespace", where),
    )
