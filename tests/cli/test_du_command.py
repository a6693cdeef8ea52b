"""Test that ``asymcheck du`` shows the disk usage of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import asymcheck
from tests.cli.conftest import Outcome
from tests.damage.flips import flip

Call = Callable[..., Outcome]


def test_checkpoints_roles_and_totals(call: Call, store: Path) -> None:
    """Test a row for each checkpoint, role, and part of the store."""
    outcome = call("du", store)
    assert (outcome.status, outcome.err) == (0, "")
    rows = [line.split() for line in outcome.out.splitlines() if line.strip()]
    assert [row[1] for row in rows if row[0] in ("default", "other") and len(row) > 8] == ["10", "20", "30", "25", "1"]
    assert [row[1] for row in rows if row[-1] == "abandoned"] == ["30"]
    names = {row[0] for row in rows}
    assert {"weights", "first_moment", "packs", "live", "freeable", "locked", "overhead", "recyclable"} <= names
    assert {"manifests", "catalog"} <= names
    assert not {"unreadable", "unfinished"} & {row[0] for row in rows}


def test_one_run(call: Call, store: Path) -> None:
    """Test its checkpoints, and status 3 for a missing run."""
    document = call("du", store, "--run", "other", "--json").json
    assert [item["step"] for item in document["accounting"]["checkpoints"]] == [1]  # type: ignore[index]  # JSON
    assert call("du", store, "--run", "nobody").status == 3


def test_garbage_after_a_deletion(call: Call, store: Path) -> None:
    """Test that freeable garbage is shown."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.delete(25)
    outcome = call("du", store)
    assert "1 pack that gc would free" in outcome.out


def test_a_lost_pack_costs_checkpoints(call: Call, store: Path) -> None:
    """Test status 1 with the number of lost checkpoints."""
    max((store / "packs").iterdir(), key=lambda path: path.stat().st_size).unlink()
    outcome = call("du", store)
    assert outcome.status == 1
    assert "\n3 checkpoints need partitions" in outcome.out
    assert "damaged" in outcome.out
    with asymcheck.Store.open(store, create=True) as opened:
        for step in (10, 20):
            opened.delete(step)
    assert "\n1 checkpoint needs partitions" in call("du", store).out


def test_a_damaged_index_costs_none(call: Call, store: Path) -> None:
    """Test status 6, because a scan finds the frames."""
    path = max((store / "packs").iterdir(), key=lambda path: path.stat().st_size)
    flip(path, 8 * 20)
    outcome = call("du", store)
    assert outcome.status == 6
    assert "1 pack with a damaged header or index; gc keeps them" in outcome.out


def test_a_damaged_manifest(call: Call, store: Path) -> None:
    """Test status 1, because the packs of the manifest are unknown."""
    (manifest,) = next((store / "manifests" / "default").iterdir()).iterdir()
    manifest.write_bytes(b"x")
    outcome = call("du", store)
    assert outcome.status == 1
    assert "1 manifest cannot be read: gc frees nothing" in outcome.out
    assert "0 packs that gc would free" in outcome.out


def test_an_empty_store(call: Call, store_path: Path) -> None:
    """Test the totals without checkpoints."""
    asymcheck.Store.open(store_path, create=True).close()
    outcome = call("du", store_path)
    assert outcome.status == 0
    assert outcome.out.startswith("no checkpoints yet\n")


def test_a_lost_head_record(call: Call, store: Path) -> None:
    """Test that no checkpoint counts as abandoned while the line is unknown, as in ``inspect`` and ``diff``."""
    (store / "heads" / "default" / "00000002.head").unlink()
    outcome = call("du", store)
    assert outcome.out.count("unknown: a head record is lost") == 4
    assert "abandoned" not in outcome.out
    difference = call("diff", store, 10, 20, "--json").json["difference"]
    assert [difference[side]["on_line"] for side in "ab"] == [None, None]  # type: ignore[index]  # JSON
