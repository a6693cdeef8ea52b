"""Test that rows of manifests locate the bytes of each tensor, also if most rows are reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asymcheck
from asymcheck.commit.manifest_builder import ManifestBuilder, inline_bytes
from asymcheck.config import StoreConfig
from asymcheck.errors import LostCheckpointError
from asymcheck.format.digest import digest
from asymcheck.format.manifest import Column, ManifestHeader, encode, manifest_of
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.state.leaves import Leaf
from asymcheck.state.partition_plan import Cut, cut
from asymcheck.state.walk import Columns, flatten
from asymcheck.types import CheckpointRef, Digest, SaveId
from tools.manifest_files import encode_manifest

CONFIG = StoreConfig(partition_bytes=8192, bundle_below_bytes=4096)
_HEADER = ManifestHeader(
    run="default",
    ref=CheckpointRef(1, 1, SaveId(bytes(16))),
    rank=0,
    world_size=1,
    parent=None,
    created_ns=1,
    writer="tests",
    metrics={},
    plan={"number": 0, "kind": "canonical"},
    packs=(),
    tree=["N"],
)
SHAPES = st.lists(st.sampled_from([(), (0,), (3,), (7, 300), (50, 50), (130, 33), (9000,)]), min_size=1, max_size=12)


def _leaves(shapes: list[tuple[int, ...]], prefix: str = "model") -> list[Leaf]:
    return flatten({prefix: {f"t{number}": torch.rand(shape) for number, shape in enumerate(shapes)}}).leaves


def _cut(leaves: list[Leaf]) -> Cut:
    return cut([leaf.nbytes for leaf in leaves], [leaf.group for leaf in leaves], CONFIG)


def _bytes(leaf: Leaf) -> bytes:
    return leaf.some_bytes(0, leaf.nbytes)


def _plains(leaves: list[Leaf], plan: Cut) -> list[bytes]:
    """Return the bytes of the partitions of a plan."""
    return [
        b"".join(_bytes(leaves[piece.row])[piece.start : piece.start + piece.length] for piece in partition.pieces)
        for partition in plan.partitions
    ]


def _check(rows: ManifestBuilder, leaves: list[Leaf], plan: Cut) -> None:
    """Check that a reader of the manifest finds each tensor's bytes where its row says."""
    plains = {digest(plain): plain for plain in _plains(leaves, plan)}
    names = [digest(plain) for plain in _plains(leaves, plan)]
    data = encode(manifest_of(_HEADER, rows.columns(Columns.of(leaves), plan, names, inline_bytes(leaves, plan))))
    read = decode_manifest(data, "test")
    found = read.rows()
    assert encode_manifest(_HEADER, found) == data
    for row, leaf in zip(found, leaves, strict=True):
        assert (row.name, row.dtype, row.role, row.shape) == (leaf.name, leaf.dtype, leaf.role, leaf.shape)
        pieces = [plains[one.digest][one.offset : one.offset + one.length] for one in row.extents]
        assert (b"".join(pieces) if row.inline is None else row.inline) == _bytes(leaf)
        assert all(len(plains[one.digest]) == one.partition_length for one in row.extents)


@pytest.mark.slow
@given(first=SHAPES, second=SHAPES)
def test_each_tensor_is_found_where_its_row_says(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> None:
    """Test states with other bytes, other partitions, other names, and other tensors, one after another."""
    rows = ManifestBuilder()
    leaves = _leaves(first)
    plan = _cut(leaves)
    _check(rows, leaves, plan)
    _check(rows, _leaves(first), plan)
    _check(rows, leaves, Cut(plan.inline, plan.partitions[::-1]))
    _check(rows, _leaves(first, "ema"), plan)
    others = _leaves(second)
    _check(rows, others, _cut(others))


def test_unreadable_manifest_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a manifest without a tensor: the checkpoint is reported as lost."""
    columns = ManifestBuilder.columns

    def forgetful(
        rows: ManifestBuilder, leaves: Sequence[Leaf], cut: Cut, names: Sequence[Digest], _inline: Mapping[int, bytes]
    ) -> list[Column]:
        return columns(rows, leaves, cut, names, {})

    monkeypatch.setattr(ManifestBuilder, "columns", forgetful)
    state = {"small": torch.ones(3)}
    with asymcheck.Store.open(tmp_path, create=True) as store:
        checkpointer = asymcheck.Checkpointer(store, state, every=1, keep=None)
        checkpointer.step(0)
        with pytest.raises(LostCheckpointError, match="manifest of a capture"):
            checkpointer.close()
        assert store.checkpoints() == []
