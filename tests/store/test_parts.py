"""Test checkpoints of several ranks, each of which saves its own part."""

import os
import time
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.errors import InvalidInputError
from asymcheck.types import Part

_SAVE_ID = (1 << 60).to_bytes(8, "big").hex() + "0123456789abcdef"


def test_a_checkpoint_is_complete_when_the_last_part_is_saved(tmp_path: Path) -> None:
    """Test every order of the parts."""
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        store.save({"w": torch.zeros(4)}, step=1)
        made = [store.save({"w": torch.full((4,), rank)}, step=7, part=Part(rank, 3, _SAVE_ID)) for rank in (2, 0, 1)]
        assert [one.complete for one in made] == [False, False, True]
        assert {(one.save_id, one.world_size) for one in made} == {(_SAVE_ID, 3)}
        (listed,) = [one for one in store.checkpoints() if one.step == 7]
        assert (listed.complete, listed.world_size) == (True, 3)


def test_parent_of_a_part_precedes_its_checkpoint(tmp_path: Path) -> None:
    """Test that the parent is neither another part of the same checkpoint nor a part of a later one."""
    begun = [time.time_ns().to_bytes(8, "big").hex() + os.urandom(8).hex() for _ in range(3)]
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        for step, rank in ((1, 0), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)):
            store.save({"w": torch.ones(4)}, step=step, part=Part(rank, 2, begun[step - 1]))
        manifests = store.resources.nvme.manifests
        parents = {}
        for files in manifests.checkpoints("default"):
            read = [manifests.read("default", files.ref, name).header for name in files.manifests]
            parents[files.ref.step] = [None if header.parent is None else header.parent.step for header in read]
    assert parents == {1: [None, None], 2: [1, 1], 3: [2, 2]}


@pytest.mark.parametrize(
    "part",
    [
        (0, 1, _SAVE_ID),
        Part(2, 2, _SAVE_ID),
        Part(-1, 2, _SAVE_ID),
        Part(True, 2, _SAVE_ID),
        Part(0, 100_000, _SAVE_ID),
        Part(0, 2, _SAVE_ID[:-1]),
        Part(0, 2, _SAVE_ID.upper()),
        Part(0, 2, bytes(16)),  # type: ignore[arg-type]  # what is tested
    ],
)
def test_invalid_part_is_refused(tmp_path: Path, part: object) -> None:
    """Test ranks out of range and invalid save ids, before anything is written."""
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        with pytest.raises(InvalidInputError):
            store.save({"w": torch.zeros(4)}, step=1, part=part)  # type: ignore[arg-type]  # what is tested
        assert store.checkpoints() == []
