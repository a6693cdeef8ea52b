"""Test versions and features: refusals and their messages."""

import pytest

from asymcheck.errors import ChecksumError, UnsupportedFeatureError, UnsupportedVersionError
from asymcheck.format import registry
from asymcheck.format.digest import sum8
from asymcheck.format.registry import (
    check_reader_features,
    check_sealed,
    check_version,
    missing_writer_features,
)


@pytest.mark.parametrize("version", range(registry.FORMAT_MIN_READ, registry.FORMAT_MAX_READ + 1))
def test_versions_in_the_range_pass(version: int) -> None:
    """Test every readable version."""
    check_version(version, "store")


def test_a_newer_version_asks_for_a_newer_program() -> None:
    """Test that the message names the structure, the version, the readable range, and the remedy."""
    with pytest.raises(UnsupportedVersionError, match=r"store has format version 2; .* reads 1 to 1: install a newer"):
        check_version(registry.FORMAT_MAX_READ + 1, "store")


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_never_was_is_no_newer_program(version: int) -> None:
    """Test a version below the range, for which no newer program is recommended."""
    with pytest.raises(UnsupportedVersionError, match=f"version {version}; .*the file is damaged"):
        check_version(version, "store")


def _sealed(version: int) -> tuple[bytes, bytes]:
    summed = b"ASYMTEST" + version.to_bytes(2, "little") + b"the rest"
    return summed, sum8(summed)


def test_a_sealed_version_in_the_range_passes() -> None:
    """Test an intact structure of a known version."""
    check_sealed(*_sealed(registry.FORMAT_WRITE), b"ASYMTEST", "test", "frame")


def test_a_sealed_version_of_the_future_is_believed() -> None:
    """Test a newer version with a valid checksum."""
    with pytest.raises(UnsupportedVersionError):
        check_sealed(*_sealed(2), b"ASYMTEST", "test", "frame")


@pytest.mark.parametrize("bit", range(16))
def test_a_flipped_bit_in_the_version_is_damage(bit: int) -> None:
    """Test that each flipped bit of a known version is distinguished from a newer version."""
    summed, own = _sealed(registry.FORMAT_WRITE)
    number = registry.FORMAT_WRITE ^ 1 << bit
    with pytest.raises(ChecksumError, match="which was 1"):
        check_sealed(summed[:8] + number.to_bytes(2, "little") + summed[10:], own, b"ASYMTEST", "test", "frame")


def test_unknown_reader_features_are_named() -> None:
    """Test the order of several unknown features."""
    check_reader_features([], "store")
    with pytest.raises(UnsupportedFeatureError, match="store needs reader feature\\(s\\) apples, pears: install"):
        check_reader_features(["pears", "apples", "pears"], "store")


def test_missing_writer_features_are_listed() -> None:
    """Test that missing writer features are returned, because the store can still be read."""
    assert missing_writer_features([]) == []
    assert missing_writer_features(["b", "a"]) == ["a", "b"]
