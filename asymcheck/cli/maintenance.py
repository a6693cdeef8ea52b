"""Commands that clean up a store: gc, delete and rebuild-catalog."""

from __future__ import annotations

import shlex
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.locations import describe_collected_ring
from asymcheck.cli.options import (
    Report,
    command,
    open_existing,
    parse_age,
    parse_best,
    parse_checkpoint,
    ring_folder_option,
    store_argument,
)
from asymcheck.config import DEFAULT_RUN, StoreConfig
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError
from asymcheck.fsck.rebuild_catalog import Rebuilt
from asymcheck.gc.collect import Collected, collect_rings
from asymcheck.policies.retention import Best, Retention, Verdict
from asymcheck.storage.remote import is_uri
from asymcheck.store import Store
from asymcheck.types import Checkpoint


@command("Free disk space: garbage packs and, with --keep rules, old checkpoints.")
@store_argument
@click.option("--dry-run", is_flag=True, help="Print what would be deleted and freed; change nothing.")
@click.option("--empty-pool", is_flag=True, help="Also delete the recyclable packs.")
@click.option("--keep-last", metavar="N", type=click.IntRange(min=1), help="Keep the newest N checkpoints of the run.")
@click.option(
    "--keep-every", metavar="K", type=click.IntRange(min=1), help="Keep checkpoints whose step is a multiple of K."
)
@click.option(
    "--keep-best",
    metavar="METRIC:N[:max]",
    type=parse_best,
    help="Keep the N checkpoints with the lowest (:max: highest) METRIC.",
)
@click.option("--keep-for", metavar="AGE", type=parse_age, help="Keep checkpoints younger than AGE, for example 7d.")
@click.option("--drop-abandoned", is_flag=True, help="Delete abandoned checkpoints unless --keep-for keeps them.")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run to which the --keep rules apply.")
@click.option(
    "--discard-rings", is_flag=True, help="Also remove rings of killed processes with captures that are not durable."
)
@ring_folder_option
def gc(
    store: str,
    dry_run: bool,
    empty_pool: bool,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Best | None,
    keep_for: timedelta | None,
    drop_abandoned: bool,
    run: str,
    discard_rings: bool,
    ring_folder: Path,
) -> Report:
    """Free the packs of STORE that no checkpoint needs, and remove leftover files of killed processes.

    Other processes may save and load at the same time. A pack is freed when it holds only garbage. If a pack is mostly
    garbage, its live frames are first copied into another pack. Freed packs of about one checkpoint stay recyclable:
    later saves overwrite them, which is faster than writing new files. --empty-pool deletes them.

    With --keep rules, checkpoints of one run that no rule keeps are first deleted permanently. The newest consistent
    checkpoint and checkpoints that a process is reading always stay. Abandoned checkpoints stay without
    --drop-abandoned.

    A ring of a killed process is removed if all its complete captures are durable. Other rings are listed, and stay
    without --discard-rings.
    """
    retention = None
    if (keep_last, keep_every, keep_best, keep_for) != (None,) * 4:
        retention = Retention(keep_last, keep_every, keep_best, keep_for, keep_abandoned=not drop_abandoned)
    elif drop_abandoned:
        raise click.UsageError("--drop-abandoned requires a --keep rule, such as --keep-last")
    if retention is not None and is_uri(store):
        raise click.UsageError(
            "--keep rules work on a local store only. At a remote location, use 'asymcheck delete', or "
            "asymcheck.Push(keep=...) in the training that pushes to it"
        )
    source = click.get_current_context().get_parameter_source
    if retention is None and source("run") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--run requires a --keep rule, such as --keep-last; without rules, gc works on all runs")
    names_rings = discard_rings or source("ring_folder") is click.core.ParameterSource.COMMANDLINE
    if is_uri(store) and (empty_pool or names_rings):
        raise click.UsageError(
            "--empty-pool, --discard-rings and --ring-folder work on a local store only: a location has no pool and no "
            "rings"
        )
    config = StoreConfig(pool_bytes=0) if empty_pool else None
    with open_existing(store, config) as opened:
        pruned = None if retention is None else opened.prune(retention, run=run, dry_run=dry_run)
        done = opened.gc(dry_run=dry_run) if pruned is None else pruned.collected
        rings = []
        if not is_uri(store):
            rings = collect_rings(opened.resources.writable(), ring_folder, discard=discard_rings, dry_run=dry_run)
    verdicts = () if pruned is None else pruned.verdicts
    document = {"store": store, "dry_run": dry_run, "verdicts": verdicts, "collected": done, "rings": rings}
    lines = [
        *(_verdict(verdict, dry_run=dry_run) for verdict in verdicts),
        _summary(done, dry_run=dry_run),
        *(describe_collected_ring(ring, store, dry_run=dry_run) for ring in rings),
    ]
    return Report(document, partial(click.echo, "\n".join(lines)))


def _verdict(verdict: Verdict, *, dry_run: bool) -> str:
    item = verdict.checkpoint
    name = f"run {item.run}, {item.ref}"
    if verdict.stays:
        return f"{'would keep' if dry_run else 'kept'} {name}: {', '.join(verdict.reasons)}"
    return f"{'would delete' if dry_run else 'deleted'} {name}, {output.size(item.state_bytes)}"


