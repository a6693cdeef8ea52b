"""Zstandard frames (RFC 8878): one frame, its content size in it, never more memory than the caller expects."""

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
    """Frequent bytes. In exponents of trained weights what repeats is chance; not to look for it is three times as
    fast and packs better, because the entropy coder then sees all bytes."""
    REPEATS = "repeats"


_PARAMETERS = {
    # 64 places to remember, and matches of 7 bytes at least: only runs are found.
    Effort.SYMBOLS: zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=18, hash_log=6, chain_log=6, search_log=1, min_match=7
    ),
    Effort.REPEATS: zstandard.ZstdCompressionParameters.from_level(1),
}
# A compressor keeps its tables from call to call and serves one thread at a time.
_own = threading.local()


def compress(plain: Buffer, effort: Effort) -> bytes:
    """Return one frame of ``plain``, with its content size, without dictionary and checksum. Releases the GIL."""
    compressors: dict[Effort, zstandard.ZstdCompressor] | None = getattr(_own, "compressors", None)
    if compressors is None:
        compressors = _own.compressors = {
            effort: zstandard.ZstdCompressor(compression_params=parameters)
            for effort, parameters in _PARAMETERS.items()
        }
    return compressors[effort].compress(plain)


def decompress(packed: Buffer, plain_length: int, where: str) -> bytes:
    """Return the content of one frame, which must have ``plain_length`` bytes. Releases the GIL.

    Raises:
        StructureError: it is not exactly one frame of that content size; nothing was allocated for another size.
    """
    if bytes(packed[:4]) != _MAGIC:
        raise StructureError(f"{where}: not a Zstandard frame")
    try:
        parameters = zstandard.get_frame_parameters(packed)
        if parameters.content_size != plain_length or parameters.dict_id:
            raise StructureError(
                f"{where}: a Zstandard frame of {parameters.content_size} bytes and dictionary {parameters.dict_id}, "
                f"not of {plain_length} bytes and none"
            )
        decompressor: zstandard.ZstdDecompressor | None = getattr(_own, "decompressor", None)
        if decompressor is None:
            decompressor = _own.decompressor = zstandard.ZstdDecompressor()
        plain = decompressor.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StructureError(f"{where}: damaged Zstandard frame: {error}") from error
    if len(plain) != plain_length:
        raise StructureError(f"{where}: a Zstandard frame gave {len(plain)} of {plain_length} bytes")
    return plain
