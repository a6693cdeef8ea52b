"""Number of points that a test visits: a sample in `make check`, all in `make long`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pytest

Point = TypeVar("Point")
Visited = Callable[[Sequence[Point]], Sequence[Point]]


def spread(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most ``most`` of ``points``, evenly distributed, including the first and the last."""
    if len(points) <= most:
        return points
    return [points[number * (len(points) - 1) // (most - 1)] for number in range(most)]


def visiting(most: int) -> pytest.MarkDecorator:
    """Give a test a parameter ``visited``, which returns the points of a sequence to test."""
    return pytest.mark.parametrize(
        "visited",
        [pytest.param(partial(spread, most=most), id="some"), pytest.param(list, id="all", marks=pytest.mark.long)],
    )
