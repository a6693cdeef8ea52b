"""Test the formulas of merge methods: properties, exact rounding, and agreement with mergekit."""

from __future__ import annotations

import fractions
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import InvalidInputError
from asymcheck.merging import SCHEDULES, methods
from asymcheck.merging.methods import Angle, MergeSettings, Threshold

DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"]
numbers = st.floats(-1e4, 1e4, width=32)
blocks = st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=6)
counts = st.integers(2, 12)
VECTORS = Path(__file__).with_name("mergekit_vectors.json")


def arrays(values: list[list[float]]) -> list[np.ndarray]:
    """Return each list as float64 values."""
    return [np.array(value, dtype=np.float64) for value in values]


@given(blocks)
def test_a_mean_is_the_sum_from_left_to_right_over_the_count(values: list[list[float]]) -> None:
    """Test every bit against a loop in Python's floats."""
    merged = methods.linear(arrays(values), MergeSettings().coefficients(len(values)))
    for place, result in enumerate(merged.tolist()):
        total = 0.0
        for number, value in enumerate(values):
            total = value[place] if number == 0 else total + value[place]
        assert result == total / len(values)


@given(counts, st.sampled_from(SCHEDULES), st.floats(0, 1))
def test_weights_are_shares(count: int, schedule: str, alpha: float) -> None:
    """Test that the weights of averages are not negative, and that their sum is 1."""
    for method in ("ema", "wsm"):
        weights = MergeSettings(method, schedule=schedule, alpha=alpha).coefficients(count)
        assert len(weights) == count
        assert min(weights) >= 0
        assert math.isclose(sum(weights), 1)


@given(blocks, st.floats(0, 1))
def test_ema_weights_unroll_the_recurrence(values: list[list[float]], alpha: float) -> None:
    """Test m_i = alpha x_i + (1 - alpha) m_(i-1)."""
    average = np.array(values[0])
    for value in values[1:]:
        average = alpha * np.array(value) + (1 - alpha) * average
    merged = methods.linear(arrays(values), MergeSettings("ema", alpha=alpha).coefficients(len(values)))
    np.testing.assert_allclose(merged, average, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.0, 0.0, 1.0), (1.5, 0.5, -1.0), (1e300, 1.0, 1.0)])
def test_elements_that_are_equal_in_all_sources_keep_their_value(weights: tuple[float, ...]) -> None:
    """Test an infinity, a sum beyond the largest number, a sum that is rounded, and the sign of a zero."""
    equal = np.array([-math.inf, 1e308, 0.1, -0.0])
    merged = methods.linear([equal.copy() for _ in weights], weights)
    assert merged.tobytes() == equal.tobytes()


