"""Test headers of safetensors files against the `safetensors` package, in both directions."""

import json
import math
import random
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.convert import safetensors_format
from asymcheck.convert.export_target import NewTensor
from asymcheck.convert.safetensors_format import DTYPE_TAGS, encode_header
from asymcheck.errors import InvalidInputError
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.state.dtypes import TORCH_DTYPES
from tests.convert.files import byte_tensor, header_of, raw, write

SHAPES = [(), (1,), (5,), (2, 3, 4), (0,), (2, 0, 3), (1, 1, 1, 1)]

SUB_BYTE = {"F4", "F6_E2M3", "F6_E3M2"}

READ_BY_TORCH = sorted(set(DTYPE_TAGS) & set(TORCH_DTYPES) - {"float8_e8m0fnu"})
"""Dtypes that the package writes and its torch adapter does not read."""

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
metadata = st.none() | st.dictionaries(names, names, max_size=3)


def new(name: str, dtype: str, shape: tuple[int, ...]) -> NewTensor:
    """Return a tensor description of a dtype and shape."""
    return NewTensor(name, dtype, shape, math.prod(shape) * DTYPE_BYTES[dtype])


new_tensors = st.lists(
    st.builds(new, names, st.sampled_from(sorted(DTYPE_TAGS)), shapes), max_size=6, unique_by=lambda tensor: tensor.name
)


def known_to_the_package(tag: str) -> bool:
    """Return whether the installed package supports a type."""
    try:
        safetensors.deserialize(raw({"a": {"dtype": tag, "shape": [0], "data_offsets": [0, 0]}}))
    except safetensors.SafetensorError:
        return False
    return True


