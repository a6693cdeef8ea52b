"""Other places of checkpoints: a remote location, and the rings in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from functools import partial
from pathlib import Path

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import Report
from asymcheck.config import DEFAULT_RUN, ring_folder_of
from asymcheck.errors import NotFoundError, StorageError
from asymcheck.gc.collect import CollectedRing
from asymcheck.storage.local_files import translated
from asymcheck.storage.shm import RingCapture, RingFile
from asymcheck.store import Store
from asymcheck.types import Checkpoint


@dataclasses.dataclass(frozen=True)
class Places:
    """The checkpoints of a store and of a remote location, by save id."""

    location: str
    here: dict[str, Checkpoint]
    there: dict[str, Checkpoint]
    runs: list[str]

    @property
    def only_there(self) -> list[Checkpoint]:
        """The checkpoints that the store does not have."""
        return [one for save_id, one in self.there.items() if save_id not in self.here]

    @property
    def all(self) -> list[Checkpoint]:
        """All checkpoints, in the order of the store."""
        return sorted([*self.here.values(), *self.only_there], key=lambda one: (one.run, one.ref))

    def of(self, one: Checkpoint) -> str:
        """Say where a checkpoint is complete."""
        found = [
            name
            for name, known in (("here", self.here), ("there", self.there))
            if one.save_id in known and known[one.save_id].complete
        ]
        return " and ".join(found) or "nowhere whole"


def places_of(store: Store, location: str, run: str | None) -> Places:
    """List the checkpoints of both.

    Raises:
        StoreNotFoundError: nothing was pushed to the location.
        RemoteUnreachableError: the location does not answer.
        InvalidInputError: it is no location.
    """
    here = {one.save_id: one for one in store.checkpoints(run)}
    with Store.open(location, read_only=True) as opened:
        there = {one.save_id: one for one in opened.checkpoints(run)}
        return Places(str(opened.location), here, there, opened.runs())


def note_captures_in_memory(store: Store, run: str | None, ring_folder: Path) -> None:
    """Print a line for each run of which a killed process left something newer than every checkpoint."""
    # A folder that this user may not look into is no reason to show nothing of the store.
    with contextlib.suppress(StorageError):
        for capture in store.captures_in_memory(run, ring_folder=ring_folder):
            command = _restore_command(store.location, capture.run, ring_folder)
            told = f"step {capture.step} of run {capture.run} is in memory only"
            output.note(f"{told}: restore() takes it up, or {command}")


def _restore_command(store: Path | str, run: str | None, ring_folder: Path) -> str:
    words = ["asymcheck", "restore", str(store), "--tier", "dram"]
    words += [] if run is None or run == DEFAULT_RUN else ["--run", run]
    words += [] if ring_folder == ring_folder_of(None) else ["--ring-folder", str(ring_folder)]
    return shlex.join(words)


def report_rings(store: Store, run: str | None, ring_folder: Path) -> Report:
    """Report the rings of a store; the status says whether a ring of a killed process is damaged."""
    with translated("look at", ring_folder):
        if not ring_folder.exists():
            raise NotFoundError(f"{ring_folder} does not exist; --ring-folder names where the training has its rings")
    rings = store.rings(run, ring_folder=ring_folder)
    document = {"store": store.location, "ring_folder": ring_folder, "rings": rings}
    of_run = "" if run is None else f" of run {run}"
    none = f"no rings{of_run} of store {store.location} in {ring_folder}"
    status = exit_status.WARNINGS if any(map(_is_damaged, rings)) else exit_status.OK
    return Report(document, partial(_show_rings, rings, none), status)


def _show_rings(rings: list[RingFile], none: str) -> None:
    if not rings:
        click.echo(none)
    for ring in rings:
        _show(ring)


def _is_damaged(ring: RingFile) -> bool:
    return not ring.is_alive and bool(ring.problem or any(capture.problem for capture in ring.captures))


def _show(ring: RingFile) -> None:
    click.echo(f"ring {ring.path}  {output.size(ring.nbytes)}")
    if ring.problem:
        click.echo(f"    {output.shown(ring.problem)}")
        return
    state = "alive" if ring.is_alive else "dead"
    made = "" if ring.created_ns is None else f"  made {output.moment(ring.created_ns)} UTC"
    click.echo(f"    run {ring.run}  rank {ring.rank}  process {ring.pid}, {state}{made}")
    if not ring.captures:
        click.echo("    nothing is complete in it")
        return
    rows = [
        {
            "step": "?" if capture.step is None else capture.step,
            "generation": "?" if capture.generation is None else capture.generation,
            "save": output.save(capture.save_id),
            "state": output.size(capture.state_bytes),
            "is": "durable" if capture.is_durable else "in memory only",
            "": _soundness(capture),
        }
        for capture in ring.captures
    ]
    output.print_table(rows, numbers=("step", "generation", "state"))


def _soundness(capture: RingCapture) -> str:
    if capture.is_intact is None:
        return "not checked: its process writes"
    return "intact" if capture.is_intact else f"DAMAGED: {capture.problem}"


def collected_ring(collected: CollectedRing, store: str, *, dry_run: bool) -> str:
    """Return what became of a ring of a killed process, and how to take up what it holds."""
    ring = collected.ring
    name = f"ring {ring.path}, {output.size(ring.nbytes)}"
    whose = "" if ring.run is None else f", run {ring.run}"
    if collected.is_store_gone:
        whose += f" of store {ring.store}, which is not there any more"
    holds = ring.problem or "nothing in it is needed"
    if collected.unsaved:
        steps = ", ".join("?" if one.step is None else str(one.step) for one in ring.captures if not one.is_durable)
        lost = output.count(collected.unsaved, "capture")
        holds = f"{lost} in it not durable (step {steps})"
    if collected.is_removed:
        return f"{'would remove' if dry_run else 'removed'} {name}{whose}: {holds}"
    take_up = f"restore() takes them up, or {_restore_command(store, ring.run, ring.path.parent)}"
    if collected.is_store_gone or not collected.unsaved:
        take_up = "nothing can take up what it holds"
    return f"left {name}{whose}: {holds}; {take_up}; --discard-rings removes it"
