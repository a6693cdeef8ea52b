"""Test that each invariant of SPEC.md §B11, broken in a copy of the frozen store, is detected and named."""

import shutil
from pathlib import Path

import lmdb
import pytest

import asymcheck
from asymcheck.errors import ChecksumError, HeadRecordError, InconsistentCheckpointError, UnsupportedFeatureError
from asymcheck.format import catalog_records
from asymcheck.format.pack import decode_index, decode_pack_header, encode_index
from asymcheck.format.record import Descriptor, decode_descriptor, encode_descriptor
from asymcheck.fsck.verify import Severity
from asymcheck.types import Location
from tests.damage.flips import flip
from tests.spec.frozen import check_everything, found_tensors, whole_stores
from tools.vectors_stores import CONFIG

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FROZEN = whole_stores()[-1]
NEWEST = max(
    (facts for facts in FROZEN.checkpoints if facts["run"] == "default" and facts["on_line"]),
    key=lambda facts: (facts["generation"], facts["step"]),
)


@pytest.fixture
def store(store_path: Path) -> Path:
    """Return a copy of the frozen store, to be damaged."""
    return FROZEN.copy_to(store_path)


def findings(store: Path) -> dict[str, set[tuple[str, Severity]]]:
    """Return the findings of verify, by invariant: kinds and severities."""
    with asymcheck.Store.open(store, read_only=True) as opened:
        found: dict[str, set[tuple[str, Severity]]] = {}
        for finding in opened.verify():
            found.setdefault(finding.invariant, set()).add((finding.kind, finding.severity))
        return found


def pack_of_newest(store: Path) -> Path:
    """Return the pack that only the newest checkpoint of the default run needs."""
    (directory,) = (store / "manifests" / "default").glob(f"*-{NEWEST['save_id']}")
    with asymcheck.Store.open(store, config=CONFIG, create=True) as opened:
        kept = set((store / "packs").iterdir())
        aside = store.with_name("aside")
        directory.rename(aside)
        opened.gc()
    (pack,) = kept - set((store / "packs").iterdir())
    (store / "pool" / pack.name).rename(pack)
    aside.rename(directory)
    shutil.rmtree(store / "catalog")
    return pack


def test_the_store_is_sound_at_first(store: Path) -> None:
    """Test that verify finds nothing at first, so that later findings come from the tests."""
    assert findings(store) == {}


def test_i1_a_pack_that_is_cut(store: Path) -> None:
    """Test I1, a pack is complete: a truncated pack only costs the checkpoint that needs it (I2)."""
    pack = pack_of_newest(store)
    with pack.open("r+b") as file:
        file.truncate(8192)
    found = findings(store)
    assert found["I1"] == {("damaged-pack", Severity.WARNING)}
    assert found["I2"] == {("missing-partition", Severity.ERROR)}
    with asymcheck.Store.open(store, read_only=True) as opened:
        restored = opened.restore()
    assert restored.checkpoint.step < NEWEST["step"]
    assert len(restored.skipped) == 1


def test_i1_a_pack_under_another_name(store: Path) -> None:
    """Test I1, a pack's header names its file: a pack under another name is not read."""
    pack = pack_of_newest(store)
    pack.rename(pack.with_name(f"{'0' * 32}.pack"))
    assert findings(store)["I1"] == {("damaged-pack", Severity.WARNING)}


def test_i1_an_index_that_describes_other_frames(store: Path) -> None:
    """Test I1, an index describes its frames: verify detects a sealed index with another length."""
    pack = pack_of_newest(store)
    data = bytearray(pack.read_bytes())
    header = decode_pack_header(data, "pack")
    index = data[header.index_offset : header.pack_length]
    entries = decode_index(index, header, "pack").copy()
    entries[0]["stored_length"] += 1
    entries[0]["plain_length"] += 1
    data[header.index_offset : header.pack_length] = encode_index(header.pack_id, entries)
    pack.write_bytes(data)
    kinds = {kind for found in findings(store).values() for kind, _ in found}
    assert kinds
    with asymcheck.Store.open(store, read_only=True) as opened:
        assert opened.restore().checkpoint.step < NEWEST["step"]