def filled(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of distinct bytes; bool tensors contain zeros and ones."""
    count = math.prod(shape) * DTYPE_BYTES[dtype]
    plain = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == "bool" else 251).to(torch.uint8)
    return plain.view(TORCH_DTYPES[dtype]).reshape(shape) if count else torch.empty(shape, dtype=TORCH_DTYPES[dtype])


def plain_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("dtype", sorted(DTYPE_TAGS))
def test_reads_files_of_the_package(dtype: str, tmp_path: Path) -> None:
    """Test each dtype and shape, including 0-dimensional and empty ones: name, shape and bytes."""
    if not known_to_the_package(DTYPE_TAGS[dtype]) or dtype not in TORCH_DTYPES:
        pytest.skip(f"the installed safetensors or torch has no {dtype}")
    tensors = {f"t{i}": filled(dtype, shape) for i, shape in enumerate(SHAPES)}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    header, data = header_of(path), path.read_bytes()
    assert header.metadata == {"format": "pt"}
    assert {tensor.name for tensor in header.tensors} == tensors.keys()
    for tensor in header.tensors:
        saved = tensors[tensor.name]
        assert (tensor.path, tensor.dtype, tensor.shape) == (path, dtype, tuple(saved.shape))
        assert data[tensor.start : tensor.start + tensor.nbytes] == plain_bytes(saved)
        assert tensor.nbytes == saved.nbytes


@pytest.mark.parametrize("dtype", sorted(DTYPE_TAGS))
def test_package_reads_our_files(dtype: str, tmp_path: Path) -> None:
    """Test names, dtypes, shapes and bytes, and torch tensors if the adapter supports the dtype."""
    if not known_to_the_package(DTYPE_TAGS[dtype]) or dtype not in TORCH_DTYPES:
        pytest.skip(f"the installed safetensors or torch has no {dtype}")
    tensors = {f"t{i}": filled(dtype, shape) for i, shape in enumerate(SHAPES)}
    path = tmp_path / "a.safetensors"
    write(path, [(new(name, dtype, tuple(t.shape)), plain_bytes(t)) for name, t in tensors.items()], {"format": "pt"})
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert found.keys() == tensors.keys()
    for name, saved in tensors.items():
        assert (found[name]["dtype"], tuple(found[name]["shape"])) == (DTYPE_TAGS[dtype], tuple(saved.shape))
        assert bytes(found[name]["data"]) == plain_bytes(saved)
    if dtype in READ_BY_TORCH:
        for name, loaded in safetensors.torch.load_file(path).items():
            assert (loaded.dtype, loaded.shape) == (tensors[name].dtype, tensors[name].shape)
            assert plain_bytes(loaded) == plain_bytes(tensors[name])


def test_every_type_of_the_package_is_known() -> None:
    """Test that only types of less than a byte are missing, and that no type has a wrong name."""
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(raw({"a": {"dtype": "?", "shape": [0], "data_offsets": [0, 0]}}))
    listed = {part for part in str(caught.value).split("`") if known_to_the_package(part)}
    assert {"F32", "BF16", "U8"} <= listed
    assert listed - SUB_BYTE <= set(DTYPE_TAGS.values())
    assert all(DTYPE_BYTES[dtype] for dtype in DTYPE_TAGS)


@given(new_tensors, st.sampled_from([None, {}, {"format": "pt"}, {"\x00é\\": "\u2028\x7f\U0001f9c0"}]))
def test_the_bytes_are_those_of_the_package(tensors: list[NewTensor], metadata: dict[str, str] | None) -> None:
    """Test order, alignment, escapes and padding: the whole file is the same."""
    tensors = [tensor for tensor in tensors if known_to_the_package(DTYPE_TAGS[tensor.dtype])]
    if not tensors and metadata == {}:
        metadata = None  # For this input, safetensors 0.8 writes a header that no reader accepts: {},"__metadata__":{}}
    theirs = safetensors.torch.save(
        {t.name: torch.zeros(t.shape, dtype=TORCH_DTYPES[t.dtype]) for t in tensors}, metadata
    )
    head, starts = encode_header(tensors, metadata)
    assert theirs == head + bytes(sum(tensor.nbytes for tensor in tensors))
    assert all(start % DTYPE_BYTES[tensor.dtype] == 0 for start, tensor in zip(starts, tensors, strict=True))


@pytest.mark.slow
@given(tensors=new_tensors, metadata=metadata, dice=st.randoms(use_true_random=False))
def test_written_headers_are_read_back(
    scratch: Path, tensors: list[NewTensor], metadata: dict[str, str] | None, dice: random.Random
) -> None:
    """Test names, dtypes, shapes, offsets and metadata, for any order of the tensors."""
    path = scratch / "round_trip.safetensors"
    head, starts = encode_header(tensors, metadata)
    path.write_bytes(head + bytes(sum(tensor.nbytes for tensor in tensors)))
    header = header_of(path)
    assert header.metadata == (metadata or {})
    assert len(header.tensors) == len(tensors)
    expected = {t.name: (t.dtype, t.shape, start, t.nbytes) for t, start in zip(tensors, starts, strict=True)}
    assert {t.name: (t.dtype, t.shape, t.start, t.nbytes) for t in header.tensors} == expected
    assert [t.start for t in header.tensors] == sorted(starts)
    mixed = dice.sample(tensors, len(tensors))
    turned = None if metadata is None else dict(reversed(metadata.items()))
    assert encode_header(mixed, turned)[0] == head


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BYTES) - set(DTYPE_TAGS)))
def test_a_dtype_that_safetensors_lacks_is_refused(dtype: str) -> None:
    """Test that the error names tensor, dtype, and a format that supports the dtype."""
    with pytest.raises(InvalidInputError, match=rf"cannot hold {dtype}, the dtype of tensor 'w.*\.pt file"):
        encode_header([new("w", dtype, (2,))])


def test_the_dtypes_that_safetensors_lacks_are_these() -> None:
    """Test the list of the test above, so that a new dtype of the registry is noticed."""
    assert set(DTYPE_BYTES) - set(DTYPE_TAGS) == {"complex32", "complex128", "float4_e2m1fn_x2"}


NOT_WRITTEN = {
    "the name of metadata": ([byte_tensor("__metadata__", 1)], None, "name __metadata__ is reserved"),
    "the same beside metadata": ([byte_tensor("__metadata__", 1)], {"a": "b"}, "name __metadata__ is reserved"),
    "half a surrogate pair": ([byte_tensor("\ud800", 1)], None, "half a surrogate pair"),
    "the same in metadata": ([], {"a": "\udc00"}, "half a surrogate pair"),
}


@pytest.mark.parametrize(("tensors", "metadata", "what"), NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_invalid_tensors_are_not_written(tensors: list[NewTensor], metadata: dict[str, str] | None, what: str) -> None:
    """Test files that a reader would refuse or misread."""
    with pytest.raises(InvalidInputError, match=what):
        encode_header(tensors, metadata)


def test_a_header_beyond_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the longest header, and one byte more."""
    head, _ = encode_header([byte_tensor("a", 1)])
    monkeypatch.setattr(safetensors_format, "HEADER_BYTES_MAX", len(head) - 8)
    assert encode_header([byte_tensor("a", 1)])[0] == head
    with pytest.raises(InvalidInputError, match="several files"):
        encode_header([byte_tensor("a", 1), byte_tensor("b", 1)])


def test_the_header_is_padded_with_spaces() -> None:
    """Test that the data begins at a multiple of 8, with the padding of the format."""
    for length in range(1, 20):
        head, (start,) = encode_header([byte_tensor("n" * length, 1)])
        assert len(head) == start
        assert start % 8 == 0
        assert head[8:].rstrip(b" ") == json.dumps(json.loads(head[8:]), separators=(",", ":")).encode()
