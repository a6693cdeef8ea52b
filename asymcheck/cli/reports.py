"""Commands that report on a store from its manifests and indexes: log, du and diff."""

from __future__ import annotations

from collections import Counter
from functools import partial

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import Report, command, places_option, store_argument
from asymcheck.cli.places import Places, places_of
from asymcheck.config import DEFAULT_RUN
from asymcheck.inspect.diff import CheckpointDiff, TensorChange, TensorNorms
from asymcheck.inspect.disk_usage import CheckpointBytes, DiskUsage
from asymcheck.inspect.history import GenerationStart, History, HistoryEntry
from asymcheck.store import Store
from asymcheck.types import Checkpoint

_METRICS_SHOWN = 8
_SAVES_SHOWN = 3


@command("List the checkpoints of a run, newest first.")
@store_argument
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="The run.")
@click.option(
    "--all", "everything", is_flag=True, help="Also what is abandoned, incomplete or damaged, marked as such."
)
@places_option
def log(store: str, run: str, everything: bool, remote: str | None) -> Report:
    """Show the checkpoints of a run of STORE along its line of training, newest first.

    A line of dashes shows where training went on from an earlier checkpoint.
    When a head record is lost, the line is not known: then --all shows what there is, and the status is 6.
    Reads manifests and head records only, never a tensor; 'asymcheck verify' checks the bytes.
    """
    with Store.open(store, read_only=True) as opened:
        history = opened.history(run, everything=everything)
        places = None if remote is None else places_of(opened, remote, run)
    there = None if places is None else sorted(places.there)
    document = {"store": store, "history": history, "remote": places and places.location, "there": there}
    status = exit_status.WARNINGS if history.line_problem else exit_status.OK
    return Report(document, partial(_show_history, history, places), status)


def _show_history(history: History, places: Places | None) -> None:
    if not (history.entries or history.openings or history.hidden_abandoned or history.hidden_incomplete):
        click.echo("no checkpoints yet")
        return
    if history.line_problem:
        output.note(history.line_problem)
    openings = list(history.openings)
    newest = next((entry for entry in history.entries if _mark(entry, history) == ""), None)
    for entry in history.entries:
        while openings and openings[0].generation > entry.checkpoint.generation:
            _show_opening(openings.pop(0))
        marks = ["newest" if entry is newest else _mark(entry, history)]
        marks += [] if places is None else [places.of(entry.checkpoint)]
        _show_entry(entry, ", ".join(filter(None, marks)))
    for opening in openings:
        _show_opening(opening)
    hidden = [
        output.count(number, f"{word} checkpoint")
        for number, word in ((history.hidden_abandoned, "abandoned"), (history.hidden_incomplete, "incomplete"))
        if number
    ]
    if places is not None and places.only_there:
        steps = ", ".join(str(one.step) for one in places.only_there)
        click.echo(f"only in {places.location}: step {steps}")
    if hidden:
        click.echo(f"{' and '.join(hidden)} not shown; --all shows them")


def _mark(entry: HistoryEntry, history: History) -> str:
    """Say what is the matter with a checkpoint; nothing when it can be restored and leads to the present."""
    marks = [] if entry.checkpoint.complete else ["incomplete or damaged"]
    if history.line_problem:
        marks.append("line unknown")
    elif not entry.checkpoint.on_line:
        marks.append("abandoned")
    return ", ".join(marks)


def _show_entry(entry: HistoryEntry, mark: str) -> None:
    item = entry.checkpoint
    name = f"step {item.step}  generation {item.generation}  save {output.save(item.save_id)}"
    details = [entry.problem] if entry.problem else []
    if item.complete:
        details.append(f"{output.size(item.state_bytes)}{_after(entry)}, by {entry.writer}")
        shown = [f"{name} {value:.6g}" for name, value in list(item.metrics.items())[:_METRICS_SHOWN]]
        more = [f"… {len(item.metrics) - _METRICS_SHOWN} more"] if len(item.metrics) > _METRICS_SHOWN else []
        if shown:
            details.append(", ".join([*shown, *more]))
    output.print_entry(f"{name}  {output.moment(item.created_ns)} UTC" + (f"  ({mark})" if mark else ""), details)


