"""Read golden vectors with the readers of the library, for each kind of structure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from asymcheck.codecs.decode import BaseReader, FrameReader, base_reader
from asymcheck.config import StoreConfig
from asymcheck.errors import FormatError
from asymcheck.format import layout
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import ENTRY_DTYPE
from asymcheck.format.record import Descriptor, decode_descriptor, encode_descriptor, parse_json
from asymcheck.format.ring_records import CaptureEntry, RingHeader
from asymcheck.restore.frame_reader import read_checked
from asymcheck.restore.frame_reader import read_frame as read_frame_of
from asymcheck.restore.partition_locator import PartitionCopy
from asymcheck.restore.state_template import RowRef, read_shape
from asymcheck.state.typed_values import TypedValue
from asymcheck.storage.nvme import NvmeTier, PackFile, Slot
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import CheckpointRef, Digest, PackId

FORMAT_SPEC = Path(__file__).resolve().parents[2] / "format_spec"
VECTORS = FORMAT_SPEC / "vectors" / "v1"
STRUCTURES = ("record", "frame", "pack", "manifest", "tree", "catalog", "layout", "ring", "codec")


@dataclasses.dataclass(frozen=True)
class Vector:
    """A pair of files."""

    folder: str
    name: str

    @property
    def data(self) -> bytes:
        """Bytes of the vector."""
        return (VECTORS / self.folder / f"{self.name}.bin").read_bytes()

    @property
    def facts(self) -> dict[str, Any]:
        """Content of the JSON file."""
        facts: dict[str, Any] = json.loads((VECTORS / self.folder / f"{self.name}.json").read_text("ascii"))
        return facts

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"


def vectors(folder: str) -> list[Vector]:
    """Return all vectors of a folder, by name."""
    return [Vector(folder, path.stem) for path in sorted((VECTORS / folder).glob("*.bin"))]


class _OnePack:
    """A pack of which only one frame is read."""

    def __init__(self, pack_id: PackId, frame: bytes, sequence: int) -> None:
        self.header = SimpleNamespace(pack_id=pack_id)
        self.entries = {sequence: self._entry_of(frame)}
        self._frame = frame

    def _entry_of(self, frame: bytes) -> np.void:
        """Return the index entry of a frame."""
        entry = np.zeros(1, dtype=ENTRY_DTYPE)
        if len(frame) >= 128:
            fields = struct.unpack_from("<8sHBBB3s16sQQ8s16sI", frame)
            entry["kind"], entry["codec"], entry["digest_algorithm"] = fields[2:5]
            entry["digest"], entry["base_digest"] = np.void(fields[6]), np.void(fields[10])
            entry["plain_length"], entry["stored_length"] = fields[7:9]
            entry["payload_shift"] = fields[11] % 4096 if fields[8] >= 65536 else 0
        one: np.void = entry[0]
        return one

    def stamped(self, sequence: int) -> int:
        """Return the number in the header of a frame."""
        return sequence

    def read_frame(self, _sequence: int, _slot: Slot) -> memoryview:
        """Return the stored frame."""
        return memoryview(self._frame)


def _tier(root: Path) -> NvmeTier:
    """Return the store around a file."""
    descriptor = Descriptor(bytes(16), 0, "tests")
    (root / layout.DESCRIPTOR_NAME).write_bytes(encode_descriptor(descriptor))
    # Packs without this folder belong to a store that has lost its checkpoints.
    (root / layout.MANIFESTS).mkdir(exist_ok=True)
    return NvmeTier(root, StoreConfig(read_lock_timeout_s=0.0), read_only=True)


def read_frame(data: bytes, facts: dict[str, Any], _scratch: Path) -> bytes:
    """Return the plain bytes of a frame with the expected pack and number."""
    pack = cast(PackFile, _OnePack(PackId(bytes.fromhex(facts["place_id"])), data, facts["sequence"]))
    name = Digest(data[16:32])
    return bytes(read_checked(PartitionCopy(pack, facts["sequence"]), name, Slot(0), base_reader(lambda _name: [])))


def bases_in(pack: PackFile) -> BaseReader:
    """Return a reader of bases in the same pack."""

    def copies_of(name: Digest) -> list[FrameReader]:
        return [
            partial(read_frame_of, PartitionCopy(pack, sequence), Slot(int(pack.entries["stored_length"][sequence])))
            for sequence, found in enumerate(pack.digests())
            if found == name
        ]

    return base_reader(copies_of)


def read_plains(pack: PackFile) -> list[bytes]:
    """Return the plain bytes of every frame of an open pack."""
    slot = Slot(int(pack.entries["stored_length"].max()))
    read_base = bases_in(pack)
    return [
        bytes(read_checked(PartitionCopy(pack, sequence), name, slot, read_base))
        for sequence, name in enumerate(pack.digests())
    ]


def read_pack(data: bytes, facts: dict[str, Any], scratch: Path) -> PackFile:
    """Return a closed pack whose header, index and frames were all checked."""
    path = scratch / facts["path"]
    path.parent.mkdir()
    path.write_bytes(data)
    pack_id = layout.parse_pack_name(path.name)
    assert pack_id is not None
    pack = _tier(scratch).open_pack(pack_id)
    try:
        if pack.damage is not None:
            # The library finds frames of a damaged index by a scan, but the vector tests the index.
            raise pack.damage
        read_plains(pack)
    finally:
        pack.close()
    return pack


def read_codec(data: bytes, facts: dict[str, Any], scratch: Path) -> list[bytes]:
    """Return the plain bytes of all partitions of a pack."""
    path = scratch / facts["path"]
    path.parent.mkdir()
    path.write_bytes(data)
    pack_id = layout.parse_pack_name(path.name)
    assert pack_id is not None
    with contextlib.closing(_tier(scratch).open_pack(pack_id)) as pack:
        return read_plains(pack)


def read_manifest(data: bytes, facts: dict[str, Any], scratch: Path) -> Manifest:
    """Return a manifest that was checked against its path, including its tree."""
    _, run, checkpoint, file_name = facts["path"].split("/")
    ref, name = layout.parse_checkpoint_name(checkpoint), layout.parse_manifest_name(file_name)
    assert isinstance(ref, CheckpointRef)
    assert isinstance(name, ManifestName)
    path = scratch / facts["path"]
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    manifest = _tier(scratch).manifests.read(run, ref, name)
    read_shape(manifest)
    return manifest


def read_descriptor(data: bytes, facts: dict[str, Any], _scratch: Path) -> object:
    """Return a store's descriptor."""
    return decode_descriptor(data, facts["path"])


