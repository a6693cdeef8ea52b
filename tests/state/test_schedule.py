"""Test plans: every byte once, sizes in proportion to windows, and reproducible from the record."""

import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asymcheck.config import MIB, StoreConfig
from asymcheck.state.partition_plan import (
    Cut,
    Partition,
    Piece,
    Plan,
    PlanInput,
    Windows,
    cut,
    make_plan,
    plan_from_record,
)

BLOCK = 4096
KINDS = ["canonical", "asymmetric", "symmetric", "eager"]


@st.composite
def configs(draw: st.DrawFn) -> StoreConfig:
    """Return configurations with small sizes, so that short lists of tensors reach every rule."""
    blocks, least = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return StoreConfig(
        partition_bytes=blocks * BLOCK,
        bundle_below_bytes=draw(st.integers(0, blocks * BLOCK)),
        inline_bytes=draw(st.integers(0, 3000)),
        inline_total_bytes=draw(st.integers(0, 6000)),
        deferred_bytes_min=least * BLOCK,
        deferred_bytes_max=draw(st.integers(2 * least, 12)) * BLOCK,
    )


SIZES = st.one_of(st.integers(0, 200_000), st.integers(0, 5000), st.sampled_from([4095, 4096, 4097, 8192, 24_576]))
TENSORS = st.lists(st.tuples(SIZES, st.sampled_from(["model", "optimizer", ""]), st.booleans()), max_size=30)
SECONDS = st.one_of(st.floats(0, 10), st.floats(0, 1e-2), st.just(0.0), st.just(1e300))
PROFILES = st.lists(st.tuples(st.sampled_from(["forward", "backward"]), SECONDS), max_size=12).map(tuple)


def _layout(tensors: list[tuple[int, str, bool]]) -> PlanInput:
    return PlanInput([t[0] for t in tensors], [t[1] for t in tensors], [t[2] for t in tensors])


def _profile(forward: list[float], backward: list[float]) -> Windows:
    """Return a profile of windows with the given lengths in units of 10 ms."""
    return (*(("forward", time / 100) for time in forward), *(("backward", time / 100) for time in backward))


def _rows(plan: Plan) -> set[int]:
    """Return the rows of deferred partitions."""
    return {
        piece.row
        for partition, release in zip(plan.cut.partitions, plan.release, strict=True)
        if release >= 0
        for piece in partition.pieces
    }


def _released(plan: Plan, window: int) -> list[int]:
    """Return the lengths of the partitions that a window releases."""
    return [one.length for one, at in zip(plan.cut.partitions, plan.release, strict=True) if at == window]


@given(TENSORS, configs(), st.sampled_from(KINDS), PROFILES | st.none())
def test_every_byte_is_in_one_piece(
    tensors: list[tuple[int, str, bool]], config: StoreConfig, kind: str, profile: Windows | None
) -> None:
    """Test that each row is inline, or covered by pieces at block boundaries without gaps or overlaps."""
    plan = make_plan(_layout(tensors), config, kind, 0, profile)
    pieces = [piece for partition in plan.cut.partitions for piece in partition.pieces]
    for row, (size, _, _) in enumerate(tensors):
        own = sorted((piece.start, piece.start + piece.length) for piece in pieces if piece.row == row)
        assert all(start % BLOCK == 0 for start, _ in own)
        if row in plan.cut.inline:
            assert own == []
            continue
        assert (own[0][0], own[-1][1]) == (0, size)
        assert all(end == start for (_, end), (start, _) in pairwise(own))
    assert list(plan.cut.inline) == sorted(set(plan.cut.inline))
    assert {piece.row for piece in pieces} | {*plan.cut.inline} == {*range(len(tensors))}
    assert sum(tensors[row][0] for row in plan.cut.inline) <= config.inline_total_bytes


@given(TENSORS, configs(), st.sampled_from(["asymmetric", "symmetric"]), PROFILES)
def test_deferred_partitions_keep_the_limits(
    tensors: list[tuple[int, str, bool]], config: StoreConfig, kind: str, profile: Windows
) -> None:
    """Test the maximum, the minimum except for whole tensors and bundles, and that groups are not mixed."""
    plan = make_plan(_layout(tensors), config, kind, 0, profile)
    assume(plan.kind == kind)
    small_below = min(config.bundle_below_bytes, config.deferred_bytes_max)
    for partition, release in zip(plan.cut.partitions, plan.release, strict=True):
        if release < 0:
            continue
        first, *others = partition.pieces
        assert 1 <= partition.length <= config.deferred_bytes_max
        if tensors[first.row][0] >= small_below:
            assert others == []
            assert first.length >= min(config.deferred_bytes_min, tensors[first.row][0])
        else:
            rows = [piece.row for piece in partition.pieces]
            assert rows == sorted(set(rows))
            assert all((piece.start, piece.length) == (0, tensors[piece.row][0]) for piece in partition.pieces)
            assert len({tensors[row][1] for row in rows}) == 1
            assert all(tensors[row][0] < small_below for row in rows)


