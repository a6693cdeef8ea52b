"""Test that encoded partitions are read, verified, kept and repaired with their bases."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck import Store
from asymcheck.codecs import derived
from asymcheck.codecs.container import Segment
from asymcheck.codecs.derived import rounded_base
from asymcheck.codecs.encode import Encoded, encode_delta, encode_derived, encode_planes, encode_zstd
from asymcheck.errors import (
    DamagedPartitionError,
    InconsistentCheckpointError,
    MissingPartitionError,
    RemoteCopyWarning,
    RemoteUnreachableError,
    SkippedCheckpointWarning,
    UnreachableRemoteWarning,
)
from asymcheck.format.digest import digest
from asymcheck.format.frame import HEADER_BYTES, decode_header
from asymcheck.fsck.verify import Severity
from asymcheck.restore.partition_locator import Hints, PartitionCopy, PartitionLocator, PartitionSet
from asymcheck.storage.nvme import NvmeTier, Slot
from asymcheck.types import PackId
from tests.damage.flips import flip
from tests.damage.small_store import CONFIG

COUNT = 900
SEGMENTS = [Segment(4 * COUNT, 4, is_float=True)]

pytestmark = pytest.mark.filterwarnings("ignore::asymcheck.errors.SkippedCheckpointWarning")


def weights(step: int) -> torch.Tensor:
    """Return the weights of a step: one partition, which changes a little at each step."""
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    return start * (1 + 1e-5 * step)


def plain_of(step: int) -> bytes:
    """Return the bytes of the weights."""
    return weights(step).numpy().tobytes()


def delta_of(step: int, base: int) -> Encoded:
    """Return the partition of a step as a delta on another step."""
    plain, older = plain_of(step), plain_of(base)
    return encode_delta(digest(plain), memoryview(plain), SEGMENTS, digest(older), memoryview(older))


def write_pack(path: Path, *encoded: Encoded) -> Path:
    """Write a pack of these partitions, as an encoding writer does; return its path."""
    tier = NvmeTier(path, CONFIG)
    writer = tier.start_pack(1 << 16)
    for one in encoded:
        slot = Slot(one.descriptor.stored_length)
        one.write_to(slot.payload(one.descriptor.stored_length))
        writer.write(slot, one.descriptor)
    header, locations = writer.seal(0, "test")
    for one, (_, location) in zip(encoded, locations, strict=True):
        assert (location.kind, location.codec) == (one.descriptor.kind, one.descriptor.codec)
        assert location.base_digest == one.descriptor.base_digest
    writer.close()
    return path / "packs" / f"{header.pack_id.hex()}.pack"


def pack_with(path: Path, plain: bytes) -> Path:
    """Return the only pack with a partition."""
    (found,) = (pack for pack in (path / "packs").glob("*.pack") if digest(plain) in _names(pack))
    return found


def _names(pack: Path) -> list[bytes]:
    data = pack.read_bytes()
    return [bytes(data[at + 16 : at + 32]) for at in range(4096, len(data), 4096) if data[at : at + 8] == b"ASYMFRAM"]


def save_steps(path: Path, *steps: int) -> None:
    """Save the weights of steps, each plain and in a separate pack."""
    with Store.open(path, config=CONFIG, create=True) as store:
        for step in steps:
            store.save({"w": weights(step)}, step=step)


def swap(path: Path, *encoded: Encoded) -> list[Path]:
    """Replace packs by encoded frames of the same partitions, one frame a pack; rebuild the catalog."""
    made = []
    for one in encoded:
        (old,) = (pack for pack in (path / "packs").glob("*.pack") if one.descriptor.digest in _names(pack))
        made.append(write_pack(path, one))
        old.unlink()
    with Store.open(path, config=CONFIG, create=True) as store:
        store.resources.rebuild_catalog()
    return made


def check_loads(path: Path, *steps: int) -> None:
    """Check that these steps are read bit for bit, also in place, and that a verification finds nothing."""
    with Store.open(path, config=CONFIG, read_only=True) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == list(steps)
        for step in steps:
            assert torch.equal(store.load(step)["w"], weights(step))  # type: ignore[index]  # a mapping
            assert store.verify(step=step) == []
        assert [one for one in store.verify() if one.severity is not Severity.HINT] == []


@pytest.fixture
def chain(store_path: Path) -> Path:
    """Return a store with steps 0 to 2, of which 1 is a delta on 0, and 2 on 1."""
    save_steps(store_path, 0, 1, 2)
    swap(store_path, delta_of(1, 0), delta_of(2, 1))
    return store_path


def test_full_frames_of_every_codec_are_loaded(store_path: Path) -> None:
    """Test frames that are longer or shorter than their plain bytes."""
    save_steps(store_path, 0, 1, 2)
    plain = [memoryview(plain_of(step)) for step in range(3)]
    swap(
        store_path,
        encode_zstd(digest(plain[0]), plain[0]),
        encode_planes(digest(plain[1]), plain[1], SEGMENTS),
        encode_planes(digest(plain[2]), plain[2], [Segment(4 * COUNT, 1)]),
    )
    check_loads(store_path, 0, 1, 2)


def test_a_chain_of_deltas_is_loaded(chain: Path) -> None:
    """Test that each base of a chain is found in any pack."""
    check_loads(chain, 0, 1, 2)


def test_local_bases_are_not_searched_remotely(chain: Path, tmp_path: Path) -> None:
    """Test that no location is read, unless a local base is damaged."""
    location, nowhere = f"file://{tmp_path}/remote", "hdfs://127.0.0.1:1/x"
    with Store.open(chain, config=CONFIG, create=True) as store:
        store.push(location, everything=True)
    with Store.open(chain, config=CONFIG, remote=nowhere, create=True) as store, pytest.warns(UnreachableRemoteWarning):
        assert torch.equal(store.load(2)["w"], weights(2))  # type: ignore[index]  # a mapping
    with Store.open(chain, config=CONFIG, remote=location, create=True) as store:
        assert torch.equal(store.load(2)["w"], weights(2))  # type: ignore[index]  # a mapping
    flip(pack_with(chain, plain_of(0)), (4096 + 300) * 8)
    with (
        Store.open(chain, config=CONFIG, remote=nowhere, create=True) as store,
        pytest.warns(UnreachableRemoteWarning),
        pytest.raises(RemoteUnreachableError),
    ):
        store.load(2)
    with Store.open(chain, config=CONFIG, remote=location, create=True) as store, pytest.warns(RemoteCopyWarning):
        assert torch.equal(store.load(2)["w"], weights(2))  # type: ignore[index]  # a mapping


@pytest.mark.slow(quick=["hinted1"])
@pytest.mark.parametrize("hinted", [(2, 1, 0), (2, 1), ()])
def test_bases_are_looked_for_where_the_manifest_says(
    chain: Path, monkeypatch: pytest.MonkeyPatch, hinted: tuple[int, ...]
) -> None:
    """Test that only packs in the hint are opened, and all packs only if a base is in none of them."""
    write_pack(chain, encode_zstd(digest(b"other" * 99), memoryview(b"other" * 99)))
    save_steps(chain, *range(20, 30))
    packs = {step: PackId(bytes.fromhex(pack_with(chain, plain_of(step)).stem)) for step in range(3)}
    tier = NvmeTier(chain, CONFIG, read_only=True)
    opened: list[PackId] = []
    open_pack = tier.open_pack
    monkeypatch.setattr(tier, "open_pack", lambda pack_id: opened.append(pack_id) or open_pack(pack_id))
    wanted = PartitionSet.of_lengths({digest(plain_of(2)): 4 * COUNT})
    with PartitionLocator(tier, wanted, Hints(tuple(packs[step] for step in hinted))) as sources:
        assert [len(sources.base_copies(digest(plain_of(step)))) for step in range(2)] == [1, 1]
        assert set(opened) == (set(packs.values()) if len(hinted) == 3 else set(tier.pack_ids()))
        # Packs are opened once for partitions and once for bases, for any chain; then the two packs with a base again.
        assert len(opened) <= 2 * len(set(opened)) + 2
        # Another pack may have an intact copy of a damaged base.
        assert list(sources.other_copies(digest(plain_of(0)), sources.base_copies(digest(plain_of(0))))) == []
        assert set(opened) == set(tier.pack_ids())


def test_the_catalog_names_the_base(chain: Path) -> None:
    """Test that a rebuilt catalog has the encoding and the base of every frame."""
    tier = NvmeTier(chain, CONFIG)
    with tier.open_catalog(lambda _: None).read() as transaction:
        found = transaction.location(digest(plain_of(2)))
    assert found is not None
    assert (found.kind, found.codec, found.base_digest) == (1, 3, digest(plain_of(1)))
    tier.close()


@pytest.mark.slow
def test_eight_deltas_are_read_and_nine_are_not(store_path: Path) -> None:
    """Test that a partition beyond the longest chain counts as damaged, so the older checkpoint is restored."""
    save_steps(store_path, *range(10))
    swap(store_path, *(delta_of(step, step - 1) for step in range(1, 9)))
    check_loads(store_path, *range(10))
    swap(store_path, delta_of(9, 8))
    with Store.open(store_path, config=CONFIG, read_only=True) as store:
        with pytest.raises(InconsistentCheckpointError, match="more than 8 deltas"):
            store.load(9)
        with pytest.warns(SkippedCheckpointWarning, match="step 9"):
            assert torch.equal(store.load()["w"], weights(8))  # type: ignore[index]  # a mapping
        (finding,) = (one for one in store.verify() if one.severity is Severity.ERROR)
        assert finding.checkpoints[0].startswith("run default, step 9")


@pytest.mark.parametrize("ends", [True, False])
def test_chain_is_followed_up_to_its_limit(store_path: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> None:
    """Test that each link costs one pass over all packs, and that deeper bases are not searched."""
    save_steps(store_path, 0, 60)
    swap(store_path, delta_of(60, 59))
    write_pack(store_path, *(delta_of(step, step - 1) for step in range(1 if ends else 30, 60)))
    listings = []
    with Store.open(store_path, config=CONFIG, read_only=True) as store:
        listed = store.resources.tier.pack_ids
        monkeypatch.setattr(store.resources.tier, "pack_ids", lambda: listings.append(1) or listed())
        with pytest.raises(InconsistentCheckpointError, match="more than 8 deltas"):
            store.load(60)
        assert len(listings) < 40
        with pytest.warns(SkippedCheckpointWarning, match="step 60"):
            assert torch.equal(store.load()["w"], weights(0))  # type: ignore[index]  # a mapping
    write_pack(store_path, encode_zstd(digest(plain_of(60)), memoryview(plain_of(60))))
    with Store.open(store_path, config=CONFIG, read_only=True) as store:
        assert torch.equal(store.load(60)["w"], weights(60))  # type: ignore[index]  # a mapping


@pytest.mark.slow
def test_lost_base_is_reported_up_to_the_limit_of_a_chain(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that further partitions, which cannot be decoded anyway, are not reported."""
    save_steps(store_path, *range(1, 60))
    swap(store_path, *(delta_of(step, step - 1) for step in range(1, 60)))
    tier = NvmeTier(store_path, CONFIG, read_only=True)
    asked = []
    bases = PartitionCopy.bases
    monkeypatch.setattr(PartitionCopy, "bases", lambda copy: asked.append(copy) or bases(copy))
    needs = PartitionSet.of_lengths({digest(plain_of(step)): 4 * COUNT for step in range(1, 60)})
    with pytest.raises(MissingPartitionError, match="needs base"):
        PartitionLocator(tier, needs, ())
    assert len(asked) < 60 * 12


