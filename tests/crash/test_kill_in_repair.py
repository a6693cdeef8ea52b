"""Test SIGKILL at every event of a repair, and before every disk operation: no readable data is lost."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.crash.actions import Action, lose_catalog, open_store, perform
from tests.crash.states import Journal, make_state
from tests.crash.survival import leftovers
from tests.damage.flips import flip
from tests.fsck.damages import check_idle, flip_header, flip_index, flip_payload, packs, readable
from tests.zygote import Zygote

Copy = Callable[[Sequence[Action]], Path]

SAVES: list[Action] = [["save", 0], ["save", 1], ["save", 2]]
READABLE = {0, 1, 2}


def _damage(store: Path) -> None:
    """Damage a record, headers and indexes, and a frame that costs a checkpoint, and add leftovers of a killed save."""
    first, second, *others = sorted(packs(store), key=lambda one: one.stat().st_mtime_ns)
    assert others
    flip_index(first)
    flip_header(second)
    # This frame belongs only to the last step.
    flip_payload(others[-1], 0)
    flip(store / "asymcheck.store", 80)
    (store / "packs" / f"{'0' * 32}.tmp").write_bytes(b"left")


@pytest.fixture(scope="module")
def damaged(zygote: Zygote, template: Copy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[int]]:
    """Return a damaged store, and the steps that can still be restored."""
    folder = tmp_path_factory.mktemp("damaged") / "copy"
    shutil.copytree(template(SAVES), folder)
    _damage(folder / "store")
    before = readable(folder / "store")
    assert before
    assert before < READABLE
    return folder, before


@pytest.fixture(scope="module")
def counted(zygote: Zygote, damaged: tuple[Path, set[int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return the number of points of a kill: for each event, and for "operation" and "transaction"."""
    folder = tmp_path_factory.mktemp("counted") / "copy"
    shutil.copytree(damaged[0], folder)
    zygote.start(perform, path=str(folder), actions=[["repair"]]).finish()
    line = Journal(folder / "journal").lines("counted")[-1]
    names = Counter(str(name) for name in line["events"])  # type: ignore[attr-defined]  # a list of names
    return {
        **names,
        "operation": len(line["operations"]),  # type: ignore[arg-type]  # as above
        "transaction": len(line["changes"]),  # type: ignore[arg-type]  # as above
    }


EVENTS = [
    "repair.record_rewritten",
    "catalog.reconciled",
    "pack.created",
    "frame.written",
    "pack.index_written",
    "pack.synced",
    "pack.renamed",
    "pack.sealed",
    "repair.entered",
    "repair.removed",
    "repair.forgotten",
]


def test_these_are_all_events(counted: dict[str, int]) -> None:
    """Test that the list includes every event of a repair, so that each is tested with a kill."""
    assert counted.keys() - {"operation", "transaction"} == set(EVENTS)


@pytest.mark.slow(quick=["repair.entered", "pack.sealed"])
@pytest.mark.parametrize("kill", [*EVENTS, "operation", "transaction"])
def test_killed_in_a_repair(
    kill: str, zygote: Zygote, damaged: tuple[Path, set[int]], counted: dict[str, int], tmp_path: Path
) -> None:
    """Test that readable checkpoints stay readable, also after the next repair, which leaves no work."""
    folder, before = damaged
    assert counted[kill] > 0
    # Test a sample, because neighbouring points are alike.
    for number in range(1, counted[kill] + 1, 6 if kill in ("transaction", "operation", "frame.written") else 1):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        zygote.start(perform, path=str(copy), actions=[["repair"]], kill=kill, number=number).wait_killed()
        assert readable(copy / "store") == before, f"{kill} {number}: lost as it lies"
        with open_store(copy / "store") as store:
            store.repair()
            check_idle(store)
            assert {finding.kind for finding in store.verify()} == {"missing-partition"}
            store.gc()
            assert leftovers(store) == []
        assert readable(copy / "store") == before, f"{kill} {number}: lost by the next repair"
        shutil.rmtree(copy)


@pytest.mark.slow(quick=["catalog.reconciled"])
@pytest.mark.parametrize("kill", ["catalog.reconciled", "catalog.rebuilt", "transaction"])
def test_killed_in_a_rebuild(kill: str, zygote: Zygote, template: Copy, tmp_path: Path) -> None:
    """Test that the next start has a complete catalog."""
    copy = tmp_path / "copy"
    shutil.copytree(template(SAVES), copy)
    lose_catalog(copy / "store")
    zygote.start(perform, path=str(copy), actions=[["rebuild"]], kill=kill, number=1).wait_killed()
    with open_store(copy / "store") as store:
        rebuilt = store.resources.rebuild_catalog()
        assert rebuilt.manifests == len(READABLE)
        assert store.save(make_state(2), step=9).written_bytes == 0
    assert readable(copy / "store", range(9)) == READABLE
