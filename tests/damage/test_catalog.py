"""Test a damaged catalog: loads do not read it, no checkpoint is lost, and the second start repairs it.

LMDB maps its file without checksums. A flipped bit may read as another value, may raise an error in the middle of a
save, and may kill the process.
"""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from asymcheck import Checkpointer, StoreConfig
from asymcheck.errors import CatalogError, OutOfSpaceError, StorageError
from asymcheck.storage import process_identity
from asymcheck.storage.process_identity import hold, let_go
from asymcheck.store import Store
from tests.damage.catalog_child import CONFIG, check, saved_and_kept, state, use
from tests.damage.flips import flip
from tests.damage.small_store import same
from tests.zygote import Zygote

TENSORS = 8
MODULE = "tests.damage.catalog_child"
VARIANTS = ["compact", "with free pages", "killed"]
PAGE = 4096
STARTS = 2
"""Maximum number of starts until a start finds no damage."""


def _build(zygote: Zygote, path: Path, variant: str, tensors: int = TENSORS) -> bytes:
    """Create a store with a variant of the catalog; return the content of the catalog."""
    zygote.call(
        f"{MODULE}:build",
        path=str(path),
        tensors=tensors,
        killed=variant == "killed",
        compact=variant == "compact",
    )
    assert bool(list((path / "catalog" / "open").iterdir())) == (variant == "killed")
    return (path / "catalog" / "data.mdb").read_bytes()


def _bits(data: bytes, count: int, seed: int) -> Iterator[int]:
    """Return bits of used bytes and page headers, and some random bits."""
    dice = random.Random(seed)
    used = [place for place, byte in enumerate(data) if byte or place % PAGE < 16]
    for _ in range(count):
        byte = dice.choice(used) if dice.random() < 0.95 else dice.randrange(len(data))
        yield byte * 8 + dice.randrange(8)


def _use_each(zygote: Zygote, paths: list[Path], step: int, tensors: int) -> dict[Path, str]:
    """Use one store after another in a child, and continue in another child if it dies; return the results."""
    ends = {}
    left = list(paths)
    while left:
        outcome = zygote.call(
            f"{MODULE}:use_each", paths=list(map(str, left)), tensors=tensors, step=step, timeout_s=120
        )
        survived = [path for path in left if (path / "result.tmp").exists()]
        for path in survived:
            result = json.loads((path / "result.tmp").read_text())
            (path / "result.tmp").unlink()
            assert not result["error"], result["error"]
            ends[path] = " ".join(result["refused"])
        left = left[len(survived) :]
        if left:
            assert outcome.signal in (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT), str(outcome)
            ends[left.pop(0)] = str(outcome)
    return ends


def _survives(zygote: Zygote, template: Path, bits: list[int], tensors: int = TENSORS) -> list[str]:
    """Flip each bit in a separate copy, and use every copy until no damage is left; return the first results."""
    paths = {}
    for number, bit in enumerate(bits):
        path = template.with_name(f"{template.name}-{number}")
        shutil.copytree(template, path)
        flip(path / "catalog" / "data.mdb", bit)
        paths[path] = bit
    ends: list[list[str]] = []
    left = list(paths)
    for start in range(STARTS):
        fared = _use_each(zygote, left, 10 + start, tensors)
        ends.append(list(fared.values()))
        left = [path for path, end in fared.items() if end]
    assert not left, f"not repaired after {STARTS} starts: bits {[paths[path] for path in left]}"
    for path in paths:
        shutil.rmtree(path)
    return ends[0]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "count"), [("compact", 25), ("with free pages", 15), ("killed", 15)])
def test_no_flip_in_the_catalog_costs_a_checkpoint(zygote: Zygote, tmp_path: Path, variant: str, count: int) -> None:
    """Test loads, a save, a deletion, a collection and loads: every checkpoint exists for any flip."""
    template = tmp_path / "store"
    bits = list(_bits(_build(zygote, template, variant), count, seed=1))
    for first in range(0, count, 25):
        _survives(zygote, template, bits[first : first + 25])


@pytest.mark.long
@pytest.mark.parametrize("tensors", [TENSORS, 150])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_flip_in_the_catalog_costs_a_checkpoint_at_length(
    zygote: Zygote, tmp_path: Path, variant: str, tensors: int
) -> None:
    """Test thousands of flips, also in a catalog with several levels of pages."""
    template = tmp_path / "store"
    bits = list(_bits(_build(zygote, template, variant, tensors), 4000 if tensors == TENSORS else 1000, seed=2))
    ends: list[str] = []
    for first in range(0, len(bits), 25):
        ends += _survives(zygote, template, bits[first : first + 25], tensors)
    assert any("killed" in end for end in ends) or variant != "compact"
    # A catalog whose last user was killed is rebuilt before it is read, so flips in it have no effect.
    assert any("MDB_" in end for end in ends) or variant == "killed"