@given(st.integers(1, 7), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_a_mean_of_short_values_needs_no_comparison(count: int, bits: list[int]) -> None:
    """Test all float32 bit patterns, equal in all sources: also subnormal numbers, infinities and payloads of NaN."""
    equal = methods.widen(np.array(bits, dtype=np.uint32).view(np.uint8), "float32")
    compared, short = (methods.linear([equal] * count, (1.0,) * count, is_short=is_short) for is_short in (False, True))
    assert compared.tobytes() == equal.tobytes() == short.tobytes()


def test_a_source_of_weight_0_has_no_part() -> None:
    """Test infinities in a source of weight 0, also in the sum of SLERP, which has no divisor."""
    values = [np.array([math.inf, math.nan]), np.array([1.0, 2.0])]
    assert methods.linear(values, (0.0, 3.0)).tolist() == [1.0, 2.0]
    assert methods.combined(values, (0.0, 1.0)).tolist() == [1.0, 2.0]


@given(counts, st.sampled_from(SCHEDULES))
def test_wsm_weights_emulate_a_decay_of_updates(count: int, schedule: str) -> None:
    """Test that merging cumulated updates multiplies update j by the decay at j / count."""
    updates = np.random.default_rng(count).normal(size=count - 1)
    checkpoints = [np.array([total]) for total in np.concatenate([[0.0], np.cumsum(updates)])]
    merged = methods.linear(checkpoints, MergeSettings("wsm", schedule=schedule).coefficients(count))
    decays = {"linear": lambda u: 1 - u, "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2}
    decay = decays.get(schedule, lambda u: 1 - math.sqrt(u))
    expected = sum(decay((j + 1) / count) * update for j, update in enumerate(updates))
    assert math.isclose(float(merged[0]), expected, rel_tol=1e-9, abs_tol=1e-12)


def test_the_linear_schedule_of_wsm_is_the_mean() -> None:
    """Test equal weights."""
    assert MergeSettings("wsm", schedule="linear").coefficients(8) == pytest.approx([1 / 8] * 8)


@given(st.lists(numbers, min_size=3, max_size=3), st.floats(0, 1))
def test_slerp_stays_on_the_sphere(value: list[float], t: float) -> None:
    """Test that vectors of one length keep it, and that the ends of the arc are the vectors."""
    x = np.array(value) + np.array([0, 0, 1e5])
    y = np.roll(x, 1)
    angle = Angle()
    angle.add(x, y)
    merged = methods.combined([x, y], angle.coefficients(t))
    assert math.isclose(float(np.linalg.norm(merged)), float(np.linalg.norm(x)), rel_tol=1e-9)
    np.testing.assert_allclose(methods.combined([x, y], angle.coefficients(0)), x)
    np.testing.assert_allclose(methods.combined([x, y], angle.coefficients(1)), y, atol=1e-7)


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_threshold_is_the_magnitude_of_the_rank(values: list[float], density: float) -> None:
    """Test two passes over any division into blocks against a sort."""
    search = Threshold(density, len(values))
    block = np.array(values)
    for _ in range(2):
        for part in np.array_split(block, 3):
            search.add(part)
        found = search.end_pass()
    rank = max(1, int(density * len(values)))
    assert found == float(np.sort(np.abs(block).astype(np.float32))[::-1][rank - 1])


@given(blocks, st.lists(numbers, min_size=5, max_size=5))
def test_ties_and_dare_keep_a_base_that_no_source_changed(values: list[list[float]], base: list[float]) -> None:
    """Test sources that equal the base, and one source with every element kept."""
    start = np.array(base)
    same, ones = [start] * len(values), [1.0] * len(values)
    assert methods.ties(start, same, ones, [0.0] * len(values), 1.0).tolist() == base
    every = np.ones(5, dtype=bool)
    assert methods.dare(start, same, ones, [every] * len(values), 0.5, 1.0).tolist() == base
    one = np.array(values[0])
    np.testing.assert_allclose(methods.ties(start, [one], [1.0], [0.0], 1.0), one, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(methods.dare(start, [one], [1.0], [every], 1.0, 1.0), one, rtol=1e-9, atol=1e-9)


def test_ties_and_dare_keep_what_is_not_finite() -> None:
    """Test an infinity of all sources, and an element that is not a number in one source."""
    base = np.array([-math.inf, 1.0, 2.0, 3.0])
    values = [np.array([-math.inf, math.nan, 2.5, 3.0]), np.array([-math.inf, 1.0, 2.0, 3.5])]
    every, halves, expected = np.ones(4, dtype=bool), [0.5, 0.5], [-math.inf, math.nan, 2.5, 3.5]
    np.testing.assert_equal(methods.ties(base, values, halves, [0.1, 0.1], 1.0), expected)
    np.testing.assert_equal(methods.dare(base, values, [1.0, 1.0], [every, every], 1.0, 1.0), expected)


@given(st.integers(0, 1000), st.integers(1, 300))
def test_a_mask_does_not_depend_on_its_division_into_blocks(start: int, count: int) -> None:
    """Test a range of a mask against the whole mask."""
    whole = methods.random_mask(7, "model.weight", 1, 0, start + count, 0.3)
    assert (methods.random_mask(7, "model.weight", 1, start, count, 0.3) == whole[start:]).all()


def test_masks_have_the_density_and_differ_by_tensor_source_and_seed() -> None:
    """Test the share of kept elements, and that each of the three changes the mask."""
    mask = methods.random_mask(0, "a", 0, 0, 100_000, 0.25)
    assert abs(mask.mean() - 0.25) < 0.01
    for seed, name, source in ((1, "a", 0), (0, "b", 0), (0, "a", 1)):
        assert 0.3 < (methods.random_mask(seed, name, source, 0, 100_000, 0.25) != mask).mean() < 0.45


@given(st.sampled_from(DTYPES), st.binary(min_size=16, max_size=16))
def test_every_value_survives_widening_and_narrowing(dtype: str, data: bytes) -> None:
    """Test any bit pattern but NaN."""
    stored = np.frombuffer(bytearray(data), dtype=np.uint8)
    values = methods.widen(stored, dtype)
    back = methods.widen(methods.narrow(values, dtype), dtype)
    np.testing.assert_array_equal(back, values)


@given(st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]), st.data())
def test_values_are_rounded_once_to_nearest_even(dtype: str, data: st.DataObject) -> None:
    """Test values around the middle of two neighbours against exact fractions."""
    bits = {"bfloat16": 16, "float16": 16}.get(dtype, 8)
    words = np.uint16 if bits == 16 else np.uint8
    exponent_all_ones = {"bfloat16": 0x7F80, "float16": 0x7C00, "float8_e4m3fn": 0x7E, "float8_e5m2": 0x7C}[dtype]
    low = data.draw(st.integers(0, exponent_all_ones - 2))
    pair = methods.widen(np.array([low, low + 1], dtype=words).view(np.uint8), dtype)
    middle = (pair[0] + pair[1]) / 2
    value = data.draw(st.sampled_from([middle, np.nextafter(middle, math.inf), np.nextafter(middle, 0.0)]))
    distances = [abs(fractions.Fraction(float(end)) - fractions.Fraction(float(value))) for end in pair]
    expected = low + (1 if distances[1] < distances[0] else 0 if distances[0] < distances[1] else low % 2)
    assert methods.narrow(np.array([value, -value]), dtype).view(words).tolist() == [
        expected,
        expected | 1 << (bits - 1),
    ]


def test_rounding_by_way_of_float32_would_be_wrong() -> None:
    """Test a value that float32 rounds to the middle of two bfloat16 numbers."""
    value = 1 + 2**-8 + 2**-40
    assert torch.tensor([value], dtype=torch.float64).to(torch.bfloat16).item() == 1.0
    merged = methods.narrow(np.array([value, math.nan, 1e300]), "bfloat16")
    assert torch.from_numpy(merged).view(torch.bfloat16).tolist()[::2] == [1 + 2**-7, math.inf]
    assert math.isnan(torch.from_numpy(merged).view(torch.bfloat16).tolist()[1])


@pytest.mark.parametrize(
    ("settings", "count", "base", "problem"),
    [
        ({"method": "median"}, 3, False, "unknown merge method 'median'; choose one of mean, ema"),
        ({"method": "weighted", "weights": (1.0, 2.0)}, 3, False, "2 weights for 3 checkpoints"),
        ({"method": "weighted"}, 3, False, "needs weights"),
        ({"method": "weighted", "weights": (1.0, -1.0)}, 2, False, "whose sum is finite and not 0"),
        ({"method": "weighted", "weights": (math.inf, -math.inf)}, 2, False, "give finite numbers"),
        ({"method": "dare", "weights": (1e308, 1e308)}, 2, True, "give finite numbers"),
        ({"method": "ties", "scale": math.nan}, 2, True, "scale nan: give a finite number"),
        ({"method": "mean", "weights": (1.0, 2.0)}, 2, False, "leave out --weights"),
        ({"method": "slerp"}, 3, False, "exactly 2 checkpoints, but 3 were given"),
        ({"method": "ties"}, 2, False, "needs a base checkpoint"),
        ({"method": "mean"}, 2, True, "has no base"),
        ({"method": "mean"}, 1, False, "at least 2 checkpoints"),
        ({"method": "ties"}, 0, True, "at least one checkpoint beside the base, not 0"),
        ({"method": "ema", "alpha": 1.5}, 2, False, "alpha 1.5: give a number from 0 to 1"),
        ({"method": "dare", "density": 0.0}, 2, True, "density 0.0: give a number above 0, up to 1"),
        ({"method": "wsm", "schedule": "square"}, 2, False, "unknown schedule 'square'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, object], count: int, base: bool, problem: str
) -> None:
    """Test the message of each error."""
    with pytest.raises(InvalidInputError, match=problem):
        MergeSettings(**settings).check(count, has_base=base)  # type: ignore[arg-type]  # some are wrong on purpose


def _vectors() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(VECTORS.read_text("utf-8"))["cases"]
    return found


@pytest.mark.parametrize("case", _vectors(), ids=lambda case: case["name"])
def test_results_agree_with_mergekit(case: dict[str, object]) -> None:
    """Test results of mergekit on the same tensors, within the rounding of its float32 arithmetic."""
    inputs = arrays(case["inputs"])  # type: ignore[arg-type]  # lists of numbers
    settings = MergeSettings(**case["settings"])  # type: ignore[arg-type]  # fields by name
    *values, base = inputs if settings.uses_base else [*inputs, inputs[0]]
    weights = settings.coefficients(len(values))
    if settings.method == "slerp":
        angle = Angle()
        angle.add(*values)
        merged = methods.combined(values, angle.coefficients(settings.t))
    elif settings.method == "ties":
        searches = [Threshold(settings.density, len(base)) for _ in values]
        thresholds = [0.0] * len(values)
        for _ in range(2):
            for search, value in zip(searches, values, strict=True):
                search.add(value - base)
            thresholds = [search.end_pass() for search in searches]
        merged = methods.ties(base, values, weights, thresholds, settings.scale)
    elif settings.method == "dare":
        masks = [np.array(mask, dtype=bool) for mask in case["masks"]]  # type: ignore[attr-defined]  # lists
        merged = methods.dare(base, values, weights, masks, settings.density, settings.scale)
    else:
        merged = methods.linear(values, weights)
    np.testing.assert_allclose(merged, case["expected"], rtol=2e-6, atol=2e-6)
