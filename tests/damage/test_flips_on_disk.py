"""Test flipped bits on disk: loads are correct or refused, and verify names lost data."""

import random
import re
from pathlib import Path

import pytest
import torch

from asymcheck.config import StoreConfig
from asymcheck.errors import InconsistentCheckpointError
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.fsck.verify import Severity
from asymcheck.store import Store
from tests.damage.flips import covered_bits, flipped
from tests.damage.small_store import CONFIG, SmallStore, check_findings, load_all, make_store, same

FLIPS = 8
"""Number of flips in each file of the small store."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    """Return a store in which every flip is undone."""
    return make_store(tmp_path_factory.mktemp("flips") / "store", steps=3)


@pytest.mark.slow
def test_a_flip_in_a_version_is_damage_and_not_a_newer_format(small: SmallStore) -> None:
    """Test each bit of the version in pack header, index and frame header, which counts as ordinary damage."""
    for path in small.files("packs/*.pack")[:2]:
        index = covered_bits(path).stop // 8 - BLOCK_BYTES
        for start in (0, BLOCK_BYTES, index):
            for bit in range((start + 8) * 8, (start + 10) * 8):
                with flipped(path, bit):
                    loads = load_all(small)
                    assert check_findings(small, loads)
                    reasons = [str(error) for error in loads.refused.values()] + list(loads.skipped)
                    assert not any("newer asymcheck" in reason for reason in reasons)


@pytest.mark.slow(quick=["packs/*.pack"])
@pytest.mark.parametrize("pattern", ["packs/*.pack", "manifests/*/*/*.manifest", "heads/*/*.head", "asymcheck.store"])
def test_a_flip_on_disk_never_gives_wrong_bytes_and_is_reported(small: SmallStore, pattern: str) -> None:
    """Test that a record costs nothing, a manifest its checkpoint, and a pack those that need it; verify agrees."""
    for path in small.files(pattern):
        bits = random.Random(path.suffix).sample(covered_bits(path), FLIPS)
        for bit in bits:
            with flipped(path, bit):
                loads = load_all(small)
                findings = check_findings(small, loads)
            assert findings, f"bit {bit} of {path} went unnoticed"
            if path.suffix in (".head", ".store"):
                assert (loads.refused, loads.newest, loads.skipped) == ({}, 3, ())
                assert [(finding.kind, finding.invariant) for finding in findings] == [("damaged-copy", "I9")]
            elif path.suffix == ".manifest":
                assert len(loads.refused) == 1
                assert path.name in str(next(iter(loads.refused.values())))
            else:
                assert loads.refused or all(finding.severity is Severity.WARNING for finding in findings)
    assert check_findings(small, load_all(small)) == []


def test_flip_in_a_shared_partition_loses_all_its_checkpoints(small: SmallStore) -> None:
    """Test that the finding lists the checkpoints with the tensor, and that the load has each reason."""
    with small.open() as store:
        (shared,) = {
            name
            for listing in store.resources.tier.manifests.checkpoints("default")
            for name in store.resources.tier.manifests.read("default", listing.ref, listing.manifests[0]).partitions()
            if all(
                name in _digests(store, other.ref.step)
                for other in store.resources.tier.manifests.checkpoints("default")
            )
        }
        path, bit = _place(store, shared)
    with flipped(path, bit):
        loads = load_all(small)
        findings = check_findings(small, loads)
    assert set(loads.refused) == {1, 2, 3}
    assert isinstance(loads.newest_error, InconsistentCheckpointError)
    assert [re.match(r"step (\d+)", reason)[1] for reason in loads.newest_error.reasons] == ["3", "2", "1"]  # type: ignore[index]  # JSON or a stand-in, untyped on purpose
    (finding,) = findings
    assert (finding.kind, len(finding.checkpoints)) == ("damaged-frame", 3)
    assert "model.frozen" in finding.tensors


def _digests(store: Store, step: int) -> set[bytes]:
    listings = [
        listing for listing in store.resources.tier.manifests.checkpoints("default") if listing.ref.step == step
    ]
    return set(store.resources.tier.manifests.read("default", listings[0].ref, listings[0].manifests[0]).partitions())


def _place(store: Store, name: bytes) -> tuple[Path, int]:
    """Return a bit in the payload of the frame with a partition."""
    for pack_id in store.resources.tier.pack_ids():
        pack = store.resources.tier.open_pack(pack_id)
        pack.close()
        if name in pack.digests():
            return pack.path, (int(pack.entries[pack.digests().index(name)]["offset"]) + 200) * 8
    raise AssertionError("no pack has it")


@pytest.mark.slow
def test_flips_in_the_tail_of_a_recycled_pack_are_harmless(tmp_path: Path) -> None:
    """Test that old bytes at the end of a recycled file affect neither loads nor verify."""
    config = StoreConfig(partition_bytes=4096, bundle_below_bytes=1024, inline_bytes=64, slots=1)
    old, new = (
        {"w": torch.arange(count, dtype=torch.float64).mul(value)} for count, value in ((6144, 3.0), (4096, 5.0))
    )
    with Store.open(tmp_path / "store", config=config, create=True) as store:
        store.save(old, step=1)
        store.delete(1)
        assert store.gc().pooled_packs == 1
        store.save(new, step=2)
    small = SmallStore(tmp_path / "store", {2: new}, config)
    (path,) = small.files("packs/*.pack")
    used, size = covered_bits(path).stop // 8, path.stat().st_size
    assert used < size
    for byte in random.Random(0).sample(range(used, size), 25):
        with flipped(path, byte * 8 + byte % 8):
            assert load_all(small).newest == 2
            assert check_findings(small, load_all(small)) == []


@pytest.mark.slow
def test_flips_in_frames_and_manifests_of_many_megabytes(tmp_path: Path) -> None:
    """Test partitions of the default size, several frames in flight, and padding between header and payload."""
    config = StoreConfig(partition_bytes=1 << 20, bundle_below_bytes=1 << 16, pack_bytes=8 << 20)
    numbers = torch.Generator().manual_seed(7)
    states = {
        step: {f"layer{i}": torch.randn(400_000, generator=numbers) for i in range(6)} | {"small": torch.ones(3000)}
        for step in (1, 2, 3)
    }
    with Store.open(tmp_path / "store", config=config, create=True) as store:
        for step, state in states.items():
            store.save(state, step=step)
    small = SmallStore(tmp_path / "store", states, config)
    files = small.files("packs/*.pack", "manifests/*/*/*.manifest")
    assert sum(path.stat().st_size for path in files) > 20 << 20
    dice = random.Random(11)
    for _ in range(25):
        path = dice.choices(files, [path.stat().st_size for path in files])[0]
        bits = covered_bits(path)
        if path.suffix == ".pack":  # its header and index are copies, which no load needs
            bits = bits[BLOCK_BYTES * 8 : -BLOCK_BYTES * 8]
        with flipped(path, dice.choice(bits)):
            loads = load_all(small)
            assert len(loads.refused) == 1
            assert check_findings(small, loads)


def test_same_tells_bits_apart() -> None:
    """Test that the comparison detects a sign of zero, a dtype, a type and an order."""
    zero = torch.zeros(2)
    assert same({"a": zero, "b": (1, 2.0)}, {"a": zero.clone(), "b": (1, 2.0)})
    for left, right in (
        (zero, -zero),
        (zero, zero.to(torch.float16)),
        (zero, zero.reshape(1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], (1,)),
        (0.0, -0.0),
        (1, True),
    ):
        assert not same(left, right)
    assert CONFIG.slots == 1
