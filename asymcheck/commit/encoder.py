"""Encoder: encodes partitions as the compression policy decides, by what was measured so far.

Facts are kept by kind of bytes: the role of the tensors, and how their elements look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from asymcheck.codecs import derived
from asymcheck.codecs.container import Segment, segment_of
from asymcheck.codecs.derived import DTYPES
from asymcheck.codecs.encode import CHUNK_BYTES, Encoded, encode_delta, encode_derived, encode_planes
from asymcheck.config import Compression
from asymcheck.events import timed
from asymcheck.format.registry import CODEC_BYTE_PLANES, CODEC_DELTA, CODEC_DERIVED, CODEC_IDENTITY, CODECS
from asymcheck.policies.compression import Choice, EncodingSample, choose
from asymcheck.state.partition_plan import Originals, Piece
from asymcheck.types import Digest

_AGAIN = 64
"""Partitions of a kind after which it is sampled again."""
_SELDOM = 1024
"""Partitions of a kind, at most, from one look for a base to the next while such a base does not pay."""
_SAMPLE_BYTES = CHUNK_BYTES
_FAST_BYTES_PER_S = 1e9
_LEAST_BYTES = 64 * 1024
"""Shorter partitions are few, and cost as much to handle as long ones."""


_HALF_BYTES = 1 << 28
"""Older measurements count half after so many bytes."""
_ENOUGH_BYTES = 16 << 20
"""Fewer bytes say nothing."""


class WriteMeter:
    """Counts bytes, and the seconds that threads took to write them, each by itself. Thread-safe.

    What a thread has to wait for, be it others that write or a core, is part of it: what is compared with it, such as
    the time to encode, is measured beside the same others.
    """

    def __init__(self) -> None:
        """Begin without a measurement."""
        self._lock = threading.Lock()
        self._bytes = 0.0
        self._seconds = 0.0

    @contextlib.contextmanager
    def write(self, size: int) -> Iterator[None]:
        """Measure what is done inside the ``with`` block: ``size`` bytes are written."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        with self._lock:
            kept = 0.5 ** (size / _HALF_BYTES)
            self._bytes = self._bytes * kept + size
            self._seconds = self._seconds * kept + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """The speed; None before enough was measured."""
        with self._lock:
            return self._bytes / self._seconds if self._bytes >= _ENOUGH_BYTES and self._seconds > 0 else None


@dataclasses.dataclass(frozen=True)
class Contents:
    """Meaning of the bytes of a partition."""

    role: str
    """The role of its tensors."""
    segments: tuple[Segment, ...]
    """Its elements."""

    @property
    def kind(self) -> tuple[str, Segment]:
        """What its facts are kept by: the role, and what most of the bytes are."""
        most = max(self.segments, key=lambda one: one.length)
        return self.role, dataclasses.replace(most, length=0)


def contents_of(pieces: Sequence[Piece], role: str, dtypes: Sequence[str]) -> Contents:
    """Describe the pieces of a partition; ``dtypes`` are those of all tensors, by row."""
    return Contents(role, tuple(segment_of(dtypes[piece.row], piece.length) for piece in pieces))


@dataclasses.dataclass(frozen=True)
class Base:
    """Another partition, from which one may be decoded."""

    codec: int
    """How: as a delta, or derived."""
    name: Digest
    """Its digest."""
    plain: memoryview
    """Its bytes."""
    offset: int = 0
    """Where, for derived, the elements begin in it."""
    dtype: int = 0
    """For derived, the number of the dtype that is rounded to."""


_LOOK_BYTES = 512
_NUMBERS = {name: number for number, name in DTYPES.items()}

Read = Callable[[int, int, int | None], tuple[Digest, memoryview] | None]
"""Gives of a partition, by number, the digest and bytes, from a byte on so many, or all that follow; None while it has
none."""