@pytest.mark.slow(quick=["2"])
@pytest.mark.parametrize("pages", range(6))
def test_a_catalog_cut_short_may_kill_one_process_and_not_the_next(zygote: Zygote, tmp_path: Path, pages: int) -> None:
    """Test a read beyond the end of a mapped file, which is a signal: the next start finds the mark of the dead."""
    path = tmp_path / "store"
    data = _build(zygote, path, "compact")
    os.truncate(path / "catalog" / "data.mdb", pages * PAGE)
    ends = [_use_each(zygote, [path], 10 + start, TENSORS)[path] for start in range(STARTS)]
    assert ends[-1] == ""
    assert (ends[0] != "") == (PAGE < pages * PAGE < len(data))
    check(str(path), TENSORS, [1, 3, 4, *saved_and_kept(str(path))])
    assert {11} <= set(saved_and_kept(str(path)))


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(5).randbytes(path.stat().st_size))


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.slow(quick=["lock.mdb-noise"])
@pytest.mark.parametrize("damage", [_noise, _zeros, Path.unlink], ids=["noise", "zeros", "lost"])
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "writer.lock"])
def test_a_file_of_the_catalog_that_is_lost_or_overwritten(
    zygote: Zygote, tmp_path: Path, name: str, damage: object
) -> None:
    """Test each file of the catalog, replaced by noise or zeros, or removed: all loads and saves work."""
    path = tmp_path / "store"
    _build(zygote, path, "with free pages")
    damage(path / "catalog" / name)  # type: ignore[operator]  # JSON or a stand-in, untyped on purpose
    ends = [_use_each(zygote, [path], 10 + start, TENSORS)[path] for start in range(STARTS)]
    assert ends[-1] == ""
    check(str(path), TENSORS, [1, 3, 4])


def test_a_catalog_that_is_no_database_is_replaced_at_once(zygote: Zygote, tmp_path: Path) -> None:
    """Test that the same start drops the file and rebuilds the catalog, without manual work."""
    path = tmp_path / "store"
    data = _build(zygote, path, "compact")
    (path / "catalog" / "data.mdb").write_bytes(b"no database".ljust(len(data), b"\0"))
    assert use(str(path), TENSORS, 10) == []


@pytest.mark.slow
def test_a_damaged_number_of_pages_is_no_dead_end(tmp_path: Path) -> None:
    """Test that the error about memory names the command that replaces the catalog."""
    path = tmp_path / "store"
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(state(1, TENSORS), step=1)
    with (path / "catalog" / "data.mdb").open("r+b") as file:
        for meta in range(2):
            file.seek(meta * PAGE + 136)
            file.write((1 << 50).to_bytes(8, "little"))
    with Store.open(path, config=CONFIG) as store:
        with pytest.raises(CatalogError, match="run asymcheck rebuild-catalog"):
            store.save(state(2, TENSORS), step=2)
        store.resources.rebuild_catalog()
        store.save(state(2, TENSORS), step=2)


