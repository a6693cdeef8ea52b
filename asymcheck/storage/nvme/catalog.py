"""Catalog of a store: an LMDB index from digests to packs, never authoritative (SPEC.md §B3).

LMDB maps its file without checksums. Damage can therefore read back as wrong values, or kill the process:

- Every value has a checksum, and restores do not read the catalog.
- After an unclean end, the catalog is rebuilt from the packs. If other processes use it, a child process checks it.
- An error in use is recorded. The next start then drops the file and rebuilds the catalog.
- A failed commit changes nothing, but LMDB then refuses all transactions. The next transaction reopens the environment.
  The next start rebuilds the catalog, because LMDB reports some damage only as a failed write.

Transactions are not synced. They survive the death of the process, but not a power loss. After a power loss, the marks
of the lost processes remain, because marks are durable before the first transaction. The next start then rebuilds the
catalog.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb

from asymcheck.config import CATALOG_READERS_MAX, StoreConfig
from asymcheck.errors import (
    CatalogError,
    ForkedStoreError,
    LockTimeoutError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    StorageError,
)
from asymcheck.events import emit
from asymcheck.format import catalog_records as codec
from asymcheck.format import registry
from asymcheck.storage import process_identity
from asymcheck.storage.local_files import (
    DESCRIPTORS,
    FILE_MODE,
    Files,
    is_same_file,
    locked,
    reserve,
    translated,
    try_lock,
    unlock,
    wait_lock,
)
from asymcheck.types import Digest, Location, Owner, PackId

# Errors that do not indicate damage of the file.
_NO_DAMAGE = (
    lmdb.BadRslotError,
    lmdb.LockError,
    lmdb.MapResizedError,
    lmdb.MemoryError,
    lmdb.PanicError,
    lmdb.ReadersFullError,
    lmdb.ReadonlyError,
    lmdb.TlsFullError,
)
_FILES = ("data.mdb", "lock.mdb")
_READER_BYTES = 64
_DATABASES = ("meta", "partitions", "packs", "manifests", "pins")
_NO_ROOM_BYTES = 1 << 20
_GIVE_WAY_S = 1.0
_GIVE_WAY_POLL_S = 0.01
# A writer that was just served lets waiting writers pass for this time.
_TURN_S = 0.02
_WALK_TIMEOUT_S = 600
# The child process imports nothing of this package, which would load torch.
_WALK = """
import lmdb, sys, xxhash
env = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=8, map_size=int(sys.argv[2]))
with env.begin() as txn:
    for name in (b"meta", b"partitions", b"packs", b"manifests", b"pins"):
        db = env.open_db(name, txn=txn, create=False)
        for key, value in txn.cursor(db):
            if bytes(value[-8:]) != xxhash.xxh3_128_digest(bytes(key) + bytes(value[:-8]))[8:]:
                sys.exit(3)
