"""URIs of remote locations."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from asymcheck.errors import InvalidInputError

_SCHEMES = "hdfs, file, s3, gs, az, abfs, viewfs, fsspec+ssh"
OBJECT_SCHEMES = ("s3", "gs", "az")
"""Schemes of object stores: S3, Google Cloud Storage and Azure Blob Storage."""
FSSPEC = "fsspec+"
"""Begin of the scheme of a location that fsspec opens, such as ``fsspec+ssh://host/path``."""
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_UNQUOTED = "/:@=+,~"
"""Characters, besides letters and digits, that are not percent-encoded in the path of a URI."""
_ANY_BYTES = "surrogateescape"
"""Names of files need not be UTF-8. Python represents them in this form."""
_SECRET = re.compile(r"secret|token|key|passw|passphrase|credential|(^|_)sas|^sig$", re.IGNORECASE)
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
    """``hdfs``, ``file``, one of :data:`OBJECT_SCHEMES`, or another scheme of pyarrow."""
    authority: str
    """Host and port, a name service, or a bucket; empty for ``file``."""
    path: str
    """Path in the file system, with a leading slash and no trailing slash."""
    options: Mapping[str, str]
    """Options of the client, from the query of the URI."""

    def __str__(self) -> str:
        """Return the URI without its options."""
        return f"{self.scheme}://{self.authority}{quote(self.path, _UNQUOTED, errors=_ANY_BYTES)}"

    def below(self, path: PurePath) -> str:
        """Return the URI of a file below the location."""
        return f"{self}/{quote(str(path), _UNQUOTED, errors=_ANY_BYTES)}" if path.parts else str(self)


def refuse_credentials(uri: str, options: Iterable[str] = ()) -> None:
    """Raise InvalidInputError if a URI for an object store or fsspec, or a name of its options, has credentials.

    The message does not repeat them.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InvalidInputError(f"a location is not a URI: {error}; correct its host and port") from error
    scheme = parts.scheme.lower()
    is_fsspec = scheme.startswith(FSSPEC)
    if scheme not in OBJECT_SCHEMES and not is_fsspec:
        return
    user = parts.netloc.rpartition("@")[0]
    names = (*(pair.partition("=")[0] for pair in parts.query.split("&")), *options)
    secret = next((name for name in names if _SECRET.search(name)), None)
    # The user of a file server is a part of its address.
    if secret is None and not (":" in user if is_fsspec else user):
        return
    what = f"the option {secret!r:.50}" if secret else "a password" if is_fsspec else "a user name"
    where = "the environment variables of the provider"
    if is_fsspec:
        where = f"FSSPEC_{scheme.removeprefix(FSSPEC).upper()}_PASSWORD or another setting of fsspec"
    raise InvalidInputError(
        f"location {scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}: {what} is not allowed, because URIs and "
        f"options are printed in messages; give credentials by {where}"
    )


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
    refuse_credentials(text)
    parts = urlsplit(text)
    host, scheme, path = parts.netloc, parts.scheme.lower(), "/" + unquote(parts.path, errors=_ANY_BYTES).strip("/")
    if path == "/" and scheme not in (*_SCHEMES.split(", "), "gcs", "abfss") and not scheme.startswith(FSSPEC):
        raise unknown_scheme(text, scheme)
    is_file = scheme == "file"
    for is_wrong, advice in (
        ("#" in text, "write %23 for the # in the path"),
        (_CONTROL_CHARACTERS.search(text), "a control character is not allowed; remove it"),
        (path == "/" or "//" in path or ".." in path.split("/"), "name a directory below the root, without .. and //"),
        ("\0" in path, "a zero byte is not allowed in a path; remove it"),
        (is_file and "?" in text, "a file URI has no options; write %3F for a ? in the path"),
        (is_file and host not in ("", "localhost"), "a file URI has three slashes, as in file:///mnt/checkpoints"),
        (scheme == "hdfs" and not host, f"name the NameNode, as in hdfs://namenode:8020{path}"),
        (scheme in OBJECT_SCHEMES and not host, f"name the bucket, as in {scheme}://bucket{path}"),
    ):
        if is_wrong:
            raise InvalidInputError(f"location {text!r:.100}: {advice}")
    return RemoteLocation(scheme, "" if is_file else host, path, _options(text, parts.query))


def _options(text: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError as error:
        raise InvalidInputError(f"location {text!r:.100}: give options as ?name=value&name=value: {error}") from error
    options = dict(pairs)
    if len(options) < len(pairs):
        raise InvalidInputError(f"location {text!r:.100}: an option is given twice; give it once")
    return options
