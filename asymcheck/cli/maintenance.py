"""Commands that check, mend and tidy a store: verify, gc, delete and rebuild."""

from __future__ import annotations

import shlex
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import (
    Report,
    command,
    open_existing,
    parse_age,
    parse_best,
    ring_folder_option,
    store_argument,
)
from asymcheck.cli.places import collected_ring
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import InvalidInputError
from asymcheck.fsck.rebuild_catalog import Rebuilt
from asymcheck.fsck.repair import Repaired
from asymcheck.fsck.verify import UNCHECKED, Finding, Severity
from asymcheck.gc.collect import Collected
from asymcheck.policies.retention import Best, Retention, Verdict
from asymcheck.storage.remote import is_uri
from asymcheck.store import Store
from asymcheck.types import Checkpoint

_INCOMPLETE = "incomplete-checkpoint"


@command("Check every byte; with --repair, mend what can be mended.")
@store_argument
@click.option(
    "--run", default=None, help="Check the manifests of this run only [default: all; with --step: 'default']."
)
@click.option("--step", type=int, default=None, help="Check only what this step's checkpoint needs.")
@click.option("--repair", is_flag=True, help="Repair the whole store first; no checkpoint is deleted.")
@click.option("--remote", default=None, help="With --repair: fetch what is lost from this location.")
@click.option("--deep", is_flag=True, help="Read every byte of a remote location, too; of a local store always.")
def verify(store: str, run: str | None, step: int | None, repair: bool, remote: str | None, deep: bool) -> Report:
    """Check every byte of STORE, or what one step needs, and change nothing unless asked to repair.

    Every frame is read and compared with its digest, every manifest and record with its checksum, and every partition
    that a checkpoint needs must be there. A check of a remote location reads manifests, records, and the header, index
    and length of every pack; with --deep, it reads every frame, too.

    With --repair, damaged records are written again from their other copy, what is intact in damaged packs is copied
    into new packs, what is lost is fetched from --remote, the catalog is corrected, and files of killed processes are
    removed. Then the store is checked: the status says what is left.

    An incomplete checkpoint is no damage: its save may be under way. Asked for by --step, with no complete one of that
    step beside it, it has status 1 nevertheless, for nothing can be restored.
    """
    if repair and (run is not None or step is not None):
        raise click.UsageError("--repair works on the whole store: leave out --run and --step")
    if repair and is_uri(store):
        raise click.UsageError(
            "--repair mends a store on a local drive: in a location, delete what is damaged ('asymcheck delete'), and "
            "push it again from a store that has it"
        )
    if remote is not None and not repair:
        raise click.UsageError("--remote goes with --repair; to check a remote location, give it as STORE")
    # A step means a run, as everywhere else: what is counted and judged is what was looked at.
    run = DEFAULT_RUN if run is None and step is not None else run
    is_deep = deep or not is_uri(store)
    repaired = None
    if repair:
        with open_existing(store, remote) as opened, output.progress("repair") as progress:
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
    nothing = step is not None and not any(one.complete for one in checkpoints)
    status = exit_status.DAMAGED if nothing else _status(findings)
    return Report(document, partial(_show_verified, repaired, findings, checkpoints, is_deep=is_deep), status)


def _show_verified(
    repaired: Repaired | None, findings: list[Finding], checkpoints: list[Checkpoint], *, is_deep: bool
) -> None:
    if repaired is not None:
        _show_repaired(repaired)
    _show_findings(findings, checkpoints)
    if not is_deep:
        click.echo("frames were not read: --deep does")


def _lost(findings: list[Finding]) -> set[str]:
    return {name for finding in findings if finding.severity is Severity.ERROR for name in finding.checkpoints}


def _named(findings: list[Finding], kind: str) -> set[str]:
    return {name for finding in findings if finding.kind == kind for name in finding.checkpoints}


