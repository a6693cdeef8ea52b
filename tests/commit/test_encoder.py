"""Test that the encoder decides by measurements of whole partitions, not only of samples."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asymcheck.codecs.derived import BFLOAT16
from asymcheck.codecs.encode import Encoded
from asymcheck.commit import encoder as module
from asymcheck.commit.encoder import Base, Contents, Encoder, contents_of
from asymcheck.config import Compression
from asymcheck.format.digest import digest
from asymcheck.format.registry import CODEC_BYTE_PLANES, CODEC_DERIVED, CODEC_IDENTITY
from asymcheck.policies.compression import EncodingSample
from asymcheck.state.partition_plan import Piece
from asymcheck.storage.throughput import ThroughputMeter

PLAIN = memoryview(np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype("<f4").tobytes())
NAME = digest(PLAIN)


@pytest.fixture
def contents() -> Contents:
    """Return weights."""
    return contents_of([Piece(0, 0, len(PLAIN))], "weights", ["float32"])


def test_an_encoder_that_has_to_wait_for_a_core_is_not_asked_again(
    contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test an encoder that is fast for a sample, and loses its core during a whole partition."""
    now_s = 0.0

    def starved(name: bytes, plain: memoryview, *rest: object) -> Encoded | None:
        nonlocal now_s
        now_s += 0.5 if len(plain) == len(PLAIN) else 1e-4
        return encode(name, plain, *rest)  # type: ignore[arg-type]  # passed on as they came

    encode = module._encode
    monkeypatch.setattr(module, "_encode", starved)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(ThroughputMeter, "bytes_per_s", 5e6)
    encoder = Encoder("auto", "nvme")
    first = encoder.choose(PLAIN, contents, [])
    assert first.codec == CODEC_BYTE_PLANES
    encoded = encoder.encode(NAME, first, PLAIN, contents, [])
    assert encoded is not None
    assert encoder.choose(PLAIN, contents, []).codec == CODEC_IDENTITY
    assert encoder.reasons() == {"weights": {"byte-planes": first.why}}


def test_off_looks_at_nothing(contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that not even a sample is read."""
    monkeypatch.setattr(module, "_try", lambda *_arguments: pytest.fail("it was looked at"))
    assert Encoder("off", "nvme").choose(PLAIN, contents, []).codec == CODEC_IDENTITY


def test_looks_for_bases_that_do_not_pay_become_seldom(contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that searches are repeated, but rarely, if a base was missing or not worth its time."""
    monkeypatch.setattr(ThroughputMeter, "bytes_per_s", 5e8)
    encoder = Encoder("auto", "nvme")
    looks = [number for number in range(10_000) if encoder.searches_original(contents)]
    pauses = [after - before - 1 for before, after in itertools.pairwise(looks)]
    assert pauses[:11] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert set(pauses[11:]) == {1024}


@pytest.mark.parametrize(("mode", "bytes_per_s", "looks"), [("auto", 5e7, 100), ("auto", 5e9, 0), ("off", 5e7, 0)])
def test_bases_are_searched_where_they_pay(
    contents: Contents, monkeypatch: pytest.MonkeyPatch, mode: Compression, bytes_per_s: float, looks: int
) -> None:
    """Test a slow drive, and a fast one."""
    monkeypatch.setattr(ThroughputMeter, "bytes_per_s", bytes_per_s)
    encoder = Encoder(mode, "nvme")
    encoder._sampled[(*contents.kind, CODEC_DERIVED)] = EncodingSample(1000, 1e9)
    assert sum(encoder.searches_original(contents) for _ in range(100)) == looks


def test_the_smallest_is_always_looked_for(contents: Contents) -> None:
    """Test any time of a search, and any earlier result."""
    encoder = Encoder("smallest", "nvme")
    encoder._sampled[(*contents.kind, CODEC_DERIVED)] = EncodingSample(1, 1e9)
    assert all(encoder.searches_original(contents) for _ in range(100))


@pytest.mark.parametrize("wrong_from", [0, len(PLAIN) - 4096], ids=["all", "the end"])
def test_wrong_original_does_not_affect_its_kind(wrong_from: int) -> None:
    """Test a mismatch in a sample, and in the whole partition."""
    copy = torch.frombuffer(bytearray(PLAIN), dtype=torch.float32).bfloat16()
    plain = memoryview(copy.view(torch.uint8).numpy().tobytes())
    contents = contents_of([Piece(0, 0, len(plain))], "weights", ["bfloat16"])
    other = memoryview(bytes(PLAIN[:wrong_from]) + bytes(PLAIN[wrong_from:])[::-1])
    bases = [[Base(CODEC_DERIVED, digest(one), one, 0, BFLOAT16)] for one in (other, PLAIN)]
    encoder = Encoder("smallest", "nvme")
    for base, codec in zip(bases, (CODEC_BYTE_PLANES, CODEC_DERIVED), strict=True):
        choice = encoder.choose(plain, contents, base)
        encoded = encoder.encode(digest(plain), choice, plain, contents, base)
        assert encoded is not None
        assert encoded.descriptor.codec == codec