@given(TENSORS, configs(), st.sampled_from(KINDS), PROFILES | st.none())
def test_only_deferred_rows_are_released_later_and_in_order(
    tensors: list[tuple[int, str, bool]], config: StoreConfig, kind: str, profile: Windows | None
) -> None:
    """Test that eager rows, and all rows of an eager plan, are captured at once."""
    plan = make_plan(_layout(tensors), config, kind, 0, profile)
    assert list(plan.release) == sorted(plan.release)
    assert all(-1 <= release < max(1, len(plan.windows)) for release in plan.release)
    if kind == "eager":
        assert _rows(plan) == set()
        assert plan.cut == cut([t[0] for t in tensors], [t[1] for t in tensors], config)
    else:
        assert _rows(plan) == {row for row, t in enumerate(tensors) if t[2]} - {*plan.cut.inline}


@given(TENSORS, configs(), st.sampled_from(["canonical", "asymmetric", "symmetric"]), PROFILES | st.none())
def test_eager_tensors_keep_their_canonical_split(
    tensors: list[tuple[int, str, bool]], config: StoreConfig, kind: str, profile: Windows | None
) -> None:
    """Test any deferred tensors."""
    plan = make_plan(_layout(tensors), config, kind, 0, profile)
    rows = [row for row, t in enumerate(tensors) if not t[2]]
    alone = cut([tensors[row][0] for row in rows], [tensors[row][1] for row in rows], config)
    expected = [
        Partition(tuple(Piece(rows[piece.row], piece.start, piece.length) for piece in partition.pieces))
        for partition in alone.partitions
    ]
    at_once = [one for one, at in zip(plan.cut.partitions, plan.release, strict=True) if at == -1]
    assert at_once == expected
    assert [row for row in plan.cut.inline if row in rows] == [rows[row] for row in alone.inline]


@given(TENSORS, configs(), st.sampled_from(KINDS), st.integers(0, 2**53 - 1), PROFILES | st.none())
def test_the_record_gives_the_same_plan_again(
    tensors: list[tuple[int, str, bool]], config: StoreConfig, kind: str, number: int, profile: Windows | None
) -> None:
    """Test the record after JSON, and the plan made a second time."""
    layout = _layout(tensors)
    plan = make_plan(layout, config, kind, number, profile)
    assert make_plan(_layout([*tensors]), dataclasses.replace(config), kind, number, profile) == plan
    record = json.loads(json.dumps(plan.record()))
    assert record == plan.record()
    assert (record["number"], record["kind"]) == (number, plan.kind)
    assert "." not in json.dumps(record)
    assert plan_from_record(record, layout, config) == plan


def test_a_record_is_small_and_readable() -> None:
    """Test a manual result: 80 % of 10 GB/s for 1 ms are 7812 KiB."""
    plan = make_plan(PlanInput([8 * MIB], ["m"], [True]), StoreConfig(), "asymmetric", 3, _profile([1], [2]))
    windows = [["forward", 7812], ["backward", 15625]]
    assert plan.record() == {"number": 3, "kind": "asymmetric", "windows": windows}


