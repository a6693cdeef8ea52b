"""Build and parse the names of files and directories in a store (SPEC.md §A3)."""

from __future__ import annotations

import dataclasses
import re

from asymcheck.errors import InvalidInputError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.types import CheckpointRef, Digest, PackId, SaveId

DESCRIPTOR_NAME = "asymcheck.store"
HEADS = "heads"
MANIFESTS = "manifests"
PACKS = "packs"
POOL = "pool"
CATALOG = "catalog"
LOCKS = "locks"
TOP_LEVEL = frozenset({DESCRIPTOR_NAME, HEADS, MANIFESTS, PACKS, POOL, CATALOG, LOCKS})
REMOTE_TOP_LEVEL = frozenset({DESCRIPTOR_NAME, HEADS, MANIFESTS, PACKS, LOCKS})
TEMPORARY = ".tmp"
PACK_PREFIX_BYTES = 4

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_PACK = re.compile(r"([0-9a-f]{32})\.pack\Z")
_DOOMED = re.compile(r"([0-9a-f]{32})\.[0-9a-f]{32}\.doomed\Z")
_PACK_TEMPORARY = re.compile(r"([0-9a-f]{32})\.tmp\Z")
_RECORD_TEMPORARY = re.compile(r"[0-9a-f]{16}\.tmp\Z")
_CATALOG_SET_ASIDE = re.compile(r"catalog\.damaged-[0-9]+\.tmp\Z", re.ASCII)
_HEAD = re.compile(r"([0-9]{8})\.head\Z", re.ASCII)
_LEASE = re.compile(r"([0-9]{12})\.lease\Z", re.ASCII)
_CHECKPOINT = re.compile(r"([0-9]{8})-([0-9]{12})-([0-9a-f]{32})\Z", re.ASCII)
_RING = re.compile(r"asymcheck-([0-9a-f]{32})-([0-9a-f]{32})\.ring\Z")
_MANIFEST = re.compile(r"([0-9]{5})-of-([0-9]{5})-([0-9a-f]{32})\.manifest\Z", re.ASCII)


@dataclasses.dataclass(frozen=True)
class ManifestName:
    """Parsed file name of a manifest."""

    rank: int
    world_size: int
    digest: Digest
    """Digest of the whole file."""

    def __str__(self) -> str:
        return f"{self.rank:05d}-of-{self.world_size:05d}-{self.digest.hex()}.manifest"


def check_run(run: object) -> str:
    """Return ``run`` if it is a valid run name; raise InvalidInputError otherwise."""
    if not isinstance(run, str) or not is_run(run):
        raise InvalidInputError(
            f"invalid run name {run!r:.100}: use 1 to {registry.RUN_NAME_BYTES_MAX} letters, digits, '.', '_' or '-', "
            f"beginning with a letter or digit, and not ending in {TEMPORARY!r}"
        )
    return run


def is_run(name: str) -> bool:
    """Tell whether a directory name is a valid run name."""
    return _RUN.match(name) is not None and not name.endswith(TEMPORARY)


def pack_name(pack_id: PackId) -> str:
    """Return the file name of a complete pack."""
    return f"{pack_id.hex()}.pack"


def pack_prefix(first_rank: int) -> bytes:
    """Return the first bytes of the ids of the remote packs of a store, whose lowest rank is given (SPEC.md §C1)."""
    return digest(str(first_rank).encode())[:PACK_PREFIX_BYTES]


def pack_path(pack_id: PackId) -> str:
    """Return the path of a complete pack, relative to the store."""
    return f"{PACKS}/{pack_name(pack_id)}"


def pack_temporary_name(pack_id: PackId) -> str:
    """Return the file name of a pack being written."""
    return f"{pack_id.hex()}{TEMPORARY}"


def parse_pack_name(name: str) -> PackId | None:
    """Return the pack id in the name of a complete pack, or None for another name."""
    match = _PACK.match(name)
    return PackId(bytes.fromhex(match[1])) if match else None


def doomed_name(pack_id: PackId, collection: bytes) -> str:
    """Return the file name of a doomed pack of a remote layout; ``collection`` is the 16-byte id of the collection."""
    return f"{pack_id.hex()}.{collection.hex()}.doomed"


def parse_doomed_name(name: str) -> PackId | None:
    """Return the pack id in the name of a doomed pack, or None for another name."""
    match = _DOOMED.match(name)
    return PackId(bytes.fromhex(match[1])) if match else None


def is_pack_temporary(name: str) -> bool:
    """Tell whether a name is that of a pack being written."""
    return _PACK_TEMPORARY.match(name) is not None


def is_record_temporary(name: str) -> bool:
    """Tell whether a name is that of a record file being written."""
    return _RECORD_TEMPORARY.match(name) is not None


def is_catalog_set_aside(name: str) -> bool:
    """Tell whether a directory name is that of a replaced damaged catalog."""
    return _CATALOG_SET_ASIDE.match(name) is not None


def head_name(generation: int) -> str:
    """Return the file name of a head record."""
    return f"{generation:08d}.head"


def head_path(run: str, generation: int) -> str:
    """Return the path of a head record, relative to the store."""
    return f"{HEADS}/{run}/{head_name(generation)}"


def lock_name(run: str) -> str:
    """Return the file name of the lock of a run."""
    return f"{run}.lock"


def location_name(location: str) -> str:
    """Return the file name of the note that a store was pushed to the location with this URI."""
    return f"{digest(location.encode()).hex()}.location"


def lease_name(number: int) -> str:
    """Return the file name of a lease in a remote layout."""
    return f"{number:012d}.lease"


def parse_lease_name(name: str) -> int | None:
    """Return the number in the name of a lease, or None for another name."""
    match = _LEASE.match(name)
    return int(match[1]) if match and int(match[1]) else None


def parse_head_name(name: str) -> int | None:
    """Return the generation in the name of a head record, or None for another name."""
    match = _HEAD.match(name)
    return int(match[1]) if match and int(match[1]) else None


def checkpoint_name(ref: CheckpointRef) -> str:
    """Return the directory name of a checkpoint."""
    return f"{ref.generation:08d}-{ref.step:012d}-{ref.save_id.hex()}"


def checkpoint_path(run: str, ref: CheckpointRef) -> str:
    """Return the path of the directory of a checkpoint, relative to the store."""
    return f"{MANIFESTS}/{run}/{checkpoint_name(ref)}"


def parse_checkpoint_name(name: str) -> CheckpointRef | None:
    """Return the checkpoint that a directory name names, or None for another name."""
    match = _CHECKPOINT.match(name)
    if not match or int(match[1]) < 1:
        return None
    return CheckpointRef(int(match[1]), int(match[2]), SaveId(bytes.fromhex(match[3])))


def parse_manifest_name(name: str) -> ManifestName | None:
    """Return the fields of a manifest name, or None for another name."""
    match = _MANIFEST.match(name)
    if not match or int(match[1]) >= int(match[2]):
        return None
    return ManifestName(int(match[1]), int(match[2]), Digest(bytes.fromhex(match[3])))


def ring_name(store_id: bytes, ring_id: bytes) -> str:
    """Return the file name of a ring."""
    return f"asymcheck-{store_id.hex()}-{ring_id.hex()}.ring"


def parse_ring_name(name: str) -> tuple[bytes, bytes] | None:
    """Return the store id and the ring id in the name of a ring, or None for another name."""
    match = _RING.match(name)
    return (bytes.fromhex(match[1]), bytes.fromhex(match[2])) if match else None
