"""Originals: found by a look at the beginning of each candidate, and read whole only when it is the one."""

from __future__ import annotations

import numpy as np
import torch

from asymcheck.codecs.rounding import BFLOAT16
from asymcheck.format.digest import digest
from asymcheck.format.registry import CODEC_DERIVED
from asymcheck.partition.originals import Originals
from asymcheck.partition.plan import Partition, Piece
from asymcheck.pipeline.bases import original_of
from asymcheck.types import Digest

LAYERS, ELEMENTS = 12, 4096


def test_of_many_candidates_only_the_original_is_read_whole() -> None:
    """Every layer has weights of one shape, and moments of it, too; a copy has one original among them."""
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