def test_the_asymmetric_cut_by_hand() -> None:
    """Test 30 MiB over gaps of 1, 2, 4 and 8 ms: a tensor is cut in this proportion, at multiples of 4 KiB."""
    layout = PlanInput([30 * MIB], ["m"], [True])
    plan = make_plan(layout, StoreConfig(), "asymmetric", 0, _profile([1, 2], [4, 8]))
    assert [partition.length // MIB for partition in plan.cut.partitions] == [2, 4, 8, 16]
    assert plan.release == (0, 1, 2, 3)
    plan = make_plan(layout, StoreConfig(), "symmetric", 0, _profile([1, 2], [4, 8]))
    assert {partition.length // 4096 for partition in plan.cut.partitions} == {30 * 64}
    assert plan.release == (0, 1, 2, 3)


def test_partitions_are_small_in_forward_and_large_in_backward() -> None:
    """Test three large tensors a layer and gaps of 1 and 7 ms: 4 and 28 MiB a window."""
    layer = [48 * MIB, 12 * 1024, 16 * MIB, 4096]
    sizes = layer * 6
    layout = PlanInput(sizes, ["model"] * 8 + ["optimizer"] * 16, [True] * len(sizes))
    plan = make_plan(layout, StoreConfig(), "asymmetric", 0, _profile([1] * 12, [7] * 12))
    forward = [length for window in range(12) for length in _released(plan, window)]
    backward = [length for window in range(12, 24) for length in _released(plan, window)]
    assert sum(forward) == pytest.approx(sum(sizes) / 8, abs=2 * MIB)
    assert 2 * MIB <= min(forward) <= max(forward) <= 6 * MIB
    assert all(abs(sum(_released(plan, window)) - 28 * MIB) <= 14 * MIB for window in range(12, 24))
    assert sorted(backward)[len(backward) // 2] >= 16 * MIB
    assert len(backward) <= 20


@given(st.integers(1, 4000), st.lists(st.floats(0.1, 20), min_size=1, max_size=20), st.sampled_from([0.1, 10, 1e3]))
def test_a_large_tensor_fills_each_window_with_its_share(blocks: int, lengths: list[float], speed: float) -> None:
    """Test any bandwidth: too much is spread over the windows, too little is stretched."""
    config = StoreConfig(deferred_bytes_min=BLOCK, deferred_bytes_max=64 * BLOCK)
    profile: Windows = tuple(("backward", length * speed) for length in lengths)
    size = blocks * 16 * BLOCK
    plan = make_plan(PlanInput([size], ["m"], [True]), config, "asymmetric", 0, profile)
    for window, length in enumerate(lengths):
        assert abs(sum(_released(plan, window)) - size * length / sum(lengths)) <= 65 * BLOCK


def test_short_windows_share_a_partition() -> None:
    """Test gaps of 300 KiB: every fourth window releases four times that, and phases do not mix."""
    layout = PlanInput([10 * MIB], ["m"], [True])
    plan = make_plan(layout, StoreConfig(), "asymmetric", 0, _profile([0.3] * 8, [2] * 4))
    assert plan.release == (3, 7, 8, 9, 10, 11)
    lengths = [partition.length / MIB for partition in plan.cut.partitions]
    assert lengths == pytest.approx([12 / 10.4] * 2 + [20 / 10.4] * 4, abs=0.01)


def test_remainder_of_a_phase_goes_to_its_longest_window() -> None:
    """Test that the last window, next to the fence, does not get the remainder."""
    plan = make_plan(
        PlanInput([9 * MIB], ["m"], [True]), StoreConfig(), "asymmetric", 0, _profile([0.25] * 2, [2, 4.5, 2])
    )
    assert plan.release == (2, 3, 4)
    assert [partition.length for partition in plan.cut.partitions] == [2 * MIB, 5 * MIB, 2 * MIB]


def test_longest_window_is_the_one_with_the_largest_slot() -> None:
    """Test three short windows that share a partition."""
    size = 1600 * 1024
    plan = make_plan(PlanInput([size], ["m"], [True]), StoreConfig(), "asymmetric", 0, _profile([0.3], [0.4, 0.5, 0.4]))
    assert plan.release == (3,)


def test_no_piece_is_smaller_than_the_least_where_tensors_end_between_gaps() -> None:
    """Test parts of 1 MiB and a tensor of 1.4 MiB, which stays whole; the next begins with a full piece."""
    sizes = [1400 * 1024, 2696 * 1024]
    plan = make_plan(PlanInput(sizes, ["m"] * 2, [True] * 2), StoreConfig(), "symmetric", 0, _profile([1] * 2, [1] * 2))
    assert [partition.length // 1024 for partition in plan.cut.partitions] == [1400, 1024, 1672]


def test_too_large_a_remainder_is_halved() -> None:
    """Test that 31.8 MiB fit the gap, and that 0.7 MiB of 32.5 MiB would remain."""
    sizes = [65 * MIB // 2 + BLOCK + 1, 311 * MIB // 10 // BLOCK * BLOCK]
    plan = make_plan(PlanInput(sizes, ["m"] * 2, [True] * 2), StoreConfig(), "symmetric", 0, _profile([1], [1]))
    half = 65 * MIB // 4
    assert [partition.length for partition in plan.cut.partitions] == [half, half + BLOCK + 1, sizes[1]]


def test_a_tensor_larger_than_a_partition_is_never_bundled() -> None:
    """Test bundles of tensors that are larger than a deferred partition."""
    config = StoreConfig(bundle_below_bytes=4 * MIB, deferred_bytes_max=2 * MIB)
    plan = make_plan(PlanInput([3 * MIB], ["m"], [True]), config, "asymmetric", 0, _profile([1], [1]))
    assert [partition.length / MIB for partition in plan.cut.partitions] == [1.5, 1.5]


def test_a_window_wider_than_the_most_releases_several() -> None:
    """Test that the partitions have equal sizes."""
    plan = make_plan(PlanInput([96 * MIB], ["m"], [True]), StoreConfig(), "asymmetric", 0, _profile([1], [3]))
    assert [partition.length // MIB for partition in plan.cut.partitions] == [24, 24, 24, 24]
    assert plan.release == (0, 1, 1, 1)


def test_a_symmetric_plan_spreads_equal_partitions() -> None:
    """Test more partitions than windows, and fewer, evenly distributed over the windows."""
    many = make_plan(PlanInput([128 * MIB], ["m"], [True]), StoreConfig(), "symmetric", 0, _profile([1], [9]))
    assert [partition.length // MIB for partition in many.cut.partitions] == [32] * 4
    assert many.release == (0, 0, 1, 1)
    few = make_plan(PlanInput([2 * MIB], ["m"], [True]), StoreConfig(), "symmetric", 0, _profile([1] * 4, [9] * 4))
    assert [partition.length // MIB for partition in few.cut.partitions] == [1, 1]
    assert few.release == (0, 4)


def test_small_tensors_fill_bundles_of_the_size_of_the_window() -> None:
    """Test 16 MiB of tensors of 128 KiB, which follow the gaps like a large tensor."""
    layout = PlanInput([MIB // 8, MIB // 4] * 128, ["a", "b"] * 128, [True, False] * 128)
    plan = make_plan(layout, StoreConfig(), "asymmetric", 0, _profile([1.5] * 4, [2.5] * 4))
    assert [_released(plan, window) for window in range(8)] == [[3 * MIB // 2]] * 4 + [[5 * MIB // 2]] * 4


@pytest.mark.parametrize("profile", [None, (), _profile([0], [0]), _profile([1e-6], [1e-6])], ids=str)
def test_without_capacity_the_cut_is_canonical_and_released_at_the_beginning(profile: Windows | None) -> None:
    """Test the time before the first profile, and a profile without measurements."""
    layout = PlanInput([9 * MIB, 9 * MIB, 2000, 2000], [""] * 4, [True, False, True, False])
    for kind in ("canonical", "asymmetric", "symmetric"):
        plan = make_plan(layout, StoreConfig(), kind, 1, profile)
        assert plan.record() == {"number": 1, "kind": "canonical"}
        assert set(zip((one.pieces[0].row for one in plan.cut.partitions), plan.release, strict=True)) == {
            (0, 0),
            (1, -1),
            (2, 0),
            (3, -1),
        }


def test_an_empty_state_has_a_plan() -> None:
    """Test also a state without deferred tensors."""
    profile = _profile([1], [2])
    for kind in KINDS:
        assert make_plan(PlanInput([], [], []), StoreConfig(), kind, 0, profile).cut == Cut((), ())
        assert set(make_plan(PlanInput([MIB], [""], [False]), StoreConfig(), kind, 0, profile).release) == {-1}


GOOD = [["forward", 1], ["backward", 2]]
HOSTILE: list[object] = [
    None,
    [],
    "canonical",
    {},
    {"number": 0},
    {"kind": "canonical"},
    {"number": 0, "kind": "canonical", "further": 1},
    {"number": 0, "kind": "canonical", "windows": GOOD},
    {"number": 0, "kind": "eager", "windows": []},
    {"number": 0, "kind": "other"},
    {"number": 0, "kind": ["canonical"]},
    {"number": 0, "kind": {}},
    {"number": True, "kind": "canonical"},
    {"number": 0.0, "kind": "canonical"},
    {"number": -1, "kind": "canonical"},
    {"number": 10**400, "kind": "canonical"},
    {"number": 0, "kind": "other", "windows": GOOD},
    {"number": 0, "kind": "asymmetric"},
    *(
        {"number": 0, "kind": "asymmetric", "windows": windows}
        for windows in (
            None,
            {},
            "ff",
            [],
            [["forward", 0]],
            [["forward", -1], ["forward", 2]],
            [["forward", 1.0]],
            [["forward", True]],
            [["forward", 10**400]],
            [["forward", float("nan")]],
            [["sideways", 1]],
            [[["forward"], 1]],
            [["forward", 1, 2]],
            [["forward"]],
            [[]],
            ["forward", 1],
            [{"forward": 1}],
            [None],
            [["forward", 1]] * 100_000,
        )
    ),
]


@pytest.mark.parametrize("record", HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
def test_a_record_that_is_none_of_ours_gives_no_plan(record: object) -> None:
    """Test any content of the file, for which no error is raised."""
    assert plan_from_record(record, PlanInput([MIB], ["m"], [True]), StoreConfig()) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["forward", "asymmetric", "symmetric"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["number", "kind"]), inner),
    max_leaves=8,
)


@given(st.fixed_dictionaries({"number": JSON, "kind": JSON | st.just("symmetric"), "windows": JSON}))
def test_no_record_raises(record: object) -> None:
    """Test that any record gives a plan with the same record, or none."""
    plan = plan_from_record(record, PlanInput([3 * MIB], ["m"], [True]), StoreConfig())
    assert plan is None or plan.record() == record
