"""``asymcheck gc``: take back the room of what no checkpoint needs."""

from __future__ import annotations

from pathlib import Path

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option, keep_options, ring_folder_option
from asymcheck.cli.rings import collected_ring
from asymcheck.config import DEFAULT_RUN
from asymcheck.pipeline.collect import Collected
from asymcheck.policies.retention import Retention, Verdict
from asymcheck.store import Store
from asymcheck.tiers.remote import is_uri


@click.command(epilog=exits.HELP, short_help="Free the packs that no checkpoint needs.")
@click.argument("store", type=click.Path())
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
@keep_options
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Whose checkpoints the --keep rules are about.")
@click.option("--discard-rings", is_flag=True, help="Also remove rings with captures that are not durable.")
@ring_folder_option
@json_option
@click.pass_context
def gc(
    ctx: click.Context,
    store: str,
    dry_run: bool,
    retention: Retention | None,
    run: str,
    discard_rings: bool,
    ring_folder: Path,
    as_json: bool,
) -> None:
    """Free the packs of STORE that no checkpoint needs, and remove what killed processes left behind.

    Safe beside processes that save and load. A pack is freed when nothing in it is needed any more, or when most of it
    is garbage and the rest was copied; some freed packs are kept for later saves to overwrite, which is faster than new
    files. 'asymcheck du' says what holds a pack.

    With --keep rules, checkpoints of one run that none of them keeps are deleted first, for good. The newest
    consistent one always stays, and so does one that somebody reads. Abandoned ones stay, unless --drop-abandoned.

    Rings in memory that killed processes left are removed when all that is complete in them is durable. Others are
    named and stay, unless --discard-rings gives up what they hold; so are rings of stores that are no longer where
    they were.
    """
    if retention is not None and is_uri(store):
        raise click.UsageError(
            "--keep rules are for a store on a local drive: in a location, 'asymcheck delete' deletes what is to go, "
            "or the training that pushes there, with asymcheck.Push(keep=...)"
        )
    if retention is None and ctx.get_parameter_source("run") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--run goes with --keep rules: without any, what all runs need stays")
    with Store.open(store, read_only=True):
        pass  # There is a store: to open it for writing would make one.
    with Store.open(store) as opened:
        pruned = None if retention is None else opened.prune(retention, run=run, dry_run=dry_run)
        done = opened.gc(dry_run=dry_run) if pruned is None else pruned.collected
        rings = [] if is_uri(store) else opened.collect_rings(ring_folder, discard=discard_rings, dry_run=dry_run)
    if as_json:
        verdicts = () if pruned is None else pruned.verdicts
        fields = {"store": store, "dry_run": dry_run, "verdicts": verdicts, "collected": done, "rings": rings}
        output.print_json(fields)
        return
    for verdict in () if pruned is None else pruned.verdicts:
        click.echo(_verdict(verdict, dry_run=dry_run))
    click.echo(_sentence(done, dry_run=dry_run))
    for ring in rings:
        click.echo(collected_ring(ring, store, dry_run=dry_run))


def _verdict(verdict: Verdict, *, dry_run: bool) -> str:
    item = verdict.checkpoint
    name = f"{item.run} step {item.step} (generation {item.generation}, save {output.save(item.save_id)})"
    if verdict.stays:
        return f"{'would keep' if dry_run else 'kept'} {name}: {', '.join(verdict.reasons)}"
    return f"{'would delete' if dry_run else 'deleted'} {name}, {output.size(item.state_bytes)}"


def _sentence(done: Collected, *, dry_run: bool) -> str:
    freed = f"{output.count(done.freed_packs, 'pack')}, {output.size(done.freed_bytes)}"
    if done.repacked_packs:
        copied = f"{output.size(done.copied_bytes)} that {'is' if dry_run else 'was'} needed of them"
        freed += f" ({output.count(done.repacked_packs, 'pack')} after a copy of {copied})"
    if dry_run:
        return f"would free {freed}; {output.count(done.kept_packs, 'pack')} needed"
    kept = f", {done.pooled_packs} of them kept to be overwritten" if done.pooled_packs else ""
    left = "1 pack in use was left" if done.busy_packs == 1 else f"{done.busy_packs} packs in use were left"
    busy = f"; {left}" if done.busy_packs else ""
    swept = f"; {output.count(done.removed_temporaries, 'leftover file')} removed" if done.removed_temporaries else ""
    return f"freed {freed}{kept}; {output.count(done.kept_packs, 'pack')} needed{busy}{swept}"