def _show_repaired(repaired: Repaired) -> None:
    for done in repaired.done:
        click.echo(output.shown(f"found: {done.where}: {done.found}"))
        click.echo(output.shown(f"done:  {done.where}: {done.done}"))
    for left in repaired.left:
        click.echo(output.shown(f"left:  {left.where}: {left.message}: {left.remedy}"))
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
        # Damage that costs no checkpoint by itself: a lost head record, after which nobody knows which one is newest.
        unknown = any(item.severity is Severity.ERROR for item in findings)
        whole = ("complete " if incomplete else "") + ("other one" if unchecked else "one")
        verdict = f"each {whole} can be restored, if it is named" if unknown else f"every {whole} can be restored"
        if any(one.store_ranks for one in checkpoints):
            verdict = "what the ranks of this store saved of them is whole"
    rest = f"; {len(incomplete)} incomplete" if incomplete else ""
    rest += f"; {len(unchecked)} not checked" if unchecked else ""
    click.echo(f"{output.count(len(checkpoints), 'checkpoint')} checked: {verdict}{rest}")


def _consequences(finding: Finding) -> list[str]:
    how = {_INCOMPLETE: "incomplete", UNCHECKED: "not checked"}.get(finding.kind, "lost")
    lost = [f"{how}: {name}" for name in finding.checkpoints]
    return [*lost, f"tensors: {', '.join(finding.tensors)}"] if finding.tensors else lost


def _status(findings: list[Finding]) -> int:
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return exit_status.DAMAGED
    return exit_status.WARNINGS if Severity.WARNING in severities else exit_status.OK


@command("Free the packs that no checkpoint needs.")
@store_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
@click.option("--keep-last", type=click.IntRange(min=1), help="Keep the newest so many checkpoints of a run.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep those whose step is a multiple of this.")
@click.option("--keep-best", metavar="METRIC:N[:max]", callback=parse_best, help="Keep the N with the least METRIC.")
@click.option("--keep-for", metavar="SPAN", callback=parse_age, help="Keep those saved within, for instance, 7d.")
@click.option("--drop-abandoned", is_flag=True, help="Keep what is not on the line by --keep-for only.")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Whose checkpoints the --keep rules are about.")
@click.option("--discard-rings", is_flag=True, help="Also remove rings with captures that are not durable.")
@ring_folder_option
def gc(
    store: str,
    dry_run: bool,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Best | None,
    keep_for: timedelta | None,
    drop_abandoned: bool,
    run: str,
    discard_rings: bool,
    ring_folder: Path,
) -> Report:
    """Free the packs of STORE that no checkpoint needs, and remove what killed processes left behind.

    Safe beside processes that save and load. A pack is freed when nothing in it is needed any more. A pack that is
    mostly garbage is freed after the rest was copied. Some freed packs are kept for later saves to overwrite, which is
    faster than new files. 'asymcheck du' says what holds a pack.

    With --keep rules, checkpoints of one run that none of them keeps are deleted first, for good. The newest
    consistent one always stays, and so does one that somebody reads. Abandoned ones stay, unless --drop-abandoned.

    Rings in memory that killed processes left are removed when all that is complete in them is durable. Others are
    named and stay, unless --discard-rings gives up what they hold; so are rings of stores that are no longer where
    they were.
    """
    retention = None
    if (keep_last, keep_every, keep_best, keep_for) != (None,) * 4:
        retention = Retention(keep_last, keep_every, keep_best, keep_for, keep_abandoned=not drop_abandoned)
    elif drop_abandoned:
        raise click.UsageError("--drop-abandoned goes with a rule that says what stays, such as --keep-last")
    if retention is not None and is_uri(store):
        raise click.UsageError(
            "--keep rules are for a store on a local drive: in a location, 'asymcheck delete' deletes what is to go, "
            "or the training that pushes there, with asymcheck.Push(keep=...)"
        )
    source = click.get_current_context().get_parameter_source
    if retention is None and source("run") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--run goes with --keep rules: without any, what all runs need stays")
    with open_existing(store) as opened:
        pruned = None if retention is None else opened.prune(retention, run=run, dry_run=dry_run)
        done = opened.gc(dry_run=dry_run) if pruned is None else pruned.collected
        rings = [] if is_uri(store) else opened.collect_rings(ring_folder, discard=discard_rings, dry_run=dry_run)
    verdicts = () if pruned is None else pruned.verdicts
    document = {"store": store, "dry_run": dry_run, "verdicts": verdicts, "collected": done, "rings": rings}
    lines = [
        *(_verdict(verdict, dry_run=dry_run) for verdict in verdicts),
        _sentence(done, dry_run=dry_run),
        *(collected_ring(ring, store, dry_run=dry_run) for ring in rings),
    ]
    return Report(document, partial(click.echo, "\n".join(lines)))


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


