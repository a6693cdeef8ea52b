"""``asymcheck merge``: merge the weights of checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from asymcheck.cli import output
from asymcheck.cli.options import Report, command, open_existing, parse_checkpoint, store_argument
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import HeadRecordError, InvalidInputError, SkippedCheckpointWarning, warn_user
from asymcheck.merging import METHODS, SCHEDULES
from asymcheck.store import Store

if TYPE_CHECKING:
    from asymcheck.merging.merge import Merged
    from asymcheck.merging.search import Searched


def _parse_weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: give numbers separated by commas, such as 1,2,3") from error


def _parse_names(text: str) -> list[int | str]:
    return [_parse_name(word.strip()) for word in text.split(",")]


def _parse_name(text: str) -> int | str:
    """Parse a step, ``save:DIGITS`` or ``best:METRIC``, alone or after ``RUN@``."""
    run, at, name = text.rpartition("@")
    parsed = parse_checkpoint(name)
    return f"{run}@{parsed}" if at else parsed


@command("Merge the weights of checkpoints into a new checkpoint.")
@store_argument
@click.option("--steps", type=_parse_names, metavar="STEP,STEP,…", help="Checkpoints, oldest first.")
@click.option("--last", type=click.IntRange(min=1), help="Merge this many newest checkpoints of the run.")
@click.option(
    "--and",
    "others",
    type=(str, str),
    multiple=True,
    metavar="LOCATION STEP",
    help="Also merge this checkpoint of another store.",
)
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run of the steps without RUN@.")
@click.option("--method", type=click.Choice(METHODS), default="mean", show_default=True, help="Formula of the merge.")
@click.option("--weights", type=_parse_weights, metavar="W,W,…", help="One weight for each checkpoint.")
@click.option("--base", metavar="STEP", help="Checkpoint from which the others were trained (ties, dare).")
@click.option("--base-store", metavar="LOCATION", help="Store of the base [default: STORE].")
@click.option("--alpha", type=float, default=0.2, show_default=True, help="Share of each newer checkpoint (ema).")
@click.option(
    "--schedule", type=click.Choice(SCHEDULES), default="1-sqrt", show_default=True, help="Decay to emulate (wsm)."
)
@click.option("--t", "t", type=float, default=0.5, show_default=True, help="Position between the checkpoints (slerp).")
@click.option("--density", type=float, default=0.5, show_default=True, help="Share of kept elements (ties, dare).")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Factor of the differences (ties, dare).")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random masks (dare).")
@click.option("--tensors", help="Merge the tensors that match this glob [default: all but optimizer state].")
@click.option("--to-run", default="merged", show_default=True, help="Run of the result.")
@click.option("--to-step", type=int, help="Step of the result [default: that of the last checkpoint].")
@click.option("--search", is_flag=True, help="Search for the settings of the best merge (needs optuna).")
@click.option("--evaluate", metavar="COMMAND", help="For --search: command with {folder} that prints a number.")
@click.option(
    "--trials", type=click.IntRange(min=1), default=20, show_default=True, help="Trials of the search in total."
)
@click.option("--maximize", is_flag=True, help="A larger number is better [default: a smaller one].")
@click.option(
    "--study",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("merge-search.log"),
    show_default=True,
    help="File that keeps the trials, so that an interrupted search can continue.",
)
@click.option("--part", default="model", show_default=True, help="Part of the state that the command gets; '' for all.")
@click.option(
    "--files-from",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Copy small files (config.json, tokenizer …) from this model folder to {folder}.",
)
def merge(
    store: str,
    steps: list[int | str] | None,
    last: int | None,
    others: Sequence[tuple[str, str]],
    run: str,
    method: str,
    base: str | None,
    base_store: str | None,
    tensors: str | None,
    to_run: str,
    to_step: int | None,
    search: bool,
    evaluate: str | None,
    trials: int,
    maximize: bool,
    study: Path,
    part: str,
    files_from: Path | None,
    **settings: object,
) -> Report:
    """Merge the weights of checkpoints of STORE, and save the result in a run of its own, without optimizer state.

    A step may be save:DIGITS, and may follow RUN@ for another run. Memory use does not grow with the model.
    Partitions that are equal in all checkpoints are neither read nor written. If a checkpoint is missing or damaged,
    nothing is saved.

    \b
    mean      equal weights
    lawa      equal weights of the newest checkpoints; see --last
    ema       exponential moving average; see --alpha
    wsm       weights that emulate a decay of the learning rate; see --schedule
    weighted  the given weights, divided by their sum; see --weights
    slerp     spherical interpolation of two checkpoints; see --t
    ties      trimmed differences from a base that agree in sign; see --base and --density
    dare      random differences from a base; see --base, --density and --seed

    \b
    Examples:
      asymcheck merge checkpoints --steps 1000,1100,1200
      asymcheck merge checkpoints --last 5 --method wsm --schedule 1-sqrt
      asymcheck merge checkpoints --steps math@900,code@900 --method ties --base base@0
      asymcheck merge checkpoints --steps 900,1000 --search --evaluate 'python loss.py {folder}' --files-from gpt2/
    """
    if steps and last is not None:
        raise click.UsageError("--steps and --last both choose checkpoints of STORE: give one of them")
    if search != (evaluate is not None):
        raise click.UsageError("--search and --evaluate belong together")
    if base_store is not None and base is None:
        raise click.UsageError("--base-store names the store of --base: give both")
    source = click.get_current_context().get_parameter_source
    # A default may be that of another method.
    given = {name: settings[name] for name in settings if source(name) is click.core.ParameterSource.COMMANDLINE}
    if search and (excess := [*given, *(["tensors"] if tensors is not None else [])]):
        names = ", ".join(f"--{name}" for name in excess)
        raise click.UsageError(f"--search chooses the settings of the method, for all tensors: leave out {names}")
    from asymcheck.merging.merge import merge as merge_checkpoints
    from asymcheck.merging.sources import SourceName

    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_existing(store))
        sources: list[int | str | SourceName] = [*_newest(opened, run, last), *(steps or [])]
        for location, name in others:
            other = stack.enter_context(Store.open(location, read_only=True))
            sources.append(SourceName(other, name))
        of = opened if base_store is None else stack.enter_context(Store.open(base_store, read_only=True))
        base_name = None if base is None else SourceName(of, base)
        if evaluate is not None:
            from asymcheck.merging import search as searching

            chosen = "weighted" if method == "mean" else method
            evaluation = searching.Evaluation(
                evaluate, study, trials, maximize, part=part or None, files_from=files_from
            )
            found = searching.search(
                opened,
                sources,
                evaluation,
                method=chosen,
                base=base_name,
                run=run,
                to_run=to_run,
                step=to_step,
                note=_note_trial,
            )
            return _report(found.merged, Path(store), found)
        progress = stack.enter_context(output.progress("merge"))
        done = merge_checkpoints(
            opened,
            sources,
            method=method,
            base=base_name,
            run=run,
            to_run=to_run,
            step=to_step,
            tensors=tensors,
            progress=progress,
            **given,
        )
    return _report(done, Path(store), None)


def _note_trial(number: int, value: float, settings: Mapping[str, object]) -> None:
    output.note(f"trial {number}: {value:.6g} with {_described(settings)}")


def _described(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in settings.items())


def _number(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "/".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _report(done: Merged, store: Path, found: Searched | None) -> Report:
    summary = found and {"best": found.best, "trials": found.trials, "settings": found.settings}

    def show() -> None:
        _show(done, store)
        if found is not None:
            trials = output.count(found.trials, "trial")
            click.echo(f"best of {trials}: {found.best:.6g} with {_described(found.settings)}")

    return Report({**vars(done), "search": summary}, show)


def _newest(store: Store, run: str, last: int | None) -> list[str]:
    """Return the names of the newest complete checkpoints on the line, oldest first."""
    if last is None:
        return []
    history = store.history(run, everything=True)
    if history.line_problem:
        raise HeadRecordError(history.line_problem)
    chosen: list[str] = []
    for entry in history.entries:
        item = entry.checkpoint
        if len(chosen) < last and item.on_line:
            if item.complete:
                chosen.append(f"save:{item.save_id}")
            else:
                warn_user(
                    f"store {store.location}, run {run!r}: skipped {item.ref}: {entry.problem}",
                    SkippedCheckpointWarning,
                )
    if len(chosen) < last:
        have = output.count(len(chosen), "complete checkpoint")
        raise InvalidInputError(f"--last {last}: run {run!r} of {store.location} has {have}; give a smaller number")
    return chosen[::-1]


def _show(done: Merged, store: Path) -> None:
    checkpoint = done.checkpoint
    click.echo(f"{store}: run {checkpoint.run}, step {checkpoint.step}")
    show_sources({"method": done.method, "sources": done.sources, "base": done.base, **done.settings})
    written = output.size(checkpoint.written_bytes or 0)
    reused = f", {output.size(done.reused_bytes)} equal in all sources" if done.reused_bytes else ""
    size = output.size(checkpoint.state_bytes)
    click.echo(f"{output.count(done.tensors, 'tensor')}, {size}, {written} newly stored{reused}")
    if done.masters:
        click.echo(f"{output.count(done.masters, 'tensor')} computed from float32 masters")
    if done.left_out:
        click.echo(f"left out {output.abbreviated(done.left_out)}")
    if done.duplicate_of is not None:
        earlier = output.short_save_id(done.duplicate_of)
        click.echo(f"identical to save:{earlier} of this step, which the run already had")


def show_sources(merged: Mapping[str, object] | None) -> None:
    """Print the origin of a merged or partial checkpoint. Other programs may have written other records."""
    if merged is None:
        return
    settings = {name: value for name, value in merged.items() if name not in ("method", "sources", "base")}
    described = f", {_described(settings)}" if settings else ""
    method = merged.get("method")
    origin = (
        "pulled in part from this checkpoint" if method == "pull" else f"merged from these checkpoints, method {method}"
    )
    click.echo(output.printable(f"{origin}{described}:"))
    sources = merged.get("sources")
    rows = []
    for source in [*(sources if isinstance(sources, (list, tuple)) else ()), merged.get("base")]:
        if isinstance(source, Mapping):
            weight = source.get("weight")
            rows.append(
                {
                    "run": source.get("run"),
                    "step": source.get("step"),
                    "save": output.short_save_id(str(source.get("save_id"))),
                    "store": output.short_save_id(str(source.get("store_id"))),
                    "weight": f"{weight:.6g}" if isinstance(weight, (int, float)) else "base",
                }
            )
    output.print_table(rows, numbers=("step", "weight"))
