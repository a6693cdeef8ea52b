"""Checkpoints outside the local store: at a remote location, and captures in ring files."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from functools import partial
from pathlib import Path

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import Report
from asymcheck.errors import NotFoundError, StorageError
from asymcheck.gc.collect import CollectedRing
from asymcheck.storage.local_files import translated
from asymcheck.storage.shm.orphaned_rings import (
    RingCapture,
    RingFile,
    newer_than_stored,
    restore_command,
    ring_folder_words,
    survey_rings,
)
from asymcheck.store import Store
from asymcheck.types import Checkpoint


@dataclasses.dataclass(frozen=True)
class Locations:
    """The checkpoints of a store and of a remote location, by save id."""

    remote_location: str
    local: dict[str, Checkpoint]
    remote: dict[str, Checkpoint]
    remote_runs: list[str]

    @property
    def remote_only(self) -> list[Checkpoint]:
        """The checkpoints that the store does not have."""
        return [checkpoint for save_id, checkpoint in self.remote.items() if save_id not in self.local]

    @property
    def all(self) -> list[Checkpoint]:
        """All checkpoints, in the order of the store."""
        return sorted(
            [*self.local.values(), *self.remote_only], key=lambda checkpoint: (checkpoint.run, checkpoint.ref)
        )

    def describe(self, checkpoint: Checkpoint) -> str:
        """Return the places where a checkpoint is complete."""
        places = [
            name
            for name, checkpoints in (("local", self.local), ("remote", self.remote))
            if checkpoint.save_id in checkpoints and checkpoints[checkpoint.save_id].complete
        ]
        return ", ".join(places) or "complete nowhere"


def list_locations(store: Store, location: str, run: str | None) -> Locations:
    """List the checkpoints of a store and of a remote location.

    Raises:
        StoreNotFoundError: nothing was pushed to the location.
        RemoteUnreachableError: the location does not answer.
        InvalidInputError: the location is not a URI of a remote location.
    """
    local = {checkpoint.save_id: checkpoint for checkpoint in store.checkpoints(run)}
    with Store.open(location, read_only=True) as opened:
        remote = {checkpoint.save_id: checkpoint for checkpoint in opened.checkpoints(run)}
        return Locations(str(opened.location), local, remote, opened.runs())


def note_unflushed_captures(store: Store, run: str | None, ring_folder: Path) -> None:
    """Print a message for each run whose newest state is only in the ring of a killed process."""
    # An unreadable ring folder must not hide the checkpoints of the store.
    with contextlib.suppress(StorageError):
        rings = survey_rings(store.resources.tier, ring_folder, run, check=False)
        for capture in newer_than_stored(store.resources.tier, rings):
            output.note(
                f"step {capture.step} of run {capture.run} is in memory only. "
                + _ring_advice(store.location, capture.run, ring_folder)
            )


def _ring_advice(store: str, run: str | None, ring_folder: Path) -> str:
    command = restore_command(store, run, ring_folder)
    return f"Checkpointer.restore() commits captures from memory. To write one to a file: {command}"


def report_rings(store: Store, run: str | None, ring_folder: Path) -> Report:
    """Report the rings of a store; the status says whether a ring of a killed process is damaged."""
    with translated("access", ring_folder):
        if not ring_folder.exists():
            raise NotFoundError(
                f"ring folder {ring_folder} does not exist; pass the ring folder of the training as --ring-folder"
            )
    rings = survey_rings(store.resources.tier, ring_folder, run, check=True)
    document = {"store": store.location, "ring_folder": ring_folder, "rings": rings}
    of_run = "" if run is None else f" of run {run}"
    no_rings = f"no rings{of_run} of store {store.location} in {ring_folder}"
    status = exit_status.WARNINGS if any(map(_is_damaged, rings)) else exit_status.OK
    return Report(document, partial(_show_rings, rings, no_rings), status)


def _show_rings(rings: list[RingFile], no_rings: str) -> None:
    if not rings:
        click.echo(no_rings)
    for ring in rings:
        _show_ring(ring)


def _is_damaged(ring: RingFile) -> bool:
    return not ring.is_alive and bool(ring.problem or any(capture.problem for capture in ring.captures))


def _show_ring(ring: RingFile) -> None:
    click.echo(f"ring {ring.path}  {output.size(ring.nbytes)}")
    if ring.problem:
        click.echo(f"    {output.printable(ring.problem)}")
        return
    process = "running" if ring.is_alive else "dead"
    created = "" if ring.created_ns is None else f"  created {output.timestamp(ring.created_ns)} UTC"
    click.echo(f"    run {ring.run}  rank {ring.rank}  process {ring.pid}, {process}{created}")
    if not ring.captures:
        click.echo("    no complete captures")
        return
    rows = [
        {
            "step": "?" if capture.step is None else capture.step,
            "generation": "?" if capture.generation is None else capture.generation,
            "save": output.short_save_id(capture.save_id),
            "size": output.size(capture.state_bytes),
            "stored": "durable" if capture.is_durable else "in memory only",
            "check": _check_result(capture),
        }
        for capture in ring.captures
    ]
    output.print_table(rows, numbers=("step", "generation", "size"))


def _check_result(capture: RingCapture) -> str:
    if capture.is_intact is None:
        return "not checked: process is running"
    return "intact" if capture.is_intact else f"DAMAGED: {capture.problem}"


def describe_collected_ring(collected: CollectedRing, store: str, *, dry_run: bool) -> str:
    """Return what gc did with a ring of a killed process, and how to recover its captures."""
    ring = collected.ring
    name = f"ring {ring.path}, {output.size(ring.nbytes)}"
    origin = "" if ring.run is None else f", run {ring.run}"
    if collected.is_store_missing:
        origin += f" of store {ring.store}, which is not at that path"
    content = ring.problem or "all complete captures are durable"
    if collected.unsaved:
        steps = [
            "?" if capture.step is None else str(capture.step) for capture in ring.captures if not capture.is_durable
        ]
        content = f"{output.count(collected.unsaved, 'capture')} not durable (step {', '.join(steps)})"
    if collected.is_removed:
        return f"{'would remove' if dry_run else 'removed'} {name}{origin}: {content}"
    advice = "The captures cannot be recovered"
    if collected.is_store_missing:
        advice = "If the store was moved, is unmounted or belongs to another container, its next training commits them"
    elif collected.unsaved:
        advice = _ring_advice(store, ring.run, ring.path.parent)
    words = ["asymcheck", "gc", store, "--discard-rings", *ring_folder_words(ring.path.parent)]
    return f"kept {name}{origin}: {content}. {advice}. To remove all kept rings: {shlex.join(words)}"
