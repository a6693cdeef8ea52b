"""Safetensors files as raw bytes, valid or not."""

import json
import struct
from pathlib import Path

import safetensors

from asymcheck.convert.safetensors_format import DTYPE_TAGS, NewTensor, SafetensorsHeader, encode_header

U8 = {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}
"""The entry of a tensor of one byte."""


def raw(header: object, data: bytes = b"") -> bytes:
    """Length, header (a JSON value, or its bytes as they stand) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changed: object) -> bytes:
    """A file with one tensor of one byte, some of whose fields are changed."""
    return raw({"a": {**U8, **changed}}, b"x")


def write(path: Path, tensors: list[tuple[NewTensor, bytes]], metadata: dict[str, str] | None = None) -> None:
    """Write a file by the starts that `encode_header` gives."""
    head, starts = encode_header([tensor for tensor, _ in tensors], metadata)
    with path.open("wb") as file:
        file.write(head)
        for start, (_, data) in zip(starts, tensors, strict=True):
            file.seek(start)
            file.write(data)


def byte_tensor(name: str, length: int) -> NewTensor:
    """A tensor of that many bytes."""
    return NewTensor(name, "uint8", (length,), length)


def package_accepts(data: bytes) -> bool:
    """Whether the `safetensors` package takes the bytes for a file."""
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def same_tensors(header: SafetensorsHeader, data: bytes) -> bool:
    """Whether names, types, shapes and bytes are those that the package finds."""
    ours = {
        tensor.name: (DTYPE_TAGS[tensor.dtype], tensor.shape, data[tensor.start : tensor.start + tensor.nbytes])
        for tensor in header.tensors
    }
    theirs = {
        name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in safetensors.deserialize(data)
    }
    return ours == theirs and len(header.tensors) == len(ours)
