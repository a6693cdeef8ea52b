"""Encoder: encode partitions as the compression policy decides from measurements.

Measurements are kept by kind of bytes: the role of the tensors and the type of their elements.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from asymcheck.codecs import derived
from asymcheck.codecs.container import Segment, segment_of
from asymcheck.codecs.derived import DTYPES
from asymcheck.codecs.encode import CHUNK_BYTES, Encoded, encode_delta, encode_derived, encode_planes
from asymcheck.config import Compression
from asymcheck.events import timed
from asymcheck.format.registry import CODEC_BYTE_PLANES, CODEC_DELTA, CODEC_DERIVED, CODEC_IDENTITY, CODECS
from asymcheck.policies.compression import Choice, EncodingSample, choose_codec
from asymcheck.state.partition_plan import Originals, Piece
from asymcheck.storage.throughput import ThroughputMeter
from asymcheck.types import Digest

_AGAIN = 64
"""Number of partitions of a kind between two samples."""
_SELDOM = 1024
"""Maximum number of partitions of a kind between two searches for a base while bases do not pay."""
_FAST_BYTES_PER_S = 1e9
_ENCODED_BYTES_MIN = 64 * 1024
"""Minimum size of a partition to encode. Smaller ones are few, and have the same overhead."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """Meaning of the bytes of a partition."""

    role: str
    segments: tuple[Segment, ...]

    @property
    def kind(self) -> tuple[str, Segment]:
        """Key of the measurements: the role, and the type of most bytes."""
        longest = max(self.segments, key=lambda segment: segment.length)
        return self.role, dataclasses.replace(longest, length=0)


def contents_of(pieces: Sequence[Piece], role: str, dtypes: Sequence[str]) -> Contents:
    """Describe the pieces of a partition; ``dtypes`` are those of all tensors, by row."""
    return Contents(role, tuple(segment_of(dtypes[piece.row], piece.length) for piece in pieces))


@dataclasses.dataclass(frozen=True)
class Base:
    """Another partition from which a partition may be decoded."""

    codec: int
    """Codec: delta or derived."""
    name: Digest
    plain: memoryview
    offset: int = 0
    """For derived: first byte of the elements in the base."""
    dtype: int = 0
    """For derived: number of the dtype to which the base is rounded."""


_LOOK_BYTES = 512
_NUMBERS = {name: number for number, name in DTYPES.items()}

Read = Callable[[int, int, int | None], tuple[Digest, memoryview] | None]
"""Return digest and bytes of a partition, given number, first byte and length (None for all); None without bytes."""


def original_of(plain: memoryview, dtype: str, number: int, originals: Originals, read: Read) -> Base | None:
    """Return the partition from which ``plain``, of 2-byte floats, was probably rounded, judged by samples."""
    look = min(len(plain), _LOOK_BYTES)
    # One sample is not enough: a row of padding is zero in weights and in moments.
    places = [start // 2 * 2 for start in (0, (len(plain) - look) // 2, len(plain) - look)]
    for other, offset in originals.candidates(number):
        # Every layer has several tensors of this shape, so most candidates differ.
        if all(_is_rounded(plain[at : at + look], dtype, read(other, offset + 2 * at, 2 * look)) for at in places):
            whole = read(other, 0, None)
            if whole is not None:
                return Base(CODEC_DERIVED, *whole, offset, _NUMBERS[dtype])
    return None


def _is_rounded(plain: memoryview, dtype: str, base: tuple[Digest, memoryview] | None) -> bool:
    if base is None:
        return False
    rounded = derived.rounded_base(base[1], 0, len(plain), _NUMBERS[dtype])
    return np.array_equal(np.frombuffer(plain, dtype=np.uint8), rounded)


class Encoder:
    """Encoder for one target. Thread-safe."""

    def __init__(
        self, mode: Compression, target: Literal["nvme", "hdfs"], link: Callable[[], float | None] | None = None
    ) -> None:
        """Encode for ``target``; ``link`` returns the write speed of one thread to the target in bytes per second."""
        self.meter = ThroughputMeter()
        """Write speed of the target, if no other object measures it.

        Waits for other threads or a core are included, because the times to encode include them as well.
        """
        self._link = link or (lambda: self.meter.bytes_per_s)
        self._mode, self._target = mode, target
        self._source = "dram" if target == "nvme" else "nvme"
        self._lock = threading.Lock()
        self._sampled: dict[tuple[str, Segment, int], EncodingSample] = {}
        self._since: dict[tuple[str, Segment, int], int] = {}
        self._pauses: dict[tuple[str, Segment, int], tuple[int, int]] = {}
        self._reasons: dict[str, dict[str, str]] = {}

    @property
    def wants_bases(self) -> bool:
        """Whether to search for bases. On a fast drive, reading and comparing them takes as long as a write."""
        link = self._link()
        return self._mode == "smallest" or (self._mode == "auto" and link is not None and link < _FAST_BYTES_PER_S)

    def searches_original(self, contents: Contents) -> bool:
        """Tell whether to search for the partition from which a partition was rounded.

        While such bases do not pay, the pauses between searches grow, because each search takes time.
        """
        if self._mode == "smallest" or not self.wants_bases:
            return self._mode == "smallest"
        key = (*contents.kind, CODEC_DERIVED)
        with self._lock:
            known = self._sampled.get(key)
            choice = None if known is None else choose_codec(self._mode, {CODEC_DERIVED: known}, self._link())
            if choice is not None and choice.codec == CODEC_DERIVED:
                return True
            remaining, pause = self._pauses.get(key, (0, 1))
            if remaining:
                self._pauses[key] = remaining - 1, pause
                return False
            self._pauses[key] = pause, min(2 * pause, _SELDOM)
            # A base that is found will be sampled again.
            self._since[key] = 0
            return True

    def stays_plain(self, length: int, contents: Contents, codecs: Sequence[int]) -> bool:
        """Tell, without reading a partition, whether it is stored plain. False if a new sample is due."""
        link = self._link()
        if self._mode == "off" or length < _ENCODED_BYTES_MIN or (self._mode == "auto" and link is None):
            return True
        keys = [(*contents.kind, codec) for codec in codecs]
        with self._lock:
            if any(key not in self._sampled or self._since.get(key, 0) % _AGAIN == 0 for key in keys):
                return False
            sampled = {key[-1]: self._sampled[key] for key in keys}
            stays = choose_codec(self._mode, sampled, link).codec == CODEC_IDENTITY
            if stays:
                for key in keys:
                    self._since[key] += 1
        return stays

    def reasons(self) -> dict[str, dict[str, str]]:
        """Return the reason for the last choice, by role and codec."""
        with self._lock:
            return {role: dict(codecs) for role, codecs in self._reasons.items()}

    def choose(self, plain: memoryview, contents: Contents, bases: Sequence[Base]) -> Choice:
        """Choose the codec of a partition; ``bases`` has at most one possible base per codec."""
        link = self._link()
        if self._mode == "off" or (self._mode == "auto" and link is None):
            return choose_codec(self._mode, {}, link)
        if len(plain) < _ENCODED_BYTES_MIN:
            return Choice(CODEC_IDENTITY, "too small to be worth it")
        sampled = {CODEC_BYTE_PLANES: self._sample(plain, contents, None)}
        for base in bases:
            sampled[base.codec] = self._sample(plain, contents, base)
        return choose_codec(self._mode, sampled, link)

    def _sample(self, plain: memoryview, contents: Contents, base: Base | None) -> EncodingSample:
        """Return the measurement of a codec for such partitions. The first time, and then regularly, take a sample."""
        key = _key(contents, base)
        with self._lock:
            due = self._since.get(key, 0) % _AGAIN == 0
            self._since[key] = self._since.get(key, 0) + 1
            known = self._sampled.get(key)
        if known is not None and not due:
            return known
        sampled = _try(plain, contents, base)
        if _is_no_original(base, sampled.ratio):
            return sampled
        if known is not None:
            # Short samples rarely wait for a core, unlike whole partitions. Therefore a sample corrects earlier
            # measurements gradually.
            sampled = EncodingSample(sampled.ratio, math.sqrt(known.bytes_per_s * sampled.bytes_per_s))
        with self._lock:
            self._sampled[key] = sampled
        return sampled

    def encode(
        self, name: Digest, choice: Choice, plain: memoryview, contents: Contents, bases: Sequence[Base]
    ) -> Encoded | None:
        """Encode a partition as chosen, or without a base if that fails; return None to store it plain."""
        encoded: Encoded | None = None
        if choice.codec != CODEC_IDENTITY:
            detail = {"from": self._source, "to": self._target, "role": contents.role, "why": choice.why}
            with timed("encode", len(plain), lambda: detail):
                base = next((base for base in bases if base.codec == choice.codec), None)
                encoded, measured = _measured(name, plain, contents.segments, base)
                if not _is_no_original(base, measured.ratio):
                    with self._lock:
                        self._sampled[_key(contents, base)] = measured
                if encoded is None and self._mode == "smallest":
                    encoded = _encode(name, plain, contents.segments, None)
            if encoded is not None and encoded.descriptor.stored_length >= len(plain):
                encoded = None
        with self._lock:
            codec = CODECS[CODEC_IDENTITY if encoded is None else encoded.descriptor.codec]
            self._reasons.setdefault(contents.role, {})[codec] = choice.why
        return encoded


def _key(contents: Contents, base: Base | None) -> tuple[str, Segment, int]:
    return (*contents.kind, CODEC_BYTE_PLANES if base is None else base.codec)


def _is_no_original(base: Base | None, ratio: float) -> bool:
    """Tell whether a partition was not rounded from its base, which says nothing about others of its kind."""
    return base is not None and base.codec == CODEC_DERIVED and not ratio


def _encode(name: Digest, plain: memoryview, segments: Sequence[Segment], base: Base | None) -> Encoded | None:
    if base is None:
        return encode_planes(name, plain, segments)
    if base.codec == CODEC_DELTA:
        return encode_delta(name, plain, segments, base.name, base.plain)
    return encode_derived(name, plain, base.dtype, base.name, base.plain, base.offset)


def _measured(
    name: Digest, plain: memoryview, segments: Sequence[Segment], base: Base | None
) -> tuple[Encoded | None, EncodingSample]:
    """Encode a partition or a piece; return the result and its measurement."""
    began = time.perf_counter()
    encoded = _encode(name, plain, segments, base)
    seconds = time.perf_counter() - began
    ratio = 0.0 if encoded is None else len(plain) / encoded.descriptor.stored_length
    return encoded, EncodingSample(ratio, len(plain) / max(seconds, 1e-9))


def _try(plain: memoryview, contents: Contents, base: Base | None) -> EncodingSample:
    """Encode a piece from the middle of the longest run of elements of one kind."""
    starts = itertools.accumulate((segment.length for segment in contents.segments), initial=0)
    first, segment = max(zip(starts, contents.segments, strict=False), key=lambda run: run[1].length)
    length = min(segment.length, CHUNK_BYTES)
    # Multiples of 16 bytes keep elements whole, whatever their width.
    offset = first + (segment.length - length) // 2 // 16 * 16
    piece = plain[offset : offset + length]
    if base is not None and base.codec == CODEC_DELTA:
        base = dataclasses.replace(base, plain=base.plain[offset : offset + length])
    elif base is not None:
        base = dataclasses.replace(base, offset=base.offset + 2 * offset)
    return _measured(Digest(bytes(16)), piece, [dataclasses.replace(segment, length=length)], base)[1]
