"""Test that the batch size minimises the predicted time within its bounds."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.policies.batching import FlushFacts, batch_bytes, flush_s, stream_batch_bytes

BLOCK = 4096
MIB = 1 << 20

facts = st.builds(
    FlushFacts,
    volume_bytes=st.integers(0, 1 << 45),
    latency_s=st.floats(0, 10),
    chunk_bytes=st.integers(1, 1 << 30),
    chunk_s=st.floats(0, 10),
    write_bytes_per_s=st.floats(1e5, 1e11),
)
limits = st.integers(0, 1 << 40)


@given(facts, limits)
def test_whole_blocks_within_the_bounds(given_facts: FlushFacts, limit: int) -> None:
    """Test a multiple of 4 KiB between a chunk and the limit, unless a chunk is larger, and never zero."""
    batch = batch_bytes(given_facts, limit)
    assert batch > 0
    assert batch % BLOCK == 0
    assert batch >= given_facts.chunk_bytes
    assert batch <= max(limit, given_facts.chunk_bytes + BLOCK - 1)


@given(facts, limits)
def test_a_small_volume_goes_straight(given_facts: FlushFacts, limit: int) -> None:
    """Test that no batch is more than a block larger than the volume or a chunk."""
    batch = batch_bytes(given_facts, limit)
    assert batch < max(given_facts.volume_bytes, given_facts.chunk_bytes) + BLOCK


@given(facts, limits, st.floats(0.01, 100))
def test_no_other_size_is_predicted_to_be_faster(given_facts: FlushFacts, limit: int, factor: float) -> None:
    """Test all sizes within the bounds, except for the rounding to blocks."""
    batch = batch_bytes(given_facts, limit)
    most = min(max(limit // BLOCK * BLOCK, batch), max(given_facts.volume_bytes, batch))
    other = min(max(batch * factor, given_facts.chunk_bytes), most)
    slack = max(abs(flush_s(given_facts, batch + step) - flush_s(given_facts, batch)) for step in (-BLOCK + 1, BLOCK))
    assert flush_s(given_facts, batch) <= flush_s(given_facts, other) * (1 + 1e-9) + slack


@given(facts, limits, st.floats(1, 1000))
def test_measurements_move_the_size_in_the_right_direction(given_facts: FlushFacts, limit: int, factor: float) -> None:
    """Test that latency favours larger batches, and slow chunks smaller batches."""
    batch = batch_bytes(given_facts, limit)
    late = dataclasses.replace(given_facts, latency_s=given_facts.latency_s * factor)
    slow = dataclasses.replace(given_facts, chunk_s=given_facts.chunk_s * factor)
    assert batch_bytes(slow, limit) <= batch <= batch_bytes(late, limit)


def test_the_square_root() -> None:
    """Test a slow path: 14.17 ms a write, 0.8 MB chunks in 1.0859 ms each, 409.6 MB: 65.4 MB."""
    given_facts = FlushFacts(409_600_000, 14.17e-3, 800_000, 1.0859e-3, 100e6)
    batch = batch_bytes(given_facts, 1 << 30)
    assert batch == pytest.approx(65.39e6, abs=BLOCK)
    assert batch == pytest.approx(math.sqrt(409.6e6 * 14.17e-3 * 0.8e6 / 1.0859e-3), abs=BLOCK)


def test_the_predicted_time() -> None:
    """Test the sum of the latency of every batch, the wait for the first batch, and the bytes."""
    given_facts = FlushFacts(1000 * MIB, 0.01, MIB, 0.002, 100 * MIB)
    assert flush_s(given_facts, 100 * MIB) == pytest.approx(10 * 0.01 + 100 * 0.002 + 10)
    assert flush_s(given_facts, 5000 * MIB) == flush_s(given_facts, 1000 * MIB)


def test_chunks_that_cost_nothing() -> None:
    """Test that the batch is as large as possible, because small batches gain nothing."""
    given_facts = FlushFacts(1000 * MIB, 0.01, MIB, 0.0, 1e9)
    assert batch_bytes(given_facts, 1 << 40) == 1000 * MIB
    assert batch_bytes(given_facts, 64 * MIB + 5) == 64 * MIB


def test_writes_without_latency() -> None:
    """Test that each chunk is written immediately."""
    assert batch_bytes(FlushFacts(1000 * MIB, 0.0, 3 * MIB + 1, 0.001, 1e9), 1 << 40) == 3 * MIB + BLOCK


@given(facts, st.integers(1, 64), limits.filter(bool), limits.filter(bool))
def test_streams_share_a_volume(given_facts: FlushFacts, streams: int, least: int, limit: int) -> None:
    """Test that more streams do not change the limit and the minimum size."""
    batch = stream_batch_bytes(given_facts, streams, least, limit)
    assert min(least, limit) <= batch <= limit


def test_streams_end_together() -> None:
    """Test 1500 MiB by four streams in packs of at most 256 MiB: two each, not six, which would leave streams idle."""
    given_facts = FlushFacts(1500 * MIB, 0.4, 16 * MIB, 0.016, 4e8)
    batch = stream_batch_bytes(given_facts, 4, 64 * MIB, 256 * MIB)
    assert 1500 / 8 * MIB <= batch <= 1500 / 8 * MIB + 16 * MIB
    assert stream_batch_bytes(given_facts, 1, 64 * MIB, 256 * MIB) == pytest.approx(250 * MIB, rel=0.07)
    small = dataclasses.replace(given_facts, volume_bytes=100 * MIB)
    assert stream_batch_bytes(small, 4, 64 * MIB, 256 * MIB) == 64 * MIB
