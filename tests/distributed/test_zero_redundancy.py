"""Test ZeroRedundancyOptimizer: each rank saves its part of the optimizer state."""

from pathlib import Path

import pytest

from tests.zygote import Zygote


def _train(zygote: Zygote, store: Path, last: int, ranks: int = 2) -> list[str]:
    """Train up to step ``last``; return the output of the first rank."""
    store.parent.mkdir(exist_ok=True)
    zygote.run_ranks(ranks, "tests.distributed.zero_trainer", [store, last], store.parent)
    return (store.parent / "output-0.txt").read_text().split()


@pytest.mark.slow
def test_resumed_training_equals_an_uninterrupted_one(zygote: Zygote, tmp_path: Path) -> None:
    """Test parts of the optimizer on two ranks, with a learning rate that a schedule has changed before the resume."""
    whole = _train(zygote, tmp_path / "whole" / "store", 8)
    _train(zygote, tmp_path / "parts" / "store", 5)
    resumed = _train(zygote, tmp_path / "parts" / "store", 8)
    assert resumed[:2] == ["from", "5:"]
    assert resumed[2] == whole[2]


@pytest.mark.slow
def test_another_number_of_ranks_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    """Test one process, whose part of the optimizer is larger."""
    _train(zygote, tmp_path / "store", 2)
    (alone,) = zygote.start_ranks(1, "tests.distributed.zero_trainer", [tmp_path / "store", 3], tmp_path)
    assert alone.wait() != 0
    assert "groups of [4] parameters are given, but of [" in alone.output.read_text()
