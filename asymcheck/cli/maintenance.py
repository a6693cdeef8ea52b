"""Commands that verify, repair and clean up a store: verify, gc, delete and rebuild-catalog."""

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
    ring_folder_option,
    store_argument,
)
from asymcheck.config import DEFAULT_RUN, StoreConfig
from asymcheck.errors import InvalidInputError
from asymcheck.fsck.rebuild_catalog import Rebuilt
from asymcheck.fsck.repair import Repaired
from asymcheck.fsck.verify import UNCHECKED, Finding, Severity
from asymcheck.gc.collect import Collected, collect_rings
from asymcheck.policies.retention import Best, Retention, Verdict
from asymcheck.storage.remote import is_uri
from asymcheck.store import Store
from asymcheck.types import Checkpoint

_INCOMPLETE = "incomplete-checkpoint"


@command("Check every byte of a store, and repair damage with --repair.")
@store_argument
@click.option("--run", help="Check only the manifests of this run [default: all runs; with --step: 'default'].")
@click.option("--step", type=int, help="Check only the checkpoints of this step.")
@click.option("--repair", is_flag=True, help="Repair the whole store first. No checkpoint is deleted.")
@click.option("--remote", help="With --repair: fetch lost data from this remote location.")
@click.option(
    "--deep", is_flag=True, help="For a remote location: also read every frame. Local frames are always read."
)
def verify(store: str, run: str | None, step: int | None, repair: bool, remote: str | None, deep: bool) -> Report:
    """Check every byte of STORE, or the checkpoints of one step. Nothing is changed without --repair.

    The check reads every frame and compares it with its digest. It compares manifests and records with their checksums,
    and looks up every partition that a checkpoint needs. For a remote location, it reads manifests, records, and the
    header, index and length of every pack. With --deep, it also reads every frame.

    --repair rewrites damaged records from their second copy, and copies intact frames of damaged packs into new packs.
    It fetches lost data from --remote, corrects the catalog, and removes files of killed processes. Then the store is
    checked, and the exit status reports the remaining damage.

    An incomplete checkpoint is not damage, because its save may still be running. With --step, the status is 1 if the
    step has no complete checkpoint.
    """
    if repair and (run is not None or step is not None):
        raise click.UsageError("--repair works on the whole store: leave out --run and --step")
    if repair and is_uri(store):
        raise click.UsageError(
            "--repair works on a local store only. At a remote location, delete the damaged checkpoint "
            "('asymcheck delete') and push it again from a store that has it"
        )
    if remote is not None and not repair:
        raise click.UsageError("--remote requires --repair; to check a remote location, pass it as STORE")
    # As in other commands, a step without a run is a step of the default run.
    run = DEFAULT_RUN if run is None and step is not None else run
    is_deep = deep or not is_uri(store)
    repaired = None
    if repair:
        with open_existing(store, remote=remote) as opened, output.progress("repair") as progress:
            repaired = opened.repair(progress)
    with Store.open(store, read_only=True) as opened:
        with output.progress("verify") as progress:
            findings = opened.verify(step, run=run, progress=progress, deep=is_deep)
        checkpoints = [item for item in opened.checkpoints(run) if step in (None, item.step)]
    document = {
        "store": store,
        "checkpoints": len(checkpoints),
        "deep": is_deep,
        "lost": sorted(_lost(findings)),
        "incomplete": sorted(_named(findings, _INCOMPLETE)),
        "findings": findings,
        "repaired": repaired,
    }
    is_lost = step is not None and not any(checkpoint.complete for checkpoint in checkpoints)
    status = exit_status.DAMAGED if is_lost else _status(findings)
    return Report(document, partial(_show_verified, repaired, findings, checkpoints, is_deep=is_deep), status)


