"""Test garbage collection with damage: unreadable data may be needed, and is neither freed nor overwritten."""

from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck.errors import InconsistentCheckpointError
from asymcheck.types import PackId
from tests.damage.flips import content, flip
from tests.damage.small_store import SmallStore, check_findings, load_all, make_store, small_state

Flips = Callable[[Path], list[int]]


def _header(path: Path) -> list[int]:
    return [40 * 8]


def _index(path: Path) -> list[int]:
    return [(path.stat().st_size - 4096 + 64 + 3) * 8]


def _header_and_first_frame(path: Path) -> list[int]:
    return [40 * 8, (4096 + 20) * 8]


def _index_and_second_frame(path: Path) -> list[int]:
    return [*_index(path), (8192 + 20) * 8, (12288 + 20) * 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flips",
    [_header, _index, _header_and_first_frame, _index_and_second_frame],
    ids=lambda one: one.__name__.strip("_"),
)
def test_a_damaged_pack_is_kept_while_its_content_may_be_needed(tmp_path: Path, flips: Flips) -> None:
    """Test two deletions of three checkpoints: gc frees intact packs, and keeps the damaged pack."""
    small = make_store(tmp_path / "store", steps=3)
    packs = small.files("packs/*.pack")
    for number, path in enumerate(packs):
        damaged = small.copy_to(tmp_path / f"damaged{number}")
        target = damaged.path / "packs" / path.name
        for bit in flips(target):
            flip(target, bit)
        with damaged.open(read_only=False) as store:
            store.delete(1)
            store.delete(2)
            freed = store.gc().freed_packs
            store.save(small_state(8), step=8)
            store.gc()
        assert freed < len(packs) - 1
        assert target.exists(), "freed, though nobody can tell what it holds"
        for bit in flips(target):
            flip(target, bit)
        assert load_all(SmallStore(damaged.path, {3: small.states[3], 8: small_state(8)})).refused == {}


def test_save_does_not_reuse_a_damaged_pack(tmp_path: Path) -> None:
    """Test a pack with a damaged index, which can be read but not reused; the state is written again."""
    small = make_store(tmp_path / "store", steps=1)
    damaged = small.files("packs/*.pack")
    for path in damaged:
        flip(path, _index(path)[0])
    with small.open(read_only=False) as store:
        assert store.save(small.states[1], step=1).written_bytes > 0
    for path in damaged:
        path.unlink()
    assert load_all(small).refused == {}


def test_damaged_manifest_stops_collection_until_deleted(tmp_path: Path) -> None:
    """Test that the error names the file and the remedy; after the deletion only its packs are freed."""
    small = make_store(tmp_path / "store", steps=3)
    (path,) = (path for path in small.files("manifests/*/*/*.manifest") if "-000000000002-" in path.parent.name)
    flip(path, 5000)
    with small.open(read_only=False) as store:
        for dry_run in (True, False):
            with pytest.raises(InconsistentCheckpointError, match=f"nothing was freed.*{path.name}.*delete that"):
                store.gc(dry_run=dry_run)
        store.delete(2)
        assert store.gc().freed_packs
    assert load_all(SmallStore(small.path, {1: small.states[1], 3: small.states[3]})).refused == {}


def test_a_scan_ends_where_frames_of_another_life_begin(tmp_path: Path) -> None:
    """Test that a scan only finds frames with the right pack id and number."""
    small = make_store(tmp_path / "store", steps=2)
    with small.open() as store:
        packs = {
            path: store.resources.tier.open_pack(PackId(bytes.fromhex(path.stem)))
            for path in small.files("packs/*.pack")
        }
        first, other = [path for path, pack in packs.items() if len(pack.digests()) > 1][:2]
        end, begin = int(packs[first].entries["offset"][1]), int(packs[other].entries["offset"][1])
        for pack in packs.values():
            pack.close()
        # The next frame also has number 1, but belongs to another pack.
        with content(first, bytes(4096) + first.read_bytes()[4096:end] + other.read_bytes()[begin:]):
            scanned = store.resources.tier.open_pack(packs[first].header.pack_id)
            scanned.close()
            assert scanned.damage is not None
            assert scanned.digests() == packs[first].digests()[:1]
            check_findings(small, load_all(small))
