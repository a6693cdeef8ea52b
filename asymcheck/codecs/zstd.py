"""Compress and decompress single Zstandard frames (RFC 8878) that state their content size."""

from __future__ import annotations

import enum
import threading

import zstandard

from asymcheck.errors import StructureError
from asymcheck.format.digest import Buffer

_MAGIC = b"\x28\xb5\x2f\xfd"


class Effort(enum.Enum):
    """Effort of the compressor."""

    SYMBOLS = "symbols"
    """Entropy coding only. In exponents of trained weights, repeats are chance. Without a search for repeats,
    compression is three times as fast and better, because the entropy coder sees all bytes."""
    REPEATS = "repeats"
    """Entropy coding and a search for repeats."""


_PARAMETERS = {
    # A hash table of 64 entries and matches of at least 7 bytes find only runs.
    Effort.SYMBOLS: zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=18, hash_log=6, chain_log=6, search_log=1, min_match=7
    ),
    Effort.REPEATS: zstandard.ZstdCompressionParameters.from_level(1),
}


class _Thread(threading.local):
    """Compressors and decompressor of this thread. They reuse their tables and serve one thread at a time."""

    def __init__(self) -> None:
        self.compressors = {
            effort: zstandard.ZstdCompressor(compression_params=parameters)
            for effort, parameters in _PARAMETERS.items()
        }
        self.decompressor = zstandard.ZstdDecompressor()


_thread = _Thread()


def compress(plain: Buffer, effort: Effort) -> bytes:
    """Return one frame with content size, without dictionary and checksum. Releases the GIL."""
    return _thread.compressors[effort].compress(plain)


def decompress(packed: Buffer, plain_length: int, where: str) -> bytes:
    """Return the content of one frame of exactly ``plain_length`` bytes. Releases the GIL.

    Raises:
        StructureError: the bytes are not exactly one frame of that content size. No memory is allocated for another
            size.
    """
    if bytes(packed[:4]) != _MAGIC:
        raise StructureError(f"{where}: not a Zstandard frame")
    try:
        parameters = zstandard.get_frame_parameters(packed)
        if parameters.content_size != plain_length or parameters.dict_id:
            raise StructureError(
                f"{where}: Zstandard frame of {parameters.content_size} bytes and dictionary {parameters.dict_id}, "
                f"expected {plain_length} bytes and no dictionary"
            )
        plain = _thread.decompressor.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StructureError(f"{where}: damaged Zstandard frame: {error}") from error
    if len(plain) != plain_length:
        raise StructureError(f"{where}: Zstandard frame decompresses to {len(plain)} of {plain_length} bytes")
    return plain
