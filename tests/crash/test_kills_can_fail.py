"""Test that the checks after a kill detect a store with a wrong order of operations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asymcheck.commit import transaction
from asymcheck.commit.pack_builder import PackBuilder
from asymcheck.format import layout
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.gc import collect
from asymcheck.storage import reachability
from asymcheck.storage.nvme import CheckpointFiles
from asymcheck.storage.nvme.manifests import ManifestFiles
from asymcheck.store import Store
from asymcheck.types import CheckpointRef
from tests.crash import faults
from tests.crash.actions import Action, perform
from tests.crash.states import Journal
from tests.crash.survival import check_survived
from tests.zygote import Zygote


def packs_under_their_final_name() -> None:
    """Give a pack its final name while it is being written."""
    layout.pack_temporary_name = layout.pack_name


def manifests_under_their_final_name() -> None:
    """Write a manifest in place."""

    def publish(self: ManifestFiles, run: str, ref: CheckpointRef, rank: int, world: int, data: bytes) -> ManifestName:
        directory = self.directory(run, ref)
        directory.mkdir(parents=True)
        name = ManifestName(rank, world, digest(data))
        descriptor = os.open(directory / str(name), os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, data[:100])
        faults.kill_this_process()

    ManifestFiles.publish = publish  # type: ignore[method-assign]  # this process is to go wrong


def manifests_before_packs() -> None:
    """Commit a manifest before its packs are complete."""

    def seal(_self: PackBuilder) -> None:
        return

    PackBuilder.seal = seal  # type: ignore[method-assign]  # as above
    transaction._check_stored = lambda _names, _flusher: None


def packs_before_manifests_in_deletion() -> None:
    """Free the packs before the manifest in a deletion."""
    remove = ManifestFiles.remove

    def remove_late(self: ManifestFiles, run: str, ref: CheckpointRef) -> None:
        root = self.directory(run, ref).parents[2]
        for pack in sorted((root / "packs").glob("*.pack"))[:1]:
            pack.unlink()
        faults.kill_this_process()
        remove(self, run, ref)

    ManifestFiles.remove = remove_late  # type: ignore[method-assign]  # as above


def collection_forgets_a_manifest() -> None:
    """Ignore the newest checkpoint in a collection."""
    checkpoints = ManifestFiles.checkpoints

    def overlook(self: ManifestFiles, run: str) -> list[CheckpointFiles]:
        return checkpoints(self, run)[:-1]

    ManifestFiles.checkpoints = overlook  # type: ignore[method-assign]  # as above
    for module in (collect, reachability):
        module.is_manifest_deleted = lambda _tier, _key: True  # type: ignore[attr-defined]  # as above


def saves_are_reported_too_early() -> None:
    """Return from a save before its commit."""
    store_save = Store.save

    def early(self: Store, state: object, *, step: int, run: str = "default", **_more: object) -> object:
        if step == 2:
            return store_save(self, state, step=step, run="elsewhere")
        return store_save(self, state, step=step, run=run)

    Store.save = early  # type: ignore[method-assign, assignment]  # as above


def go_wrong(path: str, how: str, actions: Sequence[Action], kill: str) -> None:
    """Run actions in a process with one wrong operation, and get killed. Runs in a child."""
    globals()[how]()
    perform(path, actions, kill, 1 if kill else 0)
    faults.kill_this_process()


Case = tuple[Callable[[], None], list[Action], str, str]
CASES: list[Case] = [
    (packs_under_their_final_name, [["save", 2]], "frame.written", "damaged-pack"),
    (manifests_under_their_final_name, [["save", 2]], "", "is there in part"),
    (manifests_before_packs, [["save", 2]], "catalog.committed", "no checkpoint|in no readable pack"),
    (packs_before_manifests_in_deletion, [["delete", 1]], "", "no readable pack|damage"),
    (collection_forgets_a_manifest, [["save", 4], ["gc"]], "", "no readable pack|damage"),
    (saves_are_reported_too_early, [["save", 2]], "catalog.committed", "was never saved"),
]


@pytest.mark.slow(quick=["packs_before_manifests_in_deletion"])
@pytest.mark.parametrize(("how", "actions", "kill", "message"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_wrong_order_is_noticed(
    zygote: Zygote,
    template: Callable[[Sequence[Action]], Path],
    tmp_path: Path,
    how: Callable[[], None],
    actions: list[Action],
    kill: str,
    message: str,
) -> None:
    """Test that the check after a kill fails, with a message that names the broken promise."""
    shutil.copytree(template([["save", 1]]), tmp_path / "copy")
    child = zygote.start(go_wrong, path=str(tmp_path / "copy"), how=how.__name__, actions=actions, kill=kill)
    child.wait_killed()
    with pytest.raises(Exception, match=message):
        check_survived(tmp_path / "copy" / "store", Journal(tmp_path / "copy" / "journal").promises())
