"""Test a partition with two copies: if one copy is damaged, the other is read."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from asymcheck.errors import InconsistentCheckpointError
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.fsck.verify import Severity
from asymcheck.storage.local_files import translated
from asymcheck.storage.nvme import Files, NvmeTier, Slot
from asymcheck.store import Store
from tests.damage.flips import flip
from tests.damage.small_store import CONFIG, SmallStore, check_findings, load_all, same

STATE = {"w": torch.arange(700, dtype=torch.int32), "b": torch.arange(900, dtype=torch.int16)}


def _save_again(path: Path) -> None:
    """Save the state while the packs are moved away, so that every partition is written again."""
    packs = path / "packs"
    away = packs.rename(path / "away.tmp")
    packs.mkdir()
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(STATE, step=1)
    for pack in packs.iterdir():
        pack.rename(away / pack.name)
    packs.rmdir()
    away.rename(packs)


@pytest.fixture
def twice(tmp_path: Path) -> SmallStore:
    """Return a store with one checkpoint whose partitions are all in two packs."""
    path = tmp_path / "store"
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(STATE, step=1)
    _save_again(path)
    # Keep one of the two saves of step 1, which must find the packs of the other save.
    (path / "catalog" / "data.mdb").unlink()
    with Store.open(path, config=CONFIG, create=True) as store:
        assert len(store.checkpoints()) == 2
    return SmallStore(path, {1: STATE})


def _flip_payload(path: Path) -> None:
    flip(path, (4096 + 300) * 8)


def _flip_frame_header(path: Path) -> None:
    flip(path, (4096 + 20) * 8)


def _flip_padding(path: Path) -> None:
    flip(path, (8192 - 1) * 8)


def _flip_pack_header(path: Path) -> None:
    flip(path, 40 * 8)


def _flip_index(path: Path) -> None:
    flip(path, (path.stat().st_size - 4096 + 80) * 8)


def _cut(path: Path) -> None:
    os.truncate(path, 4096 + 100)


DAMAGE = [_flip_payload, _flip_frame_header, _flip_padding, _flip_pack_header, _flip_index, _cut, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
def test_the_other_copy_is_read(twice: SmallStore, damage: Callable[[Path], None]) -> None:
    """Test any damage of any pack: the load is exact, and no checkpoint is skipped or lost."""
    for path in twice.files("packs/*.pack"):
        before = path.read_bytes()
        damage(path)
        loads = load_all(twice)
        assert (loads.refused, loads.skipped) == ({}, ())
        findings = check_findings(twice, loads)
        assert all(finding.severity is not Severity.ERROR for finding in findings)
        assert findings or not path.exists()
        path.write_bytes(before)


def test_copies_damaged_in_different_frames_complete_each_other(twice: SmallStore) -> None:
    """Test that single frames are read from the other pack."""
    first, second = twice.files("packs/*.pack")
    with twice.open() as store:
        places = [store.resources.tier.open_pack(bytes.fromhex(path.stem)) for path in (first, second)]  # type: ignore[arg-type]  # JSON or a stand-in, untyped on purpose
    names = places[0].digests()
    assert len(names) > 1
    for place, name in zip(places, names, strict=False):
        flip(place.path, (int(place.entries[place.digests().index(name)]["offset"]) + 130) * 8)
        place.close()
    assert load_all(twice).refused == {}
    assert {finding.severity for finding in check_findings(twice, load_all(twice))} == {Severity.WARNING}


def test_when_every_copy_is_damaged_each_is_named(twice: SmallStore) -> None:
    """Test that the error names the damage of each copy."""
    packs = twice.files("packs/*.pack")
    for path in packs:
        _flip_payload(path)
    loads = load_all(twice)
    assert isinstance(loads.newest_error, InconsistentCheckpointError)
    for path in packs:
        assert f"of pack {path.stem}" in str(loads.newest_error)
    check_findings(twice, loads)


def test_a_second_copy_in_the_same_pack_is_read_too(tmp_path: Path) -> None:
    """Test two copies in one pack, which the format allows and this writer never creates."""
    path = tmp_path / "store"
    state = {"w": torch.arange(700, dtype=torch.int32)}
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(state, step=1)
        (own,) = (path / "packs").iterdir()
        data = state["w"].numpy().tobytes()
        writer = store.resources.tier.start_pack(len(data))
        for _ in range(2):
            slot = Slot(len(data))
            slot.payload(len(data))[:] = data
            writer.write(slot, FrameDescriptor.identity(digest(data), len(data)))
        writer.seal(0, "test")
        writer.close()
    own.unlink()
    small = SmallStore(path, {1: state})
    (pack,) = small.files("packs/*.pack")
    assert load_all(small).refused == {}
    flip(pack, (4096 + 300) * 8)
    assert load_all(small).refused == {}


class _Unreadable(Files):
    """A device that cannot read some ranges of one pack."""

    def __init__(self, path: Path, places: range) -> None:
        self.path, self.places = path, places

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Raise an error, like a worn drive."""
        if path == self.path and offset in self.places:
            with translated("read", path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(descriptor, buffers, offset, path)


@pytest.mark.parametrize("places", [range(1, 1 << 20), range(4096, 4097), range(1)], ids=["most", "frame", "header"])
def test_a_copy_that_the_device_cannot_read_is_passed_over(twice: SmallStore, places: range) -> None:
    """Test an I/O error in the index, a frame and the header, which counts as damage."""
    for path in twice.files("packs/*.pack"):
        with Store(NvmeTier(twice.path, CONFIG, read_only=True, files=_Unreadable(path, places))) as store:
            assert same(store.load(), STATE)
            assert all(finding.severity is not Severity.ERROR for finding in store.verify())
