"""``asymcheck log``: the history of a run."""

from __future__ import annotations

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option, places_option
from asymcheck.cli.places import Places, places_of
from asymcheck.config import DEFAULT_RUN
from asymcheck.recovery.history import History, HistoryEntry, Opening
from asymcheck.store import Store

_METRICS_SHOWN = 8


@click.command(epilog=exits.HELP, short_help="List the checkpoints of a run, newest first.")
@click.argument("store", type=click.Path())
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="The run.")
@click.option(
    "--all", "everything", is_flag=True, help="Also what is abandoned, incomplete or damaged, marked as such."
)
@places_option
@json_option
@click.pass_context
def log(ctx: click.Context, store: str, run: str, everything: bool, remote: str | None, as_json: bool) -> None:
    """Show the checkpoints of a run of STORE along its line of training, newest first.

    A line of dashes shows where training went on from an earlier checkpoint.
    When a head record is lost, the line is not known: then --all shows what there is, and the status is 6.
    Reads manifests and head records only, never a tensor; 'asymcheck verify' checks the bytes.
    """
    with Store.open(store, read_only=True) as opened:
        history = opened.history(run, everything=everything)
        places = None if remote is None else places_of(opened, remote, run)
    if as_json:
        there = {
            "remote": None if places is None else places.location,
            "there": None if places is None else sorted(places.there),
        }
        output.print_json({"store": store, "history": history, **there})
    else:
        _show(history, places)
    ctx.exit(exits.WARNINGS if history.line_problem else exits.OK)


def _show(history: History, places: Places | None) -> None:
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


def _show_opening(opening: Opening) -> None:
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
