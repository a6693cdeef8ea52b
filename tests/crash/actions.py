"""Actions of child processes: saves, deletions and garbage collections, killed at a chosen point."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from asymcheck import events
from asymcheck.checkpointer import Checkpointer
from asymcheck.events import Event
from asymcheck.format import layout
from asymcheck.policies.retention import Retention
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier
from asymcheck.store import Store
from tests.crash import faults
from tests.crash.states import CONFIG, Journal, fingerprint, make_state

Action = Sequence[object]
"""An action name and its arguments: ``["save", 3]``, ``["save", 7, 3]`` (save the state of step 3 as step 7),
``["delete", 1]``, ``["gc"]``, ``["prune", 2]`` (keep the last two), ``["restore", 2]``, ``["repair"]``,
``["rebuild"]``.
"""


def open_store(path: Path, *, read_only: bool = False, files: Files | None = None, slots: int = CONFIG.slots) -> Store:
    """Open a store with the configuration of these tests, and with the given file operations."""
    return Store(NvmeTier(path, dataclasses.replace(CONFIG, slots=slots), read_only=read_only, files=files))


def save(
    store: Store, journal: Journal, step: int, run: str = "default", *, salt: int = 0, content: int | None = None
) -> None:
    """Save the state of a step, or of ``content``, and note it in the journal before and after."""
    state = make_state(step if content is None else content, salt=salt)
    journal.note("saving", run=run, step=step, fingerprint=fingerprint(state))
    checkpoint = store.save(state, step=step, run=run)
    journal.note("saved", run=run, step=step, save_id=checkpoint.save_id, written=checkpoint.written_bytes)


def delete(store: Store, journal: Journal, step: int, run: str = "default") -> None:
    """Delete a step, and note it in the journal before and after."""
    journal.note("deleting", run=run, step=step)
    store.delete(step, run=run)
    journal.note("deleted", run=run, step=step)


def prune(store: Store, journal: Journal, keep_last: int) -> None:
    """Keep the last checkpoints, and note the deleted steps in the journal before and after."""
    retention = Retention(keep_last=keep_last)
    for checkpoint in store.prune(retention, dry_run=True).removed:
        journal.note("deleting", run="default", step=checkpoint.step)
    for checkpoint in store.prune(retention).removed:
        journal.note("deleted", run="default", step=checkpoint.step)


def restore(store: Store, journal: Journal, step: int | None, run: str = "default") -> None:
    """Restore a step for further training, and note before and after that it is the newest step."""
    journal.note("restoring", run=run, step=step)
    restored = Checkpointer(store, make_state(0), run=run, every=1, keep=None).restore(step)
    assert restored is not None
    journal.note("restored", run=run, step=restored.step)


def take(store: Store, journal: Journal, actions: Iterable[Action]) -> None:
    """Run actions one after another."""
    for word, *rest in actions:
        argument, second = [*(int(str(one)) for one in rest), None, None][:2]
        if word == "save":
            save(store, journal, argument or 0, content=second)
        elif word == "delete":
            delete(store, journal, argument or 0)
        elif word == "restore":
            restore(store, journal, argument)
        elif word == "gc":
            store.gc()
            journal.note("collected")
        elif word == "prune":
            prune(store, journal, argument or 1)
        elif word == "repair":
            store.repair()
            journal.note("repaired")
        elif word == "rebuild":
            store.resources.rebuild_catalog()
            journal.note("rebuilt")
        else:
            raise AssertionError(f"no such action: {word}")


def perform(path: str, actions: Sequence[Action], kill: str = "", number: int = 0, slots: int = CONFIG.slots) -> None:
    """Run actions on the store in ``path/store``, and get killed at a point. Runs in a child.

    Args:
        path: folder with the store and its journal.
        actions: actions to run, in order.
        kill: kind of the point: the name of an event, "operation" (of a file) or "transaction" (a change inside one).
        number: occurrence of the point, from 1; with 0 the child survives, and journals all possible points.
        slots: frames in flight; with 1, the same frames are always stored in one pack.
    """
    seen: list[str] = []
    operations = faults.Counter(faults.CHANGES, number if kill == "operation" else 0, _kill)
    changes = faults.Counter(faults.CATALOG_CHANGES, number if kill == "transaction" else 0, _kill)

    def observer(event: Event) -> None:
        seen.append(event.name)
        if event.name == kill and seen.count(kill) == number:
            faults.kill_this_process()

    journal = Journal(Path(path) / "journal")
    files = faults.WatchedFiles(operations)
    with (
        events.observe(observer),
        faults.watched_catalog(changes),
        open_store(Path(path) / "store", files=files, slots=slots) as store,
    ):
        take(store, journal, actions)
    if not number:
        journal.note("counted", events=seen, operations=operations.seen, changes=changes.seen)


def _kill(_operation: str, _path: Path) -> None:
    faults.kill_this_process()


def lose_catalog(store: Path) -> None:
    """Delete the catalog, as a user may do while no process has the store open."""
    shutil.rmtree(store / layout.CATALOG)
