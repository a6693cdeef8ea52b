"""Compressors of tensors: our codecs and other libraries, behind one interface."""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import blosc2
import zstandard

from asymcheck.codecs.container import segment_of
from asymcheck.codecs.decode import decode
from asymcheck.codecs.encode import Encoded, encode_delta, encode_planes, encode_zstd
from asymcheck.format.digest import digest

with warnings.catch_warnings():
    # Importing the library raises warnings about names that torch has deprecated.
    warnings.simplefilter("ignore")
    try:
        import zipnn
    except ImportError:
        # zipnn must be compiled on most machines. Without it, the workload reports that its ratios are missing.
        zipnn = None

OURS_COUNT = 2
PLANES, DELTA, ZIPNN = "asymcheck byte-planes", "asymcheck delta", "zipnn"


@dataclasses.dataclass(frozen=True)
class Kind:
    """Bytes of one role and dtype, with the bytes of the same tensors in an older checkpoint."""

    name: str
    dtype: str
    plain: bytes
    older: bytes | None = None

    def pieces(self, length: int) -> list[Kind]:
        """Return the bytes, cut as a store cuts large tensors."""
        return [
            Kind(
                self.name,
                self.dtype,
                self.plain[start : start + length],
                None if self.older is None else self.older[start : start + length],
            )
            for start in range(0, len(self.plain), length)
        ]


class Packer:
    """A codec that compresses and restores a piece."""

    name = ""
    """Name in the tables."""

    def prepared(self, piece: Kind) -> Kind:
        """Return the input of :meth:`pack`; called outside of the timed part."""
        return piece

    def pack(self, piece: Kind) -> Any:  # noqa: ANN401 - whatever it wants back
        """Return the packed piece."""
        raise NotImplementedError

    def unpack(self, packed: Any, piece: Kind) -> bytes | memoryview:  # noqa: ANN401 - as given
        """Return the plain bytes. The packer may only use facts about ``piece`` that a reader knows."""
        raise NotImplementedError

    def size(self, packed: Any) -> int:  # noqa: ANN401 - as given
        """Return the number of packed bytes."""
        return len(packed)


class _Ours(Packer):
    def __init__(self, name: str, encode: Callable[[Kind], Encoded]) -> None:
        self.name, self._encode = name, encode

    def pack(self, piece: Kind) -> Encoded:
        return self._encode(piece)

    def unpack(self, packed: Encoded, piece: Kind) -> memoryview:
        base = None if piece.older is None else memoryview(piece.older)
        return decode(packed.descriptor, memoryview(packed.payload()), base)

    def size(self, packed: Encoded) -> int:
        return packed.descriptor.stored_length


class _Zstd(Packer):
    def __init__(self, level: int) -> None:
        self.name, self._level = f"zstd {level}", level

    def pack(self, piece: Kind) -> bytes:
        return zstandard.ZstdCompressor(level=self._level).compress(piece.plain)

    def unpack(self, packed: bytes, piece: Kind) -> bytes:  # noqa: ARG002 - the frame says it all
        return zstandard.ZstdDecompressor().decompress(packed)


class _Zlib(Packer):
    name = "zlib"

    def pack(self, piece: Kind) -> bytes:
        return zlib.compress(piece.plain)

    def unpack(self, packed: bytes, piece: Kind) -> bytes:  # noqa: ARG002 - the stream says it all
        return zlib.decompress(packed)


class _Blosc(Packer):
    name = "blosc2 bitshuffle+zstd"

    def pack(self, piece: Kind) -> Any:  # noqa: ANN401 - untyped library
        return blosc2.compress2(
            piece.plain,
            typesize=2 if piece.dtype == "bfloat16" else 4,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=[blosc2.Filter.BITSHUFFLE],
            nthreads=1,
        )

    def unpack(self, packed: Any, piece: Kind) -> bytes:  # noqa: ANN401, ARG002 - untyped library
        return bytes(blosc2.decompress2(packed, nthreads=1))


class _Zipnn(Packer):
    name = ZIPNN

    def prepared(self, piece: Kind) -> Kind:
        # zipnn rotates its input in place, even in a read-only buffer.
        return dataclasses.replace(piece, plain=bytes(bytearray(piece.plain)))

    def pack(self, piece: Kind) -> Any:  # noqa: ANN401 - untyped library
        return zipnn.ZipNN(bytearray_dtype=piece.dtype, threads=1).compress(piece.plain)

    def unpack(self, packed: Any, piece: Kind) -> Any:  # noqa: ANN401 - untyped library
        return zipnn.ZipNN(bytearray_dtype=piece.dtype, threads=1).decompress(packed)


def packers() -> list[Packer]:
    """Return all packers that need no older checkpoint; the first ``OURS_COUNT`` are ours."""
    ours: list[Packer] = [
        _Ours("asymcheck zstd", lambda one: encode_zstd(digest(one.plain), memoryview(one.plain))),
        planes_packer(),
    ]
    libraries: list[Packer] = [_Zstd(1), _Zstd(3), _Zlib(), _Blosc()]
    return [*ours, *libraries, *([_Zipnn()] if zipnn is not None else [])]


def planes_packer() -> Packer:
    """Return our byte-planes packers."""
    return _Ours(PLANES, _planes)


def delta_packer() -> Packer:
    """Return our packers of deltas to an older checkpoint."""
    return _Ours(DELTA, _delta)


def _planes(piece: Kind) -> Encoded:
    plain = memoryview(piece.plain)
    return encode_planes(digest(plain), plain, [segment_of(piece.dtype, len(plain))])


def _delta(piece: Kind) -> Encoded:
    plain, older = memoryview(piece.plain), memoryview(piece.older or b"")
    return encode_delta(digest(plain), plain, [segment_of(piece.dtype, len(plain))], digest(older), older)


Mapper = Callable[[Callable[[Any], Any], Any], Any]


@contextmanager
def threads(count: int) -> Iterator[Mapper]:
    """Yield a function that maps over pieces on a number of threads."""
    if count == 1:
        yield map
        return
    with ThreadPoolExecutor(count) as pool:
        yield pool.map
