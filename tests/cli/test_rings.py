"""Test rings on the command line, simulated by a file; tests/crash has real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import CaptureConfig, Store
from asymcheck.cli import exit_status
from asymcheck.config import ring_folder_of
from asymcheck.storage.shm.orphaned_rings import survey_rings
from tests.cli.conftest import Outcome
from tests.cli.rings import leave_ring

Call = Callable[..., Outcome]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_missing_ring_folder_is_an_error(call: Call, store: Path, tmp_path: Path, words: list[str]) -> None:
    """Test that a mistyped folder does not look like an empty folder."""
    outcome = call("inspect", store, "--tier", "memory", "--ring-folder", tmp_path / "nowhere", *words)
    assert (outcome.status, outcome.out) == (exit_status.NOT_FOUND, "")
    assert f"{tmp_path / 'nowhere'} does not exist" in outcome.err


def test_a_command_that_takes_a_ring_up_is_quoted(call: Call, store: Path, tmp_path: Path) -> None:
    """Test a path with a space."""
    there = store.rename(store.with_name("my store"))
    folder = tmp_path / "my rings"
    folder.mkdir()
    leave_ring(there, folder)
    outcome = call("gc", there, "--ring-folder", folder)
    assert f": asymcheck restore '{there}' --tier memory --ring-folder '{folder}' --to FILE" in outcome.out


def test_environment_names_the_ring_folder_at_use(
    call: Callable[..., Outcome], tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a program that sets the variable after the import."""
    folder = tmp_path / "rings"
    folder.mkdir()
    leave_ring(store, folder)
    assert "no rings of store" in call("inspect", store, "--tier", "memory").out
    monkeypatch.setenv("ASYMCHECK_RING_FOLDER", str(folder))
    assert CaptureConfig().ring_folder == str(folder)
    assert str(folder) in call("inspect", store, "--tier", "memory").out
    with Store.open(store, read_only=True) as opened:
        assert len(survey_rings(opened.resources.tier, ring_folder_of(None), None, check=True)) == 1
    assert "--ring-folder" not in call("inspect", store).err
