"""Test every parser with random input: it returns a value or a named error, in bounded time."""

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS
from tests.zygote import Zygote

COUNTS = {
    "frame header": 7_500,
    "frame": 4_000,
    "pack": 4_000,
    "record": 4_000,
    "catalog value": 7_500,
    "name": 10_000,
    "json": 10_000,
    "tree": 5_000,
    "manifest": 1_500,
}
"""Number of inputs in the default run, so that each parser gets about the same time."""

MEANT = {
    "frame header": {
        "bad-magic",
        "bad-checksum",
        "limit-exceeded",
        "bad-structure",
        "unsupported-version",
        "truncated",
    },
    "frame": {"bad-magic", "bad-checksum", "limit-exceeded", "bad-structure", "unsupported-codec", "truncated"},
    "pack": {"bad-magic", "bad-checksum", "limit-exceeded", "bad-structure", "unsupported-codec", "truncated"},
    "record": {"bad-checksum", "bad-structure", "unsupported-version", "truncated", "accepted"},
    "catalog value": {"refused", "accepted"},
    "name": {"refused", "accepted"},
    "json": {"bad-structure", "accepted"},
    "tree": {"bad-structure", "limit-exceeded", "accepted"},
    "manifest": {"bad-magic", "bad-structure", "limit-exceeded", "unsupported-version", "accepted"},
}
"""Outcomes that must occur, so that the inputs reach the intended code."""


def _fuzz(zygote: Zygote, name: str, seed: int, count: int, scratch: Path) -> None:
    progress = scratch / "progress"
    progress.write_bytes(bytes(8))
    outcome = zygote.call("tests.fuzz.worker:run", 3600, name=name, seed=seed, count=count, progress=str(progress))
    reached = int.from_bytes(progress.read_bytes(), "little")
    assert outcome.returned, f"input {reached} of seed {seed}: {outcome}"
    assert not outcome.value["problems"], "\n".join(outcome.value["problems"])
    assert reached == count - 1
    missing = MEANT[name] - set(outcome.value["outcomes"])
    assert not missing, f"no input led to {missing}: {outcome.value['outcomes']}"


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_gives_a_value_or_a_named_error(zygote: Zygote, tmp_path: Path, name: str) -> None:
    """Test thousands of changed inputs in a child with 64 MiB: no crash, no input of two seconds, no misread.

    An accepted value is the same after it was written and read again.
    """
    _fuzz(zygote, name, 1, COUNTS[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_gives_a_value_or_a_named_error_at_length(
    zygote: Zygote, tmp_path: Path, name: str, seed: int
) -> None:
    """Test two hundred times as many inputs."""
    _fuzz(zygote, name, seed, COUNTS[name] * 200, tmp_path)
