"""Compare checkpoints: same types, order and bits."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from asymcheck.format.digest import digest


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in row-major order."""
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8).cpu().numpy().tobytes()


def assert_same(actual: object, expected: object, path: str = "state") -> None:
    """Fail if two states differ in a type, an order, a key or a bit; a restored Parameter is a tensor."""
    if isinstance(expected, torch.Tensor):
        assert type(actual) is torch.Tensor, path
        assert (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device), path
        assert tensor_bytes(actual) == tensor_bytes(expected), path
        return
    assert type(actual) is type(expected), f"{path}: {type(actual)} for {type(expected)}"
    if isinstance(expected, np.ndarray | np.generic):
        assert isinstance(actual, np.ndarray | np.generic)
        assert (actual.dtype, actual.shape, actual.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), (
            path
        )
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping)
        assert [(type(key), key) for key in actual] == [(type(key), key) for key in expected], path
        for number, (key, value) in enumerate(expected.items()):
            assert_same(actual[key], value, f"{path}, item {number}")
        assert_same(getattr(actual, "_metadata", None), getattr(expected, "_metadata", None), f"{path}._metadata")
    elif type(expected) in (list, tuple):
        assert isinstance(actual, list | tuple)
        assert isinstance(expected, list | tuple)
        assert len(actual) == len(expected), path
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    elif isinstance(expected, float | complex):
        assert _bits(actual) == _bits(expected), path
    else:
        assert actual == expected, path


def _bits(value: object) -> bytes:
    number = complex(value)  # type: ignore[call-overload]  # a float or a complex, as compared before
    return struct.pack(">dd", number.real, number.imag) if isinstance(value, complex) else struct.pack(">d", value)


def tensors_in(state: object) -> Iterator[torch.Tensor | np.ndarray]:
    """Return every tensor and array of a state, in order; tied tensors appear as often as in the state."""
    if isinstance(state, torch.Tensor | np.ndarray):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_in(value)
    elif type(state) in (list, tuple):
        for value in state:  # type: ignore[attr-defined]  # the type was just compared
            yield from tensors_in(value)


def directory_content(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return every file and folder below a directory, with size, modification time and digest of its content."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = digest(path.read_bytes()) if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_size, status.st_mtime_ns, content)
    return found
