"""Remote tier: the remote layout (SPEC.md §C1) in HDFS, a shared file system, or an object store."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple, TypeVar

import numpy as np

from asymcheck.config import WRITER, StoreConfig
from asymcheck.errors import (
    InvalidInputError,
    MissingPartitionError,
    RemoteUnreachableError,
    StoreNotFoundError,
    StructureError,
    result_or_error,
)
from asymcheck.format import layout
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.record import (
    RECORD_BYTES,
    REMOTE_LAYOUT,
    STORE_LAYOUT,
    Descriptor,
    decode_descriptor,
    encode_descriptor,
)
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.remote.client_interface import Entry
from asymcheck.storage.remote.location import RemoteLocation
from asymcheck.storage.remote.manifests import RemoteManifests
from asymcheck.storage.remote.pack_reader import ReadAhead, RemotePack, read_pack_index
from asymcheck.storage.remote.readers import result_of
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import PackId

_T = TypeVar("_T")

_FOLDERS = (layout.HEADS, layout.MANIFESTS, layout.PACKS)
_PREFIXES_MAX = 8
"""Maximum number of listings by prefix; for more prefixes, all packs are listed."""


class PackListing(NamedTuple):
    """Files of packs by one listing, newest first. A pack that was renamed meanwhile may be in both mappings."""

    lasting: dict[PackId, Entry]  # complete packs
    doomed: dict[PackId, Entry]  # packs that a running or killed collection has announced to remove
    announced: dict[PackId, list[Entry]]  # announcements; an object store has them beside the packs


def lost_location(location: RemoteLocation) -> RemoteUnreachableError:
    """Return the error for a location of earlier pushes that is missing or empty."""
    return RemoteUnreachableError(
        f"{location} has no asymcheck.store any more: was it emptied, or unmounted? Mount it again. If it was emptied "
        "on purpose, create it with the option --create of asymcheck push or asymcheck publish"
    )


def _begins(pack_id: PackId, prefixes: Collection[bytes]) -> bool:
    return pack_id.startswith(tuple(prefixes))


def _only(packs: dict[PackId, _T], prefixes: Collection[bytes]) -> dict[PackId, _T]:
    return {pack_id: value for pack_id, value in packs.items() if _begins(pack_id, prefixes)}


class RemoteTier(StoreTier):
    """Open remote location."""

    root: str
    manifests: RemoteManifests

    def __init__(self, location: RemoteLocation, config: StoreConfig, *, create: bool = False) -> None:
        """Open the store at ``location``. With ``create``, create it if the location is empty.

        Raises:
            StoreNotFoundError: the location has other files, or is empty and ``create`` is not set.
            RemoteUnreachableError: the location does not answer.
            FormatError: the descriptor is damaged or of another version.
            InvalidInputError: no client supports the location.
        """
        super().__init__(config)
        self.root = str(location)
        self.location = location
        self.files = RemoteFiles(location, config.remote)
        self.pace = self.files.pace
        self._top = self.files.top
        self.packs = self._top / layout.PACKS
        self._indexes: dict[PackId, PackIndex] = {}
        self._loading: dict[PackId, Future[PackIndex]] = {}
        self._doomed: dict[PackId, Entry] = {}
        self._listed: list[PackId] | None = None
        self._lock = threading.Lock()
        data = self.files.read_small(self._top / layout.DESCRIPTOR_NAME, RECORD_BYTES)
        if data is None:
            data = self._without_descriptor(create=create)
        self.descriptor, self.damaged_descriptor_copies = decode_descriptor(data, f"store descriptor of {location}")
        self._refuse_local_store()
        self.manifests = RemoteManifests(self.files)
        self._ahead = ReadAhead(self.files)

    def _refuse_local_store(self) -> None:
        """Raise if the location is a local store, because this tier ignores the pins and locks of such a store."""
        # Descriptors of early programs do not name the layout.
        own = set() if self.descriptor.layout else {layout.CATALOG, layout.POOL}.intersection(self._names(self._top))
        if self.descriptor.layout == STORE_LAYOUT or own:
            reason = f"it has a {min(own)}" if own else f"so its {layout.DESCRIPTOR_NAME} says"
            raise InvalidInputError(
                f"{self.location} is a local store ({reason}). To open it, give its "
                f"path {self._top}; to push, choose another directory"
            )

    def _without_descriptor(self, *, create: bool) -> bytes:
        """Return the descriptor of a location that seemed to have none. With ``create``, create an empty location."""
        # Empty folders stay where objects or files were removed by a pattern, and hold nothing that could be lost.
        kept = [
            name
            for name in _FOLDERS
            if any(entry.is_file for entry in self.files.walk(self._top / name, recursive=True))
        ]
        if kept:
            # Another process may have created the location and pushed since the first read.
            data = self.files.read_small(self._top / layout.DESCRIPTOR_NAME, RECORD_BYTES)
            if data is not None:
                return data
            raise StructureError(
                f"{self.location} has no asymcheck.store, but it has {' and '.join(kept)}; restore that file from a "
                "copy, or choose another location"
            )
        if foreign := self._foreign_names():
            error = StoreNotFoundError(
                f"{self.location} has other files ({foreign[0]}) and no asymcheck.store; give the folder of earlier "
                "pushes, or an empty or new folder"
            )
            error.is_empty = False
            raise error
        if not create:
            missing = self.files.stat(self._top) is None
            problem = "does not exist" if missing else "has no asymcheck.store: nothing was pushed there"
            raise StoreNotFoundError(f"{self.location} {problem}; check the URI and the mount")
        return self._create()

    def refuse_lost_location(self) -> None:
        """Raise RemoteUnreachableError if the location was emptied or unmounted, or its manifests were moved.

        Files that are pushed there now could not be opened later.
        """
        if self.files.read_small(self._top / layout.DESCRIPTOR_NAME, RECORD_BYTES) is None:
            raise lost_location(self.location)
        self.refuse_lost_manifests()

    def refuse_lost_manifests(self) -> None:
        """Raise RemoteUnreachableError if the manifests were moved, because a collection would remove all packs.

        An object store has no folders, so it does not show this.
        """
        if self.files.renames and self.files.stat(self._top / layout.MANIFESTS) is None and self.pack_ids():
            raise RemoteUnreachableError(
                f"{self.location} has packs, but its folder {layout.MANIFESTS} is missing. Move it back, or restore it "
                "from a copy. Only if every checkpoint was deleted, create an empty folder"
            )

    def _create(self) -> bytes:
        for name in _FOLDERS:
            self.files.make_directory(self._top / name)
        self._check_puts()
        data = encode_descriptor(Descriptor(os.urandom(16), time.time_ns(), WRITER, layout=REMOTE_LAYOUT))
        path = self._top / layout.DESCRIPTOR_NAME
        if self.files.put_small(path, data):
            return data
        return self.files.read_small(path, RECORD_BYTES) or data

    def _check_puts(self) -> None:
        """Raise InvalidInputError if an object store replaces files, although the client forbids it."""
        if self.files.renames:
            return
        path = self._top / f"{os.urandom(16).hex()}{layout.TEMPORARY}"
        try:
            if self.files.put_small(path, b"first") and not self.files.put_small(path, b"second"):
                return
        finally:
            self.files.delete(path)
        raise InvalidInputError(
            f"{self.location}: the service ignores conditional puts (If-None-Match), so two trainings could overwrite "
            "each other's files; use a service or version that supports them"
        )

    def list_packs(self, prefixes: Collection[bytes] = (b"",)) -> PackListing:
        """List the packs whose ids begin with one of the prefixes, by default all."""
        lasting: dict[PackId, Entry] = {}
        doomed: dict[PackId, Entry] = {}
        announced: dict[PackId, list[Entry]] = {}
        # Other locations list a folder as a whole.
        listed = (b"",) if self.files.renames or len(prefixes) > _PREFIXES_MAX else prefixes
        # An object store lists one folder alone by a single call, which has one deadline for any number of packs.
        walk = partial(self.files.walk, self.packs, recursive=not self.files.renames)
        found = [entry for prefix in listed for entry in walk(prefix=prefix.hex())]
        entries = [entry for entry in found if entry.path.parent == self.packs]
        # Newest first, because the newest checkpoint needs them.
        for entry in sorted(entries, key=lambda entry: -entry.mtime_ns):
            if (pack_id := layout.parse_pack_name(entry.path.name)) is not None:
                lasting[pack_id] = entry
            elif (pack_id := layout.parse_doomed_name(entry.path.name)) is not None:
                doomed[pack_id] = entry
                announced.setdefault(pack_id, []).append(entry)
        if not self.files.renames:
            doomed = {pack_id: lasting.pop(pack_id) for pack_id in announced if pack_id in lasting}
        with self._lock:
            self._doomed = {pack_id: known for pack_id, known in self._doomed.items() if not _begins(pack_id, listed)}
            self._doomed |= doomed
            # Forget the indexes of removed packs, because a training may push for weeks.
            for pack_id in self._indexes.keys() - lasting.keys() - doomed.keys():
                if _begins(pack_id, listed):
                    del self._indexes[pack_id]
            self._loading = {pack_id: loading for pack_id, loading in self._loading.items() if not loading.done()}
        return PackListing(_only(lasting, prefixes), _only(doomed, prefixes), _only(announced, prefixes))

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all readable packs, newest first."""
        return self.with_prefixes((b"",))

    def with_prefixes(self, prefixes: Collection[bytes]) -> list[PackId]:
        """Return the ids of the readable packs that begin with one of the prefixes, newest first."""
        if self._listed is not None:
            return [pack_id for pack_id in self._listed if _begins(pack_id, prefixes)]
        packs = self.list_packs(prefixes)
        return [*packs.lasting, *packs.doomed]

    def reliable_packs(self, prefixes: Collection[bytes] = (b"",)) -> dict[PackId, Entry]:
        """Return the files of the packs on which a push may rely, because :meth:`reprieve` can keep them."""
        packs = self.list_packs(prefixes)
        return {**(packs.doomed if self.files.renames else {}), **packs.lasting}

    def listed(self) -> RemoteTier:
        """List the packs once, and return a view of them. The view shares everything else with this tier."""
        view = copy.copy(self)
        view._listed = self.pack_ids()  # noqa: SLF001 - of the same class
        return view

    def doom(self, entry: Entry, pack_id: PackId, collection: bytes) -> bool:
        """Announce that ``collection`` will remove a pack; return False if the pack was removed or renamed."""
        target = self.packs / layout.doomed_name(pack_id, collection)
        return self.files.rename(entry.path, target) if self.files.renames else self.files.put_small(target, b"")

    def reprieve(self, pack_ids: Iterable[PackId]) -> set[PackId]:
        """Withdraw announced removals of packs by any process; return the packs that were removed."""
        lost = set(pack_ids)
        # The first listing may be too short where a service does not list names in order.
        for prefixes in ({pack_id[: layout.PACK_PREFIX_BYTES] for pack_id in lost}, (b"",)):
            reliable = self.reliable_packs(prefixes) if lost else {}
            lost = {pack_id for pack_id in lost if not self._keep(pack_id, reliable.get(pack_id))}
        return lost

    def _keep(self, pack_id: PackId, entry: Entry | None) -> bool:
        """Rename a pack back to its final name; return whether it has that name now."""
        path = self.packs / layout.pack_name(pack_id)
        return entry is not None and (entry.path == path or self.files.rename(entry.path, path))

    def _paths(self, pack_id: PackId) -> Iterator[PurePosixPath]:
        """Yield possible paths of a pack, likely ones first. Collections rename the packs that they will remove."""
        yield self.packs / layout.pack_name(pack_id)
        with self._lock:
            known = self._doomed.get(pack_id)
        if known is not None:
            yield known.path
        packs = self.list_packs((pack_id,))
        for listed in (packs.lasting, packs.doomed):
            if pack_id in listed:
                yield listed[pack_id].path

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:  # noqa: ARG002 - used by other tiers
        """Return no pack, because hints in a manifest name packs of its original store."""
        return ()

    def may_hold(self, pack_ids: list[PackId], digests: DigestSet) -> list[PackId]:
        """Return the packs whose index is unknown or has some of these partitions; see :meth:`ReadTier.may_hold`.

        A location may have thousands of packs, and each checkpoint is in a few of them.
        """
        with self._lock:
            columns = {
                pack_id: self._indexes[pack_id].entries["digest"] for pack_id in pack_ids if pack_id in self._indexes
            }
        if not columns:
            return pack_ids
        is_needed = digests.numbers(np.concatenate(list(columns.values()))) >= 0
        owners = np.repeat(np.arange(len(columns)), [len(column) for column in columns.values()])
        counts = np.bincount(owners[is_needed], minlength=len(columns))
        useless = {pack_id for pack_id, count in zip(columns, counts.tolist(), strict=True) if not count}
        return [pack_id for pack_id in pack_ids if pack_id not in useless]

    def open_pack(self, pack_id: PackId) -> RemotePack:
        """Open a complete pack; see :meth:`ReadTier.open_pack`. Raise RemoteUnreachableError without an answer."""
        return RemotePack(self.files, partial(self._paths, pack_id), self._index(pack_id), self._ahead)

    def expect(self, pack_ids: Iterable[PackId]) -> None:
        """Begin to read the indexes of packs that will be opened next."""
        with self._lock:
            new = [pack_id for pack_id in pack_ids if pack_id not in self._indexes and pack_id not in self._loading]
        for pack_id in new:
            loading = self._ahead.threads.submit(self._read_index, pack_id)
            with self._lock:
                self._loading[pack_id] = loading

    def _index(self, pack_id: PackId) -> PackIndex:
        with self._lock:
            if (index := self._indexes.get(pack_id)) is not None:
                return index
            loading = self._loading.pop(pack_id, None)
        return result_of(loading, partial(self._read_index, pack_id))

    def _read_index(self, pack_id: PackId) -> PackIndex:
        for path in self._paths(pack_id):
            with contextlib.suppress(FileNotFoundError):
                index = read_pack_index(self.files, path, pack_id)
                if index.damage is None:
                    self.keep_index(index)
                return index
        raise MissingPartitionError(f"pack {layout.pack_name(pack_id)} does not exist in {self.location}")

    def keep_index(self, index: PackIndex) -> None:
        """Keep an index, which stays valid, because remote packs are never overwritten."""
        with self._lock:
            self._indexes[index.header.pack_id] = index

    def read_indexes(self, pack_ids: Iterable[PackId]) -> dict[PackId, PackIndex | None]:
        """Read the indexes of packs in parallel; None for a pack that is missing or has no readable index."""
        wanted = list(pack_ids)
        self.expect(wanted)
        found = {pack_id: result_or_error(self._index, pack_id) for pack_id in wanted}
        return {pack_id: index if isinstance(index, PackIndex) else None for pack_id, index in found.items()}

    def usage(self) -> tuple[int, int, int, int]:
        """Return number and bytes of the packs, then zeros, because remote locations have no pool."""
        files = self.list_packs().lasting
        return len(files), sum(entry.size for entry in files.values()), 0, 0

    def unfinished(self) -> tuple[list[Entry], list[Entry]]:
        """Return temporary files of running and killed uploads, and folders of checkpoints without other files."""
        # Other folders belong to the user, and may be links to anywhere.
        below = [self.files.walk(self._top / name, recursive=True) for name in (*_FOLDERS, layout.LOCKS)]
        entries = list(itertools.chain(self.files.walk(self._top), *below))
        files = [entry for entry in entries if entry.is_file]
        temporaries = [entry for entry in files if entry.path.name.endswith(layout.TEMPORARY)]
        used = {entry.path.parent for entry in files if not entry.path.name.endswith(layout.TEMPORARY)}
        named = [entry for entry in entries if layout.parse_checkpoint_name(entry.path.name) is not None]
        return temporaries, [entry for entry in named if not entry.is_file and entry.path not in used]

    def leftovers(self) -> list[str]:
        """Return the paths, relative to the location, of temporary files older than the grace period."""
        before_ns = time.time_ns() - int(self.config.remote.grace_s * 1e9)
        return [str(entry.path.relative_to(self._top)) for entry in self.unfinished()[0] if entry.is_older(before_ns)]

    def foreign(self) -> list[str]:
        """Return the paths, relative to the location, of files that do not belong to the location."""
        parse = (layout.parse_pack_name, layout.parse_doomed_name)
        packs = [name for name in self._names(self.packs) if not any(parser(name) for parser in parse)]
        return [*self._foreign_names(), *(f"{layout.PACKS}/{name}" for name in packs)]

    def _foreign_names(self) -> list[str]:
        return [name for name in self._names(self._top) if name not in layout.REMOTE_TOP_LEVEL]

    def _names(self, folder: PurePosixPath) -> list[str]:
        return [name for name in self.files.list(folder) if not name.endswith(layout.TEMPORARY)]

    def close(self) -> None:
        """Stop the prefetch. Closing twice is allowed."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._ahead.close()
