"""``asymcheck gc``: take back the room of what no checkpoint needs."""

from __future__ import annotations

import click

from asymcheck.cli import exits, output
from asymcheck.pipeline.collect import Collected
from asymcheck.store import Store


@click.command(epilog=exits.HELP, short_help="Free the packs that no checkpoint needs.")
@click.argument("store", type=click.Path())
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def gc(store: str, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001 - click's way
    """Free the packs of STORE that no checkpoint needs, and remove what killed processes left behind.

    Safe beside processes that save and load. A pack is freed when nothing in it is needed any more; some freed packs
    are kept for later saves to overwrite, which is faster than new files. 'asymcheck du' says what holds a pack.
    """
    with Store.open(store, read_only=True):
        pass  # There is a store: to open it for writing would make one.
    with Store.open(store) as opened:
        done = opened.gc(dry_run=dry_run)
    if as_json:
        output.print_json({"store": store, "dry_run": dry_run, "collected": done})
    else:
        click.echo(_sentence(done, dry_run=dry_run))


def _sentence(done: Collected, *, dry_run: bool) -> str:
    freed = f"{output.count(done.freed_packs, 'pack')}, {output.size(done.freed_bytes)}"
    if dry_run:
        return f"would free {freed}; {output.count(done.kept_packs, 'pack')} needed"
    kept = f", {done.pooled_packs} of them kept to be overwritten" if done.pooled_packs else ""
    busy = f"; {output.count(done.busy_packs, 'pack')} in use were left" if done.busy_packs else ""
    swept = f"; {output.count(done.removed_temporaries, 'leftover file')} removed" if done.removed_temporaries else ""
    return f"freed {freed}{kept}; {output.count(done.kept_packs, 'pack')} needed{busy}{swept}"