def _summary(done: Collected, *, dry_run: bool) -> str:
    freed = f"{output.count(done.freed_packs, 'pack')}, {output.size(done.freed_bytes)}"
    if done.repacked_packs:
        repacked = output.count(done.repacked_packs, "pack")
        freed += f" ({repacked} after copying {output.size(done.copied_bytes)} of live data)"
    remaining = f"{output.count(done.kept_packs, 'pack')} still needed"
    would = "would " if dry_run else ""
    recyclable = ""
    if done.pool_bytes:
        recyclable = (
            f"; {output.size(done.pool_bytes)} {would}stay recyclable for later saves (--empty-pool deletes them)"
        )
    if done.freed_packs or done.returned_bytes:
        freed += f"; {output.size(done.returned_bytes)} {'would return' if dry_run else 'returned'} to the file system"
    if dry_run:
        return f"would free {freed}{recyclable}; {remaining}"
    busy = f"; skipped {output.count(done.busy_packs, 'pack')} in use" if done.busy_packs else ""
    removed = f"; removed {output.count(done.removed_temporaries, 'leftover file')}" if done.removed_temporaries else ""
    return f"freed {freed}{recyclable}; {remaining}{busy}{removed}"


@command("Delete the checkpoints of a step.")
@store_argument
@click.argument("step", type=parse_checkpoint)
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run of the checkpoints.")
@click.option("--generation", type=int, help="Delete only in this generation [default: all generations].")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
def delete(store: str, step: int | str, run: str, generation: int | None, yes: bool) -> Report:
    """Delete the checkpoints of STEP from STORE permanently, after confirmation.

    Their disk space stays in use until 'asymcheck gc' frees it. Without confirmation, nothing is deleted and the
    status is 2.

    If STEP is save:DIGITS, only the checkpoint whose save id begins with DIGITS is deleted (see 'asymcheck log').
    """
    with Store.open(store, read_only=True) as opened:
        chosen = opened.delete(step, run=run, generation=generation, dry_run=True)
    if not yes and not _is_confirmed(chosen):
        output.note("nothing was deleted")
        raise click.exceptions.Exit(exit_status.USAGE)
    with Store.open(store) as opened:
        deleted: list[Checkpoint] = []
        # Only the confirmed ones: a training may have saved the step again meanwhile.
        for one in chosen:
            try:
                deleted += opened.delete(f"save:{one.save_id}", run=run)
            except CheckpointNotFoundError as error:
                # Its retention may have deleted this save meanwhile.
                output.note(str(error))
    lines = [f"deleted {_name(item)}" for item in deleted]
    lines.append(f"to free the disk space, run: asymcheck gc {shlex.quote(store)}")
    return Report({"store": store, "deleted": deleted}, partial(click.echo, "\n".join(lines)))


def _is_confirmed(chosen: list[Checkpoint]) -> bool:
    if not sys.stdin.isatty():
        names = "; ".join(map(_name, chosen))
        raise InvalidInputError(f"cannot ask for confirmation without a terminal; pass --yes to delete {names}")
    for item in chosen:
        click.echo(_name(item), err=True)
    subject = "this checkpoint" if len(chosen) == 1 else f"these {len(chosen)} checkpoints"
    try:
        return click.confirm(f"Delete {subject} permanently?", err=True)
    except click.Abort:
        # End of input or interrupt counts as no.
        click.echo(err=True)
        return False


def _name(item: Checkpoint) -> str:
    saved = f"save {output.short_save_id(item.save_id)}, {output.timestamp(item.created_ns)} UTC"
    return f"run {item.run}, step {item.step} (generation {item.generation}, {saved}), {output.size(item.state_bytes)}"


@command("Rebuild the catalog from packs and manifests.")
@store_argument
def rebuild_catalog(store: str) -> Report:
    """Rebuild the catalog of STORE from its packs and manifests.

    Nothing else is changed, and no frame is read. Other processes may use the store at the same time. The status is 6
    if a damaged pack was skipped.
    """
    with open_existing(store) as opened, output.progress("rebuild-catalog"):
        rebuilt = opened.resources.rebuild_catalog()
    status = exit_status.WARNINGS if rebuilt.left_out else exit_status.OK
    return Report({"store": store, "rebuilt": rebuilt}, partial(_show_rebuilt, rebuilt), status)


def _show_rebuilt(rebuilt: Rebuilt) -> None:
    for reason in rebuilt.left_out:
        click.echo(f"skipped: {reason}")
    packs, partitions = output.count(rebuilt.packs, "pack"), output.count(rebuilt.partitions, "partition")
    content = f"{packs}, {partitions} and {output.count(rebuilt.manifests, 'manifest')}"
    changed = "1 entry changed" if rebuilt.changed == 1 else f"{rebuilt.changed} entries changed"
    pins = f"; kept {output.count(rebuilt.kept_pins, 'pin')} of running processes" if rebuilt.kept_pins else ""
    click.echo(f"catalog rebuilt: {content}; {changed}{pins}")