def test_collection_keeps_needed_bases(chain: Path) -> None:
    """Test that the packs of both bases stay with the last checkpoint, and are freed without it."""
    with Store.open(chain, config=CONFIG, create=True) as store:
        store.delete(0)
        store.delete(1)
        assert store.gc().freed_packs == 0
    check_loads(chain, 2)
    with Store.open(chain, config=CONFIG, create=True) as store:
        store.delete(2)
        assert store.gc().freed_packs == 3


def test_usage_counts_bases(chain: Path) -> None:
    """Test freeable bytes, and all checkpoints that need the base."""
    with Store.open(chain, config=CONFIG, create=True) as store:
        own = {one.step: one.own_bytes for one in store.disk_usage().checkpoints}
        assert own[0] == own[1] == 0
        assert own[2] > 0
        for step, freeable in ((0, 0), (1, 0), (2, 3)):
            store.delete(step)
            found, would = store.disk_usage(), store.gc(dry_run=True)
            assert (found.freeable_packs, found.freeable_bytes) == (would.freed_packs, would.freed_bytes)
            assert found.freeable_packs == freeable


def test_a_base_that_nothing_needs_any_more_is_freed(chain: Path) -> None:
    """Test that a frame that is not live does not keep its base."""
    with Store.open(chain, config=CONFIG, create=True) as store:
        store.delete(1)
        store.delete(2)
        assert store.gc().freed_packs == 2
    check_loads(chain, 0)


