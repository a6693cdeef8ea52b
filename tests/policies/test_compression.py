"""Test the compression policy with invented measurements."""

from __future__ import annotations

import pytest

from asymcheck.format.registry import CODEC_BYTE_PLANES, CODEC_DELTA, CODEC_DERIVED, CODEC_IDENTITY
from asymcheck.policies.compression import EncodingSample, choose_codec

PLANES = EncodingSample(1.2, 1e9)
DELTA = EncodingSample(1.6, 0.8e9)
DERIVED = EncodingSample(32768, 2e9)


def test_off_encodes_nothing() -> None:
    """Test any possible saving."""
    assert choose_codec("off", {CODEC_DERIVED: DERIVED}, 1e6).codec == CODEC_IDENTITY


@pytest.mark.parametrize("mode", ["auto", "smallest"])
def test_incompressible_data_is_stored_plain(mode: str) -> None:
    """Test that noise costs no time in a restore."""
    assert choose_codec(mode, {CODEC_BYTE_PLANES: EncodingSample(1.01, 1e9)}, 1e6).codec == CODEC_IDENTITY  # type: ignore[arg-type]  # one of both
    assert choose_codec(mode, {CODEC_DERIVED: EncodingSample(0.0, 1e9)}, 1e6).codec == CODEC_IDENTITY  # type: ignore[arg-type]  # one of both
    assert choose_codec(mode, {}, 1e6).codec == CODEC_IDENTITY  # type: ignore[arg-type]  # one of both


def test_smallest_takes_the_smallest_regardless_of_time() -> None:
    """Test the slowest encoder with the fastest drive."""
    slow = EncodingSample(1.2, 1e6)
    assert choose_codec("smallest", {CODEC_BYTE_PLANES: slow}, 1e10).codec == CODEC_BYTE_PLANES
    assert choose_codec("smallest", {CODEC_BYTE_PLANES: slow, CODEC_DELTA: DELTA}, None).codec == CODEC_DELTA
    everything = {CODEC_BYTE_PLANES: PLANES, CODEC_DELTA: DELTA, CODEC_DERIVED: DERIVED}
    assert choose_codec("smallest", everything, None).codec == CODEC_DERIVED


def test_a_delta_that_hardly_pays_is_none() -> None:
    """Test first moments, which are stored in full, because a delta must be read with its base."""
    sampled = {CODEC_BYTE_PLANES: EncodingSample(1.19, 1e9), CODEC_DELTA: EncodingSample(1.20, 1e9)}
    assert choose_codec("smallest", sampled, None).codec == CODEC_BYTE_PLANES


def test_auto_waits_until_the_target_is_measured() -> None:
    """Test that no constant replaces a measurement."""
    assert choose_codec("auto", {CODEC_BYTE_PLANES: PLANES}, None).codec == CODEC_IDENTITY


@pytest.mark.parametrize(
    ("link", "codec"),
    [(3e9, CODEC_IDENTITY), (0.3e9, CODEC_IDENTITY), (0.1e9, CODEC_BYTE_PLANES), (1e6, CODEC_BYTE_PLANES)],
)
def test_auto_encodes_if_it_saves_time(link: float, codec: int) -> None:
    """Test that a ratio of 1.2 at 1 GB/s pays off below about 0.1 GB/s."""
    assert choose_codec("auto", {CODEC_BYTE_PLANES: PLANES}, link).codec == codec


def test_auto_derives_if_it_saves_time() -> None:
    """Test the time to read and round the original, which stores no bytes."""
    assert choose_codec("auto", {CODEC_DERIVED: DERIVED}, 1e9).codec == CODEC_DERIVED
    assert choose_codec("auto", {CODEC_DERIVED: DERIVED}, 3e9).codec == CODEC_IDENTITY
    assert choose_codec("smallest", {CODEC_DERIVED: DERIVED}, 3e9).codec == CODEC_DERIVED


def test_auto_takes_the_soonest_of_several() -> None:
    """Test a small delta that takes too long on a drive that is only slightly too slow."""
    sampled = {CODEC_BYTE_PLANES: EncodingSample(1.5, 2e9), CODEC_DELTA: EncodingSample(1.6, 0.2e9)}
    assert choose_codec("auto", sampled, 0.3e9).codec == CODEC_BYTE_PLANES
    assert choose_codec("auto", sampled, 1e6).codec == CODEC_DELTA


@pytest.mark.parametrize("link", [1e6, 1e7, 1e8, 3e8, 1e9, 1e10])
@pytest.mark.parametrize("sampled", [PLANES, DELTA, DERIVED, EncodingSample(1.03, 5e9)])
def test_auto_never_takes_longer(link: float, sampled: EncodingSample) -> None:
    """Test that encoding and writing takes less time than writing, by the given measurements."""
    if choose_codec("auto", {CODEC_BYTE_PLANES: sampled}, link).codec != CODEC_IDENTITY:
        assert 1 / sampled.bytes_per_s + 1 / (sampled.ratio * link) < 1 / link


def test_a_choice_says_why() -> None:
    """Test that the reason has the figures."""
    assert "1.20 times smaller" in choose_codec("auto", {CODEC_BYTE_PLANES: PLANES}, 1e6).why
    assert "3.00 GB/s" in choose_codec("auto", {CODEC_BYTE_PLANES: PLANES}, 3e9).why