def test_damage_met_in_use_is_noted_for_the_next_start(zygote: Zygote, tmp_path: Path) -> None:
    """Test an error of LMDB in the middle of a save: nothing is lost, and a clean close does not hide it."""
    template = tmp_path / "store"
    data = _build(zygote, template, "compact")
    met = []
    for page in range(2, len(data) // PAGE):
        path = tmp_path / f"page{page}"
        shutil.copytree(template, path)
        # A page with an invalid type.
        (path / "catalog" / "data.mdb").write_bytes(data[: page * PAGE + 10] + b"\0" + data[page * PAGE + 11 :])
        met.append(_use_each(zygote, [path], 10, TENSORS)[path])
        assert list((path / "catalog" / "open").iterdir()) == ([path / "catalog/open/damaged"] if met[-1] else [])
        check(str(path), TENSORS, [1, 3, 4])
        assert use(str(path), TENSORS, 11) == []
    assert "" in met, "a page that is needed to open it: repaired by the same start"
    assert any("stop all processes that use it: the next start rebuilds it" in end for end in met)


def test_a_page_of_two_types_fails_the_commits_of_one_start(zygote: Zygote, tmp_path: Path) -> None:
    """Test leaf pages that are also flagged as overflow pages, which LMDB reports as a failed write of each commit."""
    template = tmp_path / "store"
    data = _build(zygote, template, "compact")
    leaf, overflow = 2, 4
    pages = [page for page in range(2, len(data) // PAGE) if data[page * PAGE + 10] == leaf]
    ends = _survives(zygote, template, [(page * PAGE + 10) * 8 + overflow.bit_length() - 1 for page in pages])
    assert any("mdb_txn_commit" in end and "the next start rebuilds it" in end for end in ends)


def test_catalog_that_kills_writers_kills_once(zygote: Zygote, tmp_path: Path) -> None:
    """Test a wrong page number, which LMDB checks when it writes the page; a scan does not detect it."""
    path = tmp_path / "store"
    data = bytearray(_build(zygote, path, "compact"))
    for page in range(2, len(data) // PAGE):
        data[page * PAGE] ^= 1
    (path / "catalog" / "data.mdb").write_bytes(data)
    ends = [_use_each(zygote, [path], 10 + start, TENSORS)[path] for start in range(STARTS)]
    assert "SIGABRT" in ends[0]
    assert ends[1] == ""


def test_an_old_copy_of_the_catalog_does_no_harm(tmp_path: Path) -> None:
    """Test entries of missing or overwritten packs: only partitions in the pack's own index are reused."""
    path = tmp_path / "store"
    data = path / "catalog" / "data.mdb"
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(state(1, TENSORS), step=1)
        old = data.read_bytes()
        store.delete(1)
        assert store.gc().freed_packs
        store.save(state(2, 3 * TENSORS), step=2)
    data.write_bytes(old)
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(state(3, TENSORS), step=3)
        store.save(state(1, TENSORS), step=1, run="other")
        store.gc()
        assert same(store.load(2), state(2, 3 * TENSORS))
        assert same(store.load(3), state(3, TENSORS))
        assert same(store.load(run="other"), state(1, TENSORS))
        assert store.verify() == []


def test_a_damaged_entry_of_a_manifest_counts_as_absent(tmp_path: Path) -> None:
    """Test the rule of the format; a key that is not text, with a valid checksum, names no file."""
    path = tmp_path / "store"
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(state(1, TENSORS), step=1)
        catalog = store.resources.catalog()
        with catalog.read() as transaction:
            before = transaction.manifests()
        with catalog.write() as transaction:
            transaction._txn.put(b"default/x", b"damaged", db=transaction._db["manifests"])
            assert transaction.manifests() == before
            for key in (b"\xff\xfe/\0", b"/", b"../../x" * 60, b"a" * 500):
                transaction.put_manifest(key, 5)
        store.gc()
        assert same(store.load(), state(1, TENSORS))
        with catalog.read() as transaction:
            assert transaction.manifests() == before


def test_a_training_goes_on_after_a_repair_of_its_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a damaged pin, which only a collection reads. A save in progress, which may have a pin, is not disturbed."""
    # Other tests of this process pretend that a save was killed.
    monkeypatch.setattr(process_identity, "_held", set())
    trained = state(1, TENSORS)
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        checkpointer = Checkpointer(store, trained, every=1, keep=None)
        checkpointer.step(1)
        checkpointer.wait()
        with store.resources.catalog().write() as transaction:
            transaction._txn.put(b"x" * 20, b"damaged", db=transaction._db["pins"])
        hold(b"pin")
        with pytest.raises(CatalogError, match="during a save of this process"):
            store.repair()
        let_go(b"pin")
        assert [one.kind for one in store.repair().done] == ["catalog"]
        trained["added"] = state(2, TENSORS)
        checkpointer.step(2)
        checkpointer.wait()
        assert same(store.load(2), trained)


def test_full_map_names_its_setting(tmp_path: Path) -> None:
    """Test that the advice is not to free space on a drive that is not full."""
    with Store.open(tmp_path / "store", config=StoreConfig(catalog_map_bytes=1 << 20), create=True) as store:
        catalog = store.resources.catalog()

        def fill() -> None:
            with catalog.write() as transaction:
                for number in range(1 << 16):
                    transaction.put_manifest(b"%032d" % number, 5)

        with pytest.raises(OutOfSpaceError, match=r"1,048,576 bytes: give a larger StoreConfig\(catalog_map_bytes=…\)"):
            fill()
        store.save(state(1, TENSORS), step=1)


def test_commit_on_a_lost_drive_is_an_error_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a file system that has shut down, and does not even show its free space."""

    def refuse(_path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        catalog = store.resources.catalog()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", refuse)
            with pytest.raises(StorageError, match="check the drive"), catalog.write():
                raise lmdb.Error("mdb_txn_commit: Input/output error")
        store.save(state(1, TENSORS), step=1)


def test_catalog_that_is_removed_in_use_is_refused(tmp_path: Path) -> None:
    """Test that no save relies on pins that a collection of another process cannot see."""
    path = tmp_path / "store"
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(state(1, TENSORS), step=1)
        shutil.rmtree(path / "catalog")
        with pytest.raises(CatalogError, match="was removed while it was in use; stop all processes"):
            store.save(state(2, TENSORS), step=2)
    with Store.open(path, config=CONFIG) as store:
        store.save(state(3, TENSORS), step=3)
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 3]
        assert store.verify() == []


@pytest.mark.parametrize("damage", [Path.touch, Path.unlink], ids=["noted", "lost"])
def test_damaged_catalog_in_use_is_left_alone(zygote: Zygote, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Test that a rebuild does not free pinned packs: the error names the process and the remedy."""
    path = tmp_path / "store"
    _build(zygote, path, "with free pages")
    damage(path / "catalog" / ("open/damaged" if damage is Path.touch else "data.mdb"))
    mark = f"1-{Path('/proc/1/stat').read_bytes().rpartition(b')')[2].split()[19].decode()}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    living = path / "catalog" / "open" / f"{mark}-{boot}-{os.readlink('/proc/self/ns/pid')}"
    with living.open("x") as mark_file:
        fcntl.flock(mark_file, fcntl.LOCK_EX)
        with Store.open(path, config=CONFIG, create=True) as store:
            with pytest.raises(CatalogError, match=r"in use by process 1\b.*the next start rebuilds it"):
                store.save(state(10, TENSORS), step=10)
            store.load()
    assert use(str(path), TENSORS, 11) == []
