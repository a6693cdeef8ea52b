"""Formulas of merge methods, as pure functions on blocks of float64 values.

Sources are in the order in which they were given, oldest first. Sums are accumulated in float64 in this order, so the
result does not depend on partitions or threads. :func:`narrow` rounds it once, to nearest even.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asymcheck.errors import InvalidInputError
from asymcheck.format.digest import digest
from asymcheck.inspect.norms import numbers_of
from asymcheck.merging import METHODS, SCHEDULES
from asymcheck.state.dtypes import TORCH_DTYPES

Block: TypeAlias = npt.NDArray[np.float64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

BLOCK_ELEMENTS = 1 << 15
"""Elements that are merged at once. Their float64 values fit into the cache, and torch converts them in this thread."""

_FLOATS = ("float16", "float32", "float64")
_ELEMENTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_HALFWAY = 0x8000
_ROUNDED_BY_TORCH = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_PARALLEL = 0.9995
_TINY_NORM = 1e-8
_LEVELS = 1 << 16
_WORDS_PER_COUNTER = 4
_USERS = {
    "weights": ("weighted", "ties", "dare"),
    "alpha": ("ema",),
    "schedule": ("wsm",),
    "t": ("slerp",),
    "density": ("ties", "dare"),
    "scale": ("ties", "dare"),
    "seed": ("dare",),
}
"""Methods that use each setting."""


@dataclasses.dataclass(frozen=True)
class MergeSettings:
    """Settings of a merge. Each method uses only those that its formula names."""

    method: str = "mean"
    """One of :data:`asymcheck.merging.METHODS`."""
    weights: tuple[float, ...] | None = None
    """One weight for each source; equal weights if None."""
    alpha: float = 0.2
    """``ema``: the share of each newer source."""
    schedule: str = "1-sqrt"
    """``wsm``: the learning rate decay to emulate, one of :data:`asymcheck.merging.SCHEDULES`."""
    t: float = 0.5
    """``slerp``: 0 is the first source, 1 the second."""
    density: float = 0.5
    """``ties`` and ``dare``: the share of the elements of each task vector that are kept."""
    scale: float = 1.0
    """``ties`` and ``dare``: factor of the merged task vector (λ)."""
    seed: int = 0
    """``dare``: seed of the random masks."""

    def check(self, sources: int, *, has_base: bool) -> None:
        """Check the settings for a number of sources.

        Raises:
            InvalidInputError: a setting is unknown, out of range, or does not fit the number of sources.
        """
        if self.method not in METHODS:
            raise InvalidInputError(f"unknown merge method {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.schedule not in SCHEDULES:
            raise InvalidInputError(f"unknown schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        if self.method == "slerp" and sources != 2:  # noqa: PLR2004 - a great circle has two ends
            raise InvalidInputError(f"slerp merges exactly 2 checkpoints, but {sources} were given")
        if sources < (1 if has_base else 2):
            needed = "one checkpoint beside the base" if has_base else "2 checkpoints"
            raise InvalidInputError(f"a merge needs at least {needed}, not {sources}; give --steps or --last")
        if self.uses_base != has_base:
            problem = (
                "needs a base checkpoint; give --base"
                if self.uses_base
                else "has no base; leave out --base, or choose method ties or dare"
            )
            raise InvalidInputError(f"method {self.method} {problem}")
        for name, value, least in (("alpha", self.alpha, 0), ("t", self.t, 0), ("density", self.density, 2**-53)):
            if not least <= value <= 1:
                raise InvalidInputError(f"{name} {value}: give a number {'above 0, up to' if least else 'from 0 to'} 1")
        if not math.isfinite(self.scale):
            raise InvalidInputError(f"scale {self.scale}: give a finite number")
        self._check_weights(sources)

    def check_used(self, names: Iterable[str]) -> None:
        """Check that the method uses all settings of these names.

        Raises:
            InvalidInputError: a setting belongs to other methods.
        """
        for name in names:
            if self.method not in _USERS[name]:
                others = " or ".join(_USERS[name])
                raise InvalidInputError(
                    f"method {self.method} has no setting {name}; leave out --{name}, or choose method {others}"
                )

    def _check_weights(self, sources: int) -> None:
        weights = self.weights
        if weights is None:
            if self.method == "weighted":
                raise InvalidInputError("method weighted needs weights; give --weights, one for each checkpoint")
            return
        self.check_used(["weights"])
        if len(weights) != sources:
            raise InvalidInputError(f"{len(weights)} weights for {sources} checkpoints; give one for each checkpoint")
        # Unlike sum(), fsum() raises an error for infinities and for sums that overflow.
        is_finite = math.isfinite(sum(map(abs, weights)))
        if not is_finite or (self.method == "weighted" and not math.fsum(weights)):
            raise InvalidInputError(f"weights {weights}: give finite numbers whose sum is finite and not 0")

    @property
    def uses_base(self) -> bool:
        """Whether the method merges differences from a base checkpoint."""
        return self.method in ("ties", "dare")

    def used(self) -> dict[str, object]:
        """Return the settings in the formula of the method, except for weights."""
        names = [name for name, users in _USERS.items() if self.method in users and name != "weights"]
        return {name: getattr(self, name) for name in names}

    def coefficients(self, sources: int) -> tuple[float, ...]:
        """Return the weight of each source, oldest first.

        - ``mean``, ``lawa``: 1 each. LAWA is the mean of the newest checkpoints of a run (arXiv 2209.14981).
        - ``ema``: ``m_1 = x_1`` and ``m_i = alpha x_i + (1 - alpha) m_(i-1)``, as in PMA (arXiv 2505.12082). In closed
          form, ``x_1`` has the weight ``(1 - alpha)^(N-1)`` and ``x_i`` the weight ``alpha (1 - alpha)^(N-i)``.
        - ``wsm``: ``c_0 = 1 - w_1``, ``c_j = w_j - w_(j+1)``, ``c_k = w_k`` for k + 1 sources, with the decay
          ``w_j = D(j / (k + 1))`` (arXiv 2507.17634). ``linear`` is ``D(u) = 1 - u``, which gives the mean. ``cosine``
          is ``(1 + cos(pi u)) / 2``, and ``1-sqrt`` is ``1 - sqrt(u)``.
        - ``slerp``: ``1 - t`` and ``t``; :meth:`Angle.coefficients` replaces them for each tensor.
        - ``weighted``, ``ties``, ``dare``: the given weights. The default of ``ties`` and ``dare`` is 1 / N.
        """
        if self.method == "ema":
            rest = 1 - self.alpha
            return tuple((self.alpha if i else 1.0) * rest ** (sources - 1 - i) for i in range(sources))
        if self.method == "wsm":
            decay = [1.0, *(_decay(self.schedule, j / sources) for j in range(1, sources)), 0.0]
            return tuple(decay[j] - decay[j + 1] for j in range(sources))
        if self.method == "slerp":
            return 1 - self.t, self.t
        return self.weights or (1 / sources if self.uses_base else 1.0,) * sources


def _decay(schedule: str, u: float) -> float:
    if schedule == "cosine":
        return (1 + math.cos(math.pi * u)) / 2
    return 1 - (u if schedule == "linear" else math.sqrt(u))


def combined(values: Sequence[Block], weights: Sequence[float]) -> Block:
    """Return ``w_1 x_1 + … + w_N x_N``, added from left to right. A source with weight 0 has no part in the sum."""
    # Zero times an infinity, such as that of an attention mask, is not a number.
    used = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    terms = [value if weight == 1 else value * weight for value, weight in used]
    total = terms[0] + terms[1] if len(terms) > 1 else terms[0].copy()
    for term in terms[2:]:
        total += term
    return total


def linear(values: Sequence[Block], weights: Sequence[float], *, is_short: bool = False) -> Block:
    """Return ``(w_1 x_1 + … + w_N x_N) / (w_1 + … + w_N)``, added from left to right.

    An element that is equal in all sources keeps its value, as in partitions that need no merge. The sum may be
    rounded, or be not a number if a weight is negative and the element is infinite. It is exact if the weights are 1
    and the values ``is_short``: of 32 bits or less.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = combined(values, weights)
        divisor = math.fsum(weights)
        if divisor != 1:
            np.divide(total, divisor, out=total)
    if is_short and set(weights) == {1.0}:
        return total
    bits = [value.view(np.uint64) for value in values]
    np.copyto(total, values[0], where=np.logical_and.reduce([bits[0] == other for other in bits]))
    return total