"""


class Transaction:
    """Transaction on the catalog. Use it on the thread that began it."""

    def __init__(self, transaction: lmdb.Transaction, databases: dict[str, Any]) -> None:
        """Wrap an LMDB transaction; use :meth:`Catalog.read` or :meth:`Catalog.write`."""
        self._txn = transaction
        self._db = databases

    def _get(self, key: bytes, database: str) -> bytes | None:
        value = self._txn.get(key, db=self._db[database])
        return None if value is None else bytes(value)

    def location(self, digest: Digest) -> Location | None:
        """Return the location of a partition; None if it is unknown or the entry is damaged."""
        value = self._get(digest, "partitions")
        return None if value is None else codec.decode_location(digest, value)

    def put_location(self, digest: Digest, location: Location) -> None:
        """Set the location of a partition."""
        self._txn.put(digest, codec.encode_location(digest, location), db=self._db["partitions"])

    def leave_pack(self, pack_id: PackId, names: Iterable[Digest], moved: Mapping[Digest, Location]) -> None:
        """Remove the entries of partitions that point into a pack, and enter ``moved`` where no entry is left."""
        for name in names:
            location = self.location(name)
            if location is None or location.pack_id == pack_id:
                self.delete("partitions", name)
        for name, new_location in moved.items():
            if self.location(name) is None:
                self.put_location(name, new_location)

    def delete(self, database: str, key: bytes) -> None:
        """Remove an entry of ``partitions``, ``packs``, ``manifests`` or ``pins``."""
        self._txn.delete(key, db=self._db[database])

    def pack_state(self, pack_id: PackId) -> int | None:
        """Return the state number of a pack; None if it is unknown or the entry is damaged."""
        value = self._get(pack_id, "packs")
        return None if value is None else codec.decode_pack_state(pack_id, value)

    def put_pack(self, pack_id: PackId, state: int, frame_count: int, pack_length: int) -> None:
        """Set the entry of a pack."""
        self._txn.put(pack_id, codec.encode_pack_entry(pack_id, state, frame_count, pack_length), db=self._db["packs"])

    def pack_states(self) -> dict[PackId, int | None]:
        """Return the state numbers of all packs; None for a damaged entry."""
        cursor = self._txn.cursor(db=self._db["packs"])
        return {PackId(bytes(key)): codec.decode_pack_state(bytes(key), bytes(value)) for key, value in cursor}

    def has_pack(self, pack_id: PackId, frame_count: int, pack_length: int) -> bool:
        """Tell whether the entry of a live pack has these numbers."""
        entry = codec.encode_pack_entry(pack_id, registry.PACK_LIVE, frame_count, pack_length)
        return self._get(pack_id, "packs") == entry

    def freed_packs(self) -> list[PackId]:
        """Return the packs that are marked freed."""
        return [pack_id for pack_id, state in self.pack_states().items() if state == registry.PACK_FREED]

    def put_manifest(self, key: bytes, size: int) -> None:
        """Add a committed manifest."""
        self._txn.put(key, codec.encode_manifest_entry(key, size), db=self._db["manifests"])

    def has_manifest(self, key: bytes, size: int) -> bool:
        """Tell whether the entry of a manifest has this size."""
        return self._get(key, "manifests") == codec.encode_manifest_entry(key, size)

    def manifests(self) -> set[bytes]:
        """Return the keys of all manifests. Damaged entries count as absent."""
        cursor = self._txn.cursor(db=self._db["manifests"])
        return {bytes(key) for key, value in cursor if codec.unseal(bytes(key), bytes(value)) is not None}

    def put_pin(self, key: bytes, owner: Owner, packs: Iterable[PackId]) -> None:
        """Pin packs, so that collection keeps them until the entry is deleted or the death of the owner."""
        self._txn.put(key, codec.encode_pin(key, owner, list(packs)), db=self._db["pins"])

    def pins(self) -> dict[bytes, tuple[Owner, list[PackId]]]:
        """Return all pins.

        Raises:
            CatalogError: a pin is damaged, so its packs are unknown.
        """
        pins = {}
        for key, value in self._txn.cursor(db=self._db["pins"]):
            pin = codec.decode_pin(bytes(key), bytes(value))
            if pin is None:
                raise CatalogError(
                    "a pin in the catalog is damaged; stop all processes that use the store: the next start rebuilds it"
                )
            pins[bytes(key)] = pin
        return pins

    def locations(self) -> Iterator[tuple[Digest, Location | None]]:
        """Yield the entries of all partitions; None for a damaged entry."""
        for key, value in self._txn.cursor(db=self._db["partitions"]):
            yield Digest(bytes(key)), codec.decode_location(bytes(key), bytes(value))

    def clear(self) -> None:
        """Remove all entries."""
        for database in self._db.values():
            self._txn.drop(database, delete=False)

    def put_store_id(self, store_id: bytes) -> None:
        """Mark the catalog as complete, with the id of its store."""
        self._txn.put(b"store_id", codec.seal(b"store_id", store_id), db=self._db["meta"])

    def store_id(self) -> bytes | None:
        """Return the id of the store; None before the catalog is complete."""
        value = self._get(b"store_id", "meta")
        return None if value is None else codec.unseal(b"store_id", value)


Populate = Callable[[Transaction], object]


class CatalogUsers:
    """Marks of the processes that use a catalog: one locked file per process in the folder ``open``.

    The mark of a killed process has no lock. Its death is therefore visible from another PID namespace, for instance in
    a restarted container. A mark is durable before the first transaction of its process, which is not durable itself. A
    mark that remains after a power loss shows that the catalog cannot be trusted.
    """

    def __init__(self, files: Files, folder: Path) -> None:
        """Keep the marks in ``folder``, which need not exist for :meth:`is_dead`."""
        self._files = files
        self._folder = folder
        self._own: tuple[Path, int] | None = None

    def put(self) -> None:
        """Create the mark of this process durably. Writers and readers of marks hold the lock of the catalog.

        Raises:
            LockTimeoutError: this process has opened the catalog by another path.
        """
        path = self._path(process_identity.this_process())
        try:
            descriptor = DESCRIPTORS.open(self._files.open_new, path)
        except StorageError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            descriptor = DESCRIPTORS.open(self._files.open_existing, path)
        if not try_lock(descriptor, exclusive=True):
            DESCRIPTORS.close(descriptor)
            raise LockTimeoutError(
                f"cannot lock {path}: this process has opened the store by another path; use one path"
            )
        self._own = path, descriptor
        # Sync every parent directory, because a process that created one may have been killed before its sync.
        for folder in (self._folder, self._folder.parent, self._folder.parent.parent):
            self._files.sync_directory(folder)

    def take_back(self, *, as_if_killed: bool = False) -> None:
        """Remove the mark of this process; with ``as_if_killed``, only unlock it. The next start then rebuilds.

        A mark that cannot be removed is only unlocked, too.
        """
        if self._own is not None:
            path, descriptor = self._own
            self._own = None
            try:
                # Another store may have replaced a removed one at this path.
                if not as_if_killed and is_same_file(descriptor, path):
                    with contextlib.suppress(StorageError):
                        self._files.unlink(path)
            finally:
                DESCRIPTORS.close(descriptor)

    def other_marks(self) -> tuple[list[Path], dict[Path, Owner]]:
        """Return the marks of dead processes, and the marks of other living processes.

        A mark that this process left when it closed the catalog counts as dead.
        """
        dead: list[Path] = []
        alive: dict[Path, Owner] = {}
        own = self._path(process_identity.this_process())
        for mark in self._folder.iterdir():
            pid, ticks, rest = [*mark.name.split("-", 2), "", ""][:3]
            boot_id, _, namespace = rest.rpartition("-")
            if not (pid.isdecimal() and ticks.isdecimal()):
                continue
            owner = Owner(int(pid), int(ticks), boot_id, namespace)
            is_left = mark == own and self._own is None and not mark.is_symlink()
            if is_left or self.is_dead(owner):
                dead.append(mark)
            elif mark != own:
                alive[mark] = owner
        return dead, alive

    def is_dead(self, owner: Owner) -> bool:
        """Tell whether a process is certainly dead or has closed the catalog."""
        if process_identity.has_ended(owner):
            return True
        # A living process that does not lock the mark uses another store, of which this one is a copy.
        try:
            with locked(self._files.open_read, self._path(owner), exclusive=False) as descriptor:
                return descriptor is not None
        except FileNotFoundError:
            return True
        except StorageError:
            return False

    def _path(self, owner: Owner) -> Path:
        namespace = owner.pid_namespace.replace("/", "_")
        return self._folder / f"{owner.pid}-{owner.start_ticks}-{owner.boot_id}-{namespace}"


class Catalog:
    """Open catalog. Use :func:`open_catalog`, because LMDB allows one environment per process and path."""

    def __init__(
        self,
        files: Files,
        path: Path,
        store_id: bytes,
        config: StoreConfig,
        populate: Populate,
        *,
        rebuild: bool = False,
    ) -> None:
        """Open the LMDB environment in ``path``; rebuild it by ``populate`` if it is new, damaged or of another store.

        With ``rebuild``, rebuild the catalog unless another living process uses it.
        """
        self.path = path
        self._store_id = store_id
        self._config = config
        self._thread_lock = threading.Lock()
        self._env: lmdb.Environment | None = None
        self._has_commit_failed = False
        self._running = 0
        self._idle = threading.Condition()
        self._owner = process_identity.this_process()
        self._files = files
        for folder in (path, path / "open"):
            files.make_directory(folder)
        self._marks = CatalogUsers(files, path / "open")
        self._damage_note = path / "open" / "damaged"
        self._lock_descriptor = DESCRIPTORS.open(files.open_lock, path / "writer.lock")
        # Waiting writers hold a shared lock on this folder, which ends with their process.
        self._waiting_descriptor = DESCRIPTORS.open(files.open_read, path / "open")
        with contextlib.ExitStack() as stack:
            stack.callback(DESCRIPTORS.close, self._lock_descriptor)
            stack.callback(DESCRIPTORS.close, self._waiting_descriptor)
            stack.callback(self._take_mark_back)
            with self._writer_lock():
                self._refuse_same_pid()
                self._drop_unless_trusted(rebuild=rebuild)
                self._marks.put()
                try:
                    self._open(populate)
                except CatalogError:
                    if not os.path.lexists(self._damage_note):
                        raise
                    self._drop_unless_trusted()
                    self._open(populate)
            self._opened = stack.pop_all()

    def _open(self, populate: Populate) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_environment)
            with self._transaction(write=True) as transaction:
                if transaction.store_id() != self._store_id:
                    transaction.clear()
                    populate(transaction)
                    transaction.put_store_id(self._store_id)
                    emit("catalog.rebuilt", str(self.path))
            stack.pop_all()

    def renew(self, populate: Populate) -> None:
        """Open the environment again, for all users in this process. Rebuild the catalog if damage was recorded.

        Raises:
            CatalogError: the catalog is in use by another process, or by a save of this process.
        """
        with self._writer_lock(), self._idle:
            is_idle = self._idle.wait_for(lambda: not self._running, self._config.lock_timeout_s)
            if not is_idle or process_identity.holds_pins():
                raise CatalogError(
                    f"catalog {self.path} cannot be rebuilt during a save of this process; try again after the save"
                )
            self._close_environment()
            self._drop_unless_trusted()
            self._open(populate)

    def _open_environment(self) -> lmdb.Environment:
        _check_files(self._files, self.path)
        # Reserve before LMDB opens and maps the file: closing the file later would drop the locks of LMDB.
        size, limit = (
            _READER_BYTES * readers + registry.BLOCK_BYTES
            for readers in (self._config.catalog_readers, CATALOG_READERS_MAX)
        )
        reserve(self.path / "lock.mdb", size, limit)
        with contextlib.ExitStack() as stack:
            env = lmdb.open(
                str(self.path),
                map_size=self._config.catalog_map_bytes,
                max_readers=self._config.catalog_readers,
                max_dbs=len(_DATABASES) + 3,
                mode=FILE_MODE,
                sync=False,
            )
            stack.callback(env.close)
            self._db: dict[str, Any] = {name: env.open_db(name.encode()) for name in _DATABASES}
            env.reader_check()
            stack.pop_all()
        return env

    def _close_environment(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _begin(self, *, write: bool) -> lmdb.Transaction:
        """Begin a transaction. Reopen the environment if a commit has failed, and no transaction of this process runs.

        The content stays that of the last commit, with all pins. Other processes are not affected.
        """
        env = self._env
        if env is not None:
            try:
                return env.begin(write=write)
            except lmdb.PanicError:
                if not self._idle.wait_for(lambda: not self._running, self._config.lock_timeout_s):
                    raise
            # Another thread may have reopened it.
            if self._env is env:
                self._close_environment()
        self._env = self._env or self._open_environment()
        return self._env.begin(write=write)

    @contextlib.contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Transaction]:
        with self._lmdb_errors():
            with self._idle:
                txn = self._begin(write=write)
                self._running += 1
            try:
                with txn:
                    yield Transaction(txn, self._db)
            finally:
                with self._idle:
                    self._running -= 1
                    self._idle.notify_all()

    def _refuse_same_pid(self) -> None:
        """Raise if a process with the same PID uses the catalog, because LMDB identifies its readers by PID."""
        _, alive = self._marks.other_marks()
        if any(owner.pid == self._owner.pid for owner in alive.values()):
            raise CatalogError(
                f"cannot open catalog {self.path}: a process with the same PID {self._owner.pid}, in another PID "
                "namespace, uses it. Run the containers in one PID namespace, or give each container a separate store"
            )

    def _drop_unless_trusted(self, *, rebuild: bool = False) -> None:
        dead, alive = self._marks.other_marks()
        noted = os.path.lexists(self._damage_note)
        if not alive and (dead or rebuild or noted or self._is_shared()):
            # Rebuild without a check. A check cannot find all damage, because LMDB asserts more when it writes. Reading
            # the indexes of all packs takes about as long as the check.
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
        elif alive and (
            noted
            or not (self.path / "data.mdb").exists()
            or (dead and not _is_intact(self._files, self.path, self._config.catalog_map_bytes))
        ):
            raise CatalogError(
                f"catalog {self.path} is damaged and in use by "
                f"{', '.join(map(process_identity.describe, alive.values()))}; "
                "stop these processes: the next start rebuilds it"
            )
        self._damage_note.unlink(missing_ok=True)
        # While other processes use the catalog, keep the marks of dead processes for a later start.
        for marker in () if alive else dead:
            marker.unlink(missing_ok=True)

    def _is_shared(self) -> bool:
        """Tell whether a hard-linked copy of the store has the same files, and so would take pins here for dead."""
        paths = [self.path / name for name in _FILES]
        return any(path.stat().st_nlink > 1 for path in paths if path.exists())

    def dead_pins(self) -> dict[bytes, Owner]:
        """Return the owners of dead pins by key. A pin is dead if its process or its save has ended.

        Call this before listing the manifests. The listing then includes all manifests of these owners.
        """
        with self.read() as transaction:
            pins = transaction.pins().items()
        return {
            key: owner
            for key, (owner, _) in pins
            if self._marks.is_dead(owner) or process_identity.is_let_go(key, owner)
        }

    def still_dead(self, pins: Mapping[bytes, Owner]) -> set[bytes]:
        """Return the keys of earlier :meth:`dead_pins` that are still dead. Call it in the transaction that needs them.

        Another process may have adopted a killed save, and pinned packs under the same key. A living process may have
        opened the catalog again.
        """
        return {key for key, owner in self.dead_pins().items() if pins.get(key) == owner}

    def read(self) -> contextlib.AbstractContextManager[Transaction]:
        """Begin a read transaction. Keep it short, because it keeps old pages alive."""
        return self._transaction(write=False)

    @contextlib.contextmanager
    def write(self, *, gives_way: bool = False) -> Iterator[Transaction]:
        """Begin a write transaction. Commit it when the block ends; abort it if the block raises.

        With ``gives_way``, as in collections, first let waiting writers of other processes pass, for at most a second.

        Raises:
            LockTimeoutError: another process, named in the message, holds the writer lock.
        """
        # A process that takes the lock again at once would starve those that poll for it.
        deadline = time.monotonic() + (_GIVE_WAY_S if gives_way else _TURN_S)
        while time.monotonic() < deadline and self._is_writer_waiting():
            time.sleep(_GIVE_WAY_POLL_S)
        with self._writer_lock(gives_way=gives_way), self._transaction(write=True) as transaction:
            yield transaction

    def _is_writer_waiting(self) -> bool:
        """Tell whether a writer of another process waits for the writer lock."""
        with self._thread_lock:
            is_free = try_lock(self._waiting_descriptor, exclusive=True)
            unlock(self._waiting_descriptor)
        return not is_free

    @contextlib.contextmanager
    def _lmdb_errors(self) -> Iterator[None]:
        """Translate LMDB errors. Record damage, so that the next start drops the catalog."""
        try:
            yield
        except lmdb.Error as error:
            kind, advice = self._kind_of(error)
            raise kind(f"catalog {self.path}: {error}{advice}") from error
        except CatalogError:
            self._note_damage()
            raise

    def _kind_of(self, error: lmdb.Error) -> tuple[type[StorageError], str]:
        """Return the class and the advice for an error of LMDB."""
        text = str(error)
        if isinstance(error, lmdb.MapFullError):
            size = f"{self._config.catalog_map_bytes:,} bytes"
            return OutOfSpaceError, f"; its map has {size}: give a larger StoreConfig(catalog_map_bytes=…)"
        if isinstance(error, lmdb.DiskError) or self._is_full(text):
            return OutOfSpaceError, "; free space, or delete checkpoints and run gc"
        if "Read-only file system" in text:
            advice = "check the drive, and mount it again"
            return ReadOnlyStoreError, f"; Linux does this after an error of the drive: {advice}"
        if isinstance(error, lmdb.MemoryError):
            return CatalogError, (
                f"; its map needs {self._config.catalog_map_bytes:,} bytes of address space: raise the limit "
                "(ulimit -v), or give StoreConfig(catalog_map_bytes=…). Without a limit, the catalog is damaged: run "
                "asymcheck rebuild-catalog"
            )
        if isinstance(error, _NO_DAMAGE):
            return CatalogError, ""
        if type(error) is lmdb.Error and "mdb_txn_commit" in text:
            self._has_commit_failed = True
            return StorageError, (
                "; nothing was committed: check the drive, then try again. If the drive has no errors, the catalog may "
                "be damaged: the next start rebuilds it"
            )
        self._note_damage()
        return CatalogError, "; stop all processes that use it: the next start rebuilds it"

    def _is_full(self, message: str) -> bool:
        if "No space left" in message or "Disk quota exceeded" in message:
            return True
        # LMDB reports a partial write to a full disk as an input/output error. After an actual one, the file system may
        # refuse every access.
        with contextlib.suppress(OSError):
            return "Input/output error" in message and shutil.disk_usage(self.path).free < _NO_ROOM_BYTES
        return False

    def _take_mark_back(self) -> None:
        self._marks.take_back(as_if_killed=self._has_commit_failed)

    def _note_damage(self) -> None:
        with contextlib.suppress(StorageError, OSError):
            os.close(self._files.open_lock(self._damage_note))

    @contextlib.contextmanager
    def _writer_lock(self, *, gives_way: bool = False) -> Iterator[None]:
        # The lock of LMDB has no timeout and does not name its holder.
        timeout = self._config.lock_timeout_s
        if not self._thread_lock.acquire(timeout=timeout):
            raise LockTimeoutError(
                f"catalog {self.path} was locked by another thread of this process for {timeout:g} s; try again"
            )
        try:
            if not self._wait_lock(timeout, gives_way=gives_way):
                raise LockTimeoutError(
                    f"catalog {self.path} was locked for {timeout:g} s by {self._holder()}; stop that process, or wait"
                )
            # The PID only serves messages.
            with contextlib.suppress(OSError):
                os.pwrite(self._lock_descriptor, f"{self._owner.pid:<20}".encode(), 0)
            try:
                self._refuse_removed()
                yield
            finally:
                with contextlib.suppress(OSError):
                    unlock(self._lock_descriptor)
        finally:
            self._thread_lock.release()

    def _refuse_removed(self) -> None:
        """Raise if the files were removed in use. Other processes have a new catalog then, which lacks these pins."""
        with translated("access", self.path):
            if is_same_file(self._lock_descriptor, self.path / "writer.lock"):
                return
        raise CatalogError(
            f"catalog {self.path} was removed while it was in use; stop all processes that use it: the next start "
            "rebuilds it"
        )

    def _wait_lock(self, timeout_s: float, *, gives_way: bool) -> bool:
        if try_lock(self._lock_descriptor, exclusive=True):
            return True
        if gives_way:
            return wait_lock(self._lock_descriptor, timeout_s, exclusive=True)
        # A collection that looks for waiting writers holds the exclusive lock for a moment.
        wait_lock(self._waiting_descriptor, _GIVE_WAY_POLL_S, exclusive=False)
        try:
            return wait_lock(self._lock_descriptor, timeout_s, exclusive=True)
        finally:
            unlock(self._waiting_descriptor)

    def _holder(self) -> str:
        text = os.pread(self._lock_descriptor, 20, 0).decode(errors="replace").strip()
        if not text.isdecimal():
            return "an unknown process"
        # The number may be that of a process in another container, which the mark shows.
        owners = (owner for owner in self._marks.other_marks()[1].values() if owner.pid == int(text))
        return process_identity.describe(next(owners, Owner(int(text), 0, "", "")))

    def close(self) -> None:
        """Sync and close the catalog, then remove the mark of this process.

        Raises:
            StorageError: the sync failed. Nothing is lost: the mark stays, and the next start rebuilds the catalog.
        """
        with self._opened as opened:
            opened.callback(self._close_environment)
            try:
                with self._lmdb_errors():
                    if self._env is not None:
                        self._env.sync(True)
            except StorageError:
                self._has_commit_failed = True
                raise


def _check_files(files: Files, path: Path) -> None:
    """Raise StorageError if LMDB would open the target of a link, or wait for the writer of a pipe."""
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError):
            os.close(files.open_read(path / name))


def _is_intact(files: Files, path: Path, map_bytes: int) -> bool:
    """Check every entry of the catalog in ``path`` in a child process, because a damaged map may kill its reader."""
    _check_files(files, path)
    command = [sys.executable, "-c", _WALK, str(path), str(map_bytes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_WALK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


_Key = tuple[int, str, int]
"""Process id, path and inode. An open catalog keeps its inode, even if its store was removed."""
_open_catalogs: dict[_Key, tuple[Catalog, int]] = {}
_open_lock = threading.Lock()


def _key(path: Path) -> _Key:
    marks = path / "open"
    return os.getpid(), os.path.realpath(path), marks.stat().st_ino if marks.exists() else 0


def open_catalog(
    files: Files, path: Path, store_id: bytes, config: StoreConfig, populate: Populate, *, rebuild: bool = False
) -> Catalog:
    """Return the catalog of this process for ``path``; open it if needed. Call :func:`release_catalog` afterwards.

    With ``rebuild``, drop an existing catalog first, unless this or another process has it open.
    """
    own_pid, own_path, _ = _key(path)
    if any(open_path == own_path and pid != own_pid for pid, open_path, _ in tuple(_open_catalogs)):
        # Opening a second LMDB environment, or closing the inherited one, would drop the locks of the parent.
        raise ForkedStoreError(
            f"cannot write in a forked process: the parent process had opened the catalog {path}. "
            "Start this process by 'spawn', or fork before the first save"
        )
    with _open_lock:
        # Another thread may have created the catalog in the meantime.
        key = _key(path)
        catalog, users = _open_catalogs.get(key, (None, 0))
        if catalog is None:
            catalog = Catalog(files, path, store_id, config, populate, rebuild=rebuild)
            key = _key(path)
        _open_catalogs[key] = (catalog, users + 1)
        return catalog


def release_catalog(catalog: Catalog) -> None:
    """Release a catalog; the last release closes it."""
    with _open_lock:
        # The path may lead elsewhere by now: the program changed its working directory, or a link was replaced.
        key, users = next((key, users) for key, (opened, users) in _open_catalogs.items() if opened is catalog)
        if users > 1:
            _open_catalogs[key] = (catalog, users - 1)
        else:
            del _open_catalogs[key]
            catalog.close()
