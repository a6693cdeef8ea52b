"""Test ``asymcheck verify --repair`` and ``asymcheck rebuild-catalog``: output and exit status."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.cli import exit_status
from asymcheck.errors import InconsistentCheckpointError
from tests.cli.conftest import Outcome
from tests.cli.test_verify_command import largest_pack
from tests.damage.flips import flip

Call = Callable[..., Outcome]


def test_all_is_repaired(call: Call, store: Path) -> None:
    """Test findings, repairs and status 0; a second repair finds nothing."""
    flip(store / "asymcheck.store", 8 * 20)
    flip(largest_pack(store), 8 * 40)
    assert call("verify", store).status == exit_status.WARNINGS
    outcome = call("verify", store, "--repair")
    assert outcome.status == exit_status.OK
    lines = outcome.out.splitlines()
    assert any(line.startswith("found:     asymcheck.store: ") for line in lines)
    assert any(line.startswith("repaired:  asymcheck.store: ") for line in lines)
    assert any(line.startswith("repaired:  packs/") for line in lines)
    assert lines[-1] == "5 checkpoints checked: all can be restored"
    again = call("verify", store, "--repair")
    assert again.status == exit_status.OK
    assert again.out.splitlines()[0] == "nothing to repair"


def test_unrepaired_damage(call: Call, store: Path) -> None:
    """Test a lost partition with its checkpoints and remedies, status 1, and the JSON output."""
    flip(largest_pack(store), 8 * (4096 + 300))
    outcome = call("verify", store, "--repair")
    assert outcome.status == exit_status.DAMAGED
    assert outcome.out.count("\nremaining: ") == outcome.out.count("\n    remedy: ") == 3
    assert "3 cannot be restored\nif checkpoints were pushed, add --remote LOCATION" in outcome.out
    document = call("verify", store, "--repair", "--json").json
    assert set(document) == {"store", "checkpoints", "deep", "lost", "incomplete", "findings", "repaired", "shard"}
    repaired = document["repaired"]
    assert isinstance(repaired, dict)
    assert repaired["done"] == []
    assert {one["kind"] for one in repaired["left"]} == {"lost-partitions"}


def test_the_advised_deletion_spares_repeated_steps(call: Call, store: Path) -> None:
    """Test that the advice after a damage deletes only the damaged checkpoint, not a later one of the same step."""
    (manifest,) = store.glob(f"manifests/default/00000001-{30:012d}-*/*.manifest")
    with asymcheck.Store.open(store) as opened:
        opened.save({"model": {"weight": torch.ones(3)}}, step=30)  # The training has repeated the step.
        flip(manifest, 8 * 200)
        with pytest.raises(InconsistentCheckpointError, match="delete that checkpoint first") as refused:
            opened.gc()
    (line,) = [line for line in call("verify", store, "--repair").out.splitlines() if line.startswith("    remedy: ")]
    command = "asymcheck delete STORE 30 --run default --generation 1"
    assert command in line
    assert str(refused.value).endswith(command)
    words = command.replace("STORE", str(store)).split()[1:]
    assert call(*words, "--yes").status == exit_status.OK
    with asymcheck.Store.open(store) as opened:
        assert [(one.step, one.generation) for one in opened.checkpoints() if one.step == 30] == [(30, 2)]
        opened.gc()


def test_a_repair_is_of_the_whole_store(call: Call, store: Path) -> None:
    """Test that --step and --run are refused."""
    for words in (("--step", 20), ("--run", "default")):
        outcome = call("verify", store, "--repair", *words)
        assert outcome.status == exit_status.USAGE
        assert "whole store" in outcome.err


def test_a_repair_makes_no_store(call: Call, tmp_path: Path) -> None:
    """Test status 3 for a missing store, and that nothing is created."""
    for words in (("verify", "--repair"), ("rebuild-catalog",)):
        assert call(*words, tmp_path / "nowhere").status == exit_status.NOT_FOUND
    assert list(tmp_path.iterdir()) == []


def test_rebuild(call: Call, store: Path) -> None:
    """Test that the content of the new catalog is printed, with status 0."""
    shutil.rmtree(store / "catalog")
    outcome = call("rebuild-catalog", store)
    assert outcome.status == exit_status.OK
    packs = len(list((store / "packs").iterdir()))
    assert outcome.out.startswith(f"catalog rebuilt: {packs} packs, ")
    assert " and 5 manifests; " in outcome.out


def test_rebuild_leaves_out(call: Call, store: Path) -> None:
    """Test that a damaged pack is named with the reason, status 6, and the JSON output."""
    pack = largest_pack(store)
    flip(pack, 8 * 40)
    outcome = call("rebuild-catalog", store)
    assert outcome.status == exit_status.WARNINGS
    assert outcome.out.startswith("skipped: ")
    assert pack.name in outcome.out
    rebuilt = call("rebuild-catalog", store, "--json").json["rebuilt"]
    assert isinstance(rebuilt, dict)
    assert len(rebuilt["left_out"]) == 1
    assert set(rebuilt) == {"packs", "partitions", "manifests", "left_out", "changed", "kept_pins"}
