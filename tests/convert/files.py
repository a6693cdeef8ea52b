"""Build safetensors files as raw bytes, valid or not."""

import contextlib
import json
import struct
from pathlib import Path

import safetensors

from asymcheck import Checkpoint, Store
from asymcheck.convert.convert import foreign_state
from asymcheck.convert.export_target import NewTensor
from asymcheck.convert.hugging_face import read_folder
from asymcheck.convert.safetensors_format import DTYPE_TAGS, SafetensorsHeader, encode_header, read_header
from asymcheck.convert.source_file import SourceFile


def import_checkpoint(store: Store, path: Path, *, step: int = 0, run: str = "default") -> Checkpoint:
    """Save the content of a foreign file."""
    with foreign_state(path) as state:
        return store.save(state, step=step, run=run)


U8 = {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}
"""Entry of a tensor of one byte."""


def raw(header: object, data: bytes = b"") -> bytes:
    """Return the bytes of a file from its length, header (a JSON value or raw bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changed: object) -> bytes:
    """Return a file with one tensor of one byte, with some changed fields."""
    return raw({"a": {**U8, **changed}}, b"x")


def write(path: Path, tensors: list[tuple[NewTensor, bytes]], metadata: dict[str, str] | None = None) -> None:
    """Write a file with the header of `encode_header`."""
    head, starts = encode_header([tensor for tensor, _ in tensors], metadata)
    with path.open("wb") as file:
        file.write(head)
        for start, (_, data) in zip(starts, tensors, strict=True):
            file.seek(start)
            file.write(data)


def byte_tensor(name: str, length: int) -> NewTensor:
    """Return a tensor of that many bytes."""
    return NewTensor(name, "uint8", (length,), length)


def package_accepts(data: bytes) -> bool:
    """Return whether the `safetensors` package accepts the bytes."""
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def same_tensors(header: SafetensorsHeader, data: bytes) -> bool:
    """Return whether names, types, shapes and bytes equal those of the package."""
    ours = {
        tensor.name: (DTYPE_TAGS[tensor.dtype], tensor.shape, data[tensor.start : tensor.start + tensor.nbytes])
        for tensor in header.tensors
    }
    theirs = {
        name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in safetensors.deserialize(data)
    }
    return ours == theirs and len(header.tensors) == len(ours)


def header_of(path: Path) -> SafetensorsHeader:
    """Return the header of a safetensors file."""
    with SourceFile(path) as file:
        return read_header(file)


def folder_of(path: Path) -> SafetensorsHeader:
    """Return the content of a model folder."""
    with contextlib.ExitStack() as stack:
        return read_folder(path, lambda file: stack.enter_context(SourceFile(file)))
