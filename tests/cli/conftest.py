"""Fixtures: stores for the command line, and a function that calls it in this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import asymcheck
from asymcheck.cli.main import commands


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, object]:
        """Return the standard output, parsed as one JSON document."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


def run_command(*words: object) -> Outcome:
    """Run the command line with some arguments, as in a pipe."""
    result = CliRunner().invoke(commands, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def call() -> Callable[..., Outcome]:
    """Return a function that runs the command line, as in a pipe."""
    return run_command


@pytest.fixture
def store(store_path: Path) -> Path:
    """Return a store with a line of training, an abandoned branch and a second run."""
    # With one slot, the frames have the same order in each run. Damage hits the first one.
    config = asymcheck.StoreConfig(partition_bytes=8192, bundle_below_bytes=4096, inline_bytes=64, slots=1)
    weight = torch.arange(10_000, dtype=torch.float32)
    with asymcheck.Store.open(store_path, config=config, create=True) as opened:
        for step in (10, 20, 30):
            moment = torch.full((3000,), float(step))
            state = {"model": {"weight": weight, "tied": weight}, "optimizer": {0: {"exp_avg": moment}}, "lr": 0.1}
            opened.save(state, step=step, metrics={"loss": 1.0 / step, "bad": float("nan")})
        generation = opened.training.begin_generation(opened.checkpoints()[1])
        opened.save({"model": {"weight": weight + 1}}, step=25, generation=generation)
        opened.save({"x": torch.ones(5)}, step=1, run="other")
    return store_path
