"""The remote tier: a remote layout (SPEC.md §4.1) in HDFS, in a shared file system, or wherever pyarrow reaches."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath

from asymcheck.config import WRITER, StoreConfig
from asymcheck.errors import FormatError, InvalidInputError, MissingPartitionError, StoreNotFoundError, StructureError
from asymcheck.format import layout
from asymcheck.format.record import RECORD_BYTES, Descriptor, decode_descriptor, encode_descriptor
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.limits import check_remote
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.remote.client_interface import Entry
from asymcheck.storage.remote.location import RemoteLocation
from asymcheck.storage.remote.manifests import RemoteManifests
from asymcheck.storage.remote.pack_reader import ReadAhead, RemotePack, read_pack_index
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.storage.remote.throughput import RateLimit
from asymcheck.storage.remote.upload import PackUpload
from asymcheck.storage.slots import SlotPool
from asymcheck.types import PackId


class RemoteTier(StoreTier):
    """One opened remote layout."""

    root: str
    manifests: RemoteManifests

    def __init__(self, location: RemoteLocation, config: StoreConfig, *, create: bool = False) -> None:
        """Open the store at ``location``; with ``create``, create it if nothing is there.

        Raises:
            StoreNotFoundError: nothing is there and not ``create``; or a directory that holds something else.
            RemoteUnreachableError: nobody answers, so that nothing is known.
            FormatError: the descriptor is damaged or of another version.
            InvalidInputError: no client supports the location.
        """
        super().__init__()
        check_remote(config.remote)
        self.root = str(location)
        self.location = location
        self.config = config
        self.files = RemoteFiles(location, config.remote)
        self.pace = self.files.pace
        """The measured throughput."""
        self._top = self.files.top
        self.packs = self._top / layout.PACKS
        """The folder of packs."""
        self._indexes: dict[PackId, PackIndex] = {}
        self._doomed: dict[PackId, Entry] = {}
        self._lock = threading.Lock()
        data = self.files.read_small(self._top / layout.DESCRIPTOR_NAME, RECORD_BYTES)
        if data is None:
            data = self._without_descriptor(create=create)
        self._refuse_local_store()
        self.descriptor, self.damaged_descriptor_copies = decode_descriptor(data, f"store descriptor of {location}")
        self.manifests = RemoteManifests(self.files)
        self.slots = SlotPool(config.slots, config.partition_bytes)
        self._ahead = ReadAhead(config.remote)

    def _refuse_local_store(self) -> None:
        """Refuse a store in use on this machine: nobody here asks its catalog what is pinned, nor takes its locks."""
        if self.location.scheme != "file":
            return
        own = {layout.CATALOG, layout.POOL}.intersection(self.files.list(self._top))
        if own:
            raise InvalidInputError(
                f"{self.location} is a store that is saved to on a local drive (it has a {min(own)}): give its path, "
                f"{self._top}, instead; a location to push to is another directory"
            )

    def _without_descriptor(self, *, create: bool) -> bytes:
        """Return the descriptor of a new location; with ``create`` that is made, unless something lies there."""
        kept = [name for name in (layout.HEADS, layout.MANIFESTS, layout.PACKS) if self.files.list(self._top / name)]
        if kept:
            # Another process may have created the location, and pushed, since the first look.
            data = self.files.read_small(self._top / layout.DESCRIPTOR_NAME, RECORD_BYTES)
            if data is not None:
                return data
            raise StructureError(
                f"{self.location} has lost its asymcheck.store: it has {' and '.join(kept)}; put that file back from a "
                "copy, or name another location"
            )
        if foreign := self._foreign_names():
            error = StoreNotFoundError(
                f"{self.location} has other files in it ({foreign[0]}), and no asymcheck.store; name the folder to "
                "which was pushed, or an empty or a new one"
            )
            error.is_empty = False
            raise error
        if not create:
            missing = self.files.stat(self._top) is None
            what = "does not exist" if missing else "has no asymcheck.store in it: nothing was pushed there"
            raise StoreNotFoundError(f"{self.location} {what}")
        return self._create()

    def _create(self) -> bytes:
        for name in (layout.HEADS, layout.MANIFESTS, layout.PACKS):
            self.files.make_directory(self._top / name)
        data = encode_descriptor(Descriptor(os.urandom(16), time.time_ns(), WRITER))
        path = self._top / layout.DESCRIPTOR_NAME
        if self.files.put_small(path, data):
            return data
        return self.files.read_small(path, RECORD_BYTES) or data

    def _packs(self) -> tuple[dict[PackId, Entry], dict[PackId, Entry]]:
        """Return complete packs, and doomed ones, by one listing: a pack that gets its other name is in one of them."""
        lasting: dict[PackId, Entry] = {}
        doomed: dict[PackId, Entry] = {}
        # The newest first: they serve the newest checkpoint.
        for entry in sorted(self.files.walk(self.packs), key=lambda entry: -entry.mtime_ns):
            if (pack_id := layout.parse_pack_name(entry.path.name)) is not None:
                lasting[pack_id] = entry
            elif (pack_id := layout.parse_doomed_name(entry.path.name)) is not None:
                doomed[pack_id] = entry
        with self._lock:
            self._doomed = doomed
            # A training pushes for weeks: forget the indexes of packs that were removed.
            for pack_id in self._indexes.keys() - lasting.keys() - doomed.keys():
                del self._indexes[pack_id]
        return lasting, doomed

    def lasting_packs(self) -> dict[PackId, Entry]:
        """Return the files of all complete packs, the newest first."""
        return self._packs()[0]

    def doomed_packs(self) -> dict[PackId, Entry]:
        """Return the files of packs that a collection is about to remove, or was when it was killed."""
        return self._packs()[1]

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all packs that can be read, the newest first."""
        lasting, doomed = self._packs()
        return [*lasting, *doomed]

    def doom(self, entry: Entry, pack_id: PackId, collection: bytes) -> bool:
        """Announce that ``collection`` will remove a pack; return False when it is gone, or has another name by now."""
        return self.files.rename(entry.path, self.packs / layout.doomed_name(pack_id, collection))

    def reprieve(self, pack_ids: Iterable[PackId]) -> set[PackId]:
        """Withdraw announced removals of packs, by any process; return the packs that are gone."""
        lasting, doomed = self._packs()
        return {pack_id for pack_id in pack_ids if pack_id not in lasting and not self._kept(pack_id, doomed)}

    def _kept(self, pack_id: PackId, doomed: Mapping[PackId, Entry]) -> bool:
        entry = doomed.get(pack_id)
        return entry is not None and self.files.rename(entry.path, self.packs / layout.pack_name(pack_id))

    def _paths(self, pack_id: PackId) -> Iterator[PurePosixPath]:
        """Yield where a pack may be, likely places first: collections announce what they remove by other names."""
        yield self.packs / layout.pack_name(pack_id)
        with self._lock:
            known = self._doomed.get(pack_id)
        if known is not None:
            yield known.path
        for found in self._packs():
            if pack_id in found:
                yield found[pack_id].path

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:  # noqa: ARG002 - as another tier takes it
        """Return no pack: hints in a manifest name packs of the store that it comes from."""
        return ()

    def open_pack(self, pack_id: PackId) -> RemotePack:
        """Open a complete pack for reading.

        Raises:
            MissingPartitionError: there is no such pack.
            FormatError: header or index are damaged and no frame was found, or they need a newer program.
            RemoteUnreachableError: nobody answers.
        """
        return RemotePack(self.files, partial(self._paths, pack_id), self._index(pack_id), self._ahead)

    def _index(self, pack_id: PackId) -> PackIndex:
        with self._lock:
            if (index := self._indexes.get(pack_id)) is not None:
                return index
        for path in self._paths(pack_id):
            with contextlib.suppress(MissingPartitionError):
                index = read_pack_index(self.files, path, pack_id)
                if index.damage is None:
                    # For as long as it is there: a pack here is never overwritten.
                    with self._lock:
                        self._indexes[pack_id] = index
                return index
        raise MissingPartitionError(f"pack {layout.pack_name(pack_id)} does not exist in {self.location}")

    def read_indexes(self, pack_ids: Iterable[PackId]) -> dict[PackId, PackIndex | None]:
        """Return the indexes of packs, by parallel requests; None for a pack that is gone or has no readable index."""

        def index_of(pack_id: PackId) -> PackIndex | None:
            with contextlib.suppress(FormatError, MissingPartitionError):
                return self._index(pack_id)
            return None

        wanted = list(pack_ids)
        return dict(zip(wanted, self._ahead.threads.map(index_of, wanted), strict=True))

    def uploader(self) -> PackUpload:
        """Return what writes packs there; its limit of bytes a second is for all of them together."""
        return PackUpload(self.files, self.packs, RateLimit(self.config.remote.bytes_per_s))

    def pack_bytes(self, pack_id: PackId) -> int:
        """Return the bytes of a pack's file; 0 when it is gone."""
        found = self.files.stat(self.packs / layout.pack_name(pack_id))
        return 0 if found is None else found.size

    def usage(self) -> tuple[int, int, int, int]:
        """Return the number and bytes of packs in use; here none are kept to be overwritten."""
        files = self.lasting_packs()
        return len(files), sum(entry.size for entry in files.values()), 0, 0

    def temporaries(self) -> list[Entry]:
        """Return what uploads have not finished, or have left."""
        return [
            entry
            for entry in self.files.walk(self._top, recursive=True)
            if entry.is_file and entry.path.name.endswith(layout.TEMPORARY)
        ]

    def leftovers(self) -> list[str]:
        """Return the temporary files that are older than uploads take, by their place here."""
        before_ns = time.time_ns() - int(self.config.remote.grace_s * 1e9)
        return [str(entry.path.relative_to(self._top)) for entry in self.temporaries() if entry.is_older(before_ns)]

    def foreign(self) -> list[str]:
        """Return what does not belong here, by its place here."""
        parse = (layout.parse_pack_name, layout.parse_doomed_name)
        found = [name for name in self._names(self.packs) if not any(one(name) for one in parse)]
        return [*self._foreign_names(), *(f"{layout.PACKS}/{name}" for name in found)]

    def _foreign_names(self) -> list[str]:
        return [name for name in self._names(self._top) if name not in layout.REMOTE_TOP_LEVEL]

    def _names(self, folder: PurePosixPath) -> list[str]:
        return [name for name in self.files.list(folder) if not name.endswith(layout.TEMPORARY)]

    def close(self) -> None:
        """Let go of it; closing twice is no error."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._ahead.close()
