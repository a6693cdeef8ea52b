"""Test that single bit flips in a pack, a manifest or a record are detected before data is returned."""

from pathlib import Path

import pytest

from asymcheck.codecs.decode import base_reader
from asymcheck.errors import BadMagicError, ChecksumError, FormatError
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.restore.frame_reader import read_checked
from asymcheck.restore.partition_locator import PartitionCopy
from asymcheck.storage.nvme import NvmeTier, Slot
from asymcheck.store import Store
from asymcheck.types import PackId
from tests.damage.flips import FlippingFiles, covered_bits
from tests.damage.small_store import CONFIG, SmallStore, check_findings, load_all, make_store
from tests.visiting import Visited, visiting

NO_BASES = base_reader(lambda _name: [])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    """Return a store that the tests only read."""
    return make_store(tmp_path_factory.mktemp("bits") / "store")


@pytest.fixture
def files() -> FlippingFiles:
    """Return the file operations that flip a bit."""
    return FlippingFiles()


@pytest.fixture
def tier(small: SmallStore, files: FlippingFiles) -> NvmeTier:
    """Return the store's tier with these file operations."""
    return NvmeTier(small.path, CONFIG, read_only=True, files=files)


def _damage(tier: NvmeTier, pack_id: PackId) -> FormatError | None:
    """Return the damage of the header or the index of a pack, as of a newly opened one."""
    pack = tier.open_pack(pack_id)
    pack.close()
    return pack.damage


@pytest.mark.slow
@visiting(8000)
def test_no_flipped_bit_of_a_pack_is_read_as_if_nothing_were_wrong(
    tier: NvmeTier, files: FlippingFiles, visited: Visited[int]
) -> None:
    """Test that a flip in header or index is noted at the opening, and that a flip in a frame refuses the frame."""
    packs = [tier.open_pack(pack_id) for pack_id in tier.pack_ids()]
    pack = max(packs, key=lambda pack: len(set(pack.entries["stored_length"].tolist())))
    files.path = pack.path
    slot = Slot(2 * CONFIG.partition_bytes)
    names = pack.digests()
    starts = [*pack.entries["offset"].tolist(), pack.header.index_offset]
    assert len(names) > 1
    assert starts[0] == BLOCK_BYTES
    missed = []
    for bit in visited(covered_bits(pack.path)):
        files.bit = bit
        byte = files.bit // 8
        try:
            if starts[0] <= byte < starts[-1]:
                sequence = sum(start <= byte for start in starts) - 1
                read_checked(PartitionCopy(pack, sequence), names[sequence], slot, NO_BASES)
            elif _damage(tier, pack.header.pack_id) is not None:
                continue
        except FormatError:
            continue
        missed.append(bit)
    for opened in packs:
        opened.close()
    assert not missed


def test_a_flip_in_each_field_gives_the_error_that_fits(tier: NvmeTier, files: FlippingFiles) -> None:
    """Test that the error names the first invalid field: the magic, or a checksum, also for a flipped version."""
    pack = tier.open_pack(tier.pack_ids()[0])
    files.path = pack.path
    expected = {0: BadMagicError, 8: ChecksumError, 16: ChecksumError, 100: ChecksumError, 120: ChecksumError}
    for offset, kind in expected.items():
        files.bit = offset * 8
        damage = _damage(tier, pack.header.pack_id)
        assert isinstance(damage, kind)
        assert pack.path.name in str(damage)
        files.bit = (int(pack.entries[0]["offset"]) + offset) * 8
        with pytest.raises(kind, match=f"frame 0 of pack {pack.header.pack_id.hex()}"):
            read_checked(PartitionCopy(pack, 0), pack.digests()[0], Slot(2 * CONFIG.partition_bytes), NO_BASES)
    pack.close()


@pytest.mark.slow
def test_no_flipped_bit_of_a_manifest_is_read_as_if_nothing_were_wrong(
    tier: NvmeTier, small: SmallStore, files: FlippingFiles
) -> None:
    """Test each bit of every manifest, whose content then differs from the digest in its name."""
    for listing in tier.manifests.checkpoints("default"):
        (name,) = listing.manifests
        files.path = tier.manifests.directory("default", listing.ref) / str(name)
        for bit in covered_bits(files.path):
            files.bit = bit
            with pytest.raises(ChecksumError):
                tier.manifests.read("default", listing.ref, name)


@visiting(2000)
def test_a_record_survives_each_flip_and_the_flip_is_counted(
    tier: NvmeTier, small: SmallStore, files: FlippingFiles, visited: Visited[int]
) -> None:
    """Test bits of every head record and of the descriptor: the other copy is read, and one counts as damaged."""
    expected = {generation: tier.manifests.read_head("default", generation) for generation in (1, 2)}
    for generation, intact in expected.items():
        assert intact is not None
        files.path = small.path / "heads" / "default" / f"{generation:08d}.head"
        for bit in visited(covered_bits(files.path)):
            files.bit = bit
            assert tier.manifests.read_head("default", generation) == (intact[0], 1)
    files.path = small.path / "asymcheck.store"
    for bit in visited(covered_bits(files.path)):
        files.bit = bit
        assert tier._read_descriptor() == (tier.descriptor, 1)


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["packs/*.pack", "manifests/*/*/*.manifest", "heads/*/*.head", "asymcheck.store"])
def test_no_flipped_bit_gets_past_a_load_or_past_verify(tmp_path: Path, pattern: str) -> None:
    """Test each bit of a whole store with the calls of a user.

    Every load returns the exact bytes, raises an error of the package, or returns an older checkpoint with the reason.
    verify lists lost data, and also reports a flip that costs nothing.
    """
    small = make_store(tmp_path / "store", tiny=True)
    files = FlippingFiles()

    def open_flipping() -> Store:
        return Store(NvmeTier(small.path, CONFIG, read_only=True, files=files))

    for path in small.files(pattern):
        files.path = path
        for bit in covered_bits(path):
            files.bit = bit
            loads = load_all(small, open_flipping)
            assert check_findings(small, loads, open_flipping), f"bit {bit} of {path} went unnoticed"
