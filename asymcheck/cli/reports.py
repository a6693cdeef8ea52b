"""Commands that report on a store: log, du and diff."""

from __future__ import annotations

from collections import Counter
from functools import partial

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.locations import Locations, list_locations
from asymcheck.cli.options import Report, command, show_remote_option, store_argument
from asymcheck.config import DEFAULT_RUN
from asymcheck.inspect.diff import CheckpointDiff, TensorChange
from asymcheck.inspect.disk_usage import CheckpointBytes, DiskUsage
from asymcheck.inspect.history import GenerationStart, History, HistoryEntry
from asymcheck.inspect.norms import TensorNorms
from asymcheck.store import Store
from asymcheck.types import Checkpoint

_METRICS_SHOWN = 8
_SAVES_SHOWN = 3


@command("List the checkpoints of a run, newest first.")
@store_argument
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run to list.")
@click.option("--all", "everything", is_flag=True, help="Also show abandoned, incomplete and damaged checkpoints.")
@show_remote_option
def log(store: str, run: str, everything: bool, remote: str | None) -> Report:
    """Show the history of a run in STORE: the checkpoints on the line of training, newest first.

    Entries that begin with dashes show where training continued from an earlier checkpoint.

    If a head record is lost, the line is unknown. Then --all lists all checkpoints, and the status is 6.

    Reads manifests and head records only; 'asymcheck verify' checks the tensor data.
    """
    with Store.open(store, read_only=True) as opened:
        history = opened.history(run, everything=everything)
        locations = None if remote is None else list_locations(opened, remote, run)
    document = {
        "store": store,
        "history": history,
        "remote": locations and locations.remote_location,
        "there": locations and sorted(locations.remote),
    }
    status = exit_status.WARNINGS if history.line_problem else exit_status.OK
    return Report(document, partial(_show_history, history, locations), status)


def _show_history(history: History, locations: Locations | None) -> None:
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
        marks += [] if locations is None else [locations.describe(entry.checkpoint)]
        _show_entry(entry, ", ".join(filter(None, marks)))
    for opening in openings:
        _show_opening(opening)
    hidden = [
        output.count(number, f"{word} checkpoint")
        for number, word in ((history.hidden_abandoned, "abandoned"), (history.hidden_incomplete, "incomplete"))
        if number
    ]
    if locations is not None and locations.remote_only:
        steps = ", ".join(str(checkpoint.step) for checkpoint in locations.remote_only)
        click.echo(f"only at {locations.remote_location}: step {steps}")
    if hidden:
        click.echo(f"{' and '.join(hidden)} not shown; pass --all to show them")


def _mark(entry: HistoryEntry, history: History) -> str:
    """Return the problems of a checkpoint, or nothing for a complete checkpoint on the line."""
    marks = [] if entry.checkpoint.complete else ["incomplete or damaged"]
    if history.line_problem:
        marks.append("line unknown")
    elif not entry.checkpoint.on_line:
        marks.append("abandoned")
    return ", ".join(marks)


def _show_entry(entry: HistoryEntry, mark: str) -> None:
    item = entry.checkpoint
    name = f"step {item.step}  generation {item.generation}  save {output.short_save_id(item.save_id)}"
    facts = [name, output.age(item.created_ns)]
    if item.complete:
        facts.append(f"{output.size(item.state_bytes)}{_after(entry)}")
        facts.append(output.metrics(item.metrics, _METRICS_SHOWN))
    facts.append(mark and f"({mark})")
    output.print_entry("  ".join(filter(None, facts)), [entry.problem] if entry.problem else [])


def _after(entry: HistoryEntry) -> str:
    if entry.since_before_ns is None:
        return ""
    before = "an earlier save of " if entry.step_before == entry.checkpoint.step else ""
    # The time is negative if an older step was saved later, or if the clock was set back.
    order = "before" if entry.since_before_ns < 0 else "after"
    return f", {output.duration(abs(entry.since_before_ns))} {order} {before}step {entry.step_before}"


def _show_opening(opening: GenerationStart) -> None:
    heading = f"--- generation {opening.generation}"
    if opening.problem:
        output.print_entry(f"{heading}: its head record cannot be read", [opening.problem])
        return
    origin = (
        "started from scratch"
        if opening.parent_step is None
        else f"continued from step {opening.parent_step} of generation {opening.parent_generation}"
    )
    lost = "" if opening.abandoned is None else f"; {output.count(opening.abandoned, 'checkpoint')} abandoned"
    mark = "" if opening.on_line else " (not on the line)"
    when = "" if opening.opened_ns is None else f"{output.timestamp(opening.opened_ns)} UTC, by {opening.writer}"
    output.print_entry(
        f"{heading} {origin}{lost if opening.abandoned or opening.parent_step is not None else ''}{mark}", [when]
    )


