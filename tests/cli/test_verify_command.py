"""``asymcheck verify`` reads every byte and says what is wrong, in words, in JSON and by its exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    assert outcome.out == "5 checkpoints checked: every one can be restored\n"
    assert outcome.err == ""


def test_damage_that_costs_checkpoints(call: Call, store: Path) -> None:
    """A flipped bit in a frame gives status 1 and names frame, tensor and the checkpoints that are lost."""
    flip(largest_pack(store), 4096 + 300)
    outcome = call("verify", store)
    assert outcome.status == 1
    assert "damaged-frame" in outcome.out
    assert "3 cannot be restored" in outcome.out
    document = call("verify", store, "--json").json
    assert set(document) == {"store", "checkpoints", "lost", "findings", "repaired"}
    assert document["checkpoints"] == 5
    assert len(document["lost"]) == 3  # type: ignore[arg-type]  # JSON
    (finding,) = document["findings"]  # type: ignore[misc]  # JSON
    assert set(finding) == FINDING_KEYS
    assert finding["severity"] == "error"
    assert finding["tensors"] == ["model.weight"]


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
