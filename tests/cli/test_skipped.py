"""Test that a command that skips a newer checkpoint says so, in words and in its exit status."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.cli import exit_status
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


@pytest.fixture
def damaged(store: Path) -> Path:
    """Return a store whose newest checkpoint, step 25, has a damaged manifest. Step 20 is intact."""
    _damage(store)
    return store


def _damage(folder: Path) -> None:
    (manifest,) = folder.glob("manifests/default/00000002-*/*.manifest")
    os.truncate(manifest, 100)


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "{store}", "--values"),
        ("merge", "{store}", "--last", "2"),
        ("publish", "{store}", "--to", "{folder}/releases"),
        ("push", "{store}", "file://{folder}/remote"),
        ("restore", "{store}", "--to", "{folder}/o.pt"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_each_command_reports_the_skipped_checkpoint(
    call: Call, damaged: Path, tmp_path: Path, words: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Test status 6, and a message with the step."""
    outcome = call(*(word.format(store=damaged, folder=tmp_path) for word in words), *more)
    assert "skipped step 25 (generation 2, save" in outcome.err
    assert outcome.status == exit_status.WARNINGS
    assert outcome.out


def test_a_pull_reports_the_skipped_checkpoint(call: Call, store: Path, tmp_path: Path) -> None:
    """Test a damaged manifest at the location."""
    with Store.open(store) as opened:
        opened.push(f"file://{tmp_path}/remote", everything=True)
    _damage(tmp_path / "remote")
    outcome = call("pull", f"file://{tmp_path}/remote", tmp_path / "pulled")
    assert "skipped step 25" in outcome.err
    assert outcome.status == exit_status.WARNINGS
    assert "step 20" in outcome.out


@pytest.mark.parametrize("command", ["push", "pull"])
def test_a_named_step_is_not_the_whole_store(call: Call, store: Path, tmp_path: Path, command: str) -> None:
    """Test that the message about a damaged step does not say that the store has no intact checkpoint."""
    location = f"file://{tmp_path}/remote"
    with Store.open(store) as opened:
        opened.push(location, everything=True)
    _damage(store if command == "push" else tmp_path / "remote")
    words = (store, f"file://{tmp_path}/other") if command == "push" else (location, tmp_path / "pulled")
    outcome = call(command, *words, "--step", 25)
    assert outcome.status == exit_status.UNREADABLE
    assert "step 25 of run 'default' cannot be copied; other steps may be intact" in outcome.err


def test_a_merge_of_the_newest_needs_a_known_line(call: Call, store: Path) -> None:
    """Test a lost head record: the run has complete checkpoints, but the newest ones are unknown."""
    (store / "heads" / "default" / "00000002.head").unlink()
    outcome = call("merge", store, "--last", 2)
    assert outcome.status == exit_status.UNREADABLE
    assert "cannot tell which checkpoint of run default is newest" in outcome.err
    missing = call("merge", store, "--last", 2, "--run", "nobody")
    assert (missing.status, "has no run 'nobody'" in missing.err) == (exit_status.NOT_FOUND, True)


def test_a_warning_is_a_message(call: Call, store: Path, tmp_path: Path) -> None:
    """Test a warning without a source line: an unreadable manifest prevents the collection of old releases."""
    releases = tmp_path / "releases"
    words = ("publish", store, "--to", releases, "--keep", "1", "--tensors", "model.weight")
    assert call(*words).err == ""
    (manifest,) = releases.rglob("*.manifest")
    damaged = releases / "manifests" / "other" / manifest.parent.name / manifest.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"x")
    outcome = call(*words)
    assert outcome.err.startswith(f"asymcheck: cannot remove old releases at {releases}: ")