def test_damaged_base_damages_its_dependents(chain: Path) -> None:
    """Test that the error names both partitions, verify names all checkpoints, and none is restored."""
    base = pack_with(chain, plain_of(0))
    flip(base, (4096 + 300) * 8)
    with Store.open(chain, config=CONFIG, read_only=True) as store:
        for step in (1, 2):
            with pytest.raises(InconsistentCheckpointError) as caught:
                store.load(step)
            assert isinstance(caught.value.__cause__, DamagedPartitionError) or "needs base" in str(caught.value)
            assert digest(plain_of(step)).hex() in str(caught.value)
            assert digest(plain_of(0)).hex() in str(caught.value)
        found = {one.where: one for one in store.verify() if one.severity is Severity.ERROR}
        assert {name for one in found.values() for name in one.checkpoints} >= {
            f"run default, {checkpoint}" for checkpoint in _names_of(store)
        }
        assert len(found) == 3
        assert len(found[f"packs/{base.name} frame 0"].checkpoints) == 3
        assert {one.where for one in store.verify(step=2)} == set(found)


def _names_of(store: Store) -> list[str]:
    return [f"step {one.step} (generation {one.generation}, save {one.save_id[:12]})" for one in store.checkpoints()]


def test_a_missing_base_makes_a_checkpoint_inconsistent(chain: Path) -> None:
    """Test that the indexes show the missing base before any frame is read."""
    pack_with(chain, plain_of(0)).unlink()
    with Store.open(chain, config=CONFIG, read_only=True) as store:
        with pytest.raises(InconsistentCheckpointError) as caught:
            store.load(2)
        needs = f"partition {digest(plain_of(2)).hex()} needs base {digest(plain_of(1)).hex()}"
        assert f"{needs}, which cannot be read from any pack" in str(caught.value)


