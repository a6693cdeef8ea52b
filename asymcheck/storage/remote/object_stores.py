"""Client of object stores, based on obstore: S3, Google Cloud Storage and Azure Blob Storage."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

from asymcheck.errors import InvalidInputError, RemoteUnreachableError, StorageError
from asymcheck.storage.remote.client_interface import Entry, ObjectStore
from asymcheck.storage.remote.location import RemoteLocation, refuse_credentials

_STORES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_GCS_EMULATOR = "STORAGE_EMULATOR_HOST"
"""Environment variable of Google's clients with the URL of a server that needs no credentials."""
_PUT_S = timedelta(minutes=1)
"""Time that a put of a pack may take beyond the deadline. The caller ends all other requests at their deadline."""
_NO_BUCKET = ("NoSuchBucket", "InvalidBucketName", "ContainerNotFound", "bucket does not exist")
_REASON = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_QUERY = re.compile(r"(https?://[^\s?\"']*)\?[^\s\"',)]*")


class _ObstoreClient(ObjectStore):
    kind = "objects"

    def __init__(self, location: RemoteLocation, store: Any) -> None:  # noqa: ANN401 - obstore
        self._obstore: Any = importlib.import_module("obstore")
        self._exceptions: Any = importlib.import_module("obstore.exceptions")
        self._store = store
        self._bucket = f"{location.scheme}://{location.authority}"
        self.top = location.path

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Shorten the text of "not found", and raise StorageError if the bucket does not exist."""
        try:
            yield
        except (FileNotFoundError, self._exceptions.GenericError) as error:
            text = short_text(str(error))
            if any(sign in text for sign in _NO_BUCKET):
                raise StorageError(
                    f"bucket {self._bucket} does not exist; create it, or correct location, endpoint and region"
                ) from None
            if isinstance(error, FileNotFoundError):
                error.args = (text,)
            raise

    def stat(self, path: str) -> Entry | None:
        with self.translated():
            try:
                return _entry(self._obstore.head(self._store, _key(path)))
            except FileNotFoundError:
                pass
            for _ in self._obstore.list(self._store, f"{_key(path)}/", chunk_size=1):
                return Entry(PurePosixPath(path), False, 0, 0)
        return None

    def children(self, path: str) -> list[Entry]:
        with self.translated():
            listed = self._obstore.list_with_delimiter(self._store, f"{_key(path)}/")
        folders = [Entry(PurePosixPath("/", prefix), False, 0, 0) for prefix in listed["common_prefixes"]]
        return [*folders, *_entries_below(path, listed["objects"])]

    def beginning(self, path: str, prefix: str, found: list[Entry]) -> None:
        with self.translated():
            # The client lists whole folders only. Names come in order, so those with the prefix follow it.
            for chunk in self._obstore.list(self._store, f"{_key(path)}/", offset=f"{_key(path)}/{prefix}"):
                new = [entry for entry in _entries_below(path, chunk) if entry.path.name.startswith(prefix)]
                found += new
                if len(new) < len(chunk):
                    break

    def walk(self, path: str, found: list[Entry]) -> None:
        """Append the files in and below a directory to ``found``, by one request for each 1,000 files."""
        with self.translated():
            for chunk in self._obstore.list(self._store, f"{_key(path)}/"):
                found += _entries_below(path, chunk)

    def read(self, path: str, offset: int, length: int) -> tuple[memoryview, int]:
        with self.translated():
            try:
                got = self._obstore.get(self._store, _key(path), options={"range": (offset, offset + length)})
            except self._exceptions.GenericError:
                # A range beyond the end of the object is an error of the service.
                size = self._obstore.head(self._store, _key(path))["size"]
                if offset < size:
                    raise
                return memoryview(b""), size
            data, size = memoryview(got.bytes()), got.meta["size"]
        if len(data) != min(length, size - offset):
            sent = f"the service sent {len(data)} of {min(length, size - offset)} bytes"
            raise RemoteUnreachableError(f"{self._bucket}{path}: {sent}; try again")
        return data, size

    def put(self, path: str, pieces: Sequence[bytes | memoryview]) -> bool:
        with self.translated():
            try:
                self._obstore.put(self._store, _key(path), pieces, mode="create", use_multipart=False)
            except self._exceptions.AlreadyExistsError:
                pass
            else:
                return True
            try:
                # An earlier request may have stored the object, although its answer was lost.
                return memoryview(self._obstore.get(self._store, _key(path)).bytes()) == b"".join(pieces)
            except FileNotFoundError:
                # S3 answers "conflict" while another put of the name is in progress, which may fail.
                pass
        raise RemoteUnreachableError(
            f"{self._bucket}{path}: the service refused a put because of another one; try again"
        )

    def delete(self, path: str) -> None:
        with self.translated():
            self._obstore.delete(self._store, _key(path))


def short_text(text: str) -> str:
    """Return the text of an error without debugging output, and without queries of URLs, which may have signatures."""
    text = _QUERY.sub(r"\1", text.partition("\n\nDebug source")[0])
    reason = _REASON.search(text)
    return text.partition("<?xml")[0] + (f"{reason[1]}: {reason[2]}" if reason else "")


def _key(path: str) -> str:
    return path.lstrip("/")


def _entry(meta: Any) -> Entry:  # noqa: ANN401 - obstore
    return Entry(PurePosixPath("/", meta["path"]), True, meta["size"], int(meta["last_modified"].timestamp() * 1e9))


def _entries_below(path: str, listed: Iterable[Any]) -> list[Entry]:
    """Return the listed objects, without the empty object "path/" that consoles and some clients put for a folder."""
    return [entry for entry in map(_entry, listed) if entry.path != PurePosixPath(path)]


def _emulated(endpoint: str) -> dict[str, str]:
    """Return the configuration for a server that stands for Google Cloud Storage."""
    account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
    return {"service_account_key": json.dumps({**account, "private_key_id": ""})}


def connect(location: RemoteLocation, options: Mapping[str, str], deadline_s: float) -> ObjectStore:
    """Return the client for a location. Sends no request.

    Raises:
        InvalidInputError: obstore is not installed, or refuses an option; or an option is a credential.
    """
    refuse_credentials(str(location), options)
    if importlib.util.find_spec("obstore") is None:
        raise InvalidInputError(f"location {location}: obstore is not installed; install asymcheck[objects]")
    stores: Any = importlib.import_module("obstore.store")
    exceptions: Any = importlib.import_module("obstore.exceptions")
    emulator = os.environ.get(_GCS_EMULATOR, "") if location.scheme == "gs" else ""
    endpoints = (*(os.environ.get(name, "") for name in _ENDPOINTS), *options.values(), emulator)
    seconds = timedelta(seconds=deadline_s)
    try:
        store = getattr(stores, _STORES[location.scheme])(
            location.authority,
            config={**(_emulated(emulator) if emulator else {}), **options},
            client_options={
                "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
                "connect_timeout": min(seconds, timedelta(seconds=5)),
                "timeout": seconds + _PUT_S,
            },
            retry_config={"max_retries": 10, "retry_timeout": min(seconds / 2, timedelta(minutes=3))},
        )
    except (exceptions.BaseError, ValueError, TypeError) as error:
        reason = short_text(str(error))
        raise InvalidInputError(f"location {location}: obstore refuses the configuration: {reason}") from None
    return _ObstoreClient(location, store)
