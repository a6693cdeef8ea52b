"""URIs of remote locations."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from asymcheck.errors import InvalidInputError

_SCHEMES = "hdfs, file, s3, gs, abfs, viewfs"
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_UNQUOTED = "/:@=+,~"
"""Characters, besides letters and digits, that are not percent-encoded in the path of a URI."""
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")


def is_uri(location: object) -> bool:
    """Tell whether a location is a URI, such as ``hdfs://namenode:8020/checkpoints``, instead of a path."""
    return isinstance(location, str) and _URI.match(location) is not None


def unknown_scheme(location: object, scheme: str) -> InvalidInputError:
    """Return the error for a URI scheme without a file system."""
    return InvalidInputError(
        f"location {str(location)!r:.100}: no file system is known for {scheme}://; use {_SCHEMES}"
    )


@dataclasses.dataclass(frozen=True)
class RemoteLocation:
    """Parsed URI of a remote location."""

    scheme: str
    """``hdfs``, ``file``, or another scheme of pyarrow."""
    authority: str
    """Host and port, a name service, or a bucket; empty for ``file``."""
    path: str
    """Path in the file system, with a leading slash and no trailing slash."""
    options: Mapping[str, str]
    """Options of the client, from the query of the URI."""

    def __str__(self) -> str:
        """Return the URI without its options."""
        return f"{self.scheme}://{self.authority}{quote(self.path, _UNQUOTED)}"

    def below(self, path: PurePath) -> str:
        """Return the URI of a file below the location."""
        return f"{self}/{quote(str(path), _UNQUOTED)}" if path.parts else str(self)


def parse_location(location: str | os.PathLike[str]) -> RemoteLocation:
    """Parse the URI of a remote location.

    Raises:
        InvalidInputError: the location is not a URI, or is incomplete.
    """
    text = os.fspath(location)
    if not is_uri(text):
        raise InvalidInputError(
            f"location {text!r:.100}: give a URI, such as hdfs://namenode:8020/checkpoints or file:///mnt/checkpoints"
        )
    if "#" in text:
        raise InvalidInputError(f"location {text!r:.100}: write %23 for the # in the path")
    if _CONTROL_CHARACTERS.search(text):
        raise InvalidInputError(f"location {text!r:.100}: a control character is not allowed; remove it")
    parts = urlsplit(text)
    scheme, path = parts.scheme.lower(), "/" + unquote(parts.path).strip("/")
    if path == "/" and scheme not in (*_SCHEMES.split(", "), "gcs", "abfss"):
        raise unknown_scheme(text, scheme)
    if path == "/" or "//" in path or ".." in path.split("/"):
        raise InvalidInputError(f"location {text!r:.100}: name a directory below the root")
    if "\0" in path:
        raise InvalidInputError(f"location {text!r:.100}: a zero byte is not allowed in a path; remove it")
    if scheme == "file" and "?" in text:
        raise InvalidInputError(f"location {text!r:.100}: a file URI has no options; write %3F for a ? in the path")
    if scheme == "file" and parts.netloc not in ("", "localhost"):
        raise InvalidInputError(f"location {text!r:.100}: a file URI has three slashes, as in file:///mnt/checkpoints")
    if scheme == "hdfs" and not parts.netloc:
        raise InvalidInputError(f"location {text!r:.100}: name the NameNode, as in hdfs://namenode:8020{path}")
    authority = "" if scheme == "file" else parts.netloc
    return RemoteLocation(scheme, authority, path, _options(text, parts.query))


def _options(text: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError as error:
        raise InvalidInputError(f"location {text!r:.100}: give options as ?name=value&name=value: {error}") from error
    options = dict(pairs)
    if len(options) < len(pairs):
        raise InvalidInputError(f"location {text!r:.100}: an option is given twice; give it once")
    return options
