"""Read, check and write the header of safetensors files.

A file has 8 bytes (little-endian length of the header), the header (a JSON object), and the bytes of the tensors::

    {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}

Offsets count from the end of the header. Sorted by offset, the tensors cover the rest of the file without gap or
overlap. The `safetensors` package is not needed, because this module reads no tensor data.

This module accepts everything that the package accepts, except for

- a duplicate key in an object, at any depth: readers differ in which of the two they use;
- a header that begins with a space: the specification forbids it, so that no other format fits the same bytes;
- a tensor given as a list ``["U8", [1], [0, 1]]``, which the JSON library of the package accepts by accident;
- a size of 2^63 or more together with a size of 0: no framework and no manifest can hold such a shape;
- types smaller than a byte (F4, F6_E2M3, F6_E3M2): asymcheck stores whole bytes per element.

In return, this module accepts a few harmless spellings that the package refuses: -0 for 0, and, in unused fields,
numbers beyond the range of a float and lists nested more than 128 deep.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asymcheck.convert.export_target import NewTensor
from asymcheck.convert.source_file import SourceFile
from asymcheck.errors import ForeignFileError, InvalidInputError
from asymcheck.format.registry import DTYPE_BYTES

HEADER_BYTES_MAX: Final = 100_000_000  # limit of the format

METADATA_KEY: Final = "__metadata__"

DTYPE_TAGS: Final = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Name of each dtype in the format, in the order in which the `safetensors` package writes tensors.

Element sizes descend, so every tensor is aligned if the header is padded to 8 bytes.
"""

_DTYPE_NAMES = {tag: name for name, tag in DTYPE_TAGS.items()}
_WRITE_ORDER = {name: position for position, name in enumerate(DTYPE_TAGS)}
_SUB_BYTE_TAGS = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
_LENGTH_BYTES = 8
_SIZE_MAX = (1 << 63) - 1
_FETCH_AGAIN = "fetch or write the file again"
_CHECK = "check that this is a safetensors file"

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = _SHORT.maxtuple = 8
_SHORT.maxlevel = 2


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Location, dtype and shape of a tensor in a safetensors file."""

    path: Path
    name: str
    dtype: str  # asymcheck's name, such as "bfloat16"
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Header of a safetensors file, or the headers of all files of a model folder."""

    tensors: tuple[FileTensor, ...]  # ordered by file name, then by offset
    metadata: dict[str, str]


