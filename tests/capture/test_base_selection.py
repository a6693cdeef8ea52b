"""Test the search for originals of rounded copies: samples exclude candidates, and only the original is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.codecs.derived import BFLOAT16
from asymcheck.commit.encoder import original_of
from asymcheck.format.digest import digest
from asymcheck.format.registry import CODEC_DERIVED
from asymcheck.state.partition_plan import Originals, Partition, Piece
from asymcheck.types import Digest

LAYERS, ELEMENTS = 12, 4096


def test_only_the_original_is_read_as_a_whole() -> None:
    """Test many candidates of equal shape, of which samples exclude all but the original."""
    masters = [torch.randn(ELEMENTS) for _ in range(3 * LAYERS)]
    copy = masters[17].to(torch.bfloat16)
    partitions = [Partition((Piece(row, 0, 4 * ELEMENTS),)) for row in range(len(masters))]
    partitions.append(Partition((Piece(len(masters), 0, 2 * ELEMENTS),)))
    dtypes = ["float32"] * len(masters) + ["bfloat16"]
    originals = Originals(partitions, dtypes, [(ELEMENTS,)] * len(dtypes))
    read_bytes = 0

    def read(number: int, start: int, length: int | None) -> tuple[Digest, memoryview] | None:
        nonlocal read_bytes
        whole = memoryview(masters[number].numpy().tobytes())
        part = whole[start : None if length is None else start + length]
        read_bytes += len(part)
        return digest(whole), part

    plain = memoryview(copy.view(torch.uint8).numpy().tobytes())
    found = original_of(plain, "bfloat16", len(masters), originals, read)
    assert found is not None
    assert (found.codec, found.name, found.offset, found.dtype) == (
        *(CODEC_DERIVED, digest(memoryview(masters[17].numpy().tobytes()))),
        *(0, BFLOAT16),
    )
    assert np.array_equal(np.frombuffer(found.plain, dtype="<f4"), masters[17].numpy())
    assert read_bytes < 3 * 4 * ELEMENTS
    assert original_of(memoryview(bytes(len(plain))), "bfloat16", len(masters), originals, read) is None


def test_zeros_at_the_beginning_do_not_hide_the_original() -> None:
    """Test a row of padding, which is also zero in the moments that are compared first."""
    moment, master = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
    moment[:1000] = master[:1000] = 0
    tensors = [moment, master]
    partitions = [Partition((Piece(row, 0, 4 * ELEMENTS),)) for row in range(2)]
    partitions.append(Partition((Piece(2, 0, 2 * ELEMENTS),)))
    originals = Originals(partitions, ["float32", "float32", "bfloat16"], [(ELEMENTS,)] * 3)

    def read(number: int, start: int, length: int | None) -> tuple[Digest, memoryview] | None:
        whole = memoryview(tensors[number].numpy().tobytes())
        return digest(whole), whole[start : None if length is None else start + length]

    plain = memoryview(master.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    found = original_of(plain, "bfloat16", 2, originals, read)
    assert found is not None
    assert found.name == digest(memoryview(master.numpy().tobytes()))


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_candidates_are_masters_with_all_elements(masters: list[int], copies: list[int]) -> None:
    """Test any partition boundaries, and any number of tensors of the shape."""
    pieces = [Piece(row, 4 * sum(masters[:i]), 4 * n) for row in (0, 1) for i, n in enumerate(masters)]
    pieces += [Piece(2, 2 * sum(copies[:i]), 2 * n) for i, n in enumerate(copies)]
    originals = Originals([Partition((one,)) for one in pieces], ["float32", "float32", "bfloat16"], [(7,)] * 3)
    for number, piece in enumerate(pieces):
        start, end = 2 * piece.start, 2 * (piece.start + piece.length)
        assert list(originals.candidates(number)) == [
            (other, start - one.start)
            for other, one in enumerate(pieces)
            if piece.row == 2 and one.row != 2 and one.start <= start and end <= one.start + one.length
        ]
