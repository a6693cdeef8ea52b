"""``asymcheck rebuild``: make the catalog again from packs and manifests."""

from __future__ import annotations

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option
from asymcheck.recovery.rebuild import Rebuilt
from asymcheck.store import Store


@click.command(epilog=exits.HELP, short_help="Make the catalog again from packs and manifests.")
@click.argument("store", type=click.Path())
@json_option
@click.pass_context
def rebuild(ctx: click.Context, store: str, as_json: bool) -> None:
    """Make the catalog of STORE again from its packs and manifests alone, which are the truth.

    Nothing else is changed, and no frame is read. Safe beside processes that use the store. The status is 6 when a
    pack was left out.
    """
    with Store.open(store, read_only=True):
        pass  # There is a store: to open it for writing would make one.
    with Store.open(store) as opened, output.progress("rebuild"):
        rebuilt = opened.rebuild()
    if as_json:
        output.print_json({"store": store, "rebuilt": rebuilt})
    else:
        _show(rebuilt)
    ctx.exit(exits.WARNINGS if rebuilt.left_out else exits.OK)


def _show(rebuilt: Rebuilt) -> None:
    for reason in rebuilt.left_out:
        click.echo(f"left out: {reason}")
    packs, partitions = output.count(rebuilt.packs, "pack"), output.count(rebuilt.partitions, "partition")
    entered = f"{packs}, {partitions} and {output.count(rebuilt.manifests, 'manifest')}"
    changed = "1 entry was changed" if rebuilt.changed == 1 else f"{rebuilt.changed} entries were changed"
    pins = f"; kept {output.count(rebuilt.kept_pins, 'pin')} of living processes" if rebuilt.kept_pins else ""
    click.echo(f"the catalog knows {entered}; {changed}{pins}")
