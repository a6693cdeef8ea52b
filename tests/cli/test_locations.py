"""Test the locations of checkpoints: a store with a remote location."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from asymcheck import Store
from asymcheck.cli import exit_status
from tests.architecture.source_tree import REPOSITORY
from tests.cli.conftest import Outcome


@pytest.fixture
def location(store: Path, tmp_path: Path) -> str:
    """Return a location and a store: step 10 is in both, step 20 only remote, the others only local."""
    place = f"file://{tmp_path}/remote"
    with Store.open(store, create=True) as opened:
        opened.push(place, 10)
        opened.push(place, 20)
        opened.delete(20)
    return place


def rows(outcome: Outcome) -> dict[tuple[str, str], str]:
    """Return the locations of each run and step in a table."""
    found = {}
    for line in outcome.out.splitlines():
        words = line.split()
        if len(words) > 2 and words[0] in ("default", "other"):
            place = next((place for place in ("local, remote", "remote", "local") if f" {place}" in line), "")
            found[words[0], words[1]] = place
    return found


def check_schema(document: dict[str, object], name: str) -> None:
    """Check a document against its schema."""
    jsonschema.validate(document, json.loads((REPOSITORY / "docs" / "schemas" / f"{name}.json").read_text()))


def test_inspect_shows_the_locations(store: Path, location: str, call: Callable[..., Outcome]) -> None:
    """Test also checkpoints that only the remote location has."""
    assert rows(call("inspect", store, "--remote", location)) == {
        ("default", "10"): "local, remote",
        ("default", "20"): "remote",
        ("default", "25"): "local",
        ("default", "30"): "local",
        ("other", "1"): "local",
    }
    document = call("inspect", store, "--remote", location, "--json").json
    check_schema(document, "inspect")
    assert [one["step"] for one in document["there"]] == [10, 20]  # type: ignore[index, attr-defined]  # a list
    assert call("inspect", store, "--json").json["there"] is None


def test_log_shows_the_locations(store: Path, location: str, call: Callable[..., Outcome]) -> None:
    """Test the order of the line, with remote-only checkpoints at the end."""
    out = call("log", store, "--remote", location).out
    lines = [line for line in out.splitlines() if line.startswith("step")]
    assert [line.rpartition("(")[2] for line in lines] == ["newest, local)", "local, remote)"]
    assert f"only at {location}: step 20" in out
    document = call("log", store, "--remote", location, "--json").json
    check_schema(document, "log")
    assert len(document["there"]) == 2  # type: ignore[arg-type]  # a list


def test_inspect_finds_a_remote_run(location: str, call: Callable[..., Outcome], tmp_path: Path) -> None:
    """Test that the error for an unknown run lists the known ones."""
    with Store.open(tmp_path / "new", create=True) as opened:
        opened.save({"x": 1}, step=1, run="mine")
    found = call("inspect", tmp_path / "new", "--remote", location, "--run", "default")
    assert (found.status, rows(found)) == (0, {("default", "10"): "remote", ("default", "20"): "remote"})
    missing = call("inspect", tmp_path / "new", "--remote", location, "--run", "nobodys")
    assert missing.status == exit_status.NOT_FOUND
    assert "'nobodys'" in missing.err
    assert "default" in missing.err


@pytest.mark.parametrize("words", [("--step", "999"), ("--run", "nobodys"), ("--run", "nobodys", "--all")])
def test_a_pull_of_nothing_makes_no_store(
    location: str, call: Callable[..., Outcome], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Test that the next pull succeeds."""
    assert call("pull", location, tmp_path / "new", *words).status == exit_status.NOT_FOUND
    assert not (tmp_path / "new").exists()
    assert call("pull", location, tmp_path / "new").status == 0


def test_local_commands_refuse_a_location(location: str, call: Callable[..., Outcome]) -> None:
    """Test that the error names the alternative."""
    for option in ("--empty-pool", "--discard-rings", "--ring-folder=/dev/shm"):
        outcome = call("gc", location, option)
        assert (outcome.status, "work on a local store only" in " ".join(outcome.err.split())) == (
            exit_status.USAGE,
            True,
        )
    pruned = call("gc", location, "--keep-last", "1")
    assert (pruned.status, "Push(keep=...)" in pruned.err) == (exit_status.USAGE, True)
    repaired = call("verify", location, "--repair")
    assert (repaired.status, "push STORE LOCATION --all" in " ".join(repaired.err.split())) == (exit_status.USAGE, True)


def test_contradictory_options(store: Path, location: str, call: Callable[..., Outcome], tmp_path: Path) -> None:
    """Test that contradictory options raise an error."""
    assert call("inspect", store, "--remote", location, "--step", "10").status == 2
    assert call("inspect", store, "--remote", location, "--tier", "memory").status == 2
    assert call("inspect", store, "--remote", f"file://{tmp_path}/nothing").status != 0
    words = ("--to", tmp_path / "out.pt", "--tier", "memory", "--ring-folder", tmp_path)
    refused = call("restore", store, *words, "--remote", location)
    assert (refused.status, "leave out --remote" in " ".join(refused.err.split())) == (exit_status.USAGE, True)


def test_a_location_is_checked_without_its_frames(location: str, call: Callable[..., Outcome], tmp_path: Path) -> None:
    """Test lengths, indexes and manifests; only --deep detects a flipped bit inside of a frame."""
    assert call("verify", location).out.splitlines()[-1] == "frames were not read; pass --deep to read and check them"
    packs = sorted((tmp_path / "remote" / "packs").iterdir(), key=lambda path: path.stat().st_size)
    whole = packs[-1].read_bytes()
    packs[-1].write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    assert call("verify", location).status == 0
    deep = call("verify", location, "--deep")
    assert (deep.status, "damaged-frame" in deep.out) == (exit_status.DAMAGED, True)
    packs[-1].write_bytes(whole[: len(whole) // 2])
    cut = call("verify", location)
    assert cut.status != 0
    assert "damaged-pack" in cut.out
    packs[-1].unlink()
    gone = call("verify", location)
    assert (gone.status, "missing-partition" in gone.out) == (exit_status.DAMAGED, True)