def _after(entry: HistoryEntry) -> str:
    if entry.since_before_ns is None:
        return ""
    # A step may have been saved more than once: then the number alone would mean this very checkpoint.
    before = "an earlier save of " if entry.step_before == entry.checkpoint.step else ""
    # An older step that was saved later, or a clock that was set back.
    order = "before" if entry.since_before_ns < 0 else "after"
    return f", {output.duration(abs(entry.since_before_ns))} {order} {before}step {entry.step_before}"


def _show_opening(opening: GenerationStart) -> None:
    what = f"--- generation {opening.generation}"
    if opening.problem:
        output.print_entry(f"{what}: its head record cannot be read", [opening.problem])
        return
    origin = (
        "began from nothing"
        if opening.parent_step is None
        else f"went on from step {opening.parent_step}, generation {opening.parent_generation}"
    )
    lost = "" if opening.abandoned is None else f"; {output.count(opening.abandoned, 'checkpoint')} abandoned"
    mark = "" if opening.on_line else " (not on the line)"
    when = "" if opening.opened_ns is None else f"{output.moment(opening.opened_ns)} UTC, by {opening.writer}"
    output.print_entry(
        f"{what} {origin}{lost if opening.abandoned or opening.parent_step is not None else ''}{mark}", [when]
    )


@command("Show disk usage per checkpoint and tensor role.")
@store_argument
@click.option("--run", default=None, help="List the checkpoints of this run only; the totals are of the whole store.")
def du(store: str, run: str | None) -> Report:
    """Show the disk usage of STORE per checkpoint, per tensor role, and in total.

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
        accounting = opened.disk_usage(run)
    status = exit_status.WARNINGS if accounting.damaged_packs else exit_status.OK
    if accounting.unreadable_manifests or any(item.missing_partitions for item in accounting.checkpoints):
        status = exit_status.DAMAGED
    return Report({"store": store, "accounting": accounting}, partial(_show_accounting, accounting), status)


def _show_accounting(accounting: DiskUsage) -> None:
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


def _totals(accounting: DiskUsage) -> list[dict[str, str]]:
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


def _problems(accounting: DiskUsage) -> list[str]:
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


@command("Say what changed from one checkpoint to another.")
@store_argument
@click.argument("a")
@click.argument("b")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="The run of A and B, where they do not name one.")
@click.option("--tensors", "pattern", default="*", help="Only what has a name that matches this glob, as 'model.*'.")
@click.option("--norms/--no-norms", default=True, help="Read what changed and say by how much [default: yes].")
def diff(store: str, a: str, b: str, run: str, pattern: str, norms: bool) -> Report:
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
    return Report({"store": store, "difference": difference}, partial(_show_difference, difference))


def _show_difference(difference: CheckpointDiff) -> None:
    _show_side("A", difference.a, difference.other_saves_a)
    _show_side("B", difference.b, difference.other_saves_b)
    # First of all: the tables may have hundreds of rows.
    _show_sums(difference)
    if difference.tensors:
        # Tensors of several ranks may have the same names.
        is_shared = any(change.rank for change in difference.tensors)
        _show_tensors(difference.tensors, is_shared=is_shared)
        _show_norms(difference.tensors, is_shared=is_shared)
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


def _show_tensors(changes: tuple[TensorChange, ...], *, is_shared: bool) -> None:
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


def _show_norms(changes: tuple[TensorChange, ...], *, is_shared: bool) -> None:
    compared = [(change, change.norms) for change in changes if change.norms is not None]
    if not compared:
        return
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


def _show_sums(difference: CheckpointDiff) -> None:
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