def test_i2_a_pack_that_is_gone(store: Path) -> None:
    """Test I2, partitions of manifests are in packs: a lost pack is an error that names the checkpoint."""
    pack_of_newest(store).unlink()
    assert findings(store) == {"I2": {("missing-partition", Severity.ERROR)}}
    with asymcheck.Store.open(store, read_only=True) as opened:
        named = {name for finding in opened.verify() for name in finding.checkpoints}
        assert len(named) == 1
        assert str(NEWEST["step"]) in named.pop()
        with pytest.raises(InconsistentCheckpointError):
            opened.restore(NEWEST["step"])


def test_i2_a_frame_that_is_damaged(store: Path) -> None:
    """Test I2 for a flipped bit in a payload, which no checksum of index or header covers."""
    flip(pack_of_newest(store), 8 * (4096 + 128))
    assert findings(store) == {"I2": {("damaged-frame", Severity.ERROR)}}


@pytest.mark.parametrize("offset", [0, 100, 3000, -1])
def test_i3_a_manifest_that_is_damaged(store: Path, offset: int) -> None:
    """Test I3, a manifest's name contains its digest: a flipped bit is detected before anything is parsed."""
    (manifest,) = (store / "manifests" / "default").glob(f"*-{NEWEST['save_id']}/*")
    flip(manifest, 8 * offset)
    assert findings(store)["I3"] == {("damaged-manifest", Severity.ERROR)}


def test_i3_a_manifest_under_another_path(store: Path) -> None:
    """Test I3, a manifest's header agrees with its path: a copy in another step is refused."""
    (directory,) = (store / "manifests" / "default").glob(f"*-{NEWEST['save_id']}")
    shutil.copytree(directory, directory.with_name(directory.name.replace("-000000000040-", "-000000000041-")))
    assert findings(store)["I3"] == {("damaged-manifest", Severity.ERROR)}


def test_i4_manifests_that_disagree_on_the_world_size(store: Path) -> None:
    """Test I4, all manifests of a checkpoint have one world size: otherwise, the checkpoint is incomplete."""
    (manifest,) = (store / "manifests" / "default").glob(f"*-{NEWEST['save_id']}/*")
    shutil.copyfile(manifest, manifest.with_name(manifest.name.replace("-of-00001-", "-of-00002-")))
    assert findings(store)["I4"] == {("incomplete-checkpoint", Severity.WARNING)}
    with asymcheck.Store.open(store, read_only=True) as opened, pytest.raises(InconsistentCheckpointError):
        opened.restore(NEWEST["step"])


def test_i5_collection_frees_nothing_that_is_named(store: Path) -> None:
    """Test I5, a pack named by a manifest is never freed, including packs of abandoned checkpoints."""
    with asymcheck.Store.open(store, create=True) as opened:
        assert opened.gc().freed_packs == 0
        check_everything(opened, FROZEN)


def test_i5_a_pack_that_was_freed_all_the_same(store: Path) -> None:
    """Test broken I5, which loses a checkpoint (I2): packs in the pool are never read, even if intact."""
    pack = pack_of_newest(store)
    pack.rename(store / "pool" / pack.name)
    assert findings(store) == {"I2": {("missing-partition", Severity.ERROR)}}


def test_i6_a_head_record_that_is_gone(store: Path) -> None:
    """Test I6, a generation above 1 has a head record: without it, the newest checkpoint is not guessed."""
    (store / "heads" / "default" / "00000002.head").unlink()
    assert findings(store) == {"I6": {("missing-head", Severity.ERROR)}}
    with asymcheck.Store.open(store, read_only=True) as opened:
        with pytest.raises(HeadRecordError):
            opened.restore()
        assert opened.restore(NEWEST["step"]).checkpoint.save_id == NEWEST["save_id"]


def test_i6_a_head_record_with_no_intact_copy(store: Path) -> None:
    """Test I6 with both copies damaged."""
    head = store / "heads" / "default" / "00000002.head"
    flip(head, 8 * 10)
    flip(head, 8 * (4096 + 10))
    assert findings(store) == {"I6": {("damaged-head", Severity.ERROR)}}
    with asymcheck.Store.open(store, read_only=True) as opened, pytest.raises(HeadRecordError):
        opened.restore()