@command("Delete the checkpoints of a step.")
@store_argument
@click.argument("step", type=click.IntRange(min=0))
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Whose checkpoints.")
@click.option("--generation", type=int, default=None, help="Only the one of this generation [default: of all].")
@click.option("--yes", is_flag=True, help="Do not ask; must be given where there is nobody to ask.")
def delete(store: str, step: int, run: str, generation: int | None, yes: bool) -> Report:
    """Delete the checkpoints of STEP from STORE, for good, after asking.

    They are gone at once; their bytes stay until 'asymcheck gc' frees what no other checkpoint needs.
    The status is 2 when the answer is no, and then nothing was deleted.
    """
    with Store.open(store, read_only=True) as opened:
        chosen = opened.delete(step, run=run, generation=generation, dry_run=True)
    if not yes and not _is_confirmed(chosen):
        output.note("nothing was deleted")
        raise click.exceptions.Exit(exit_status.USAGE)
    with Store.open(store) as opened:
        deleted = opened.delete(step, run=run, generation=generation)
    lines = [f"deleted {_name(item)}" for item in deleted]
    lines.append(f"asymcheck gc {shlex.quote(store)} frees the bytes that no other checkpoint needs")
    return Report({"store": store, "deleted": deleted}, partial(click.echo, "\n".join(lines)))


def _is_confirmed(chosen: list[Checkpoint]) -> bool:
    """Ask on the terminal."""
    if not sys.stdin.isatty():
        raise InvalidInputError("nobody can be asked here; give --yes to delete " + "; ".join(map(_name, chosen)))
    for item in chosen:
        click.echo(_name(item), err=True)
    question = "Delete it for good?" if len(chosen) == 1 else f"Delete these {len(chosen)} checkpoints for good?"
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        # The end of the input, or an interrupt: no answer is no.
        click.echo(err=True)
        return False


def _name(item: Checkpoint) -> str:
    saved = f"save {output.save(item.save_id)}, {output.moment(item.created_ns)} UTC"
    return f"{item.run} step {item.step} (generation {item.generation}, {saved}), {output.size(item.state_bytes)}"


@command("Make the catalog again from packs and manifests.")
@store_argument
def rebuild(store: str) -> Report:
    """Make the catalog of STORE again from its packs and manifests alone, which are the truth.

    Nothing else is changed, and no frame is read. Safe beside processes that use the store. The status is 6 when a
    pack was left out.
    """
    with open_existing(store) as opened, output.progress("rebuild"):
        rebuilt = opened.rebuild_catalog()
    status = exit_status.WARNINGS if rebuilt.left_out else exit_status.OK
    return Report({"store": store, "rebuilt": rebuilt}, partial(_show_rebuilt, rebuilt), status)


def _show_rebuilt(rebuilt: Rebuilt) -> None:
    for reason in rebuilt.left_out:
        click.echo(f"left out: {reason}")
    packs, partitions = output.count(rebuilt.packs, "pack"), output.count(rebuilt.partitions, "partition")
    entered = f"{packs}, {partitions} and {output.count(rebuilt.manifests, 'manifest')}"
    changed = "1 entry was changed" if rebuilt.changed == 1 else f"{rebuilt.changed} entries were changed"
    pins = f"; kept {output.count(rebuilt.kept_pins, 'pin')} of living processes" if rebuilt.kept_pins else ""
    click.echo(f"the catalog knows {entered}; {changed}{pins}")
