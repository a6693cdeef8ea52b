"""Test read-only stores: by option, by permission and by mount, and stores without a catalog."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import CaptureConfig, Checkpointer
from asymcheck.errors import MissingPartitionError, ReadOnlyStoreError, StoreNotFoundError
from asymcheck.storage.nvme import pack_reader
from asymcheck.store import Store
from asymcheck.types import PackId
from tests.crash.actions import Action, lose_catalog, open_store, perform
from tests.crash.states import Journal, fingerprint, make_state
from tests.crash.survival import check_goes_on, check_unrepaired
from tests.zygote import Zygote

BEFORE: list[Action] = [["save", 0], ["save", 1], ["save", 2], ["delete", 0]]
NOBODY = 65534

WRITES: dict[str, Callable[[Store], object]] = {
    "save": lambda store: store.save(make_state(7), step=7),
    "delete": lambda store: store.delete(1),
    "gc": lambda store: store.gc(),
    "begin_generation": lambda store: store.training.begin_generation(None),
}


@pytest.fixture
def folder(zygote: Zygote, tmp_path: Path) -> Path:
    """Return a folder with a store of two checkpoints and its journal."""
    zygote.start(perform, path=str(tmp_path), actions=BEFORE).finish()
    return tmp_path


def _check_reads(store: Store) -> None:
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]
    for step in (1, 2):
        assert fingerprint(store.load(step)) == fingerprint(make_state(step))
    assert fingerprint(store.load()) == fingerprint(make_state(2))
    assert store.verify() == []


def _check_refuses(store: Store, message: str) -> None:
    for name, write in WRITES.items():
        with pytest.raises(ReadOnlyStoreError, match=message):
            write(store)
        assert name


def _snapshot(path: Path) -> dict[str, tuple[int, int]]:
    return {str(one): (one.stat().st_size, one.stat().st_mtime_ns) for one in sorted(path.rglob("*"))}


@pytest.mark.slow(quick=["lost"])
@pytest.mark.parametrize("catalog", ["there", "lost"])
def test_opened_read_only(folder: Path, catalog: str) -> None:
    """Test that all data can be read, with and without a catalog, and that no write succeeds."""
    if catalog == "lost":
        lose_catalog(folder / "store")
    before = _snapshot(folder / "store")
    with open_store(folder / "store", read_only=True) as store:
        _check_reads(store)
        _check_refuses(store, "opened with read_only=True")
    assert _snapshot(folder / "store") == before


def test_read_only_creates_nothing(tmp_path: Path) -> None:
    """Test that a path without a store is not changed."""
    with pytest.raises(StoreNotFoundError):
        open_store(tmp_path / "store", read_only=True)
    assert list(tmp_path.iterdir()) == []


def read_as_nobody(path: str, *, read_only: bool) -> None:
    """Read a store without write permission, and try to write. Runs in a child."""
    # Import all modules before the change of the user, who may not read the interpreter's own files.
    with open_store(Path(path), read_only=True) as store:
        _check_reads(store)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with open_store(Path(path), read_only=read_only) as store:
        _check_reads(store)
        _check_refuses(store, "read_only=True" if read_only else rf" belongs to user 0, not to user {NOBODY}: .*chown")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("read_only", [True, False])
def test_another_users_store(folder: Path, read_only: bool, zygote: Zygote) -> None:
    """Test that a user with read permission can read the store, however it was opened."""
    # pytest's own folder is private, so use another one.
    with tempfile.TemporaryDirectory() as open_to_all:
        store = Path(open_to_all) / "store"
        shutil.copytree(folder / "store", store)
        store.parent.chmod(0o755)
        if not all(parent.stat().st_mode & 0o001 for parent in store.parents):
            pytest.skip(f"{tempfile.gettempdir()} is private")
        before = _snapshot(store)
        zygote.start(read_as_nobody, path=str(store), read_only=read_only).finish()
        assert _snapshot(store) == before


def train_as(path: str, user: int, umask: int, step: int) -> None:
    """Begin or continue the training of a store as a user of the same group. Runs in a child."""
    ring_folder, state = Path(path).parent / "rings", {"w": torch.zeros(1000)}
    config = CaptureConfig(ring_folder=ring_folder)
    # Import all modules before the change of the user, who may not read the interpreter's own files.
    with Store.open(ring_folder.with_name("other"), create=True) as store:
        store.save(state, step=0)
    os.umask(umask)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(user)
    with (
        Store.open(path, create=True) as store,
        Checkpointer(store, state, every=1, keep=None, capture=config) as checkpointer,
    ):
        restored = checkpointer.restore()
        assert (restored.step if restored else -1) == step - 1
        checkpointer.step(step)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("users", "umask"),
    [((NOBODY - 1, NOBODY, NOBODY - 1), 0o002), ((NOBODY, 0, NOBODY), 0o022)],
    ids=["group", "root"],
)
def test_store_of_two_users(users: tuple[int, ...], umask: int, zygote: Zygote) -> None:
    """Test a store that a group shares by its umask, and one in which root has continued the training of its owner."""
    with tempfile.TemporaryDirectory() as open_to_all:
        folder = Path(open_to_all)
        (folder / "rings").mkdir()
        for shared in (folder, folder / "rings"):
            shared.chmod(0o777)
        if not all(parent.stat().st_mode & 0o001 for parent in folder.parents):
            pytest.skip(f"{tempfile.gettempdir()} is private")
        for step, user in enumerate(users):
            zygote.start(train_as, path=str(folder / "store"), user=user, umask=umask, step=step).finish()


def open_as_nobody(path: str) -> None:
    """Open a store in a folder that may not be searched. Runs in a child."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for options in ({}, {"create": True}, {"read_only": True}):
        with pytest.raises(ReadOnlyStoreError, match="no permission to read it"):
            Store.open(path, **options)  # type: ignore[arg-type]  # options of the method


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_store_in_a_private_folder_is_refused(folder: Path, zygote: Zygote) -> None:
    """Test that the error of a private folder is one of this package, however the store is opened."""
    folder.chmod(0o700)
    zygote.start(open_as_nobody, path=str(folder / "store")).finish()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_on_a_file_system_without_locks(store_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Test that a copy of a store on a network file system can be read, as SPEC.md §A12 allows."""
    with open_store(store_path) as store:
        for step in (1, 2):
            store.save(make_state(step), step=step)

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, open_store(store_path, read_only=True) as store:
        patch.setattr(fcntl, "flock", refuse)
        _check_reads(store)


def test_pack_that_is_recycled_during_a_read_without_locks(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a recycled pack is missing, and not damaged."""
    with open_store(store_path) as store:
        store.save(make_state(1), step=1)
    (path, *_) = (store_path / "packs").iterdir()

    def recycle(_descriptor: int, _operation: int) -> None:
        path.write_bytes(bytes(path.stat().st_size))
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    original = pack_reader.find_frames

    def find_frames(*arguments: object, **options: object) -> object:
        try:
            return original(*arguments, **options)  # type: ignore[arg-type]  # as it was called
        finally:
            path.rename(store_path / "pool" / path.name)

    with monkeypatch.context() as patch, open_store(store_path, read_only=True) as store:
        patch.setattr(fcntl, "flock", recycle)
        patch.setattr(pack_reader, "find_frames", find_frames)
        with pytest.raises(MissingPartitionError, match="does not exist"):
            store.resources.nvme.open_pack(PackId(bytes.fromhex(path.stem)))


@pytest.fixture
def read_only_mount(folder: Path) -> Iterator[Path]:
    """Return the store on a file system that is mounted read-only."""
    point = folder / "mounted"
    point.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(point)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        shutil.copytree(folder / "store", point / "store")
        subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
        yield point / "store"
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.slow(quick=["False"])
@pytest.mark.parametrize("read_only", [True, False])
def test_on_a_read_only_mount(read_only_mount: Path, read_only: bool) -> None:
    """Test that all data can be read, and that the error of a write says what to do."""
    with open_store(read_only_mount, read_only=read_only) as store:
        _check_reads(store)
        _check_refuses(store, "read_only=True")


@pytest.mark.slow
def test_the_catalog_is_deleted_between_saves(folder: Path) -> None:
    """Test that the catalog is rebuilt from the packs: stored data is not written again, deleted data stays deleted."""
    lose_catalog(folder / "store")
    with open_store(folder / "store") as store:
        again = store.save(make_state(2), step=3)
        assert again.written_bytes == 0
        assert fingerprint(store.load(3)) == fingerprint(make_state(2))
    promised = Journal(folder / "journal").promises()
    promised.begun["default", 3] = promised.durable["default", 3] = fingerprint(make_state(2))
    promised.newest.clear()
    check_unrepaired(folder / "store", promised)
    check_goes_on(folder / "store", promised)


@pytest.mark.slow
@pytest.mark.parametrize("collected", [False, True])
def test_nothing_deleted_is_resurrected(folder: Path, collected: bool) -> None:
    """Test a deletion and a loss of the catalog: the rebuilt catalog has exactly the existing manifests."""
    with open_store(folder / "store") as store:
        store.delete(1)
        if collected:
            store.gc()
    lose_catalog(folder / "store")
    with open_store(folder / "store") as store:
        assert store.save(make_state(2), step=3).written_bytes == 0
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [2, 3]
        store.gc()
        assert fingerprint(store.load(2)) == fingerprint(make_state(2))
        assert store.verify() == []
