"""Test that ``asymcheck verify`` reads every byte, and reports damage in text, JSON and exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.storage.manifests import ManifestReader
from asymcheck.types import Part
from tests.cli.conftest import Outcome
from tests.damage.flips import flip

Call = Callable[..., Outcome]

FINDING_KEYS = {"kind", "severity", "invariant", "where", "message", "checkpoints", "tensors"}


def largest_pack(store: Path) -> Path:
    """Return the pack with the shared weights."""
    return max((store / "packs").iterdir(), key=lambda path: path.stat().st_size)


def test_a_sound_store(call: Call, store: Path) -> None:
    """Test status 0, and that only the verdict is printed to a pipe."""
    outcome = call("verify", store)
    assert outcome.status == 0
    assert outcome.out == "5 checkpoints checked: all can be restored\n"
    assert outcome.err == ""


def test_damage_that_costs_checkpoints(call: Call, store: Path) -> None:
    """Test a flipped bit in a frame: status 1, with frame, tensor and lost checkpoints."""
    flip(largest_pack(store), 8 * (4096 + 300))
    outcome = call("verify", store)
    assert outcome.status == 1
    assert "damaged-frame" in outcome.out
    assert f"3 cannot be restored\nto repair: asymcheck verify {store} --repair; add --remote" in outcome.out
    document = call("verify", store, "--json").json
    assert set(document) == {"store", "checkpoints", "deep", "lost", "incomplete", "findings", "repaired", "shard"}
    assert document["shard"] is None
    assert document["checkpoints"] == 5
    assert len(document["lost"]) == 3  # type: ignore[arg-type]  # JSON
    (finding,) = document["findings"]  # type: ignore[misc]  # JSON
    assert set(finding) == FINDING_KEYS
    assert finding["severity"] == "error"
    assert finding["tensors"] == ["model.weight"]


def test_a_checkpoint_that_is_incomplete(call: Call, store: Path) -> None:
    """Test that an incomplete checkpoint is no damage, and is not reported as restorable."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"x": 1}, step=40, part=Part(0, 2, "18" + "0" * 30))
    outcome = call("verify", store)
    assert outcome.status == 6
    assert outcome.out.endswith("6 checkpoints checked: all complete checkpoints can be restored; 1 incomplete\n")
    assert "    incomplete: run default, step 40 (" in outcome.out
    assert "lost: " not in outcome.out
    one = call("verify", store, "--step", 40)
    assert one.status == 1
    assert one.out.endswith("1 checkpoint checked: none can be restored; 1 incomplete\n")
    document = call("verify", store, "--json").json
    assert document["lost"] == []
    assert [name[:20] for name in document["incomplete"]] == ["run default, step 40"]  # type: ignore[attr-defined]  # JSON


def test_no_checkpoint_is_not_all_well(call: Call, store: Path) -> None:
    """Test a run without checkpoints, which is mentioned because they may have been deleted or lost."""
    assert "no-checkpoint" not in call("verify", store).out
    (store / "manifests" / "default").rename(store / "gone")
    outcome = call("verify", store)
    assert "no-checkpoint: heads/default: run 'default'" in outcome.out
    (store / "manifests" / "other").rename(store / "gone-too")
    outcome = call("verify", store)
    assert "no-checkpoint: packs: " in outcome.out
    assert "manifests/" in outcome.out
    assert outcome.out.endswith("no checkpoints to check\n")


def test_damage_that_costs_nothing(call: Call, store: Path) -> None:
    """Test one damaged copy of a record: status 6, because nothing is lost."""
    flip(store / "asymcheck.store", 8 * 20)
    outcome = call("verify", store)
    assert outcome.status == 6
    assert "damaged-copy" in outcome.out


def test_one_step_only(call: Call, store: Path) -> None:
    """Test that with --step, other damage is not searched."""
    flip(largest_pack(store), 8 * (4096 + 300))
    assert call("verify", store, "--step", 25).status == 0
    assert call("verify", store, "--step", 20).status == 1


def test_a_step_without_a_run_is_that_of_the_default_run(call: Call, store: Path) -> None:
    """Test that the step of another run is only checked with --run."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"model": {"weight": torch.full((10_000,), 7.0)}}, step=25, run="other")
    flip(max((store / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns), 8 * (4096 + 300))
    outcome = call("verify", store, "--step", 25)
    assert (outcome.status, outcome.out) == (0, "1 checkpoint checked: all can be restored\n")
    assert call("verify", store, "--step", 25, "--json").json["checkpoints"] == 1
    assert call("verify", store, "--step", 25, "--run", "other").status == 1


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_an_empty_run_is_refused(call: Call, store: Path, command: str) -> None:
    """Test a script whose variable is not set: the step is not that of another run, and is not called lost."""
    outcome = call(command, store, "--run", "", "--step", "25")
    assert outcome.status == 2
    assert "invalid run name ''" in outcome.err


def test_a_document_says_whether_frames_were_read(call: Call, store: Path, tmp_path: Path) -> None:
    """Test a store, and a location with and without --deep."""
    location = (tmp_path / "there").as_uri()
    assert call("push", store, location).status == 0
    assert call("verify", store, "--json").json["deep"] is True
    assert call("verify", location, "--json").json["deep"] is False
    assert call("verify", location, "--deep", "--json").json["deep"] is True


@pytest.mark.parametrize("is_remote", [False, True], ids=["store", "location"])
def test_each_manifest_is_read_once(
    call: Call, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    """Test that the number of checkpoints in the verdict costs no second read of every manifest."""
    location = str(store)
    if is_remote:
        location = f"file://{tmp_path / 'location'}"
        with asymcheck.Store.open(store) as opened:
            opened.push(location, everything=True)
    names: list[str] = []
    read_bytes = ManifestReader.read_bytes

    def counted(self: ManifestReader, run: str, ref: object, name: object) -> bytes:
        names.append(str(name))
        return read_bytes(self, run, ref, name)  # type: ignore[arg-type]  # as it was

    monkeypatch.setattr(ManifestReader, "read_bytes", counted)
    outcome = call("verify", location)
    assert f"{len(names)} checkpoints checked" in outcome.out
    assert len(set(names)) == len(names)
