"""Test that the partitions of manifests are found, whatever the manifests have in common."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from asymcheck.format.manifest import Extent
from asymcheck.format.manifest_reader import ManifestCache, decode_manifest, decode_manifests
from asymcheck.restore.partition_locator import PartitionSet
from asymcheck.types import Digest
from tests.fuzz.manifests import HEADER, row
from tools.manifest_files import encode_manifest


def _extents(first: int, count: int) -> tuple[Extent, ...]:
    return tuple(Extent(Digest(bytes([number]) * 16), 0, 4, 8) for number in range(first, first + count))


@pytest.mark.slow
def test_columns_that_ranks_share_are_counted_once_and_others_all() -> None:
    """Test replicas, and ranks with their own partitions, with fewer, and with none."""
    held = [_extents(0, 3), _extents(0, 3), _extents(3, 3), _extents(0, 2), (), _extents(2, 2)]
    for ranks in itertools.permutations(held, 4):
        files = [
            encode_manifest(
                dataclasses.replace(HEADER, rank=rank, world_size=4),
                [row(f"t{number}", (1,), "float32", extents=(one,)) for number, one in enumerate(extents)],
            )
            for rank, extents in enumerate(ranks)
        ]
        together = PartitionSet.of_manifests(decode_manifests([(data, "x") for data in files], ManifestCache()))
        wanted: dict[Digest, int] = {}
        for data in files:
            wanted |= decode_manifest(data, "x").partitions()
        numbers = range(len(together.digests))
        assert {together.digests[number]: int(together.lengths[number]) for number in numbers} == wanted
