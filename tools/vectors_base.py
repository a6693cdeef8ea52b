"""Define golden vectors, and the fixed ids, times and bytes of all vectors."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from asymcheck.format.digest import digest
from asymcheck.types import Digest, PackId, SaveId

SEED = 20261120
"""Seed from which, together with a label, all pseudo-random bytes of vectors are derived."""

CREATED_NS = 1_790_000_000_000_000_000
"""Time in every vector: 2026-09-21."""

WRITER = "asymcheck 0.1.0"
"""Writer in every vector, which does not change with the version of the package."""

STRUCTURES = ("record", "frame", "pack", "manifest", "tree", "catalog", "layout", "ring", "codec")
"""Folders of well-formed vectors, next to the folder ``invalid``."""

INVALID = "invalid"


@dataclasses.dataclass(frozen=True)
class Vector:
    """The bytes of a vector, and the result that a reader must decode from them."""

    folder: str
    """Name of a structure, or ``invalid``."""
    name: str
    """File name without suffix."""
    data: bytes
    """Bytes of ``NAME.bin``."""
    facts: Mapping[str, object]
    """Content of ``NAME.json``."""


def valid(folder: str, name: str, data: bytes, why: str, value: object, **more: object) -> Vector:
    """Return a vector that a reader must accept and read as ``value``; ``more`` is more context for the reader."""
    return Vector(folder, name, data, {"why": why, **more, "value": value})


def invalid(
    structure: str, name: str, data: bytes, error_kind: str, why: str, *, also: object = None, **more: object
) -> Vector:
    """Return a vector that a reader must refuse with an error of ``error_kind``.

    If bytes break two rules, another reader may report the kind ``also``. For example, a wrong payload breaks both
    stored_sum and digest.
    """
    facts = {"structure": structure, "error_kind": error_kind, "why": why, **more}
    return Vector(INVALID, f"{structure}-{name}", data, facts if also is None else {**facts, "or": also})


def fixed_bytes(label: str, length: int) -> bytes:
    """Return pseudo-random bytes that are the same in every run."""
    return random.Random(f"{SEED}:{label}").randbytes(length)


def plain_bytes(label: str, length: int) -> bytes:
    """Return the plain bytes of a partition: 64 fixed bytes repeated, so that the repository stays small."""
    return (fixed_bytes(label, 64) * (length // 64 + 1))[:length]


def pack_id(label: str) -> PackId:
    """Return a fixed pack id."""
    return PackId(fixed_bytes(f"pack {label}", 16))


def save_id(label: str, seconds: int = 0) -> SaveId:
    """Return a fixed save id, ``seconds`` after :data:`CREATED_NS`."""
    return SaveId((CREATED_NS + seconds * 10**9).to_bytes(8, "big") + fixed_bytes(f"save {label}", 8))


def partition_digest(label: str, length: int) -> Digest:
    """Return the digest of :func:`plain_bytes`."""
    return digest(plain_bytes(label, length))


def patched(data: bytes, *changes: tuple[int, bytes]) -> bytes:
    """Return ``data`` with bytes replaced at some offsets."""
    copy = bytearray(data)
    for offset, replacement in changes:
        copy[offset : offset + len(replacement)] = replacement
    return bytes(copy)


def flipped(data: bytes, offset: int) -> bytes:
    """Return ``data`` with the lowest bit of one byte flipped."""
    return patched(data, (offset, bytes([data[offset] ^ 1])))


def json_text(value: object) -> str:
    """Return JSON in the layout of the vector files."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"


def write_vectors(vectors: Iterable[Vector], out: Path) -> int:
    """Replace the vectors below ``out``; return their number."""
    by_path: dict[Path, Vector] = {}
    for vector in vectors:
        path = out / vector.folder / vector.name
        assert path not in by_path, f"two vectors are called {vector.folder}/{vector.name}"
        by_path[path] = vector
    for folder in (*STRUCTURES, INVALID):
        (out / folder).mkdir(parents=True, exist_ok=True)
        for old in [*(out / folder).glob("*.bin"), *(out / folder).glob("*.json")]:
            old.unlink()
    for path, vector in by_path.items():
        path.with_name(f"{vector.name}.bin").write_bytes(vector.data)
        path.with_name(f"{vector.name}.json").write_text(json_text(dict(vector.facts)), encoding="ascii")
    return len(by_path)
