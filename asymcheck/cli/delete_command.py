"""``asymcheck delete``: checkpoints that are not needed any more."""

from __future__ import annotations

import shlex
import sys

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import InvalidInputError
from asymcheck.store import Store
from asymcheck.types import Checkpoint


@click.command(epilog=exits.HELP, short_help="Delete the checkpoints of a step.")
@click.argument("store", type=click.Path())
@click.argument("step", type=click.IntRange(min=0))
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Whose checkpoints.")
@click.option("--generation", type=int, default=None, help="Only the one of this generation [default: of all].")
@click.option("--yes", is_flag=True, help="Do not ask; must be given where there is nobody to ask.")
@json_option
@click.pass_context
def delete(
    ctx: click.Context, store: str, step: int, run: str, generation: int | None, yes: bool, as_json: bool
) -> None:
    """Delete the checkpoints of STEP from STORE, for good, after asking.

    They are gone at once; their bytes stay until 'asymcheck gc' frees what no other checkpoint needs.
    The status is 2 when the answer is no, and then nothing was deleted.
    """
    with Store.open(store, read_only=True) as opened:
        chosen = opened.delete(step, run=run, generation=generation, dry_run=True)
    if not yes and not _is_confirmed(chosen):
        output.note("nothing was deleted")
        ctx.exit(exits.USAGE)
    with Store.open(store) as opened:
        deleted = opened.delete(step, run=run, generation=generation)
    if as_json:
        output.print_json({"store": store, "deleted": deleted})
        return
    for item in deleted:
        click.echo(f"deleted {_name(item)}")
    click.echo(f"asymcheck gc {shlex.quote(store)} frees the bytes that no other checkpoint needs")


def _is_confirmed(chosen: list[Checkpoint]) -> bool:
    """Ask on the terminal.

    Raises:
        InvalidInputError: there is none.
    """
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