def _show_verified(
    repaired: Repaired | None, findings: list[Finding], checkpoints: list[Checkpoint], *, is_deep: bool
) -> None:
    if repaired is not None:
        _show_repaired(repaired)
    _show_findings(findings, checkpoints)
    if not is_deep:
        click.echo("frames were not read; pass --deep to read and check them")


def _lost(findings: list[Finding]) -> set[str]:
    return {name for finding in findings if finding.severity is Severity.ERROR for name in finding.checkpoints}


def _named(findings: list[Finding], kind: str) -> set[str]:
    return {name for finding in findings if finding.kind == kind for name in finding.checkpoints}


def _show_repaired(repaired: Repaired) -> None:
    for done in repaired.done:
        click.echo(output.printable(f"found:     {done.where}: {done.found}"))
        click.echo(output.printable(f"repaired:  {done.where}: {done.done}"))
    for left in repaired.left:
        click.echo(output.printable(f"remaining: {left.where}: {left.message}: {left.remedy}"))
    if not repaired.done:
        click.echo("nothing to repair" if not repaired.left else "nothing could be repaired")


def _show_findings(findings: list[Finding], checkpoints: list[Checkpoint]) -> None:
    for item in findings:
        output.print_entry(f"{item.severity.value} {item.kind}: {item.where}: {item.message}", _consequences(item))
    if not checkpoints:
        click.echo("no checkpoints to check")
        return
    lost, incomplete, unchecked = _lost(findings), _named(findings, _INCOMPLETE), _named(findings, UNCHECKED)
    verdict = f"{len(lost)} cannot be restored"
    if len(incomplete) == len(checkpoints):
        verdict = "none can be restored"
    elif not lost:
        others = "all" + (" other" if unchecked else "") + (" complete checkpoints" if incomplete else "")
        verdict = f"{others} can be restored"
        # An error that costs no checkpoint is a lost head record: then the newest checkpoint is not known.
        if any(item.severity is Severity.ERROR for item in findings):
            verdict += " by step, but the newest one is unknown"
        if any(checkpoint.store_ranks for checkpoint in checkpoints):
            verdict = "all shards in this store are intact"
    rest = f"; {len(incomplete)} incomplete" if incomplete else ""
    rest += f"; {len(unchecked)} not checked" if unchecked else ""
    click.echo(f"{output.count(len(checkpoints), 'checkpoint')} checked: {verdict}{rest}")


def _consequences(finding: Finding) -> list[str]:
    label = {_INCOMPLETE: "incomplete", UNCHECKED: "not checked"}.get(finding.kind, "lost")
    checkpoints = [f"{label}: {name}" for name in finding.checkpoints]
    return [*checkpoints, f"tensors: {', '.join(finding.tensors)}"] if finding.tensors else checkpoints


def _status(findings: list[Finding]) -> int:
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return exit_status.DAMAGED
    return exit_status.WARNINGS if Severity.WARNING in severities else exit_status.OK


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
    callback=parse_best,
    help="Keep the N checkpoints with the lowest (:max: highest) METRIC.",
)
@click.option(
    "--keep-for", metavar="AGE", callback=parse_age, help="Keep checkpoints younger than AGE, for example 7d."
)
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
@click.argument("step", type=click.IntRange(min=0))
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run of the checkpoints.")
@click.option("--generation", type=int, help="Delete only in this generation [default: all generations].")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
def delete(store: str, step: int, run: str, generation: int | None, yes: bool) -> Report:
    """Delete the checkpoints of STEP from STORE permanently, after confirmation.

    Their disk space stays in use until 'asymcheck gc' frees it. Without confirmation, nothing is deleted and the
    status is 2.
    """
    with Store.open(store, read_only=True) as opened:
        chosen = opened.delete(step, run=run, generation=generation, dry_run=True)
    if not yes and not _is_confirmed(chosen):
        output.note("nothing was deleted")
        raise click.exceptions.Exit(exit_status.USAGE)
    with Store.open(store) as opened:
        deleted = opened.delete(step, run=run, generation=generation)
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
