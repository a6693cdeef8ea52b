"""Test partitions: every byte once, stable between steps, and within the limits of the format."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.config import StoreConfig
from asymcheck.state.partition_plan import Cut, Partition, Piece, cut

KIB = 1024


@st.composite
def configs(draw: st.DrawFn) -> StoreConfig:
    """Return configurations with small sizes, so that short lists of tensors reach every rule."""
    blocks = draw(st.integers(1, 6))
    return StoreConfig(
        partition_bytes=blocks * 4096,
        bundle_below_bytes=draw(st.integers(0, blocks * 4096)),
        inline_bytes=draw(st.integers(0, 4096)),
        inline_total_bytes=draw(st.integers(0, 9000)),
    )


SIZES = st.one_of(st.integers(0, 40_000), st.integers(0, 64), st.sampled_from([4095, 4096, 4097, 8192, 24_576]))
TENSORS = st.lists(st.tuples(SIZES, st.sampled_from(["model", "optimizer", ""])), max_size=40)


def _cut(tensors: list[tuple[int, str]], config: StoreConfig) -> Cut:
    return cut([size for size, _ in tensors], [group for _, group in tensors], config)


@given(TENSORS, configs())
def test_every_byte_is_in_one_piece(tensors: list[tuple[int, str]], config: StoreConfig) -> None:
    """Test that each row is inline, or covered by pieces without gaps or overlaps."""
    found = _cut(tensors, config)
    pieces = [piece for partition in found.partitions for piece in partition.pieces]
    for row, (size, _) in enumerate(tensors):
        own = sorted((piece.start, piece.start + piece.length) for piece in pieces if piece.row == row)
        if row in found.inline:
            assert own == []
            continue
        assert own[0][0] == 0
        assert own[-1][1] == size
        assert all(end == start for (_, end), (start, _) in pairwise(own))
    assert sorted(found.inline) == sorted(set(found.inline))
    assert {piece.row for piece in pieces} | set(found.inline) == set(range(len(tensors)))


@given(TENSORS, configs())
def test_partitions_keep_the_limits(tensors: list[tuple[int, str]], config: StoreConfig) -> None:
    """Test that no partition is empty, has an empty piece, is too large, or mixes groups."""
    for partition in _cut(tensors, config).partitions:
        assert 1 <= partition.length <= config.partition_bytes
        assert all(piece.length > 0 for piece in partition.pieces)
        assert len({tensors[piece.row][1] for piece in partition.pieces}) == 1


@given(TENSORS, configs())
def test_inline_bytes_are_bounded(tensors: list[tuple[int, str]], config: StoreConfig) -> None:
    """Test the limits of each tensor (`inline_bytes` and the format's 4,096) and of the total."""
    inline = [tensors[row][0] for row in _cut(tensors, config).inline]
    assert all(size <= min(config.inline_bytes, 4096) for size in inline)
    assert sum(inline) <= config.inline_total_bytes


@given(TENSORS, configs())
def test_empty_tensors_never_reach_a_partition(tensors: list[tuple[int, str]], config: StoreConfig) -> None:
    """Test that empty tensors are inline even without inline space, because an extent has at least 1 byte."""
    found = _cut(tensors, config)
    assert {row for row, (size, _) in enumerate(tensors) if size == 0} <= set(found.inline)


@given(TENSORS, configs())
def test_small_tensors_are_bundled_and_large_ones_split(tensors: list[tuple[int, str]], config: StoreConfig) -> None:
    """Test that a partition has whole small tensors of ascending rows, or a piece of one large tensor."""
    for partition in _cut(tensors, config).partitions:
        first, *others = partition.pieces
        if tensors[first.row][0] >= config.bundle_below_bytes:
            assert others == []
            continue
        rows = [piece.row for piece in partition.pieces]
        assert rows == sorted(set(rows))
        assert all((piece.start, piece.length) == (0, tensors[piece.row][0]) for piece in partition.pieces)


@given(TENSORS, configs())
def test_large_tensors_are_cut_into_equal_pieces_on_block_boundaries(
    tensors: list[tuple[int, str]], config: StoreConfig
) -> None:
    """Test that all pieces have one length, a multiple of 4 KiB; the last is not longer."""
    found = _cut(tensors, config)
    for row, (size, _) in enumerate(tensors):
        own = [p.pieces[0] for p in found.partitions if p.pieces[0].row == row and size >= config.bundle_below_bytes]
        if len(own) > 1:
            assert own == sorted(own, key=lambda piece: piece.start)
            assert len({piece.length for piece in own[:-1]}) == 1
            assert own[0].length % 4096 == 0
            assert own[-1].length <= own[0].length


@given(TENSORS, configs())
def test_neighbouring_bundles_do_not_fit_into_one(tensors: list[tuple[int, str]], config: StoreConfig) -> None:
    """Test that a new bundle begins only if the next tensor does not fit."""
    found = _cut(tensors, config)
    for group in ("model", "optimizer", ""):
        bundles = [
            partition
            for partition in found.partitions
            if tensors[partition.pieces[0].row][1] == group
            and tensors[partition.pieces[0].row][0] < config.bundle_below_bytes
        ]
        bundles.sort(key=lambda partition: partition.pieces[0].row)
        for bundle, following in pairwise(bundles):
            assert bundle.length + following.pieces[0].length > config.partition_bytes


@given(TENSORS, configs())
def test_the_cut_depends_on_nothing_else(tensors: list[tuple[int, str]], config: StoreConfig) -> None:
    """Test that the result does not depend on time, chance or an earlier call."""
    assert _cut(tensors, config) == _cut(list(tensors), dataclasses.replace(config))


@given(TENSORS.filter(bool), configs(), st.data())
def test_resized_tensor_moves_only_its_bundle(
    tensors: list[tuple[int, str]], config: StoreConfig, data: st.DataObject
) -> None:
    """Test that large tensors, other groups and earlier bundles keep their partitions and digests."""
    config = dataclasses.replace(config, inline_bytes=0)
    row = data.draw(st.integers(0, len(tensors) - 1))
    group = tensors[row][1]
    resized = [*tensors]
    resized[row] = (data.draw(st.integers(1, 40_000)), group)

    def is_bundle_of_the_group(partition: Partition) -> bool:
        size, own = tensors[partition.pieces[0].row]
        return own == group and size < config.bundle_below_bytes

    unconcerned = [
        partition
        for partition in _cut(tensors, config).partitions
        if partition.pieces[0].row != row and not is_bundle_of_the_group(partition)
    ]
    bundles = [partition for partition in _cut(tensors, config).partitions if is_bundle_of_the_group(partition)]
    closed = sorted((b for b in bundles if b.pieces[-1].row < row), key=lambda bundle: bundle.pieces[0].row)
    # The last bundle before the tensor was still open, so it may include the tensor, or lose the tensors after it.
    assert {*unconcerned, *closed[:-1]} <= set(_cut(resized, config).partitions)


def test_a_small_cut_by_hand() -> None:
    """Test the rules of SPEC.md §B10 on nine tensors against a manual result; one bundle is exactly full."""
    config = StoreConfig(partition_bytes=8 * KIB, bundle_below_bytes=4 * KIB, inline_bytes=16, inline_total_bytes=20)
    sizes = [16, 3 * KIB, 20 * KIB + 1, 3 * KIB, 8, 4, 2 * KIB, 5 * KIB, 17]
    groups = ["a", "a", "a", "a", "b", "b", "a", "b", "a"]
    found = cut(sizes, groups, config)
    assert found.inline == (0, 5)
    assert set(found.partitions) == {
        Partition((Piece(2, 0, 8 * KIB),)),
        Partition((Piece(2, 8 * KIB, 8 * KIB),)),
        Partition((Piece(2, 16 * KIB, 4 * KIB + 1),)),
        Partition((Piece(1, 0, 3 * KIB), Piece(3, 0, 3 * KIB), Piece(6, 0, 2 * KIB))),
        Partition((Piece(8, 0, 17),)),
        Partition((Piece(4, 0, 8),)),
        Partition((Piece(7, 0, 5 * KIB),)),
    }


def test_the_default_cut_of_a_tensor_just_over_one_partition_is_two_halves() -> None:
    """Test equal pieces instead of a full piece and a rest."""
    size = 4 * KIB * KIB + 1
    found = cut([size], ["model"], StoreConfig())
    lengths = [partition.length for partition in found.partitions]
    assert lengths == [2 * KIB * KIB + 16384, 2 * KIB * KIB - 16383]


@pytest.mark.parametrize("elements", [700_000, 1_048_576, 3_333_333, 40_000_000])
def test_a_rounded_copy_is_cut_at_the_elements_of_its_original(elements: int) -> None:
    """Test that each partition of the copy can be derived from one partition."""
    found = cut([2 * elements, 4 * elements], ["model", "optimizer"], StoreConfig(), [2, 4])
    copies, originals = ([one.pieces[0] for one in found.partitions if one.pieces[0].row == row] for row in (0, 1))
    assert [(2 * one.start, 2 * one.length) for one in copies] == [(one.start, one.length) for one in originals]
