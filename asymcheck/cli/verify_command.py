"""``asymcheck verify``: read every byte and say what is wrong."""

from __future__ import annotations

import click

from asymcheck.cli import exits, output
from asymcheck.store import Store
from asymcheck.verify import Finding, Severity


@click.command(epilog=exits.HELP)
@click.argument("store", type=click.Path())
@click.option(
    "--run", default=None, help="Check the manifests of this run only [default: all; with --step: 'default']."
)
@click.option("--step", type=int, default=None, help="Check only what this step's checkpoint needs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.pass_context
def verify(ctx: click.Context, store: str, run: str | None, step: int | None, as_json: bool) -> None:  # noqa: FBT001 - click's way
    """Check every byte of STORE, or what one step needs, and change nothing.

    Every frame is read and compared with its digest, every manifest and record with its checksum, and every partition
    that a checkpoint needs must be there.
    """
    with Store.open(store, read_only=True) as opened:
        with output.progress("verify") as progress:
            findings = opened.verify(step, run=run, progress=progress)
        checkpoints = [item for item in opened.checkpoints(run) if step in (None, item.step)]
    lost = {name for finding in findings if finding.severity is Severity.ERROR for name in finding.checkpoints}
    if as_json:
        output.print_json({"store": store, "checkpoints": len(checkpoints), "lost": sorted(lost), "findings": findings})
    else:
        _show(findings, len(checkpoints), len(lost))
    ctx.exit(_status(findings))


def _show(findings: list[Finding], checkpoints: int, lost: int) -> None:
    if findings:
        output.print_table(
            [("severity", "left"), ("kind", "left"), ("where", "left"), ("what", "left"), ("checkpoints lost", "left")],
            [
                [item.severity.value, item.kind, item.where, _what(item), "; ".join(item.checkpoints)]
                for item in findings
            ],
        )
    verdict = "every one can be restored" if not lost else f"{lost} cannot be restored"
    click.echo(f"{checkpoints} checkpoints checked: {verdict}")


def _what(finding: Finding) -> str:
    tensors = f" (tensor {', '.join(finding.tensors)})" if finding.tensors else ""
    return finding.message + tensors


def _status(findings: list[Finding]) -> int:
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return exits.DAMAGED
    return exits.WARNINGS if Severity.WARNING in severities else exits.OK
