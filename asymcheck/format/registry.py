"""Numbers, names and limits of SPEC.md §A15, and the supported features (§A13).

Tests compare these values with format_spec/registry.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asymcheck.errors import BadMagicError, ChecksumError, UnsupportedFeatureError, UnsupportedVersionError
from asymcheck.format.digest import sum8

FORMAT_MIN_READ: Final = 1
FORMAT_MAX_READ: Final = 1
FORMAT_WRITE: Final = 1

FRAME_MAGIC: Final = b"ASYMFRAM"
PACK_MAGIC: Final = b"ASYMPACK"
PACK_INDEX_MAGIC: Final = b"ASYMINDX"

DIGEST_XXH3_128: Final = 1
DIGESTS: Final = {1: "xxh3-128", 2: "blake3-128", 3: "sha2-256-128"}
DIGEST_BYTES: Final = 16

KIND_FULL: Final = 0
KIND_DELTA: Final = 1
KIND_DERIVED: Final = 2
FRAME_KINDS: Final = {0: "full", 1: "delta", 2: "derived", 3: "lossy", 4: "gradient"}

CODEC_IDENTITY: Final = 0
CODEC_ZSTD: Final = 1
CODEC_BYTE_PLANES: Final = 2
CODEC_DELTA: Final = 3
CODEC_DERIVED: Final = 4
CODECS: Final = {0: "identity", 1: "zstd", 2: "byte-planes", 3: "ordered-integer-delta", 4: "derived-round-to-nearest"}

CODECS_OF_KIND: Final = {
    KIND_FULL: frozenset({CODEC_IDENTITY, CODEC_ZSTD, CODEC_BYTE_PLANES}),
    KIND_DELTA: frozenset({CODEC_DELTA}),
    KIND_DERIVED: frozenset({CODEC_DERIVED}),
}
"""Allowed codecs for each supported frame kind."""
SUPPORTED_KINDS: Final = frozenset(CODECS_OF_KIND)
SUPPORTED_CODECS: Final = frozenset().union(*CODECS_OF_KIND.values())
SUPPORTED_DIGESTS: Final = frozenset({DIGEST_XXH3_128})

SHIFTED_PAYLOAD: Final = "shifted-payload"
TYPED_VALUE: Final = "typed-value"
ENUM_ITEM: Final = "enum-item"
READER_FEATURES: Final = frozenset({SHIFTED_PAYLOAD, TYPED_VALUE, ENUM_ITEM, "device-generator", "nested-tensor"})
"""Supported features. A type of typed values that is younger than the others has a feature of its name."""
WRITER_FEATURES: Final[frozenset[str]] = frozenset()

PACK_LIVE: Final = 1
PACK_FREED: Final = 2
PACK_STATES: Final = {1: "live", 2: "freed"}

# fmt: off
DTYPE_BYTES: Final = {
    "bool": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}
# fmt: on

VALUE_TYPES: Final = {
    "defaultdict": "d",
    "deque": "l",
    "set": "t",
    "frozenset": "t",
    "namedtuple": "d",
    "dataclass": "d",
    "enum": "node",
    "path": "string",
    "pure-path": "string",
    "date": "string",
    "time": "string",
    "datetime": "string",
    "timedelta": "t",
    "range": "t",
    "slice": "t",
    "torch-generator": "T",
    "device-generator": "T",
    "nested-tensor": "l",
    "numpy-generator": "d",
    "python-random": "t",
}
"""Types of typed values, with the node of their content: its tag, a string, or any node."""

ROLES: Final = ("weights", "first_moment", "second_moment", "gradient", "rng", "other")

BLOCK_BYTES: Final = 4096
PARTITION_BYTES_MAX: Final = 1 << 30
FRAME_STORED_BYTES_MAX: Final = (1 << 30) + (8 << 20)
ALIGNED_PAYLOAD_MIN_BYTES: Final = 65536
INLINE_BYTES_MAX: Final = 4096
MANIFEST_BYTES_MAX: Final = 1 << 30
PACK_INDEX_BYTES_MAX: Final = 1 << 28
RECORD_JSON_BYTES_MAX: Final = 4000
TREE_DEPTH_MAX: Final = 64
INTEGER_DIGITS_MAX: Final = 65536
STEP_MAX: Final = 10**12 - 1
GENERATION_MAX: Final = 10**8 - 1
WORLD_SIZE_MAX: Final = 99999
RUN_NAME_BYTES_MAX: Final = 64
METRICS_MAX: Final = 256
CODEC_PLANES_MAX: Final = 65536
DELTA_DEPTH_MAX: Final = 8

_VERSION = slice(8, 10)
"""Position of the version in every binary structure."""


def check_version(version: int, where: str) -> None:
    """Refuse a structure whose major version is outside the readable range."""
    if not FORMAT_MIN_READ <= version <= FORMAT_MAX_READ:
        newer = version > FORMAT_MAX_READ
        remedy = "install a newer asymcheck" if newer else "the file is damaged, or has another format"
        raise UnsupportedVersionError(
            f"{where} has format version {version}; this program reads {FORMAT_MIN_READ} to {FORMAT_MAX_READ}: {remedy}"
        )


def check_sealed(summed: bytes, own_sum: bytes, magic: bytes, kind: str, where: str) -> None:
    """Check the magic number, the version and the checksum of a binary structure of a ``kind``, such as a frame.

    If the checksum over ``summed`` is right with a known version in place of the version, the version field is damaged.
    """
    if not summed.startswith(magic):
        raise BadMagicError(f"{where}: not a {kind} (wrong magic)")
    version = int.from_bytes(summed[_VERSION], "little")
    for known in range(FORMAT_MIN_READ, FORMAT_MAX_READ + 1):
        version_bytes = known.to_bytes(2, "little")
        if version != known and sum8(summed[: _VERSION.start] + version_bytes + summed[_VERSION.stop :]) == own_sum:
            raise ChecksumError(f"{where}: checksum mismatch in format version {version}, which was {known}")
    check_version(version, where)
    if own_sum != sum8(summed):
        raise ChecksumError(f"{where}: {kind} header checksum mismatch")


def check_reader_features(features: Iterable[str], where: str) -> None:
    """Refuse unsupported reader features."""
    unknown = sorted(set(features) - READER_FEATURES)
    if unknown:
        raise UnsupportedFeatureError(
            f"{where} needs reader feature(s) {', '.join(unknown)}: install a newer asymcheck"
        )


def missing_writer_features(features: Iterable[str]) -> list[str]:
    """Return the unsupported writer features. A store that lists any is opened read-only."""
    return sorted(set(features) - WRITER_FEATURES)
