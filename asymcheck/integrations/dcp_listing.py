"""File system of fsspec that lists the checkpoints of a run, for programs that look for the newest one by themselves.

``asymcheck:///path/of/store?run=RUN`` is a directory with a directory ``step-N`` for each complete checkpoint on the
line. Each of these seems to contain the file ``.metadata``, by which programs recognise a complete checkpoint of DCP.
A checkpoint can be deleted; everything else goes through storage writer and storage reader.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from typing import Any

from fsspec import AbstractFileSystem

from asymcheck.errors import CheckpointNotFoundError, InvalidInputError, MissingEntryError, StoreNotFoundError
from asymcheck.integrations.dcp_uri import CheckpointURI
from asymcheck.store import Store

_METADATA = ".metadata"


class CheckpointListing(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Directory of checkpoints, which the package's entry point and ``dcp.register()`` make known to fsspec."""

    protocol = "asymcheck"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        """Keep the URI, which is the name of a directory."""
        return path.rstrip("/")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:  # noqa: ANN401, FBT001, FBT002 - signature of fsspec
        """List the checkpoints of a run, or the file of a checkpoint.

        Raises:
            MissingEntryError: the store has no such run or checkpoint.
        """
        path = self._strip_protocol(path)
        uri = CheckpointURI.parse(path.removesuffix(f"/{_METADATA}"))
        with _opened(uri, path, read_only=True) as store:
            steps = sorted({item.step for item in store.checkpoints(uri.run) if item.complete and item.on_line})
        if uri.step is not None and uri.step not in steps:
            raise MissingEntryError(_missing(path))
        names = [f"step-{step}" for step in steps] if uri.step is None else [_METADATA]
        kind = "directory" if uri.step is None else "file"
        if posixpath.basename(path) == _METADATA:
            path = posixpath.dirname(path)
        entries = [{"name": f"{path}/{name}", "size": 0, "type": kind} for name in names]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - signature of fsspec
        """Describe a run, a checkpoint, or its file."""
        path = self._strip_protocol(path)
        self.ls(path)
        kind = "file" if posixpath.basename(path) == _METADATA else "directory"
        return {"name": path, "size": 0, "type": kind}

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT001, FBT002 - as above
        """Delete a checkpoint, and free its space."""
        uri = CheckpointURI.parse(self._strip_protocol(path))
        if uri.step is None:
            raise InvalidInputError(
                f"cannot delete {path}: only checkpoints can be deleted, not runs; append /step-100"
            )
        with _opened(uri, path) as store:
            store.delete(uri.step, run=uri.run)
            store.gc()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - as above
        """Refuse to write."""
        raise _refusal(path)

    def _open(self, path: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as above
        raise _refusal(path)


@contextlib.contextmanager
def _opened(uri: CheckpointURI, path: str, *, read_only: bool = False) -> Iterator[Store]:
    try:
        with Store.open(uri.location, read_only=read_only) as store:
            yield store
    except (StoreNotFoundError, CheckpointNotFoundError) as error:
        raise MissingEntryError(_missing(path)) from error


def _missing(path: str) -> str:
    return f"{path} does not exist: the store has no such run or complete checkpoint; list them with asymcheck inspect"


def _refusal(path: str) -> InvalidInputError:
    return InvalidInputError(
        f"cannot access {path} as a file; call asymcheck.integrations.dcp.register() in this process, or pass "
        "storage_writer=AsymcheckWriter(uri) or storage_reader=AsymcheckReader(uri)"
    )
