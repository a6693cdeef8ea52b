"""Test SIGKILL at every event of a save, a collection, a deletion and a pruning, and before every disk operation."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from asymcheck.events import COMMIT_ORDER
from tests.crash.actions import Action, lose_catalog, open_store, perform
from tests.crash.states import Journal, fingerprint, make_state
from tests.crash.survival import check_survived
from tests.visiting import Visited, visiting
from tests.zygote import Zygote

Copy = Callable[[Sequence[Action]], Path]

BEFORE: dict[str, list[Action]] = {
    "the first save": [],
    "a later save": [["save", 1]],
    "a save that reuses all": [["save", 1]],
    "a save into recycled packs": [["save", 0], ["save", 1], ["save", 2], ["delete", 0], ["delete", 1], ["gc"]],
    "a collection": [["save", 0], ["save", 2], ["save", 4], ["delete", 0], ["delete", 2]],
    "a deletion": [["save", 0], ["save", 1], ["save", 2]],
    "a pruning": [["save", 0], ["save", 2], ["save", 4], ["save", 5]],
    "a restore": [["save", 0], ["save", 1], ["save", 2]],
    "a rebuild of the catalog": [["save", 0], ["save", 1]],
}
"""Actions on the store before the killed process starts."""

CUT_OFF: dict[str, list[Action]] = {
    "the first save": [["save", 0]],
    "a later save": [["save", 2]],
    "a save that reuses all": [["save", 1]],
    "a save into recycled packs": [["save", 3]],
    "a collection": [["gc"]],
    "a deletion": [["delete", 1]],
    "a pruning": [["prune", 2]],
    "a restore": [["restore", 1]],
    "a rebuild of the catalog": [["save", 2]],
}
"""Actions of the killed process."""

PACK_EVENTS = [name for name in COMMIT_ORDER if name.startswith(("pack.", "frame."))]
GC_EVENTS = ["gc.marked_freed", "gc.retired", "gc.forgotten", "gc.repacked", *PACK_EVENTS]
"""Actions before a collection that frees packs, and copies live frames of others."""

SAVES = ["the first save", "a later save", "a save into recycled packs"]
POINTS = [
    *((scene, event) for scene in SAVES for event in COMMIT_ORDER),
    *(("a save that reuses all", event) for event in COMMIT_ORDER if event not in PACK_EVENTS),
    *(("a collection", event) for event in GC_EVENTS),
    *(("a pruning", event) for event in GC_EVENTS),
    ("a restore", "head.published"),
    ("a rebuild of the catalog", "catalog.rebuilt"),
]


@pytest.fixture(scope="session")
def points(zygote: Zygote, template: Copy, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, int]]:
    """Return the number of points of a kill, by scene: for each event, and for "operation" and "transaction"."""
    counted: dict[str, dict[str, int]] = {}

    def count(scene: str) -> dict[str, int]:
        if scene not in counted:
            folder = tmp_path_factory.mktemp("counted") / "copy"
            _prepare(scene, template, folder)
            zygote.start(perform, path=str(folder), actions=CUT_OFF[scene]).finish()
            line = Journal(folder / "journal").lines("counted")[-1]
            names = Counter(str(name) for name in line["events"])  # type: ignore[attr-defined]  # a list of names
            counted[scene] = {
                **names,
                "operation": len(line["operations"]),  # type: ignore[arg-type]  # as above
                "transaction": len(line["changes"]),  # type: ignore[arg-type]  # as above
            }
        return counted[scene]

    return count


def _prepare(scene: str, template: Copy, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template(BEFORE[scene]), folder)
    if scene == "a rebuild of the catalog":
        lose_catalog(folder / "store")


@contextlib.contextmanager
def _with_point(where: str) -> Iterator[None]:
    """Add the point of the kill to a failed assertion."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


def _kill_and_check(zygote: Zygote, template: Copy, folder: Path, scene: str, kill: str, number: int) -> None:
    with _with_point(f"{scene}, killed at {kill} number {number}"):
        _prepare(scene, template, folder)
        zygote.start(perform, path=str(folder), actions=CUT_OFF[scene], kill=kill, number=number).wait_killed()
        promised = Journal(folder / "journal").promises()
        if scene == "a save that reuses all":
            # The process saves the same state under the same step again. The earlier save stays durable.
            assert ("default", 1) in promised.durable
        check_survived(folder / "store", promised)


@pytest.mark.slow(
    quick=[
        "a collection-gc.retired-some",
        "the first save-frame.written-some",
        "a collection-gc.marked_freed-some",
        "the first save-pack.created-some",
        "a collection-gc.forgotten-some",
        "the first save-pack.synced-some",
        "the first save-pack.sealed-some",
        "the first save-pack.index_written-some",
        "the first save-pack.renamed-some",
        "the first save-catalog.committed-some",
        "the first save-manifest.synced-some",
        "a collection-gc.repacked-some",
        "the first save-manifest.committed-some",
        "the first save-manifest.renamed-some",
        "the first save-catalog.pinned-some",
        "the first save-manifest.written-some",
        "the first save-manifest.directory_created-some",
    ],
    # A save into recycled packs passes the same steps.
    long=["a later save-*"],
)
@visiting(2)
@pytest.mark.parametrize(("scene", "event"), POINTS)
def test_killed_at_an_event(
    scene: str,
    event: str,
    visited: Visited[int],
    zygote: Zygote,
    template: Copy,
    points: Callable[[str], dict[str, int]],
    tmp_path: Path,
) -> None:
    """Test a kill right after each step of the commit order and of a collection."""
    occurrences = points(scene)[event]
    assert occurrences > 0
    for number in visited(range(1, occurrences + 1)):
        _kill_and_check(zygote, template, tmp_path / "copy", scene, event, number)


def test_killed_right_after_a_restore(zygote: Zygote, template: Copy, tmp_path: Path) -> None:
    """Test that the restored step is the newest, and that later steps are abandoned and only read on request."""
    _prepare("a restore", template, tmp_path / "copy")
    # The second event belongs to a generation that is begun twice, after the first restore.
    actions = [["restore", 0], ["restore", 0]]
    zygote.start(perform, path=str(tmp_path / "copy"), actions=actions, kill="head.published", number=2).wait_killed()
    journal = Journal(tmp_path / "copy" / "journal")
    assert journal.promises().newest["default"] == {0}
    with open_store(tmp_path / "copy" / "store", read_only=True) as store:
        assert [(one.step, one.on_line) for one in store.checkpoints()] == [(0, True), (1, False), (2, False)]
        assert store.restore().checkpoint.step == 0
        restored = store.restore(2)
        assert (restored.checkpoint.step, restored.checkpoint.on_line) == (2, False)
        assert fingerprint(restored.state) == fingerprint(make_state(2))
    check_survived(tmp_path / "copy" / "store", journal.promises())


@pytest.mark.slow(quick=["a deletion-transaction-some"])
@visiting(4)
@pytest.mark.parametrize("kill", ["operation", "transaction"])
@pytest.mark.parametrize("scene", BEFORE)
def test_killed_before_an_operation(
    scene: str,
    kill: str,
    visited: Visited[int],
    zygote: Zygote,
    template: Copy,
    points: Callable[[str], dict[str, int]],
    tmp_path: Path,
) -> None:
    """Test a kill before each change of a file or a directory, and inside each transaction of the catalog."""
    count = points(scene)[kill]
    assert count > 0 or (scene, kill) == ("a restore", "transaction")
    for number in visited(range(1, count + 1)):
        _kill_and_check(zygote, template, tmp_path / "copy", scene, kill, number)