def test_i7_a_descriptor_that_asks_for_more(store: Path) -> None:
    """Test I7, the descriptor has no unknown feature: otherwise the store is not opened, even to read."""
    path = store / "asymcheck.store"
    known, _ = decode_descriptor(path.read_bytes(), "descriptor")
    path.write_bytes(encode_descriptor(Descriptor(known.store_id, known.created_ns, known.writer, ("later",))))
    with pytest.raises(UnsupportedFeatureError, match="later"):
        asymcheck.Store.open(store, read_only=True)


def test_i7_a_descriptor_that_is_damaged(store: Path) -> None:
    """Test I7, the descriptor is intact: with both copies damaged the store is not opened."""
    flip(store / "asymcheck.store", 8 * 10)
    flip(store / "asymcheck.store", 8 * (4096 + 10))
    with pytest.raises(ChecksumError):
        asymcheck.Store.open(store, read_only=True)


def test_i8_wrong_catalog(store_path: Path) -> None:
    """Test I8: if catalog entries with valid checksums disagree with packs, no save trusts them."""
    FROZEN.copy_to(store_path, with_catalog=True)
    pack = next(iter(sorted((store_path / "packs").iterdir())))
    header = decode_pack_header(pack.read_bytes(), "pack")
    start, end = header.index_offset, header.pack_length
    held = decode_index(pack.read_bytes()[start:end], header, "pack")["digest"].tobytes()
    absent = bytes.fromhex(next(name for name in FROZEN.catalog["partitions"] if bytes.fromhex(name) not in held))
    with lmdb.open(str(store_path / "catalog"), map_size=1 << 26, max_dbs=8) as environment:
        partitions = environment.open_db(b"partitions")
        with environment.begin(write=True) as transaction:
            for key in map(bytes.fromhex, FROZEN.catalog["partitions"]):
                # Every partition, including the one with `absent`'s length, is claimed to be in one pack.
                old = catalog_records.decode_location(key, transaction.get(key, db=partitions))
                assert old is not None
                wrong = Location(header.pack_id, 4096, old.stored_length, old.plain_length)
                transaction.put(key, catalog_records.encode_location(key, wrong), db=partitions)
    assert absent not in held
    with asymcheck.Store.open(store_path, config=CONFIG, create=True) as opened:
        check_everything(opened, FROZEN)
        state = opened.load()
        saved = opened.save(state, step=NEWEST["step"] + 1)
        assert saved.written_bytes > 0
        assert found_tensors(opened.load(saved.step)) == found_tensors(state)
        assert opened.verify() == []


@pytest.mark.parametrize("name", ["asymcheck.store", "heads/default/00000001.head", "heads/default/00000002.head"])
@pytest.mark.parametrize("copy", [0, 4096], ids=["first", "second"])
def test_i9_a_damaged_copy_in_a_record(store: Path, name: str, copy: int) -> None:
    """Test I9, both copies of a record are intact: one damaged copy only loses redundancy."""
    flip(store / name, 8 * (copy + 10))
    assert findings(store) == {"I9": {("damaged-copy", Severity.WARNING)}}
    with asymcheck.Store.open(store, read_only=True) as opened:
        check_everything(opened, FROZEN)


def test_i10_files_that_are_not_the_stores(store: Path) -> None:
    """Test I10: foreign files, temporary files and empty directories are hints, and collection removes the last two."""
    for name in ("notes.txt", "packs/notes.txt", "heads/notes.txt", "heads/.DS_Store", "manifests/notes.txt"):
        (store / name).write_text("not ours")
    (store / "packs" / f"{'0' * 32}.tmp").write_bytes(b"")
    (store / "manifests" / "default" / f"00000002-{50:012d}-{'0' * 32}").mkdir()
    kinds = ("foreign-file", "stale-temporary", "empty-checkpoint")
    assert findings(store) == {"I10": {(kind, Severity.HINT) for kind in kinds}}
    with asymcheck.Store.open(store, create=True) as opened:
        opened.gc()
        check_everything(opened, FROZEN)
    assert findings(store) == {"I10": {("foreign-file", Severity.HINT)}}


def test_i10_temporary_file_that_no_collection_removes(store: Path) -> None:
    """Test I10: a temporary file with a name that no writer gives (§B1) is reported as foreign."""
    (store / "asymcheck.store.17.tmp").write_bytes(b"")
    assert findings(store) == {"I10": {("foreign-file", Severity.HINT)}}
