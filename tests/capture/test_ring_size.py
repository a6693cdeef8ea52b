"""Test the automatic size of a ring, and the largest partition for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck.capture import background_saver
from asymcheck.config import StoreConfig


def test_the_largest_partition_is_the_configured_one_while_no_limit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a system that reports no memory limit."""
    monkeypatch.setattr(background_saver, "ring_limits", lambda *_: [])
    config = StoreConfig()
    assert background_saver.cut_for_ring(config, None, Path(), 1).deferred_bytes_max == config.deferred_bytes_max


@pytest.mark.parametrize(("ring_bytes", "most"), [(64 << 20, 16 << 20), (256 << 20, 32 << 20)])
def test_a_ring_takes_two_of_the_largest_partitions(ring_bytes: int, most: int) -> None:
    """Test that one partition can be copied while another is written, including the overhead of frames."""
    assert background_saver.cut_for_ring(StoreConfig(), ring_bytes, Path(), 1).deferred_bytes_max == most