def original_of(plain: memoryview, dtype: str, number: int, originals: Originals, read: Read) -> Base | None:
    """Return the partition that ``plain``, of 2-byte floats, was rounded from, as far as a look at some of it shows."""
    look = min(len(plain), _LOOK_BYTES)
    # One place tells too little: where a row of padding is zero, it is so in the moments, too.
    places = [start // 2 * 2 for start in (0, (len(plain) - look) // 2, len(plain) - look)]
    for other, offset in originals.candidates(number):
        # Every layer has tensors of this shape, and each three of them: most candidates are none.
        if all(_is_rounded(plain[at : at + look], dtype, read(other, offset + 2 * at, 2 * look)) for at in places):
            whole = read(other, 0, None)
            if whole is not None:
                return Base(CODEC_DERIVED, *whole, offset, _NUMBERS[dtype])
    return None


def _is_rounded(plain: memoryview, dtype: str, found: tuple[Digest, memoryview] | None) -> bool:
    if found is None:
        return False
    rounded = derived.rounded_base(found[1], 0, len(plain), _NUMBERS[dtype])
    return np.array_equal(np.frombuffer(plain, dtype=np.uint8), rounded)


class Encoder:
    """Encodes for one target, by one mode. Thread-safe."""

    def __init__(
        self, mode: Compression, target: Literal["nvme", "hdfs"], link: Callable[[], float | None] | None = None
    ) -> None:
        """Encode for ``target``; ``link`` says how many bytes a second one thread writes to it."""
        self.meter = WriteMeter()
        """Measures what the target takes, where nobody else does."""
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
        """Whether it is worth looking for bases: to read and compare them takes as long as to write to a fast drive."""
        link = self._link()
        return self._mode == "smallest" or (self._mode == "auto" and link is not None and link < _FAST_BYTES_PER_S)

    def looks_for(self, codec: int, contents: Contents) -> bool:
        """Tell whether to look for a base that a partition could be decoded from by ``codec``.

        While such bases do not pay, or there are none, the pauses between looks grow: each look costs some of the time
        that it is to save.
        """
        if self._mode == "smallest" or not self.wants_bases:
            return self._mode == "smallest"
        key = (*contents.kind, codec)
        with self._lock:
            known = self._sampled.get(key)
            if known is not None and choose(self._mode, {codec: known}, self._link()).codec == codec:
                return True
            left, pause = self._pauses.get(key, (0, 1))
            if left:
                self._pauses[key] = left - 1, pause
                return False
            self._pauses[key] = pause, min(2 * pause, _SELDOM)
            # What is found is sampled anew.
            self._since[key] = 0
            return True

    def stays_plain(self, length: int, contents: Contents, codecs: Sequence[int]) -> bool:
        """Tell without a look at a partition that it would be stored as it is; at times a look is due, then it is not.

        ``codecs`` are those that could be taken.
        """
        link = self._link()
        if self._mode == "off" or length < _LEAST_BYTES or (self._mode == "auto" and link is None):
            return True
        keys = [(*contents.kind, codec) for codec in codecs]
        with self._lock:
            if any(key not in self._sampled or self._since.get(key, 0) % _AGAIN == 0 for key in keys):
                return False
            stays = choose(self._mode, {key[-1]: self._sampled[key] for key in keys}, link).codec == CODEC_IDENTITY
            if stays:
                for key in keys:
                    self._since[key] += 1
        return stays

    def reasons(self) -> dict[str, dict[str, str]]:
        """Return by role and codec why tensors are stored so: the reason for the last choice."""
        with self._lock:
            return {role: dict(codecs) for role, codecs in self._reasons.items()}

    def choose(self, plain: memoryview, contents: Contents, bases: Sequence[Base]) -> Choice:
        """Choose the codec of a partition, which may be decoded from any of ``bases``, at most one per codec."""
        link = self._link()
        if self._mode == "off" or (self._mode == "auto" and link is None):
            return choose(self._mode, {}, link)
        if len(plain) < _LEAST_BYTES:
            return Choice(CODEC_IDENTITY, "too small to be worth it")
        sampled = {CODEC_BYTE_PLANES: self._sample(plain, contents, None)}
        for base in bases:
            sampled[base.codec] = self._sample(plain, contents, base)
        return choose(self._mode, sampled, link)

    def _sample(self, plain: memoryview, contents: Contents, base: Base | None) -> EncodingSample:
        """Return what a codec gave for such partitions; now and then, and at first, it is tried on a part of one."""
        key = (*contents.kind, CODEC_BYTE_PLANES if base is None else base.codec)
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
            # A sample is so short that it seldom has to wait for a core, which a partition may: it corrects what was
            # seen of whole ones, step by step, and does not replace it.
            sampled = EncodingSample(sampled.ratio, math.sqrt(known.bytes_per_s * sampled.bytes_per_s))
        with self._lock:
            self._sampled[key] = sampled
        return sampled

    def _note(
        self, contents: Contents, base: Base | None, encoded: Encoded | None, length: int, seconds: float
    ) -> None:
        """Keep what encoding a whole partition gave."""
        ratio = 0.0 if encoded is None else length / encoded.descriptor.stored_length
        if _is_no_original(base, ratio):
            return
        with self._lock:
            key = (*contents.kind, CODEC_BYTE_PLANES if base is None else base.codec)
            self._sampled[key] = EncodingSample(ratio, length / max(seconds, 1e-9))

    def encode(
        self, name: Digest, choice: Choice, plain: memoryview, contents: Contents, bases: Sequence[Base]
    ) -> Encoded | None:
        """Encode a partition as was chosen, or without a base if that fails; None when it is stored unencoded."""
        encoded = None
        if choice.codec != CODEC_IDENTITY:
            detail = {"from": self._source, "to": self._target, "role": contents.role, "why": choice.why}
            with timed("encode", len(plain), lambda: detail):
                base = next((base for base in bases if base.codec == choice.codec), None)
                began = time.perf_counter()
                encoded = _encode(name, plain, contents.segments, base)
                self._note(contents, base, encoded, len(plain), time.perf_counter() - began)
                if encoded is None and self._mode == "smallest":
                    encoded = _encode(name, plain, contents.segments, None)
            if encoded is not None and encoded.descriptor.stored_length >= len(plain):
                encoded = None
        with self._lock:
            codec = CODECS[CODEC_IDENTITY if encoded is None else encoded.descriptor.codec]
            self._reasons.setdefault(contents.role, {})[codec] = choice.why
        return encoded


def _is_no_original(base: Base | None, ratio: float) -> bool:
    """Tell whether a partition was not rounded from its base after all, which says nothing of others of its kind."""
    return base is not None and base.codec == CODEC_DERIVED and not ratio


def _encode(name: Digest, plain: memoryview, segments: Sequence[Segment], base: Base | None) -> Encoded | None:
    if base is None:
        return encode_planes(name, plain, segments)
    if base.codec == CODEC_DELTA:
        return encode_delta(name, plain, segments, base.name, base.plain)
    return encode_derived(name, plain, base.dtype, base.name, base.plain, base.offset)


def _try(plain: memoryview, contents: Contents, base: Base | None) -> EncodingSample:
    """Encode a piece from the middle of the longest run of elements of one kind."""
    start, found = 0, (0, contents.segments[0])
    for segment in contents.segments:
        if segment.length > found[1].length:
            found = start, segment
        start += segment.length
    first, segment = found
    length = min(segment.length, _SAMPLE_BYTES)
    # Multiples of 16 bytes keep elements whole, whatever their width.
    offset = first + (segment.length - length) // 2 // 16 * 16
    piece, name = plain[offset : offset + length], Digest(bytes(16))
    if base is not None and base.codec == CODEC_DELTA:
        base = dataclasses.replace(base, plain=base.plain[offset : offset + length])
    elif base is not None:
        base = dataclasses.replace(base, offset=base.offset + 2 * offset)
    began = time.perf_counter()
    encoded = _encode(name, piece, [dataclasses.replace(segment, length=length)], base)
    seconds = time.perf_counter() - began
    ratio = 0.0 if encoded is None else length / encoded.descriptor.stored_length
    return EncodingSample(ratio, length / max(seconds, 1e-9))