def read_head(data: bytes, facts: dict[str, Any], scratch: Path) -> object:
    """Return a head record that was checked against its path."""
    path = scratch / facts["path"]
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    generation = layout.parse_head_name(path.name)
    assert generation is not None
    return _tier(scratch).manifests.read_head(path.parent.name, generation)


def read_tree(data: bytes, facts: dict[str, Any], _scratch: Path) -> object:
    """Return the value of a tree, with placeholders for tensors."""
    tree = parse_json(data, "vector")
    header = SimpleNamespace(run="run", ref="vector", rank=0, tree=tree)

    class _Rows(SimpleNamespace):
        def __len__(self) -> int:
            return int(facts["rows"])

    return read_shape(cast(Manifest, _Rows(header=header)))


@dataclasses.dataclass(frozen=True)
class FoundRing:
    """A copy of the content of a ring."""

    header: RingHeader
    captures: list[CaptureEntry]
    frames: list[tuple[int, Digest, int, int]]
    """Offset, digest, stored and plain length of each intact frame."""
    payloads: dict[int, bytes]
    """Payload of each frame, by offset."""


def read_ring(data: bytes, facts: dict[str, Any], scratch: Path) -> FoundRing:
    """Return an unused ring, with the frames whose payloads were checked."""
    path = scratch / facts["path"]
    path.write_bytes(data)
    with RingReader(path) as reader:
        payloads = {}
        for offset in reader.entries["offset"].tolist():
            with contextlib.suppress(FormatError):
                payloads[offset] = bytes(reader.payload_at(offset))
        frames = [
            (int(row["offset"]), Digest(row["digest"].tobytes()), int(row["stored_length"]), int(row["plain_length"]))
            for row in reader.entries
            if int(row["offset"]) in payloads
        ]
        return FoundRing(reader.header, reader.captures, frames, payloads)


READERS: dict[str, Callable[[bytes, dict[str, Any], Path], object]] = {
    "frame": read_frame,
    "pack": read_pack,
    "manifest": read_manifest,
    "descriptor": read_descriptor,
    "head": read_head,
    "tree": read_tree,
    "ring": read_ring,
}


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _decimal(value: int) -> str:
    # Python refuses to print more than 4300 digits at once.
    sign, rest, text = ("-" if value < 0 else ""), abs(value), ""
    while rest >= 10**4000:
        rest, low = divmod(rest, 10**4000)
        text = f"{low:04000d}{text}"
    return f"{sign}{rest}{text}"


_SCALARS: tuple[tuple[type, str, Callable[[Any], object]], ...] = (
    (RowRef, "tensor", lambda value: value.row),
    (type(None), "none", lambda _: None),
    (bool, "bool", lambda value: value),
    (torch.Size, "size", lambda value: [str(item) for item in value]),
    (torch.dtype, "dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "device", str),
    (np.generic, "scalar", lambda value: [value.dtype.name, value.tobytes().hex()]),
    (int, "int", _decimal),
    (float, "float", _bits),
    (complex, "complex", lambda value: [_bits(value.real), _bits(value.imag)]),
    (str, "str", lambda value: value),
    (bytes, "bytes", bytes.hex),
    (list, "list", lambda value: [describe(item) for item in value]),
    (tuple, "tuple", lambda value: [describe(item) for item in value]),
)
"""Kinds of values in the order of the checks: a bool is an int, and numpy's float64 is a float."""


def describe(value: object) -> dict[str, Any]:
    """Return a value as in the vectors of trees: an object with one key, the kind of value."""
    if isinstance(value, RowRef) and value.as_array:
        return {"array": value.row}
    if isinstance(value, TypedValue):
        parts = {"type": value.kind, "parameter": value.parameter, "content": describe(value.content)}
        return {"typed": parts}
    for kind, name, make in _SCALARS:
        if isinstance(value, kind):
            return {name: make(value)}
    assert isinstance(value, dict)
    items = [[describe(key), describe(item)] for key, item in value.items()]
    if type(value) is dict:
        return {"dict": items}
    if hasattr(value, "_metadata"):
        return {"module": {"items": items, "metadata": describe(value._metadata)}}
    return {"ordered": items}
