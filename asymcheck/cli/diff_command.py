"""``asymcheck diff``: what changed between two checkpoints."""

from __future__ import annotations

from collections import Counter

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option
from asymcheck.config import DEFAULT_RUN
from asymcheck.recovery.difference import Difference, TensorChange
from asymcheck.recovery.norms import TensorNorms
from asymcheck.store import Store
from asymcheck.types import Checkpoint

_SAVES_SHOWN = 3


@click.command(epilog=exits.HELP, short_help="Say what changed from one checkpoint to another.")
@click.argument("store", type=click.Path())
@click.argument("a")
@click.argument("b")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="The run of A and B, where they do not name one.")
@click.option("--tensors", "pattern", default="*", help="Only what has a name that matches this glob, as 'model.*'.")
@click.option("--norms/--no-norms", default=True, help="Read what changed and say by how much [default: yes].")
@json_option
def diff(store: str, a: str, b: str, run: str, pattern: str, norms: bool, as_json: bool) -> None:
    """Show what changed from checkpoint A to checkpoint B of STORE.

    \b
    A and B are each one of
      STEP             the checkpoint of this step that a restore would take
      save:DIGITS      the one whose save id begins with these digits (see 'asymcheck log')
      RUN@STEP, RUN@save:DIGITS

    Tensors whose digests are equal are not read. Of the others every byte is read and checked, a few partitions at a
    time. Norms are in float64: of integers and bool, too; those of complex numbers in complex128. Elements that are
    infinite or not a number are counted and left out of the norms. There are no norms of states of random number
    generators, of float4, and where the shape changed.
    With --no-norms nothing is read but manifests; then a tensor that shares its partitions with others may be
    'undecided'.
    The status is 0 whether they differ or not.
    """
    with Store.open(store, read_only=True) as opened, output.progress("diff") as progress:
        difference = opened.diff(a, b, run=run, tensors=pattern, norms=norms, progress=progress)
    if as_json:
        output.print_json({"store": store, "difference": difference})
        return
    _show_side("A", difference.a, difference.other_saves_a)
    _show_side("B", difference.b, difference.other_saves_b)
    # First of all: the tables may have hundreds of rows.
    _show_sums(difference)
    if difference.tensors:
        _show_tensors(difference.tensors)
        _show_norms(difference.tensors)
    if difference.values:
        output.print_table(
            [{"value": one.name, "in A": one.a or "(none)", "in B": one.b or "(none)"} for one in difference.values]
        )


def _show_side(letter: str, item: Checkpoint, others: tuple[str, ...]) -> None:
    details = []
    if others:
        listed = ", ".join(f"save:{output.save(other)}" for other in others[:_SAVES_SHOWN])
        more = " …" if len(others) > _SAVES_SHOWN else ""
        details.append(f"step {item.step} was saved {len(others) + 1} times, also as {listed}{more}")
    save = f"save {output.save(item.save_id)}  {output.moment(item.created_ns)} UTC"
    output.print_entry(f"{letter}  {item.run}  step {item.step}  generation {item.generation}  {save}", details)


def _is_shared(changes: tuple[TensorChange, ...]) -> bool:
    """Tell whether these are of several ranks, whose tensors may have the same names."""
    return any(change.rank for change in changes)


def _show_tensors(changes: tuple[TensorChange, ...]) -> None:
    is_shared = _is_shared(changes)
    rows = [
        {
            "rank": change.rank if is_shared else None,
            "tensor": " = ".join((change.name, *change.aliases)),
            "change": change.change,
            "dtype": _from_to(change.dtype_a, change.dtype_b),
            "shape": _from_to(_shape(change.shape_a), _shape(change.shape_b)),
            "bytes": output.size(change.bytes_a if change.change == "removed" else change.bytes_b),
            "shared": output.size(change.shared_bytes),
        }
        for change in changes
    ]
    output.print_table(rows, numbers=("rank", "bytes", "shared"))


def _from_to(a: str | None, b: str | None) -> str:
    return f"{a} → {b}" if a is not None and b is not None and a != b else a or b or ""


def _shape(shape: tuple[int, ...] | None) -> str | None:
    return None if shape is None else "×".join(map(str, shape)) or "scalar"


def _show_norms(changes: tuple[TensorChange, ...]) -> None:
    compared = [(change, change.norms) for change in changes if change.norms is not None]
    if not compared:
        return
    is_shared = _is_shared(changes)
    has_odd = any(norms.nonfinite_a or norms.nonfinite_b for _, norms in compared)
    rows = [
        {
            "rank": change.rank if is_shared else None,
            "tensor": change.name,
            "|A|": _number(norms.l2_a),
            "|B−A|": _number(norms.l2_difference),
            "relative": _number(norms.relative),
            "largest": _number(norms.largest),
            "differ": norms.differing,
            "not finite": _nonfinite(norms) if has_odd else None,
        }
        for change, norms in compared
    ]
    output.print_table(rows, numbers={*rows[0]} - {"tensor"})
    notes: dict[str, list[str]] = {}
    for change, norms in compared:
        if norms.note:
            of_rank = f" of rank {change.rank}" if is_shared else ""
            notes.setdefault(norms.note, []).append(f"{change.name}{of_rank}")
    for note, names in notes.items():
        click.echo(f"no norms of {', '.join(map(output.shown, names))}: {note}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _nonfinite(norms: TensorNorms) -> str:
    return f"{norms.nonfinite_a} → {norms.nonfinite_b}" if norms.nonfinite_a or norms.nonfinite_b else ""


def _show_sums(difference: Difference) -> None:
    words = {
        "added": "added",
        "removed": "removed",
        "shape": "changed in shape",
        "layout": "cut otherwise",
        "dtype": "changed in dtype",
        "value": "changed in value",
        "undecided": "undecided",
    }
    counts = Counter(change.change for change in difference.tensors)
    parts = [f"{counts[change]} {word}" for change, word in words.items() if counts[change]]
    parts.append(f"{difference.unchanged_tensors} unchanged ({output.size(difference.unchanged_bytes)})")
    click.echo(f"tensors: {', '.join(parts)}")
    if difference.values or difference.unchanged_values:
        click.echo(f"values: {len(difference.values)} changed, {difference.unchanged_values} unchanged")
    share = f" ({difference.shared_bytes / difference.bytes_b:.0%} of B)" if difference.bytes_b else ""
    a, b = output.size(difference.bytes_a), output.size(difference.bytes_b)
    click.echo(f"bytes: {a} in A, {b} in B, {output.size(difference.shared_bytes)} shared{share}")
