"""Test whole files: truncated, empty, missing, or replaced by another file, a folder or a link."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asymcheck.errors import AsymcheckError, CheckpointNotFoundError, HeadRecordError, StorageError
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.storage.nvme import Files
from tests.damage.flips import content, covered_bits
from tests.damage.small_store import SmallStore, check_findings, load_all, make_store, same, small_state

PATTERNS = ["packs/*.pack", "manifests/*/*/*.manifest", "heads/*/*.head", "asymcheck.store"]


@pytest.fixture
def small(tmp_path: Path) -> SmallStore:
    """Return a store to be damaged."""
    return make_store(tmp_path / "store", steps=3)


@contextlib.contextmanager
def moved_away(path: Path) -> Iterator[Path]:
    """Move a file out of the store for the ``with`` block, and remove its replacement afterwards."""
    aside = path.with_name(f"{os.urandom(4).hex()}.tmp")
    path.rename(aside)
    try:
        yield aside
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


def _nothing(path: Path, aside: Path) -> None:
    """Create no replacement."""


def _folder(path: Path, aside: Path) -> None:
    path.mkdir()


def _full_folder(path: Path, aside: Path) -> None:
    path.mkdir()
    (path / "something").write_text("else")


def _dangling_link(path: Path, aside: Path) -> None:
    path.symlink_to("nowhere")


def _circular_link(path: Path, aside: Path) -> None:
    path.symlink_to(path.name)


def _empty(path: Path, aside: Path) -> None:
    path.touch()


def _zeros(path: Path, aside: Path) -> None:
    path.write_bytes(bytes(aside.stat().st_size))


def _text(path: Path, aside: Path) -> None:
    path.write_bytes(b"something else altogether\n" * 1000)


def _pipe(path: Path, aside: Path) -> None:
    """Create a pipe, as an archive may contain: opening it waits for another process."""
    os.mkfifo(path)


REPLACEMENTS = [_nothing, _folder, _full_folder, _dangling_link, _circular_link, _empty, _zeros, _text, _pipe]


def _check(small: SmallStore, path: Path) -> None:
    """Check the promises of a store in which one file cannot be used."""
    loads = load_all(small)
    if path.name == "asymcheck.store":
        assert len(loads.refused) == 3
        assert small.path.name in str(loads.newest_error)
        return
    findings = check_findings(small, loads)
    assert findings, f"nobody noticed {path}"
    if path.suffix == ".head":
        assert not loads.refused
        if loads.newest_error is not None:
            assert isinstance(loads.newest_error, HeadRecordError)
            assert "step=" in str(loads.newest_error)
            assert any(finding.invariant == "I6" for finding in findings)
    elif path.suffix == ".manifest":
        assert len(loads.refused) == 1
        assert path.name in str(next(iter(loads.refused.values())))


def _may_be_missing(path: Path) -> bool:
    """Return whether a store without this file looks like a store that never had it."""
    return path.name == "00000001.head" or (path.suffix == ".manifest" and not os.path.lexists(path))


@pytest.mark.slow(quick=["asymcheck.store-pipe"])
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__.strip("_"))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_file_that_is_something_else_is_noticed(
    small: SmallStore, pattern: str, replace: Callable[[Path, Path], None]
) -> None:
    """Test a missing file, a folder, a broken link, no bytes, zeros, and text: a named error, and a finding.

    When the file is restored, everything can be loaded again.
    """
    for path in small.files(pattern):
        with moved_away(path) as aside:
            replace(path, aside)
            if not (_may_be_missing(path) and not path.exists()):
                _check(small, path)
    assert check_findings(small, load_all(small)) == []


def test_a_checkpoint_whose_only_manifest_is_lost_is_gone_and_nothing_else(small: SmallStore) -> None:
    """Test that the step is not found, as if its save had never ended, and that other checkpoints load."""
    for path in small.files("manifests/*/*/*.manifest"):
        step = int(path.parent.name.split("-")[1])
        others = SmallStore(small.path, {other: state for other, state in small.states.items() if other != step})
        with moved_away(path):
            loads = load_all(others)
            assert loads.refused == {}
            assert loads.newest == max(others.states)
            with small.open() as store, pytest.raises(CheckpointNotFoundError, match=f"no checkpoint of step {step}"):
                store.restore(step)


@pytest.mark.slow(quick=["asymcheck.store"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_truncated_file_is_detected_anywhere(small: SmallStore, pattern: str) -> None:
    """Test each block boundary, the bytes next to it, and random lengths."""
    for path in small.files(pattern)[:2]:
        data = path.read_bytes()
        covered = covered_bits(path).stop // 8
        edges = {at + step for at in range(0, covered + 1, BLOCK_BYTES) for step in (-1, 0, 1)}
        cuts = edges | {128, covered - 8} | set(random.Random(3).sample(range(covered), 10))
        for length in sorted(cut for cut in cuts if 0 <= cut < covered):
            with content(path, data[:length]):
                _check(small, path)
    assert check_findings(small, load_all(small)) == []


@pytest.mark.slow
def test_a_longer_record_or_manifest_is_noticed(small: SmallStore) -> None:
    """Test bytes after the end, which are damage except for packs, whose files may have older bytes."""
    for path in small.files(*PATTERNS):
        with content(path, path.read_bytes() + bytes(BLOCK_BYTES)):
            if path.suffix == ".pack":
                assert check_findings(small, load_all(small)) == []
            else:
                _check(small, path)


@pytest.mark.slow
def test_a_pack_under_the_name_of_another_is_noticed(small: SmallStore) -> None:
    """Test each pack with the content of each other pack, whose header has another id."""
    packs = small.files("packs/*.pack")
    for path in packs:
        for other in packs:
            if other != path:
                with content(path, other.read_bytes()):
                    _check(small, path)
                    findings = check_findings(small, load_all(small))
                (found,) = (finding for finding in findings if finding.kind == "damaged-pack")
                assert path.name in found.where
                assert f"names pack {other.stem}" in found.message


def test_frames_of_another_pack_are_noticed_though_each_is_intact(small: SmallStore) -> None:
    """Test a write at a wrong position: a frame has the id of its pack and its number."""
    first, second = small.files("packs/*.pack")[:2]
    data, other = first.read_bytes(), second.read_bytes()
    end = covered_bits(first).stop // 8
    block = slice(BLOCK_BYTES, 2 * BLOCK_BYTES)
    with content(first, data[: block.start] + other[block] + data[block.stop : end]):
        findings = check_findings(small, load_all(small))
    assert second.stem in findings[0].message


def test_a_manifest_in_the_folder_of_another_checkpoint_is_refused(small: SmallStore) -> None:
    """Test a moved and a copied manifest, whose bytes are never restored for the wrong step."""
    manifests = small.files("manifests/*/*/*.manifest")
    for path in manifests:
        for other in manifests:
            if other != path:
                stranger = other.parent / path.name
                shutil.copy(path, stranger)
                loads = load_all(small)
                assert len(loads.refused) == 1
                assert check_findings(small, loads)
                with moved_away(other):
                    loads = load_all(small)
                    assert "the header disagrees with the path" in str(next(iter(loads.refused.values())))
                    check_findings(small, loads)
                stranger.unlink()
    assert check_findings(small, load_all(small)) == []


def test_a_head_record_of_another_run_or_generation_is_refused(small: SmallStore) -> None:
    """Test that the record names its run and generation, and that the newest checkpoint is an error, not a guess."""
    with small.open(read_only=False) as store:
        store.training.begin_generation(None, run="other")
        store.training.begin_generation(None, run="other")
    heads = small.path / "heads"
    for stranger in (heads / "other" / "00000002.head", heads / "default" / "00000001.head"):
        with content(heads / "default" / "00000002.head", stranger.read_bytes()):
            loads = load_all(small)
            assert isinstance(loads.newest_error, HeadRecordError)
            assert not loads.refused
            assert [finding.kind for finding in check_findings(small, loads)] == ["damaged-head", "no-checkpoint"]


def test_the_descriptor_of_another_store_takes_nothing_away(tmp_path: Path, small: SmallStore) -> None:
    """Test that the catalog, which then belongs to another store, is rebuilt."""
    other = make_store(tmp_path / "other")
    shutil.copy(other.path / "asymcheck.store", small.path / "asymcheck.store")
    with small.open(read_only=False) as store:
        store.save(small_state(4), step=4)
        store.gc()
    assert load_all(SmallStore(small.path, {**small.states, 4: small_state(4)})).newest == 4


@pytest.mark.parametrize("replace", REPLACEMENTS[1:], ids=lambda replace: replace.__name__.strip("_"))
def test_collection_frees_nothing_while_a_manifest_cannot_be_read(
    small: SmallStore, replace: Callable[[Path, Path], None]
) -> None:
    """Test that gc refuses to work, and that the checkpoint can be loaded when the manifest is restored."""
    (path,) = (path for path in small.files("manifests/*/*/*.manifest") if "-000000000002-" in path.parent.name)
    with small.open(read_only=False) as store:
        with moved_away(path) as aside:
            replace(path, aside)
            with pytest.raises(AsymcheckError, match=path.name):
                store.gc()
        assert store.gc().freed_packs == 0
    assert load_all(small).refused == {}


@pytest.mark.slow(quick=["text"])
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__.strip("_"))
def test_a_save_and_a_collection_work_around_a_pack_that_cannot_be_read(
    small: SmallStore, replace: Callable[[Path, Path], None]
) -> None:
    """Test that the next save writes the partitions again, also after a rebuild of the catalog; gc skips the pack."""
    for path in small.files("packs/*.pack"):
        with moved_away(path) as aside:
            replace(path, aside)
            shutil.rmtree(small.path / "catalog", ignore_errors=True)
            with small.open(read_only=False) as store:
                store.save(small.states[3], step=3)
                store.gc()
                assert same(store.load(), small.states[3])
    assert load_all(small).refused == {}


def test_foreign_file_in_the_pool_is_never_overwritten(small: SmallStore) -> None:
    """Test a link, a folder, and a file with a second name."""
    live = small.files("packs/*.pack")
    pool = small.path / "pool"
    (pool / f"{1:032x}.pack").symlink_to(live[0])
    (pool / f"{2:032x}.pack").mkdir()
    (pool / f"{3:032x}.pack").symlink_to(f"{3:032x}.pack")
    os.link(live[1], pool / f"{4:032x}.pack")
    with small.open(read_only=False) as store:
        for step in (4, 5):
            store.save(small_state(step), step=step)
            store.gc()
    assert load_all(SmallStore(small.path, {**small.states, 4: small_state(4), 5: small_state(5)})).refused == {}


def test_a_hard_linked_copy_of_a_store_keeps_its_bytes(small: SmallStore, tmp_path: Path) -> None:
    """Test a copy by `cp -al`, which shares every pack: recycling must not write into shared files."""
    snapshot = SmallStore(tmp_path / "snapshot", small.states)
    shutil.copytree(small.path, snapshot.path, copy_function=os.link)
    with small.open(read_only=False) as store:
        for step in small.states:
            store.delete(step)
        done = store.gc()
        assert done.freed_packs
        # Recycled files would only use space in the pool.
        assert done.pooled_packs == 0
        store.save(small_state(8), step=8)
        store.save(small_state(9), step=9)
    assert load_all(snapshot).refused == {}
    (tmp_path / "link.pack").symlink_to(snapshot.files("packs/*.pack")[0])
    with pytest.raises(StorageError, match=r"link\.pack"):
        Files().open_existing(tmp_path / "link.pack")


@pytest.mark.slow(quick=["packs"])
@pytest.mark.parametrize("name", ["manifests", "packs", "heads", "pool", "catalog"])
def test_a_file_where_a_folder_belongs_gives_named_errors(small: SmallStore, name: str) -> None:
    """Test that every call succeeds, or raises an error of the package."""
    with moved_away(small.path / name):
        (small.path / name).write_text("not a folder")
        with small.open(read_only=False) as store:
            assert isinstance(store.verify(), list)
            for call in (
                store.restore,
                lambda: store.restore(1),
                store.checkpoints,
                lambda: store.save(small.states[1], step=9),
                lambda: store.delete(9),
                lambda: store.training.begin_generation(None, run="other"),
                store.gc,
            ):
                with contextlib.suppress(AsymcheckError):
                    call()
    if name not in ("manifests", "heads"):
        assert load_all(small).refused == {}


def test_a_pack_that_is_a_folder_counts_as_damaged(small: SmallStore) -> None:
    """Test an unneeded pack, which does not count as busy."""
    (small.path / "packs" / f"{1:032x}.pack").mkdir()
    assert [finding.kind for finding in check_findings(small, load_all(small))] == ["damaged-pack"]
