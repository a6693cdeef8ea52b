"""Locations: what a URI says about where a remote layout lies."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from asymcheck.errors import InvalidInputError

_SCHEMES = "hdfs, file, s3, gs, abfs, viewfs"
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_uri(location: object) -> bool:
    """Tell whether a location is a URI, such as ``hdfs://namenode:8020/checkpoints``, and not a path."""
    return isinstance(location, str) and _URI.match(location) is not None


def unknown_scheme(location: object, scheme: str) -> InvalidInputError:
    """Return the error for a location of a kind that there is no file system for."""
    return InvalidInputError(
        f"location {str(location)!r:.100}: no file system is known for {scheme}://; use {_SCHEMES}"
    )


@dataclasses.dataclass(frozen=True)
class RemoteLocation:
    """Where a remote layout lies."""

    scheme: str
    """``hdfs``, ``file``, or another one that pyarrow knows."""
    authority: str
    """Host and port, a name service, or a bucket; empty for ``file``."""
    path: str
    """Where in that file system, beginning with a slash and ending without one."""
    options: Mapping[str, str]
    """Settings of the client, from the query."""

    def __str__(self) -> str:
        """Return the URI without its options."""
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_location(location: str | os.PathLike[str]) -> RemoteLocation:
    """Take a URI apart.

    Raises:
        InvalidInputError: it is none, or says too little.
    """
    text = os.fspath(location)
    if not is_uri(text):
        raise InvalidInputError(
            f"location {text!r:.100}: give a URI, such as hdfs://namenode:8020/checkpoints or file:///mnt/checkpoints"
        )
    parts = urlsplit(text)
    scheme, path = parts.scheme.lower(), "/" + unquote(parts.path).strip("/")
    if path == "/" and scheme not in (*_SCHEMES.split(", "), "gcs", "abfss"):
        raise unknown_scheme(text, scheme)
    if path == "/" or "//" in path or ".." in path.split("/"):
        raise InvalidInputError(f"location {text!r:.100}: name a directory below the root")
    if scheme == "file" and parts.netloc not in ("", "localhost"):
        raise InvalidInputError(f"location {text!r:.100}: a file URI has three slashes, as in file:///mnt/checkpoints")
    if scheme == "hdfs" and not parts.netloc:
        raise InvalidInputError(f"location {text!r:.100}: name the NameNode, as in hdfs://namenode:8020{path}")
    authority = "" if scheme == "file" else parts.netloc
    return RemoteLocation(scheme, authority, path, dict(parse_qsl(parts.query)))
