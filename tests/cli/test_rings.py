"""Rings on the command line, of which a file is enough; tests/crash has those that trainings leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck.cli import exits
from tests.cli.conftest import Outcome
from tests.cli.rings import leave_ring

Call = Callable[..., Outcome]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_folder_of_rings_that_is_not_there_is_said(call: Call, store: Path, tmp_path: Path, words: list[str]) -> None:
    """Who mistypes it would be told that nothing is in memory."""
    outcome = call("inspect", store, "--tier", "dram", "--ring-folder", tmp_path / "nowhere", *words)
    assert (outcome.status, outcome.out) == (exits.NOT_FOUND, "")
    assert f"{tmp_path / 'nowhere'} does not exist; --ring-folder names where" in outcome.err


def test_a_command_that_takes_a_ring_up_is_quoted(call: Call, store: Path, tmp_path: Path) -> None:
    """Paths may have spaces in them."""
    there = store.rename(store.with_name("my store"))
    folder = tmp_path / "my rings"
    folder.mkdir()
    leave_ring(there, folder)
    outcome = call("gc", there, "--ring-folder", folder)
    assert f"or asymcheck restore '{there}' --tier dram --ring-folder '{folder}'; --discard-rings" in outcome.out
