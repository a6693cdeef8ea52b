"""``asymcheck inspect``: the content of a store."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import Report, command, parse_which, places_option, ring_options, store_argument
from asymcheck.cli.places import Places, note_captures_in_memory, places_of, report_rings
from asymcheck.config import DEFAULT_RUN
from asymcheck.inspect.inventory import StoredPartition, StoredTensor, StoredValue
from asymcheck.inspect.values import shortened
from asymcheck.restore.resolve import check_run_exists
from asymcheck.store import Store
from asymcheck.types import Checkpoint, Usage

_HEX_SHOWN = 8
_METRICS_SHOWN = 3


@command("List checkpoints, or the tensors or values of one.")
@store_argument
@click.option("--run", default=None, help="Only this run; for tensors, the run to look into [default: 'default'].")
@click.option(
    "--step",
    metavar="STEP",
    callback=parse_which,
    default=None,
    help="List the tensors of this step's checkpoint; save:DIGITS for one of its saves.",
)
@click.option(
    "--tensors", "pattern", default=None, help="List tensors whose name matches this glob, for instance 'model.*'."
)
@click.option("--values", is_flag=True, help="List the plain values (counters, hyperparameters …) instead of tensors.")
@ring_options
@places_option
@click.option("--where", is_flag=True, help="Also say in which frames of which packs each tensor lies.")
def inspect(
    store: str,
    run: str | None,
    step: int | str | None,
    pattern: str | None,
    values: bool,
    tier: str,
    ring_folder: Path,
    remote: str | None,
    where: bool,
) -> Report:
    """Show the checkpoints of STORE, or the tensors of one of them.

    Without --step and --tensors: the checkpoints. With --step: the tensors of that step. With --tensors alone: those
    of the newest checkpoint. With --values: the plain values in their place, and --tensors is a glob of their names.
    With --tier dram: the rings in memory, of living processes and of killed ones, and what
    is complete in them; every frame of what killed processes left is read and checked.
    The other forms read manifests and pack indexes only, never a tensor; 'asymcheck verify' checks the bytes.
    """
    of_one = step is not None or pattern is not None or values
    if tier == "dram" and (of_one or where or remote is not None):
        raise click.UsageError("--tier dram lists rings: leave out --step, --tensors, --values, --where and --remote")
    if remote is not None and of_one:
        raise click.UsageError("--remote lists checkpoints: leave out --step, --tensors and --values")
    if where and not of_one:
        raise click.UsageError("--where is about tensors: give --step or --tensors, too")
    if values and where:
        raise click.UsageError("plain values lie in the manifest: leave out --where")
    with Store.open(store, read_only=True) as opened:
        if tier == "dram":
            return report_rings(opened, run, ring_folder)
        if not of_one:
            note_captures_in_memory(opened, run, ring_folder)
            places = None if remote is None else places_of(opened, remote, run)
            return _checkpoints(opened, run, places)
        if values:
            checkpoint, found = opened.values(step, pattern or "*", run=run or DEFAULT_RUN)
            return Report({"checkpoint": checkpoint, "values": found}, partial(_show_values, checkpoint, found))
        checkpoint, tensors = opened.tensors(step, pattern or "*", run=run or DEFAULT_RUN)
        missing = sum(part.pack is None for tensor in tensors for part in tensor.partitions)
        show = partial(_show_tensors, checkpoint, tensors, missing, where=where)
        document = {"checkpoint": checkpoint, "tensors": tensors}
        return Report(document, show, exit_status.WARNINGS if missing else exit_status.OK)


def _checkpoints(store: Store, run: str | None, places: Places | None) -> Report:
    if run is not None:
        check_run_exists(store.location, run, [*store.runs(), *(() if places is None else places.runs)])
    checkpoints, usage = store.checkpoints(run), store.usage()
    status = (
        exit_status.OK
        if all(item.complete and item.on_line is not None for item in checkpoints)
        else exit_status.WARNINGS
    )
    document = {
        "store": store.location,
        "usage": usage,
        "checkpoints": checkpoints,
        "remote": places and places.location,
        "there": places and list(places.there.values()),
    }
    heading = f"store {store.location}  id {usage.store_id[:_HEX_SHOWN]}  {_used(usage)}"
    show = partial(_show_checkpoints, heading, checkpoints if places is None else places.all, places, status)
    return Report(document, show, status)


def _used(usage: Usage) -> str:
    used = f"{output.size(usage.pack_bytes)} in {output.count(usage.packs, 'pack')}"
    freed = f", {output.size(usage.pooled_bytes)} in {output.count(usage.pooled_packs, 'freed pack')}"
    return used + freed if usage.pooled_packs else used


def _show_checkpoints(heading: str, checkpoints: list[Checkpoint], places: Places | None, status: int) -> None:
    click.echo(heading)
    if not checkpoints:
        click.echo("no checkpoints yet")
        return
    is_repeated = output.has_repeated_steps(checkpoints)
    # Of each run, the newest complete checkpoint on its line.
    newest = {item.run: item.save_id for item in checkpoints if item.complete and item.on_line}
    is_shared = any(item.world_size > 1 for item in checkpoints)
    rows = [
        {
            "run": item.run,
            "step": item.step,
            "generation": item.generation,
            "save": output.save(item.save_id) if is_repeated else None,
            "saved (UTC)": output.moment(item.created_ns),
            "ranks": item.ranks if is_shared else None,
            "state": output.size(item.state_bytes),
            "is": _standing(item, newest),
            "lies": None if places is None else places.of(item),
            "metrics": _metrics(item),
        }
        for item in checkpoints
    ]
    output.print_table(rows, numbers=("step", "generation", "ranks", "state"))
    if status:
        click.echo("something is damaged or unfinished: 'asymcheck verify' says what")


def _standing(item: Checkpoint, newest: dict[str, str]) -> str:
    if not item.complete:
        return "incomplete or damaged"
    if item.on_line is None:
        return "unknown: a head record is lost"
    if not item.on_line:
        return "abandoned"
    return "newest" if newest.get(item.run) == item.save_id else ""


def _metrics(item: Checkpoint) -> str:
    shown = list(item.metrics.items())[:_METRICS_SHOWN]
    more = " …" if len(item.metrics) > _METRICS_SHOWN else ""
    return ", ".join(f"{name} {value:.6g}" for name, value in shown) + more


def _show_values(checkpoint: Checkpoint, values: list[StoredValue]) -> None:
    is_shared = checkpoint.world_size > 1
    ranks = f", {output.count(checkpoint.world_size, 'rank')}" if is_shared else ""
    click.echo(f"{_title(checkpoint)}: {output.count(len(values), 'plain value')}{ranks}")
    rows = [
        {"rank": one.rank if is_shared else None, "value": one.name, "is": shortened(one.text) or ""} for one in values
    ]
    output.print_table(rows, numbers=["rank"])


def _title(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.run} step {checkpoint.step} generation {checkpoint.generation}"


def _show_tensors(checkpoint: Checkpoint, tensors: list[StoredTensor], missing: int, *, where: bool) -> None:
    listed = _by_tensor(tensors)
    total = output.size(sum(map(_nbytes, listed)))
    ranks = f", {output.count(checkpoint.world_size, 'rank')}" if checkpoint.world_size > 1 else ""
    click.echo(f"{_title(checkpoint)}: {output.count(len(listed), 'tensor')}, {total}{ranks}")
    rows = [
        {
            "tensor": " = ".join((same[0].name, *same[0].aliases)),
            "dtype": same[0].dtype,
            "shape": "×".join(map(str, same[0].global_shape)) or "scalar",
            "parts": len(_different(same)) if ranks else None,
            "bytes": output.size(_nbytes(same)),
            "role": same[0].role,
            "lies in": ", ".join(dict.fromkeys(map(_place, same))) if where else None,
        }
        for same in listed
    ]
    output.print_table(rows, numbers=("parts", "bytes"))
    _show_encodings(tensors)
    if missing:
        click.echo(f"MISSING: {output.count(missing, 'partition')} of them in no readable pack; see asymcheck verify")


def _by_tensor(tensors: list[StoredTensor]) -> list[list[StoredTensor]]:
    """Return what ranks saved of each tensor."""
    found: dict[object, list[StoredTensor]] = {}
    for number, tensor in enumerate(tensors):
        same = (tensor.name, tensor.dtype, tensor.global_shape)
        # Within one rank names may repeat, and stand for different tensors.
        key = same if not any(one.rank == tensor.rank for one in found.get(same, ())) else (*same, number)
        found.setdefault(key, []).append(tensor)
    return list(found.values())


def _different(same: list[StoredTensor]) -> list[StoredTensor]:
    """Return the parts of a tensor, those that several ranks have once."""
    return list({(part.offset, part.shape): part for part in reversed(same)}.values())


def _nbytes(same: list[StoredTensor]) -> int:
    return sum(part.nbytes for part in _different(same))


def _show_encodings(tensors: list[StoredTensor]) -> None:
    """Say by role and codec how much was stored, and why so, if any codec but identity was used."""
    seen: dict[tuple[str, str], dict[str, StoredPartition]] = {}
    reasons = {(tensor.role, codec): why for tensor in tensors for codec, why in tensor.why.items()}
    for tensor in tensors:
        for one in tensor.partitions:
            if one.codec is not None:
                seen.setdefault((tensor.role, one.codec), {})[one.digest] = one
    if all(codec == "identity" for _, codec in seen):
        return
    rows = []
    for (role, codec), found in seen.items():
        plain = sum(one.partition_length for one in found.values())
        stored = sum(one.stored_length or 0 for one in found.values())
        rows.append(
            {
                "role": role,
                "stored as": codec,
                "partitions": len(found),
                "bytes": output.size(plain),
                "stored": output.size(stored),
                "ratio": f"{plain / stored:,.2f}" if stored else "",
                "why": reasons.get((role, codec), ""),
            }
        )
    output.print_table(rows, numbers=("partitions", "bytes", "stored", "ratio"))


def _place(tensor: StoredTensor) -> str:
    if tensor.inline:
        return "manifest"
    packs: dict[str, list[int]] = {}
    missing = 0
    for partition in tensor.partitions:
        if partition.pack is None or partition.frame is None:
            missing += 1
        else:
            packs.setdefault(partition.pack[:_HEX_SHOWN], []).append(partition.frame)
    places = [f"pack {pack} frame {_frames(frames)}" for pack, frames in packs.items()]
    return ", ".join([*places, *([f"{missing} MISSING"] if missing else [])])


def _frames(frames: list[int]) -> str:
    """Return frame numbers as ranges, for instance ``1-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(frames):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