@command("Show disk usage per checkpoint and tensor role.")
@store_argument
@click.option("--run", help="List the checkpoints of this run only. The totals are for the whole store.")
def du(store: str, run: str | None) -> Report:
    """Show the disk usage of STORE per checkpoint, per tensor role, and in total.

    \b
    size        bytes of the tensors
    stored      bytes on disk of the frames that hold them
    exclusive   part of stored that no other checkpoint needs
    shared      part of stored that other checkpoints need, too

    Deleting a checkpoint turns its exclusive bytes into garbage. A pack is freed as a whole, so its garbage is locked
    while the pack holds a live frame. Data of a save in progress counts as garbage.

    Reads manifests and pack indexes only. The status is 1 if a manifest cannot be read or a partition is missing, and 6
    if only packs are damaged.
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
            {"role": role.role, "size": output.size(role.state_bytes), "stored": output.size(role.stored_bytes)}
            for role in accounting.roles
        ]
        output.print_table(roles, numbers=("size", "stored"))
    output.print_table(_totals(accounting), numbers=["bytes"])
    for problem in _problems(accounting):
        click.echo(problem)


def _show_checkpoints(items: tuple[CheckpointBytes, ...]) -> None:
    rows = [
        {
            **identity,
            "size": output.size(item.state_bytes),
            "stored": output.size(item.stored_bytes),
            "exclusive": output.size(item.own_bytes),
            "shared": output.size(item.shared_bytes),
            "status": "damaged" if item.complete and item.missing_partitions else output.status(item),
        }
        for identity, item in zip(output.identity_columns(items), items, strict=True)
    ]
    output.print_table(rows, numbers=("step", "generation", "size", "stored", "exclusive", "shared"))


def _totals(accounting: DiskUsage) -> list[dict[str, str]]:
    rows: list[tuple[str, int, str]] = [
        ("packs", accounting.pack_bytes, output.count(accounting.packs, "pack")),
        ("  live", accounting.live_bytes, "frames that checkpoints need"),
        (
            "  freeable",
            accounting.freeable_bytes,
            f"{output.count(accounting.freeable_packs, 'pack')} that gc would free",
        ),
        ("  locked", accounting.locked_bytes, "garbage in packs with live frames"),
        ("  overhead", accounting.overhead_bytes, "headers, indexes, unused ends of files"),
        ("  unreadable", accounting.unreadable_bytes, "packs that cannot be read"),
        (
            "recyclable",
            accounting.pooled_bytes,
            f"{output.count(accounting.pooled_packs, 'freed pack')} for later saves to overwrite",
        ),
        ("unfinished", accounting.unfinished_bytes, "packs of running or killed saves"),
        ("manifests", accounting.manifest_bytes, output.count(accounting.manifests, "manifest")),
        ("catalog", accounting.catalog_bytes, ""),
    ]
    optional = ("  unreadable", "unfinished")
    return [
        {"total": name, "bytes": output.size(size), "content": content}
        for name, size, content in rows
        if size or name not in optional
    ]


def _problems(accounting: DiskUsage) -> list[str]:
    problems = []
    if accounting.unreadable_manifests:
        unreadable = output.count(accounting.unreadable_manifests, "manifest")
        problems.append(
            f"{unreadable} cannot be read: gc frees nothing, because it does not know the needed partitions"
        )
    missing = sum(item.missing_partitions > 0 for item in accounting.checkpoints)
    if missing:
        subject = "1 checkpoint needs" if missing == 1 else f"{missing} checkpoints need"
        problems.append(f"{subject} partitions that are in no readable pack")
    if accounting.damaged_packs:
        damaged = output.count(accounting.damaged_packs, "pack")
        problems.append(f"{damaged} with a damaged header or index; gc keeps them")
    return [*problems, "run 'asymcheck verify' for details of the damage"] if problems else []


@command("Compare two checkpoints.")
@store_argument
@click.argument("a")
@click.argument("b")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run of A and B, unless they name a run.")
@click.option(
    "--tensors", "pattern", default="*", help="Compare only names that match this glob, for example 'model.*'."
)
@click.option(
    "--norms/--no-norms",
    default=True,
    help="Read changed tensors and compute norms of the difference [default: --norms].",
)
def diff(store: str, a: str, b: str, run: str, pattern: str, norms: bool) -> Report:
    """Compare checkpoints A and B of STORE.

    \b
    A and B are each one of
      STEP             the checkpoint of this step that a restore would choose
      save:DIGITS      the checkpoint whose save id begins with DIGITS (see 'asymcheck log')
      best:METRIC      the checkpoint with the lowest value of METRIC; best:METRIC:max: the highest
      RUN@STEP, RUN@save:DIGITS, RUN@best:METRIC

    \b
    Columns of the tables:
      shared        bytes that A and B have in common on disk
      |A|, |B−A|    L2 norms of A and of the difference
      relative      |B−A| / |A|
      max change    largest absolute difference of an element
      changed       number of elements that differ

    Tensors with equal digests are not read. All other tensors are read and checked, a few partitions at a time. Norms
    are computed in float64 (complex128 for complex numbers), without infinities and NaN, which are counted separately.
    Random number generator states, float4 tensors and tensors of different shapes have no norms.

    --no-norms reads manifests only. A tensor that shares its partition with other tensors may then be 'undecided'.

    The status is 0 whether A and B differ or not.
    """
    with Store.open(store, read_only=True) as opened, output.progress("diff") as progress:
        difference = opened.diff(a, b, run=run, tensors=pattern, norms=norms, progress=progress)
    return Report({"store": store, "difference": difference}, partial(_show_difference, difference))


def _show_difference(difference: CheckpointDiff) -> None:
    _show_side("A", difference.a, difference.other_saves_a)
    _show_side("B", difference.b, difference.other_saves_b)
    # The summary comes before the tables, which may have hundreds of rows.
    _show_summary(difference)
    if difference.tensors:
        is_shared = difference.a.world_size > 1
        _show_tensors(difference.tensors, is_shared=is_shared)
        _show_norms(difference.tensors, is_shared=is_shared)
    if difference.values:
        output.print_table(
            [{"value": item.name, "A": item.a or "(none)", "B": item.b or "(none)"} for item in difference.values]
        )


def _show_side(letter: str, item: Checkpoint, others: tuple[str, ...]) -> None:
    details = []
    if others:
        listed = ", ".join(f"save:{output.short_save_id(other)}" for other in others[:_SAVES_SHOWN])
        more = " …" if len(others) > _SAVES_SHOWN else ""
        details.append(f"step {item.step} was saved {len(others) + 1} times, also as {listed}{more}")
    save = f"save {output.short_save_id(item.save_id)}  {output.timestamp(item.created_ns)} UTC"
    output.print_entry(f"{letter}  {item.run}  step {item.step}  generation {item.generation}  {save}", details)


def _show_tensors(changes: tuple[TensorChange, ...], *, is_shared: bool) -> None:
    rows = [
        {
            "rank": change.rank if is_shared else None,
            "tensor": " = ".join((change.name, *change.aliases)),
            "change": change.change,
            "dtype": _from_to(change.dtype_a, change.dtype_b),
            "shape": _from_to(_shape(change.shape_a), _shape(change.shape_b)),
            "size": output.size(change.bytes_a if change.change == "removed" else change.bytes_b),
            "shared": output.size(change.shared_bytes),
        }
        for change in changes
    ]
    output.print_table(rows, numbers=("rank", "size", "shared"))


def _from_to(a: str | None, b: str | None) -> str:
    return f"{a} → {b}" if a is not None and b is not None and a != b else a or b or ""


def _shape(shape: tuple[int, ...] | None) -> str | None:
    return None if shape is None else output.shape(shape)


def _show_norms(changes: tuple[TensorChange, ...], *, is_shared: bool) -> None:
    compared = [(change, change.norms) for change in changes if change.norms is not None]
    if not compared:
        return
    has_nonfinite = any(norms.nonfinite_a or norms.nonfinite_b for _, norms in compared)
    rows = [
        {
            "rank": change.rank if is_shared else None,
            "tensor": change.name,
            "|A|": _number(norms.l2_a),
            "|B−A|": _number(norms.l2_difference),
            "relative": _number(norms.relative),
            "max change": _number(norms.largest),
            "changed": norms.differing,
            "non-finite": _nonfinite(norms) if has_nonfinite else None,
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
        click.echo(f"no norms of {', '.join(map(output.printable, names))}: {note}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _nonfinite(norms: TensorNorms) -> str:
    return f"{norms.nonfinite_a} → {norms.nonfinite_b}" if norms.nonfinite_a or norms.nonfinite_b else ""


def _show_summary(difference: CheckpointDiff) -> None:
    words = {
        "added": "added",
        "removed": "removed",
        "shape": "changed in shape",
        "layout": "changed in sharding",
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