def test_another_copy_of_a_base_is_taken(chain: Path) -> None:
    """Test the intact copy of a base, and a full copy of a partition that has lost its base."""
    spare = plain_of(0)
    flip(pack_with(chain, spare), (4096 + 300) * 8)
    write_pack(chain, encode_zstd(digest(spare), memoryview(spare)))
    with Store.open(chain, config=CONFIG, read_only=True) as store:
        assert torch.equal(store.load(2)["w"], weights(2))  # type: ignore[index]  # a mapping
    for pack in (chain / "packs").glob("*.pack"):
        if digest(spare) in _names(pack):
            pack.unlink()
    whole = plain_of(2)
    write_pack(chain, encode_zstd(digest(whole), memoryview(whole)))
    with Store.open(chain, config=CONFIG, read_only=True) as store:
        assert torch.equal(store.load(2)["w"], weights(2))  # type: ignore[index]  # a mapping


def test_a_derived_partition_is_read_from_its_master(store_path: Path) -> None:
    """Test a bfloat16 copy, which takes 16 bytes in addition to its master."""
    master = plain_of(0)
    copy = rounded_base(memoryview(master), 0, 2 * COUNT, derived.BFLOAT16).tobytes()
    tensor = torch.from_numpy(np.frombuffer(copy, dtype="<i2").copy()).view(torch.bfloat16)
    assert torch.equal(tensor, weights(0).bfloat16())
    with Store.open(store_path, config=CONFIG, create=True) as store:
        store.save({"w": weights(0)}, step=0)
        store.save({"b": tensor}, step=1)
    encoded = encode_derived(digest(copy), memoryview(copy), derived.BFLOAT16, digest(master), memoryview(master), 0)
    assert encoded is not None
    swap(store_path, encoded)
    with Store.open(store_path, config=CONFIG, create=True) as store:
        store.delete(0)
        assert store.gc().freed_packs == 0
        assert torch.equal(store.load(1)["b"], tensor)  # type: ignore[index]  # a mapping
        assert store.verify() == []


