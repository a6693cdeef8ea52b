"""``asymcheck du``: what takes the room in a store."""

from __future__ import annotations

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option
from asymcheck.recovery.accounting import Accounting, CheckpointBytes
from asymcheck.store import Store


@click.command(epilog=exits.HELP, short_help="Say what takes the room, by checkpoint and by role.")
@click.argument("store", type=click.Path())
@click.option("--run", default=None, help="List the checkpoints of this run only; the totals are of the whole store.")
@json_option
@click.pass_context
def du(ctx: click.Context, store: str, run: str | None, as_json: bool) -> None:
    """Show what takes the room in STORE: by checkpoint, by role and in all.

    \b
    state    bytes of the tensors
    stored   bytes on disk of the frames that hold them, each counted once
    own      those that no other checkpoint needs: garbage once it is deleted
    shared   the rest of stored

    A pack is freed as a whole, so garbage is locked while its pack holds a live frame. What a save in progress has
    written looks like garbage.
    Reads manifests and the indexes of packs only. The status is 1 when a manifest cannot be read or a partition is
    missing, and 6 when only packs are damaged: then the figures are what could be counted.
    """
    with Store.open(store, read_only=True) as opened:
        accounting = opened.accounting(run)
    if as_json:
        output.print_json({"store": store, "accounting": accounting})
    else:
        _show(accounting)
    ctx.exit(_status(accounting))


def _status(accounting: Accounting) -> int:
    missing = any(item.missing_partitions for item in accounting.checkpoints)
    if accounting.unreadable_manifests or missing:
        return exits.DAMAGED
    return exits.WARNINGS if accounting.damaged_packs else exits.OK


def _show(accounting: Accounting) -> None:
    if accounting.checkpoints:
        _show_checkpoints(accounting.checkpoints)
    else:
        click.echo("no checkpoints yet")
    if accounting.roles:
        roles = [
            {"role": role.role, "state": output.size(role.state_bytes), "stored": output.size(role.stored_bytes)}
            for role in accounting.roles
        ]
        output.print_table(roles, numbers=("state", "stored"))
    output.print_table(_totals(accounting), numbers=["bytes"])
    for problem in _problems(accounting):
        click.echo(problem)


def _show_checkpoints(items: tuple[CheckpointBytes, ...]) -> None:
    is_repeated = output.has_repeated_steps(items)
    rows = [
        {
            "run": item.run,
            "step": item.step,
            "gen": item.generation,
            "save": output.save(item.save_id) if is_repeated else None,
            "state": output.size(item.state_bytes),
            "stored": output.size(item.stored_bytes),
            "own": output.size(item.own_bytes),
            "shared": output.size(item.shared_bytes),
            "is": _standing(item),
        }
        for item in items
    ]
    output.print_table(rows, numbers=("step", "gen", "state", "stored", "own", "shared"))


def _standing(item: CheckpointBytes) -> str:
    if not item.complete or item.missing_partitions:
        return "damaged" if item.complete else "incomplete or damaged"
    return "" if item.on_line else "abandoned"


def _totals(accounting: Accounting) -> list[dict[str, str]]:
    rows: list[tuple[str, int, str]] = [
        ("packs", accounting.pack_bytes, output.count(accounting.packs, "pack")),
        ("  live", accounting.live_bytes, "frames that a checkpoint needs"),
        (
            "  freeable",
            accounting.freeable_bytes,
            f"{output.count(accounting.freeable_packs, 'pack')} that gc would free",
        ),
        ("  locked", accounting.locked_bytes, "garbage in packs with live frames"),
        ("  overhead", accounting.overhead_bytes, "headers, indexes, old tails"),
        ("  unreadable", accounting.unreadable_bytes, "packs that cannot be read"),
        ("pool", accounting.pooled_bytes, f"{output.count(accounting.pooled_packs, 'freed pack')}, to be overwritten"),
        ("unfinished", accounting.unfinished_bytes, "packs being written, or left by a killed save"),
        ("manifests", accounting.manifest_bytes, output.count(accounting.manifests, "manifest")),
        ("catalog", accounting.catalog_bytes, ""),
    ]
    optional = ("  unreadable", "unfinished")
    return [
        {"in all": name, "bytes": output.size(size), "": what}
        for name, size, what in rows
        if size or name not in optional
    ]


def _problems(accounting: Accounting) -> list[str]:
    found = []
    if accounting.unreadable_manifests:
        unreadable = output.count(accounting.unreadable_manifests, "manifest")
        found.append(f"{unreadable} cannot be read: gc frees nothing while what they need is unknown")
    missing = sum(item.missing_partitions > 0 for item in accounting.checkpoints)
    if missing:
        refer = "1 checkpoint refers" if missing == 1 else f"{missing} checkpoints refer"
        found.append(f"{refer} to partitions that lie in no readable pack")
    if accounting.damaged_packs:
        found.append(f"{output.count(accounting.damaged_packs, 'pack')} with a damaged header or index; gc keeps them")
    return [*found, "run 'asymcheck verify' for all the damage"] if found else []