def read_header(file: SourceFile) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Memory use is bounded by the header's real length, which is at most the size of the file and at most 100 MB. Parsing
    takes at most 48 times that length.

    Raises:
        ForeignFileError: the file breaks a rule of the format, or uses a dtype that asymcheck does not store.
        StorageError: the operating system refused to read the file.
    """
    path, length = file.path, _header_bytes(file)
    header = file.read_json(_LENGTH_BYTES, length, "the header", _FETCH_AGAIN)
    if not isinstance(header, dict):
        raise ForeignFileError(path, "the header is not a JSON object", _FETCH_AGAIN)
    metadata = _metadata(path, header.pop(METADATA_KEY, None))
    data_start = _LENGTH_BYTES + length
    tensors = [_tensor(path, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    _check_cover(path, tensors, data_start, file.size)
    return SafetensorsHeader(tuple(tensors), metadata)


def _header_bytes(file: SourceFile) -> int:
    """Return the length of the header, which is inside of the file and begins as an object."""
    path = file.path
    if file.size < _LENGTH_BYTES:
        raise ForeignFileError(path, f"truncated: {file.size} bytes are too few for a safetensors file", _FETCH_AGAIN)
    length = int.from_bytes(file.read_bytes(0, _LENGTH_BYTES), "little")
    if length > HEADER_BYTES_MAX:
        raise ForeignFileError(path, f"the header has {length} bytes, at most {HEADER_BYTES_MAX} are allowed", _CHECK)
    if length > file.size - _LENGTH_BYTES:
        problem = f"truncated: a header of {length} bytes in a file of {file.size} bytes"
        raise ForeignFileError(path, problem, _FETCH_AGAIN)
    if file.read_bytes(_LENGTH_BYTES, min(length, 1)) != b"{":
        raise ForeignFileError(path, "the header does not begin with '{'", _CHECK)
    return length


def _metadata(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ForeignFileError(path, f"{METADATA_KEY} does not map strings to strings", _FETCH_AGAIN)
    return value


def _tensor(path: Path, name: str, entry: object, data_start: int) -> FileTensor:
    """Parse one entry of the header. Unknown fields are ignored, as in the reference implementation."""
    if not isinstance(entry, dict):
        raise _refused(path, name, "is not a JSON object")
    dtype = _dtype(path, name, entry.get("dtype"))
    shape = _sizes(path, name, entry.get("shape"), "shape")
    offsets = _sizes(path, name, entry.get("data_offsets"), "data_offsets")
    nbytes = tensor_bytes(dtype, shape)
    if nbytes is None:
        raise _refused(path, name, f"has a shape whose size overflows 64 bits: {shown(shape)}")
    if len(offsets) != 2 or offsets[1] < offsets[0]:  # noqa: PLR2004 - begin and end
        raise _refused(path, name, f"has data_offsets that are not [begin, end]: {shown(offsets)}")
    if offsets[1] - offsets[0] != nbytes:
        problem = f"has {offsets[1] - offsets[0]} bytes, but {dtype} of shape {shown(shape)} takes {nbytes}"
        raise _refused(path, name, problem)
    return FileTensor(path, name, dtype, shape, data_start + offsets[0], nbytes)


def _dtype(path: Path, name: str, tag: object) -> str:
    if isinstance(tag, str) and tag in _DTYPE_NAMES:
        return _DTYPE_NAMES[tag]
    if isinstance(tag, str) and tag in _SUB_BYTE_TAGS:
        problem = f"tensor {shown(name)} is {tag}, whose elements are smaller than a byte, which is not supported"
        raise ForeignFileError(path, problem, "write it as U8 with the packed bytes, or as F8_E4M3")
    raise _refused(path, name, f"has the unknown dtype {shown(tag)}")


def _sizes(path: Path, name: str, value: object, field: str) -> tuple[int, ...]:
    # `type` is compared, because True is an instance of int.
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size <= _SIZE_MAX for size in value):
        raise _refused(path, name, f"has a {field} that is not a list of integers from 0 to 2^63-1: {shown(value)}")
    return tuple(value)


def _check_cover(path: Path, tensors: Sequence[FileTensor], data_start: int, file_bytes: int) -> None:
    """Check that each byte after the header belongs to one tensor, and that no empty tensor is inside another."""
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            problem = "overlaps the previous tensor" if tensor.start < end else "leaves a gap after the previous tensor"
            raise _refused(path, tensor.name, f"{problem}: it begins at byte {tensor.start} instead of {end}")
        end += tensor.nbytes
    if end != file_bytes:
        problem = "truncated" if end > file_bytes else "trailing bytes that belong to no tensor"
        raise ForeignFileError(path, f"{problem}: {end} bytes expected, {file_bytes} found", _FETCH_AGAIN)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the bytes of a tensor, or None if the bytes or an intermediate product exceed 2^63-1.

    Sizes are multiplied from left to right, as in the reference implementation: (2^62, 4, 0) overflows, (0, 2^62, 4)
    has 0 bytes.
    """
    elements = 1
    for size in shape:
        elements *= size
        if elements > _SIZE_MAX:
            return None
    nbytes = elements * DTYPE_BYTES[dtype]
    return nbytes if nbytes <= _SIZE_MAX else None


def encode_header(tensors: Sequence[NewTensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file with its length prefix, and the offset of each tensor in the file.

    The offsets are in the order of ``tensors``. Tensors are stored by descending element size, then by name, without
    gaps. The result does not depend on the order of ``tensors``, and equals the output of the `safetensors` package.

    Raises:
        InvalidInputError: the format lacks a dtype, a name is ``__metadata__``, a text is not valid Unicode, or the
            header is too long.
    """
    order = sorted(range(len(tensors)), key=lambda i: (_WRITE_ORDER.get(tensors[i].dtype, -1), tensors[i].name))
    header: dict[str, object] = {} if metadata is None else {METADATA_KEY: dict(sorted(metadata.items()))}
    offsets = [0] * len(tensors)
    end = 0
    for i in order:
        tensor = tensors[i]
        _check_new(tensor)
        offsets[i], end = end, end + tensor.nbytes
        tag, shape = DTYPE_TAGS[tensor.dtype], list(tensor.shape)
        header[tensor.name] = {"dtype": tag, "shape": shape, "data_offsets": [offsets[i], end]}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        characters = shown(error.object[error.start : error.end])
        raise InvalidInputError(f"a name or metadata holds half a surrogate pair: {characters}; rename it") from error
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        problem = f"the safetensors header has {len(text)} bytes, but the format allows {HEADER_BYTES_MAX}"
        raise InvalidInputError(f"{problem}; write the tensors into several files")
    data_start = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, [data_start + offset for offset in offsets]


def _check_new(tensor: NewTensor) -> None:
    if tensor.dtype not in DTYPE_TAGS:
        problem = f"safetensors cannot hold {tensor.dtype}, the dtype of tensor {shown(tensor.name)}"
        raise InvalidInputError(f"{problem}; export to a .pt file instead, or convert the tensor")
    if tensor.name == METADATA_KEY:
        raise InvalidInputError(f"the name {METADATA_KEY} is reserved in safetensors; rename the tensor")


def shown(value: object) -> str:
    """Format a value for an error message: quoted, escaped and shortened."""
    return _SHORT.repr(value)


def _refused(path: Path, name: str, problem: str) -> ForeignFileError:
    return ForeignFileError(path, f"tensor {shown(name)} {problem}", _FETCH_AGAIN)
