"""``asymcheck verify`` reads every byte, and reports damage in text, in JSON and by its exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import asymcheck
from asymcheck.types import Part
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]

FINDING_KEYS = {"kind", "severity", "invariant", "where", "message", "checkpoints", "tensors"}


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def largest_pack(store: Path) -> Path:
    """Return the pack with the shared weights."""
    return max((store / "packs").iterdir(), key=lambda path: path.stat().st_size)


def test_a_sound_store(call: Call, store: Path) -> None:
    """Nothing is found, the status is 0, and nothing is written to a pipe but the verdict."""
    outcome = call("verify", store)
    assert outcome.status == 0
    assert outcome.out == "5 checkpoints checked: all can be restored\n"
    assert outcome.err == ""


def test_damage_that_costs_checkpoints(call: Call, store: Path) -> None:
    """A flipped bit in a frame gives status 1 and names frame, tensor and the checkpoints that are lost."""
    flip(largest_pack(store), 4096 + 300)
    outcome = call("verify", store)
    assert outcome.status == 1
    assert "damaged-frame" in outcome.out
    assert "3 cannot be restored" in outcome.out
    document = call("verify", store, "--json").json
    assert set(document) == {"store", "checkpoints", "deep", "lost", "incomplete", "findings", "repaired"}
    assert document["checkpoints"] == 5
    assert len(document["lost"]) == 3  # type: ignore[arg-type]  # JSON
    (finding,) = document["findings"]  # type: ignore[misc]  # JSON
    assert set(finding) == FINDING_KEYS
    assert finding["severity"] == "error"
    assert finding["tensors"] == ["model.weight"]


def test_a_checkpoint_that_is_incomplete(call: Call, store: Path) -> None:
    """It is no damage among others, but nobody is told that it can be restored."""
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
    """Those of a run that is gone are spoken of; whether they were deleted, only who trains knows."""
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
    """One of two copies of a record is damaged: status 6, for nothing is lost yet."""
    flip(store / "asymcheck.store", 20)
    outcome = call("verify", store)
    assert outcome.status == 6
    assert "damaged-copy" in outcome.out


def test_one_step_only(call: Call, store: Path) -> None:
    """With --step, damage that the step does not need is not looked at."""
    flip(largest_pack(store), 4096 + 300)
    assert call("verify", store, "--step", 25).status == 0
    assert call("verify", store, "--step", 20).status == 1


def test_a_step_without_a_run_is_that_of_the_default_run(call: Call, store: Path) -> None:
    """What another run has of that step is neither looked at nor counted, and --run chooses it."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"model": {"weight": torch.full((10_000,), 7.0)}}, step=25, run="other")
    flip(max((store / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns), 4096 + 300)
    outcome = call("verify", store, "--step", 25)
    assert (outcome.status, outcome.out) == (0, "1 checkpoint checked: all can be restored\n")
    assert call("verify", store, "--step", 25, "--json").json["checkpoints"] == 1
    assert call("verify", store, "--step", 25, "--run", "other").status == 1


def test_a_document_says_whether_frames_were_read(call: Call, store: Path, tmp_path: Path) -> None:
    """Of a store they are; of a location only with --deep."""
    location = (tmp_path / "there").as_uri()
    assert call("push", store, location).status == 0
    assert call("verify", store, "--json").json["deep"] is True
    assert call("verify", location, "--json").json["deep"] is False
    assert call("verify", location, "--deep", "--json").json["deep"] is True