class Angle:
    """Sums of the first pass of SLERP over two tensors: ``x·x``, ``y·y`` and ``x·y``."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0]

    def add(self, x: Block, y: Block) -> None:
        """Add the next block of both tensors."""
        for index, (a, b) in enumerate(((x, x), (y, y), (x, y))):
            self._sums[index] += float((a * b).sum())

    def coefficients(self, t: float) -> tuple[float, float]:
        """Return ``sin((1-t) θ) / sin θ`` and ``sin(t θ) / sin θ``, where θ is the angle between the tensors.

        They are ``1 - t`` and ``t`` if the tensors are almost parallel or opposite: ``|cos θ| > 0.9995``. A tensor with
        a norm up to 1e-8 counts as it is, without division by its norm. Both rules are those of mergekit.
        """
        norms = [norm if norm > _TINY_NORM else 1.0 for norm in map(math.sqrt, self._sums[:2])]
        cosine = self._sums[2] / norms[0] / norms[1]
        if not abs(cosine) <= _PARALLEL:
            return 1 - t, t
        angle = math.acos(cosine)
        return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


class Threshold:
    """The k-th largest magnitude of a task vector, in two passes over its elements.

    Magnitudes are compared as float32, whose bits sort like the numbers: the first pass counts the upper 16 bits, and
    the second pass the lower 16 bits of the elements with the upper bits of the k-th largest one.
    """

    def __init__(self, density: float, elements: int) -> None:
        """Search the magnitude of rank ``k = max(1, floor(density * elements))``, as mergekit does."""
        self._rank = max(1, int(density * elements))
        self._counts = np.zeros(_LEVELS, dtype=np.int64)
        self._upper: int | None = None

    def add(self, delta: Block) -> None:
        """Count the magnitudes of the next block, in the present pass."""
        bits = magnitude(delta).view(np.uint32)
        upper = bits >> 16
        if self._upper is None:
            self._counts += np.bincount(upper, minlength=_LEVELS)
        else:
            lower = bits[upper == self._upper] & (_LEVELS - 1)
            self._counts += np.bincount(lower, minlength=_LEVELS)

    def end_pass(self) -> float:
        """End a pass; return the magnitude after the second one."""
        above = np.cumsum(self._counts[::-1])
        place = int(np.searchsorted(above, self._rank))
        level = _LEVELS - 1 - place
        if self._upper is None:
            self._upper = level
            self._rank -= int(above[place - 1]) if place else 0
            self._counts[:] = 0
            return 0.0
        return float(np.array(self._upper << 16 | level, dtype=np.uint32).view(np.float32))


def task_vector(value: Block, base: Block) -> Block:
    """Return ``value - base``, which is 0 for equal infinities, such as those of an attention mask."""
    with np.errstate(invalid="ignore"):
        return np.where(value == base, 0.0, value - base)


def magnitude(delta: Block) -> npt.NDArray[np.float32]:
    """Return absolute values as float32, in which magnitudes are compared."""
    with np.errstate(over="ignore"):
        return np.abs(delta).astype(np.float32)


def ties(
    base: Block, values: Sequence[Block], weights: Sequence[float], thresholds: Sequence[float], scale: float
) -> Block:
    """Merge task vectors by TIES (arXiv 2306.01708): trim, elect a sign, and average what agrees with it.

    With ``d_i = x_i - base``, keep the elements of ``d_i`` whose magnitude is at least ``thresholds[i]``, and multiply
    them by ``w_i``. The elected sign of an element is that of the sum over all sources; 0 counts as positive. The
    result is ``base + scale * (sum of the elements with this sign) / (sum of their weights)``. An element that is not a
    number in any source is not a number in the result.
    """
    trimmed = []
    for value, weight, threshold in zip(values, weights, thresholds, strict=True):
        delta = task_vector(value, base)
        trimmed.append(np.where(magnitude(delta) < np.float32(threshold), 0.0, delta) * weight)
    total = combined(trimmed, [1.0] * len(trimmed))
    elected = np.where(total >= 0, 1.0, -1.0)
    merged, divisor = np.zeros_like(base), np.zeros_like(base)
    for delta, weight in zip(trimmed, weights, strict=True):
        agrees = np.sign(delta) == elected
        merged += np.where(agrees | np.isnan(delta), delta, 0.0)
        divisor += np.where(agrees, weight, 0.0)
    divisor[divisor == 0] = 1
    return base + scale * (merged / divisor)


def dare(
    base: Block,
    values: Sequence[Block],
    weights: Sequence[float],
    masks: Sequence[npt.NDArray[np.bool_]],
    density: float,
    scale: float,
) -> Block:
    """Merge task vectors by DARE (arXiv 2311.03099): drop elements at random, and rescale the others.

    The result is ``base + scale * sum of w_i m_i (x_i - base) / density``, where the mask ``m_i`` is 1 for a share
    ``density`` of the elements, and 0 for the others.
    """
    merged = np.zeros_like(base)
    for value, weight, mask in zip(values, weights, masks, strict=True):
        merged += np.where(mask, task_vector(value, base) * weight, 0.0)
    return base + scale * (merged / density)


def random_mask(seed: int, name: str, source: int, start: int, count: int, density: float) -> npt.NDArray[np.bool_]:
    """Return ``count`` elements of DARE's mask of a tensor, from element ``start`` on.

    The mask depends on the seed, the name of the tensor and the number of the source, and not on partitions. Element n
    is kept if word n of Philox 4x64, keyed by the digest of these three, is less than ``density * 2^64``.
    """
    key = np.frombuffer(digest(f"{seed}\0{source}\0{name}".encode()), dtype="<u8")
    generator = np.random.Philox(key=key)
    skipped = start % _WORDS_PER_COUNTER
    generator.advance(start // _WORDS_PER_COUNTER)
    words = generator.random_raw(skipped + count)[skipped:]
    mask: npt.NDArray[np.bool_] = words < np.uint64(min(int(density * 2**64), 2**64 - 1))
    return mask


def is_mergeable(dtype: str) -> bool:
    """Tell whether values of a dtype can be averaged. Others, such as integers, are taken from the newest source."""
    return _ELEMENTS.get(dtype, dtype) in (*_FLOATS, *_ROUNDED_BY_TORCH)


def widen(data: Bytes, dtype: str) -> Block:
    """Return the values of stored elements, exactly. A complex number is two values."""
    values: Block = numbers_of(data, _ELEMENTS.get(dtype, dtype))  # type: ignore[assignment]  # no dtype here is complex
    return values


def narrow(values: Block, dtype: str) -> Bytes:
    """Return the bytes of values, rounded once to nearest even."""
    dtype = _ELEMENTS.get(dtype, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in _FLOATS:
            return values.astype(dtype).view(np.uint8)
        rough = values.astype(np.float32)
    # torch rounds float32 values. Rounding to odd there prevents that a value is rounded twice. A bfloat16 is the upper
    # half of a float32, so it matters only if the float32 value is in the middle between two of them.
    bits = rough.view(np.uint32)
    at = np.flatnonzero(bits & 0xFFFF == _HALFWAY) if dtype == "bfloat16" else slice(None)
    exact, back = values[at], rough[at].astype(np.float64)
    odd = bits[at] - (np.abs(back) > np.abs(exact))
    bits[at] = odd | ((back != exact) & ~np.isnan(exact))
    rounded: Bytes = torch.from_numpy(rough).to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy()
    return rounded
