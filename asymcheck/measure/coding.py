"""Codecs: how much smaller they make real tensors, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from asymcheck.codecs.container import segment_of
from asymcheck.codecs.decode import decode
from asymcheck.codecs.encode import Encoded, encode_delta, encode_planes, encode_zstd
from asymcheck.errors import DigestMismatchError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.measure.clock import seconds_of
from asymcheck.policies.facts import CodecFacts
from asymcheck.types import Sample


def measure_codecs(samples: Iterable[Sample], budget_s: float) -> tuple[CodecFacts, ...]:
    """Encode and decode each sample with each codec that fits it, on one thread; check what comes back.

    Raises:
        DigestMismatchError: a codec did not give back what it was given: a defect.
    """
    return tuple(_measure(sample, codec, encode, budget_s) for sample in samples for codec, encode in _encoders(sample))


def _measure(sample: Sample, codec: int, encode: Callable[[], Encoded], budget_s: float) -> CodecFacts:
    encoded = encode()
    payload = memoryview(encoded.payload())
    base = None if sample.older is None else memoryview(sample.older)
    if digest(decode(encoded.descriptor, payload, base)) != encoded.descriptor.digest:
        raise DigestMismatchError(f"codec {registry.CODECS[codec]} changes {sample.dtype} of {sample.role}")
    encode_s = seconds_of(encode, budget_s)
    decode_s = seconds_of(lambda: decode(encoded.descriptor, payload, base), budget_s)
    size = len(sample.plain)
    return CodecFacts(
        role=sample.role,
        dtype=sample.dtype,
        codec=registry.CODECS[codec],
        sample_bytes=size,
        ratio=size / len(payload),
        encode_bytes_per_s=size / encode_s,
        decode_bytes_per_s=size / decode_s,
    )


def _encoders(sample: Sample) -> Iterator[tuple[int, Callable[[], Encoded]]]:
    plain, name = memoryview(sample.plain), digest(sample.plain)
    segments = [segment_of(sample.dtype, len(plain))]
    yield registry.CODEC_ZSTD, lambda: encode_zstd(name, plain)
    yield registry.CODEC_BYTE_PLANES, lambda: encode_planes(name, plain, segments)
    if sample.older is not None and sample.older != sample.plain:
        base, older = memoryview(sample.older), digest(sample.older)
        yield registry.CODEC_DELTA, lambda: encode_delta(name, plain, segments, older, base)