def test_partition_is_reused_with_its_base(chain: Path) -> None:
    """Test that a save of the same bytes writes nothing, and keeps the bases."""
    with Store.open(chain, config=CONFIG, create=True) as store:
        assert store.save({"w": weights(2)}, step=3).written_bytes == 0
        for step in (0, 1, 2):
            store.delete(step)
        store.gc()
        assert torch.equal(store.load(3)["w"], weights(2))  # type: ignore[index]  # a mapping
    kinds = [
        decode_header(data[at : at + HEADER_BYTES], "test").descriptor.kind
        for pack in (chain / "packs").glob("*.pack")
        if (data := pack.read_bytes())
        for at in range(4096, len(data), 4096)
        if data[at : at + 8] == b"ASYMFRAM"
    ]
    assert sorted(kinds) == [0, 1, 1]


@pytest.mark.parametrize("place", ["header", "index", "frame"])
def test_a_damaged_pack_of_deltas_is_repaired(chain: Path, place: str) -> None:
    """Test that frames are copied in encoded form, with their bases."""
    pack = pack_with(chain, plain_of(2))
    offset = {"header": 40, "index": pack.stat().st_size - 4096 + 80, "frame": 4096 + 20}[place]
    flip(pack, offset * 8)
    with Store.open(chain, config=CONFIG, create=True) as store:
        assert store.repair().left == ()
    assert not pack.exists()
    data = pack_with(chain, plain_of(2)).read_bytes()
    assert decode_header(data[4096 : 4096 + HEADER_BYTES], "test").descriptor == delta_of(2, 1).descriptor
    check_loads(chain, 0, 1, 2)


def test_a_repair_keeps_deltas_whose_base_may_come_back(chain: Path) -> None:
    """Test that the next save of the base makes all dependent partitions readable."""
    flip(pack_with(chain, plain_of(0)), (4096 + 300) * 8)
    with Store.open(chain, config=CONFIG, create=True) as store:
        assert {one.kind for one in store.repair().left} >= {"lost-partitions"}
        store.save({"w": weights(0)}, step=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (0, 1, 2):
                assert torch.equal(store.load(step)["w"], weights(step))  # type: ignore[index]  # a mapping
        assert store.repair().left == ()
        assert [one for one in store.verify() if one.severity is not Severity.HINT] == []
