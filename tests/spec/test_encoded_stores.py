"""Test that both readers read the frozen stores with all codecs and several ranks, and the remote layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asymcheck
from asymcheck.format import layout, registry
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.pack import Entries, decode_index, decode_pack_header
from tests.spec.frozen import (
    Frozen,
    check_everything,
    encoded_stores,
    expected_wholes,
    found_tensors,
    part_stores,
)
from tests.spec.test_readers_agree import reader
from tests.spec.test_reference_reader import read

ALL = encoded_stores()
STORES = [frozen for frozen in ALL if frozen.whole.name.endswith("-codecs")]


def opened(frozen: Frozen, path: Path, *, read_only: bool) -> asymcheck.Store:
    """Return a copy of the store, or of the remote layout."""
    frozen.copy_to(path)
    is_remote = frozen.whole.name.endswith("-remote")
    return asymcheck.Store.open(f"file://{path}" if is_remote else path, read_only=read_only, create=not read_only)


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_a_copy_restores(frozen: Frozen, store_path: Path) -> None:
    """Test every checkpoint, bit for bit, and that a check finds no damage."""
    with opened(frozen, store_path, read_only=True) as store:
        check_everything(store, frozen)
        assert store.verify() == []


@pytest.mark.parametrize("frozen", STORES, ids=str)
def test_a_collection_keeps_bases_and_ranks(frozen: Frozen, store_path: Path) -> None:
    """Test that a writer opens the store, deletes a checkpoint, and that all others survive the collection."""
    with opened(frozen, store_path, read_only=False) as store:
        store.delete(0, run="codecs")
        store.gc()
        for facts in frozen.checkpoints:
            if (facts["run"], facts["step"]) != ("codecs", 0):
                restored, whole = store.restore(facts["step"], run=facts["run"]), facts.get("merged", facts)
                assert found_tensors(restored.state) == (whole["tree"], whole["tensors"])


@pytest.mark.slow(quick=["v1-by-0.1.0-remote"])
@pytest.mark.parametrize("frozen", [*ALL, *part_stores()], ids=str)
def test_reference_reader_reads_every_rank(frozen: Frozen, store_path: Path) -> None:
    """Test tree and digest of every tensor: each step of one rank, and each rank of one step."""
    frozen.copy_to(store_path)
    for facts in frozen.checkpoints:
        for rank, part in enumerate(facts.get("parts", [facts])):
            where = (store_path, "--run", facts["run"], "--step", facts["step"], "--rank", rank)
            chosen = read(*where)["chosen"]
            assert chosen["save_id"] == facts["save_id"]
            assert chosen["world_size"] == facts["world_size"]
            assert (chosen["tree"], chosen["tensors"]) == (part["tree"], part["tensors"])


@pytest.mark.parametrize("frozen", [*ALL, *part_stores()], ids=str)
def test_reference_reader_reads_whole_tensors(frozen: Frozen, store_path: Path) -> None:
    """Test that the parts of all ranks are put together by name, and that missing elements are refused."""
    frozen.copy_to(store_path)
    for facts in frozen.checkpoints:
        wholes = expected_wholes(facts)
        store = reader()["read_store"](store_path, facts["run"]) if wholes else None
        for name, digest in wholes.items():
            (checkpoint,) = store.candidates(facts["step"])
            if digest is None:
                with pytest.raises(reader()["SpecError"], match=f"{name}: its parts lack"):
                    store.read_whole(checkpoint, name)
            else:
                assert reader()["digest"](store.read_whole(checkpoint, name)) == digest


def packs(frozen: Frozen) -> Iterator[tuple[str, bytes, Entries]]:
    """Yield the name, the bytes and the index of each pack."""
    for path in sorted((frozen.whole / "store" / "packs").iterdir()):
        data = path.read_bytes()
        header = decode_pack_header(data[:4096], path.name)
        yield path.name, data, decode_index(data[header.index_offset : header.pack_length], header, path.name)


@pytest.mark.parametrize("frozen", STORES, ids=str)
def test_the_store_has_every_encoding(frozen: Frozen) -> None:
    """Test frame kinds, codecs, encodings of planes, derived dtypes, and the longest chain, over several packs."""
    old: dict[str, Any] = json.loads((frozen.whole / "registry.json").read_text("ascii"))
    found: dict[str, set[int]] = {
        "frame_kinds": set(),
        "codecs": set(),
        "plane_encodings": set(),
        "derived_dtypes": set(),
    }
    bases: dict[bytes, tuple[int, bytes]] = {}
    pack_of: dict[bytes, str] = {}
    for name, data, entries in packs(frozen):
        for entry in entries:
            found["frame_kinds"].add(int(entry["kind"]))
            found["codecs"].add(int(entry["codec"]))
            digest = entry["digest"].tobytes()
            bases[digest] = int(entry["kind"]), entry["base_digest"].tobytes()
            pack_of[digest] = name
            payload = data[int(entry["offset"]) + 128 :] if entry["stored_length"] < 65536 else b""
            if entry["codec"] in (registry.CODEC_BYTE_PLANES, registry.CODEC_DELTA):
                _, segments, count, _ = struct.unpack_from("<4I", payload)
                words = np.frombuffer(payload, "<u4", count, 16 + 8 * segments)
                found["plane_encodings"] |= set((words >> 24).tolist())
            if entry["codec"] == registry.CODEC_DERIVED:
                found["derived_dtypes"].add(payload[0])
    for table, numbers in found.items():
        wanted = {int(n) for n, about in old[table].items() if "reserved" not in str(about)}
        assert numbers == wanted, table
    depths = {digest: _deltas(digest, bases) for digest in bases}
    assert max(depths.values()) == registry.DELTA_DEPTH_MAX
    assert any(kind == registry.KIND_DERIVED and depths[base] == 8 for kind, base in bases.values())
    assert any(base in pack_of and pack_of[base] != pack_of[digest] for digest, (_, base) in bases.items())


def _deltas(digest: bytes, bases: dict[bytes, tuple[int, bytes]]) -> int:
    """Return the number of deltas from a frame down to a full frame."""
    kind, base = bases[digest]
    return 0 if kind == registry.KIND_FULL else (kind == registry.KIND_DELTA) + _deltas(base, bases)


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_the_store_has_ranks_and_stale_hints(frozen: Frozen) -> None:
    """Test shards of a tensor, a replica, and manifests whose hints name no pack of the store."""
    manifests = [decode_manifest(path.read_bytes(), path.name) for path in sorted(frozen.whole.rglob("*.manifest"))]
    ranks = [one for one in manifests if one.header.world_size == 4]
    assert [one.header.rank for one in ranks] == [0, 1, 2, 3]
    shapes = {(row.name, row.offset) for one in ranks for row in one.rows()}
    assert {("model.shard", (2 * rank, 0)) for rank in range(4)} <= shapes
    names = {path.name for path in (frozen.whole / "store" / "packs").iterdir()}
    hints = {layout.pack_name(pack) for one in manifests for pack in one.header.packs}
    assert hints - names


def test_a_remote_layout_is_frozen() -> None:
    """Test that its descriptor says so, and that a partition is only in a doomed pack."""
    (frozen,) = (frozen for frozen in ALL if frozen.whole.name.endswith("-remote"))
    assert b'"layout":"remote"' in (frozen.whole / "store" / "asymcheck.store").read_bytes()
    doomed = {bytes(d) for name, _, entries in packs(frozen) for d in entries["digest"] if name.endswith(".doomed")}
    lasting = {bytes(d) for name, _, entries in packs(frozen) for d in entries["digest"] if name.endswith(".pack")}
    assert doomed - lasting
