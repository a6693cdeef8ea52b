"""``asymcheck verify``: read every byte and say what is wrong; with ``--repair``, make whole what can be made whole."""

from __future__ import annotations

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option
from asymcheck.config import DEFAULT_RUN
from asymcheck.recovery.repair import Repaired
from asymcheck.store import Store
from asymcheck.tiers.remote import is_uri
from asymcheck.types import Checkpoint
from asymcheck.verify import UNCHECKED, Finding, Severity

_INCOMPLETE = "incomplete-checkpoint"


@click.command(epilog=exits.HELP, short_help="Check every byte; with --repair, mend what can be mended.")
@click.argument("store", type=click.Path())
@click.option(
    "--run", default=None, help="Check the manifests of this run only [default: all; with --step: 'default']."
)
@click.option("--step", type=int, default=None, help="Check only what this step's checkpoint needs.")
@click.option("--repair", is_flag=True, help="Repair the whole store first; no checkpoint is deleted.")
@click.option("--remote", default=None, help="With --repair: fetch what is lost from this location.")
@click.option("--deep", is_flag=True, help="Read every byte of a remote location, too; of a local store always.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    store: str,
    run: str | None,
    step: int | None,
    repair: bool,
    remote: str | None,
    deep: bool,
    as_json: bool,
) -> None:
    """Check every byte of STORE, or what one step needs, and change nothing unless asked to repair.

    Every frame is read and compared with its digest, every manifest and record with its checksum, and every partition
    that a checkpoint needs must be there. Of a remote location manifests, records, and the header, index and length of
    every pack are read, and with --deep every frame.

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
    repaired = _repair(store, remote) if repair else None
    with Store.open(store, read_only=True) as opened:
        with output.progress("verify") as progress:
            findings = opened.verify(step, run=run, progress=progress, deep=is_deep)
        checkpoints = [item for item in opened.checkpoints(run) if step in (None, item.step)]
    if as_json:
        found = {"store": store, "checkpoints": len(checkpoints), "deep": is_deep, "lost": sorted(_lost(findings))}
        incomplete = sorted(_named(findings, _INCOMPLETE))
        output.print_json({**found, "incomplete": incomplete, "findings": findings, "repaired": repaired})
    else:
        _report(findings, checkpoints, repaired, is_deep=is_deep)
    nothing = step is not None and not any(one.complete for one in checkpoints)
    ctx.exit(exits.DAMAGED if nothing else _status(findings))


def _repair(store: str, remote: str | None) -> Repaired:
    with Store.open(store, read_only=True):
        pass  # There is a store: to open it for writing would make one.
    with Store.open(store, remote=remote) as opened, output.progress("repair") as progress:
        return opened.repair(progress)


def _lost(findings: list[Finding]) -> set[str]:
    return {name for finding in findings if finding.severity is Severity.ERROR for name in finding.checkpoints}


def _named(findings: list[Finding], kind: str) -> set[str]:
    return {name for finding in findings if finding.kind == kind for name in finding.checkpoints}


def _report(
    findings: list[Finding], checkpoints: list[Checkpoint], repaired: Repaired | None, *, is_deep: bool
) -> None:
    if repaired is not None:
        _show_repaired(repaired)
    _show(findings, checkpoints)
    if not is_deep:
        click.echo("frames were not read: --deep does")


def _show_repaired(repaired: Repaired) -> None:
    for done in repaired.done:
        click.echo(output.shown(f"found: {done.where}: {done.found}"))
        click.echo(output.shown(f"done:  {done.where}: {done.done}"))
    for left in repaired.left:
        click.echo(output.shown(f"left:  {left.where}: {left.message}: {left.remedy}"))
    if not repaired.done:
        click.echo("nothing to repair" if not repaired.left else "nothing could be repaired")


def _show(findings: list[Finding], checkpoints: list[Checkpoint]) -> None:
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
        return exits.DAMAGED
    return exits.WARNINGS if Severity.WARNING in severities else exits.OK
