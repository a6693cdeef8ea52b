"""Test boxes: intersections element by element and byte by byte, as for numpy slices."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import LimitError
from asymcheck.state.boxes import Box, Crossing, tile

Pair = tuple[Box, Box]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True))


def _marked(boxes: Sequence[Box], whole: tuple[int, ...]) -> np.ndarray:
    """Return how many of the boxes contain each element."""
    count = np.zeros(whole, dtype=np.int64)
    for box in boxes:
        count[_slices(box)] += 1
    return count


@st.composite
def _box_in(draw: st.DrawFn, whole: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in whole]
    # Make most boxes non-empty, which would be rare by chance in several dimensions.
    if draw(st.integers(0, 7)):
        ends = [[first, max(last, min(first + 1, size))] for (first, last), size in zip(ends, whole, strict=True)]
    return Box(whole, tuple(first for first, _ in ends), tuple(last - first for first, last in ends))


WHOLES = st.one_of(
    st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple), st.lists(st.integers(0, 6), max_size=3).map(tuple)
)


@st.composite
def boxes(draw: st.DrawFn, count: int) -> list[Box]:
    """Return some boxes of one whole, sometimes of whole rows, as ranks have them."""
    whole = draw(WHOLES)
    return [draw(st.one_of(_box_in(whole), st.just(Box.of_whole(whole)))) for _ in range(count)]


@given(boxes(2))
def test_intersection_is_what_both_slices_mark(pair: list[Box]) -> None:
    """Test that it is empty without common elements, and that a box covers another one if it contains it."""
    one, other = pair
    marked = _marked(pair, one.whole) == 2
    common = one.common(other)
    assert (common is None) == (not marked.any())
    if common is not None:
        assert np.array_equal(_marked([common], one.whole) > 0, marked)
    assert one.covers(other) == (int(marked.sum()) == other.elements)


@given(boxes(2))
def test_difference_and_intersection_make_up_the_box(pair: list[Box]) -> None:
    """Test that each element is in exactly one of the results."""
    one, other = pair
    common = one.common(other)
    left = one.without(other)
    together = [*left, *([common] if common is not None else [])]
    assert np.array_equal(_marked(together, one.whole), _marked([one], one.whole))


@given(st.integers(1, 12).flatmap(boxes))
def test_a_box_is_tiled_by_the_first_part_that_has_an_element(found: list[Box]) -> None:
    """Test that no element appears twice or is left out, and that an element of no part is named."""
    box, *parts = found
    wanted = np.full(box.whole, -1)
    for number, part in reversed(list(enumerate(parts))):
        wanted[_slices(part)] = number
    tiling = tile(box, parts)
    if tiling.missing is not None:
        assert tiling.missing.elements
        assert box.covers(tiling.missing)
        assert (wanted[_slices(tiling.missing)] == -1).all()
        return
    taken = np.full(box.whole, -1)
    for number, common in tiling.tiles:
        assert (taken[_slices(common)] == -1).all()
        taken[_slices(common)] = number
    assert np.array_equal(taken[_slices(box)], wanted[_slices(box)])
    assert (wanted[_slices(box)] >= 0).all()


def test_parts_that_overlap_are_not_counted_twice() -> None:
    """Test two parts with as many elements as the box, but without its last element."""
    whole = (4,)
    parts = [Box(whole, (0,), (2,)), Box(whole, (1,), (2,))]
    assert tile(Box.of_whole(whole), parts).missing == Box(whole, (3,), (1,))


@pytest.mark.slow
def test_hostile_parts_end_in_an_error() -> None:
    """Test many dimensions, in which a few overlapping parts leave millions of pieces, unlike real layouts."""
    whole = (3,) * 20
    slabs = [[int(dim == cut) for dim in range(20)] for cut in range(20)]
    parts = [Box(whole, tuple(slab), tuple(1 if here else 3 for here in slab)) for slab in slabs]
    with pytest.raises(LimitError, match="overlap in more ways"):
        tile(Box.of_whole(whole), parts)


def test_a_grid_of_thousands_of_parts_is_tiled() -> None:
    """Test any order, also with replicas."""
    whole = (640, 640)
    grid = [Box(whole, (10 * i, 10 * j), (10, 10)) for i, j in itertools.product(range(64), repeat=2)]
    shuffled = [grid[i * 1237 % len(grid)] for i in range(len(grid))]
    box = Box(whole, (5, 100), (630, 200))
    tiling = tile(box, shuffled + grid)
    assert tiling.missing is None
    assert (_marked([common for _, common in tiling.tiles], whole)[_slices(box)] == 1).all()
    assert all(number < len(grid) for number, _ in tiling.tiles)


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Box, Box, Box, int]:
    """Return two overlapping boxes of one whole, and the bytes of an element."""
    whole = draw(st.lists(st.integers(1, 7), max_size=4).map(tuple))
    source, target = (
        draw(st.one_of(_box_in(whole), st.just(Box.of_whole(whole))).filter(lambda box: box.elements)) for _ in "ab"
    )
    common = source.common(target)
    if common is None:
        target, common = source, source
    elif draw(st.booleans()):
        # A tile may be smaller than the intersection of two boxes.
        inner = draw(_box_in(whole).map(common.common))
        common = common if inner is None else inner
    return source, target, common, draw(st.sampled_from([1, 2, 3, 4, 8, 16]))


@given(crossings(), st.lists(st.integers(0, 1 << 20), max_size=6))
def test_bytes_of_one_box_go_where_slices_say(case: tuple[Box, Box, Box, int], cuts: list[int]) -> None:
    """Test any byte ranges, also ranges that split elements, and that other bytes are not changed."""
    source, target, common, width = case
    whole = np.random.default_rng(0).integers(0, 256, (*source.whole, width), dtype=np.uint8)
    plain = whole[_slices(source)].tobytes()
    room = np.zeros(target.elements * width, dtype=np.uint8)
    ends = sorted({0, len(plain), *(cut % (len(plain) + 1) for cut in cuts)})
    crossing = Crossing(source, target, common, width)
    done = 0
    for start, stop in itertools.pairwise(ends):
        regions = list(crossing.regions(start, stop))
        assert crossing.touches(start, stop) == bool(regions)
        data = memoryview(plain)[start:stop]
        for region in regions:
            assert math.prod(region.shape) == region.nbytes
            done += region.nbytes
            region.copy(data, room)
    assert done == crossing.nbytes == common.elements * width
    expected = np.zeros_like(whole)
    expected[_slices(common)] = whole[_slices(common)]
    assert room.tobytes() == expected[_slices(target)].tobytes()
    assert len(list(crossing.regions(0, len(plain)))) == 1


@pytest.mark.parametrize(
    ("source", "target", "is_run"),
    [
        (Box((8, 6), (2, 0), (2, 6)), Box((8, 6), (0, 0), (4, 6)), True),
        (Box((8, 6), (2, 0), (1, 6)), Box((8, 6), (0, 2), (8, 2)), True),
        (Box((8, 6), (0, 0), (8, 3)), Box.of_whole((8, 6)), False),
        (Box.of_whole(()), Box.of_whole(()), True),
        (Box((4, 3, 2), (0, 1, 0), (4, 1, 2)), Box((4, 3, 2), (2, 0, 0), (1, 3, 2)), True),
    ],
)
def test_whole_rows_are_one_run(source: Box, target: Box, is_run: bool) -> None:
    """Test that a split along the first dimension costs one copy, and may be written to a file directly."""
    common = source.common(target)
    assert common is not None
    crossing = Crossing(source, target, common, 4)
    assert crossing.is_run == is_run
    assert all(region.is_run for region in crossing.regions(0, source.elements * 4)) == is_run
