"""Which versions and features this program can read and write (SPEC.md §13)."""

from __future__ import annotations

from collections.abc import Iterable

from asymcheck.errors import ChecksumError, UnsupportedFeatureError, UnsupportedVersionError
from asymcheck.format import registry
from asymcheck.format.digest import sum8

_VERSION = slice(8, 10)
"""Where it lies in every binary structure."""


def check_version(version: int, what: str) -> None:
    """Refuse a structure whose major version is outside the readable range.

    Raises:
        UnsupportedVersionError: naming the version met and what to do.
    """
    if not registry.FORMAT_MIN_READ <= version <= registry.FORMAT_MAX_READ:
        newer = version > registry.FORMAT_MAX_READ
        remedy = "install a newer asymcheck" if newer else "the file is damaged, or not of this format"
        raise UnsupportedVersionError(
            f"{what} has format version {version}; this program reads "
            f"{registry.FORMAT_MIN_READ} to {registry.FORMAT_MAX_READ}: {remedy}"
        )


def check_binary_version(summed: bytes, own_sum: bytes, what: str) -> None:
    """Refuse a binary structure (its magic, then its version) outside the readable range.

    A flipped bit in the version is told apart from a newer program's work by the checksum over ``summed``: it is right
    when a known version stands there.

    Raises:
        UnsupportedVersionError: naming the version met and what to do.
        ChecksumError: only the version is damaged.
    """
    version = int.from_bytes(summed[_VERSION], "little")
    for known in range(registry.FORMAT_MIN_READ, registry.FORMAT_MAX_READ + 1):
        there = known.to_bytes(2, "little")
        if version != known and sum8(summed[: _VERSION.start] + there + summed[_VERSION.stop :]) == own_sum:
            raise ChecksumError(f"{what}: checksum mismatch in the format version {version}, which was {known}")
    check_version(version, what)


def check_reader_features(features: Iterable[str], what: str) -> None:
    """Refuse reader features that this program lacks.

    Raises:
        UnsupportedFeatureError: naming the features.
    """
    unknown = sorted(set(features) - registry.READER_FEATURES)
    if unknown:
        raise UnsupportedFeatureError(f"{what} needs reader feature(s) {', '.join(unknown)}: install a newer asymcheck")


def missing_writer_features(features: Iterable[str]) -> list[str]:
    """Return the writer features that this program lacks; a store that has any is opened read-only."""
    return sorted(set(features) - registry.WRITER_FEATURES)
