"""Test that encoded partitions and their bases are repacked without a change of any bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck import Retention, Store
from asymcheck.codecs.encode import Encoded, encode_planes, encode_zstd
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST, digest
from asymcheck.format.pack import Entries
from asymcheck.types import Digest
from tests.damage.flips import flip
from tests.damage.small_store import CONFIG
from tests.restore.test_bases import SEGMENTS, check_loads, delta_of, plain_of, save_steps, write_pack

pytestmark = pytest.mark.filterwarnings("ignore::asymcheck.errors.SkippedCheckpointWarning")


def planes_of(step: int) -> Encoded:
    """Return the partition of a step in codec byte-planes."""
    return encode_planes(digest(plain_of(step)), memoryview(plain_of(step)), SEGMENTS)


def zstd_of(step: int) -> Encoded:
    """Return the partition of a step in codec zstd."""
    return encode_zstd(digest(plain_of(step)), memoryview(plain_of(step)))


def store_of(path: Path, steps: tuple[int, ...], *packs: list[Encoded]) -> Path:
    """Return a store with the weights of some steps in these packs."""
    save_steps(path, *steps)
    for old in (path / "packs").glob("*.pack"):
        old.unlink()
    for encoded in packs:
        write_pack(path, *encoded)
    with Store.open(path, config=CONFIG, create=True) as store:
        store.resources.rebuild_catalog()
    return path


def entries_of(store: Store, step: int) -> list[Entries]:
    """Return the index entries of every copy of the weights of a step."""
    found = []
    for pack_id in store.resources.tier.pack_ids():
        pack = store.resources.tier.open_pack(pack_id)
        found += [entry for entry in pack.entries if Digest(entry["digest"].tobytes()) == digest(plain_of(step))]
        pack.close()
    return found


def test_copied_frame_keeps_codec_and_base(store_path: Path) -> None:
    """Test a chain of two deltas in mostly garbage packs, which is moved and not encoded again."""
    garbage = [[planes_of(step) for step in range(start, start + 3)] for start in (10, 20, 30)]
    chain = [planes_of(0), delta_of(1, 0), delta_of(2, 1)]
    path = store_of(store_path, (2,), *([*dead, one] for dead, one in zip(garbage, chain, strict=True)))
    with Store.open(path, config=CONFIG, create=True) as store:
        before = [entries_of(store, step)[0] for step in range(3)]
        assert store.gc().repacked_packs == 3
        assert store.resources.usage().packs == 1
        for step, old in enumerate(before):
            (new,) = entries_of(store, step)
            fields = ("base_digest", "stored_length", "plain_length", "kind", "codec", "digest_algorithm")
            assert all(new[field] == old[field] for field in fields)
    check_loads(path, 2)


def test_retention_keeps_needed_bases(store_path: Path) -> None:
    """Test that partitions stay while a kept checkpoint needs them."""
    path = store_of(store_path, (0, 1, 2), [planes_of(0)], [delta_of(1, 0)], [delta_of(2, 1)])
    with Store.open(path, config=CONFIG, create=True) as store:
        pruned = store.prune(Retention(keep_last=1))
        assert [one.step for one in pruned.removed] == [0, 1]
        assert pruned.collected.freed_packs == 0
    check_loads(path, 2)


def test_a_delta_does_not_stand_for_a_full_frame(store_path: Path) -> None:
    """Test that a full frame among garbage is copied, so that chains that end in it do not grow."""
    chain = [[planes_of(0)], *([delta_of(step, step - 1)] for step in range(1, 9))]
    # Step 8 ends the longest allowed chain, and is the base of step 9, whose chain ends in the full copy.
    full = [*(planes_of(step) for step in range(20, 24)), zstd_of(8)]
    path = store_of(store_path, (8, 9), *chain, full, [delta_of(9, 8)])
    check_loads(path, 8, 9)
    with Store.open(path, config=CONFIG, create=True) as store:
        assert store.gc().repacked_packs == 1
        assert sorted(int(entry["kind"]) for entry in entries_of(store, 8)) == [registry.KIND_FULL, 1]
    check_loads(path, 8, 9)


def test_a_full_frame_stands_for_a_delta(store_path: Path) -> None:
    """Test that a delta among garbage is not copied if its bytes are stored in full elsewhere."""
    garbage = [planes_of(step) for step in range(20, 24)]
    path = store_of(store_path, (1,), [planes_of(0)], [*garbage, delta_of(1, 0)], [planes_of(1)])
    with Store.open(path, config=CONFIG, create=True) as store:
        done = store.gc()
        assert (done.repacked_packs, done.copied_bytes) == (1, 0)
        assert store.gc().freed_packs == 1
        assert store.resources.usage().packs == 1
    check_loads(path, 1)


def damaged_pack(path: Path, *encoded: Encoded) -> Path:
    """Write a pack with a damaged index and intact frames."""
    pack = write_pack(path, *encoded)
    flip(pack, (pack.stat().st_size - 4096 + 80) * 8)
    return pack


def test_repair_takes_no_delta_for_a_full_frame(store_path: Path) -> None:
    """Test that a full frame of a damaged pack is copied although an intact delta exists."""
    chain = [[planes_of(0)], *([delta_of(step, step - 1)] for step in range(1, 9))]
    path = store_of(store_path, (8, 9), *chain, [delta_of(9, 8)])
    damaged = damaged_pack(path, planes_of(8))
    with Store.open(path, config=CONFIG, create=True) as store:
        assert store.repair().copied_partitions == 1
        assert not damaged.exists()
        assert sorted(int(entry["kind"]) for entry in entries_of(store, 8)) == [registry.KIND_FULL, 1]
        assert store.repair().done == ()
    check_loads(path, 8, 9)


def test_repair_leaves_no_circle_of_deltas(store_path: Path) -> None:
    """Test two partitions that are deltas on each other in intact packs, and full in a damaged pack."""
    path = store_of(store_path, (0, 1), [delta_of(0, 1)], [delta_of(1, 0)])
    damaged_pack(path, planes_of(0), planes_of(1))
    with Store.open(path, config=CONFIG, create=True) as store:
        assert store.repair().copied_partitions == 2
    check_loads(path, 0, 1)


@pytest.mark.parametrize(
    ("held", "elsewhere", "left"),
    [
        ([delta_of(2, 1)], [delta_of(2, 0)], [plain_of(0), plain_of(1)]),
        ([delta_of(2, 1)], [delta_of(2, 1)], [plain_of(1)]),
        ([delta_of(2, 1)], [planes_of(2)], [b""]),
        ([planes_of(2), delta_of(2, 1)], [], [b""]),
    ],
    ids=["another base", "the same base", "full elsewhere", "full beside it"],
)
def test_repair_takes_a_delta_for_its_like_alone(
    store_path: Path, held: list[Encoded], elsewhere: list[Encoded], left: list[bytes]
) -> None:
    """Test that a delta of a damaged pack is copied unless a copy elsewhere has the same base, or none."""
    packs = [[planes_of(0)], [planes_of(1)], *([one] for one in elsewhere)]
    path = store_of(store_path, (0, 1, 2), *packs)
    damaged_pack(path, *held)
    with Store.open(path, config=CONFIG, create=True) as store:
        assert store.repair().left == ()
        bases = {entry["base_digest"].tobytes() for entry in entries_of(store, 2)}
        assert bases == {digest(base) if base else ZERO_DIGEST for base in left}
    check_loads(path, 0, 1, 2)
