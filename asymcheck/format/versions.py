"""Which versions and features this program can read and write (SPEC.md §13)."""

from __future__ import annotations

from collections.abc import Iterable

from asymcheck.errors import UnsupportedFeatureError, UnsupportedVersionError
from asymcheck.format import registry


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
