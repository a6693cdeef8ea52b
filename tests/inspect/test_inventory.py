"""Test the list of the tensors of a checkpoint, and where they are stored."""

from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator
from asymcheck.types import Digest


def test_a_shared_partition_is_looked_up_once(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a list of 100,000 small tensors does not take as many searches."""
    searched: list[Digest] = []
    original = PartitionLocator.find

    def find(locator: PartitionLocator, digest: Digest) -> PartitionCopy | None:
        searched.append(digest)
        return original(locator, digest)

    monkeypatch.setattr(PartitionLocator, "find", find)
    with Store.open(store_path, create=True) as store:
        store.save({"model": {str(number): torch.rand(500) for number in range(50)}}, step=1)
        _, tensors = store.tensors()
    assert {tensor.partitions[0].frame for tensor in tensors} == {0}
    assert (len(tensors), len(searched)) == (50, 1)
