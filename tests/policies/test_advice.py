"""Test that recommendations follow from measurements, each with a reason."""

from __future__ import annotations

import dataclasses
import math

import pytest

from asymcheck.policies.advice import IDENTITY, Advice, CodecFacts, DriveFacts, Facts, Situation, advise
from asymcheck.policies.batching import FlushFacts, flush_s

MIB = 1 << 20
GB = 10**9

FAST = DriveFacts(4e9, 4e9, 2e9, 4e9, 2e-4, 2e-3, 2e-3)
SLOW = dataclasses.replace(FAST, durable_write_bytes_per_s=0.1e9, flush_latency_s=2e-2)
PLANES = CodecFacts("weights", "float32", "byte-planes", 8 * MIB, 1.2, 1e9, 2e9)
DELTA = dataclasses.replace(PLANES, codec="ordered-integer-delta", ratio=1.5, encode_bytes_per_s=0.7e9)
HALF = dataclasses.replace(PLANES, dtype="bfloat16", ratio=1.5)
FACTS = Facts(
    cores=4,
    ring_room_bytes=10 * GB,
    copy_bytes_per_s=10e9,
    digest_bytes_per_s=30e9,
    drive=FAST,
    codecs=(PLANES, DELTA, HALF),
    sample="made up",
    state_bytes=GB,
    device=None,
    device_copy_bytes_per_s=None,
    written_bytes=0,
    took_s=1.0,
)
SITUATION = Situation(GB, 86_400.0, 4 * MIB, 1024 * MIB, 4096 * MIB)


def _advise(facts: Facts = FACTS, **changed: float) -> Advice:
    return advise(facts, dataclasses.replace(SITUATION, **changed))  # type: ignore[arg-type]  # numbers, as the fields


def test_packs_are_as_large_as_latency_and_copies_ask_for() -> None:
    """Test V, L, s and Tc of a store that copies and digests on half of the cores, against the policy itself."""
    batch = _advise().batch
    chunk_s = 4 * MIB * (1 / 10e9 + 1 / 30e9) / 2
    assert batch.pack_bytes == pytest.approx(math.sqrt(GB * 2e-3 * 4 * MIB / chunk_s), abs=4096)
    flush = FlushFacts(GB, 2e-3, 4 * MIB, chunk_s, 4e9)
    assert batch.flush_s == pytest.approx(flush_s(flush, batch.pack_bytes))
    assert batch.present_flush_s == pytest.approx(flush_s(flush, 1024 * MIB))
    assert batch.flush_s <= batch.present_flush_s
    assert "2 ms" in batch.reason
    assert "in 6 packs" in batch.reason


def test_a_small_state_is_one_pack() -> None:
    """Test that a small state is written as one pack."""
    batch = _advise(state_bytes=MIB).batch
    assert batch.pack_bytes == MIB
    assert batch.reason.endswith("in 1 pack")


def test_no_pack_is_larger_than_the_limit() -> None:
    """Test any latency of a durable write."""
    facts = dataclasses.replace(FACTS, drive=dataclasses.replace(FAST, flush_latency_s=100.0))
    assert _advise(facts, pack_limit_bytes=64 * MIB).batch.pack_bytes == 64 * MIB


def test_the_stall_is_the_copy() -> None:
    """Test a copy in memory, and a copy from the accelerator."""
    assert _advise().stall.stall_s == pytest.approx(0.1)
    stall = _advise(dataclasses.replace(FACTS, device="X1", device_copy_bytes_per_s=50e9)).stall
    assert stall.stall_s == pytest.approx(0.02)
    assert "from X1 run at 50 GB/s" in stall.reason


def test_the_interval_is_youngs() -> None:
    """Test the root of twice the stall times the time between failures, and the loss."""
    advice = _advise()
    interval = advice.interval
    assert interval.interval_s == pytest.approx(math.sqrt(2 * 0.1 * 86_400))
    assert interval.mtbf_s == 86_400
    lost = 0.1 / interval.interval_s + (interval.interval_s / 2 + advice.batch.flush_s) / 86_400
    assert interval.lost_share == pytest.approx(lost)
    assert "Young" in interval.reason


def test_the_interval_is_no_shorter_than_a_write() -> None:
    """Test a slow drive, on which a checkpoint must be durable before the next is due."""
    advice = _advise(dataclasses.replace(FACTS, drive=SLOW), mtbf_s=60.0)
    assert advice.interval.interval_s == advice.batch.flush_s > 10
    assert "the drive needs this time" in advice.interval.reason


@pytest.mark.parametrize(
    ("room", "states", "reason"), [(3 * GB, 2, "two states"), (2 * GB, 1, "one state only"), (GB, 0, "stream")]
)
def test_ring_holds_two_states_if_possible(room: int, states: int, reason: str) -> None:
    """Test two states, one, and none, within the available memory."""
    ring = _advise(dataclasses.replace(FACTS, ring_room_bytes=room)).ring
    assert ring.wanted_bytes >= 2 * GB
    assert ring.ring_bytes == min(room, ring.wanted_bytes)
    assert ring.ring_bytes // (ring.wanted_bytes // 2) == states
    assert ring.room_bytes == room
    assert reason in ring.reason


def test_encoding_does_not_pay_on_a_fast_drive() -> None:
    """Test a drive that writes plain bytes faster than the codec encodes them."""
    codecs = _advise().codecs
    assert [(one.role, one.dtype, one.codec, one.gain) for one in codecs] == [
        ("weights", "float32", IDENTITY, 1.0),
        ("weights", "bfloat16", IDENTITY, 1.0),
    ]
    assert "encoding would only delay it" in codecs[0].reason


def test_encoding_pays_on_a_slow_drive() -> None:
    """Test that the codec with the best ratio is recommended, not the fastest one."""
    codecs = _advise(dataclasses.replace(FACTS, drive=SLOW)).codecs
    assert [(one.dtype, one.codec) for one in codecs] == [("float32", DELTA.codec), ("bfloat16", HALF.codec)]
    # 4 MiB at 0.1 GB/s, and 0.1 ms on each of two cores.
    plain_s = 4 * MIB / 0.1e9
    assert codecs[0].gain == pytest.approx(plain_s / (plain_s / 1.5 + 1e-4))


def test_a_faster_codec_wins_where_encoding_is_the_narrow_place() -> None:
    """Test a drive on which the encoding of the codec with the best ratio is too slow."""
    drive = dataclasses.replace(FAST, durable_write_bytes_per_s=1.2e9)
    assert _advise(dataclasses.replace(FACTS, drive=drive)).codecs[0].codec == PLANES.codec


def test_a_codec_that_saves_nothing_is_not_taken() -> None:
    """Test also the slowest drive, on which the time of the codec is lost."""
    useless = dataclasses.replace(PLANES, ratio=1.0)
    advice = _advise(dataclasses.replace(FACTS, drive=SLOW, codecs=(useless,)))
    assert [one.codec for one in advice.codecs] == [IDENTITY]
