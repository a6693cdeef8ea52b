"""``asymcheck inspect``: list checkpoints, tensors, plain values and rings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.follow import follow
from asymcheck.cli.locations import Locations, list_locations, note_unflushed_captures, report_rings
from asymcheck.cli.merge_command import show_sources
from asymcheck.cli.options import Report, command, parse_checkpoint, ring_options, show_remote_option, store_argument
from asymcheck.config import DEFAULT_RUN
from asymcheck.format.spans import shown_spans, spans_of
from asymcheck.inspect.inventory import StoredPartition, StoredTensor, StoredValue, merge_of
from asymcheck.inspect.values import shortened
from asymcheck.restore.resolve import check_run_exists
from asymcheck.store import Store
from asymcheck.types import Checkpoint, Usage

_HEX_SHOWN = 8
_METRICS_SHOWN = 3
_ITEMS_SHOWN = 5
"""Items of a list of plain values that are shown without ``--tensors``."""


@command("List checkpoints, or the tensors or values of one checkpoint.")
@store_argument
@click.option("--run", help="Run to list [default: all runs; for tensors and values: 'default'].")
@click.option(
    "--step",
    metavar="STEP",
    type=parse_checkpoint,
    help="List the tensors of this step; save:DIGITS selects one save of a step, and best:METRIC the best step.",
)
@click.option("--tensors", "pattern", help="List the tensors whose names match this glob, for example 'model.*'.")
@click.option("--values", is_flag=True, help="List plain values (counters, hyperparameters …) instead of tensors.")
@ring_options
@show_remote_option
@click.option("--where", is_flag=True, help="Also show the packs and frames that store each tensor.")
@click.option("--follow", "follows", is_flag=True, help="Show the runs of a running training until Ctrl-C.")
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
    follows: bool,
) -> Report:
    """List the checkpoints of STORE, or the tensors or values of one checkpoint.

    \b
    (no option)      list checkpoints
    --step           list the tensors of one checkpoint
    --tensors        list matching tensors [default: of the newest checkpoint]
    --values         list plain values; --tensors is then a glob of their names
    --tier memory    list the rings in memory and their complete captures
    --follow         show newest steps, ages and places of copies, once a second; with --json, one line each

    Reads manifests and pack indexes only; 'asymcheck verify' checks the tensor data. With --tier memory, reads and
    checks every frame in the rings of killed processes.
    """
    is_one_checkpoint = step is not None or pattern is not None or values
    if tier == "memory" and (is_one_checkpoint or where or remote is not None):
        raise click.UsageError("--tier memory lists rings: leave out --step, --tensors, --values, --where and --remote")
    if remote is not None and is_one_checkpoint:
        raise click.UsageError("--remote lists checkpoints: leave out --step, --tensors and --values")
    if where and not is_one_checkpoint:
        raise click.UsageError("--where lists tensors: also pass --step or --tensors")
    if values and where:
        raise click.UsageError("plain values are stored in the manifest: leave out --where")
    if follows:
        if is_one_checkpoint or tier == "memory":
            raise click.UsageError("--follow shows runs: leave out --step, --tensors, --values and --tier")
        context = click.get_current_context()
        follow(store, run, ring_folder, remote, as_json=context.params["as_json"])
        context.exit(exit_status.OK)
    with Store.open(store, read_only=True) as opened:
        if tier == "memory":
            return report_rings(opened, run, ring_folder)
        if not is_one_checkpoint:
            note_unflushed_captures(opened, run, ring_folder)
            locations = None if remote is None else list_locations(opened, remote, run)
            return _report_checkpoints(opened, run, locations)
        run = DEFAULT_RUN if run is None else run
        if values:
            checkpoint, listed = opened.values(step, pattern or "*", run=run)
            merged = merge_of(opened.resources.tier, checkpoint)
            show = partial(_show_values, checkpoint, listed, merged, everything=pattern is not None)
            return Report({"checkpoint": checkpoint, "values": listed, "merged": merged}, show)
        checkpoint, tensors = opened.tensors(step, pattern or "*", run=run)
        missing = sum(part.pack is None for tensor in tensors for part in tensor.partitions)
        merged = merge_of(opened.resources.tier, checkpoint)
        show = partial(_show_tensors, checkpoint, tensors, missing, merged, where=where)
        document = {"checkpoint": checkpoint, "tensors": tensors, "merged": merged}
        return Report(document, show, exit_status.WARNINGS if missing else exit_status.OK)


def _report_checkpoints(store: Store, run: str | None, locations: Locations | None) -> Report:
    if run is not None:
        check_run_exists(store.location, run, [*store.runs(), *(() if locations is None else locations.remote_runs)])
    checkpoints, usage = store.checkpoints(run), store.resources.usage()
    is_damaged = any(not item.complete or item.on_line is None for item in checkpoints)
    status = exit_status.WARNINGS if is_damaged else exit_status.OK
    document = {
        "store": store.location,
        "usage": usage,
        "checkpoints": checkpoints,
        "remote": locations and locations.remote_location,
        "there": locations and list(locations.remote.values()),
    }
    heading = f"store {store.location}  id {usage.store_id[:_HEX_SHOWN]}  {_used(usage)}"
    shown = checkpoints if locations is None else locations.all
    show = partial(_show_checkpoints, heading, shown, locations, status)
    return Report(document, show, status)


def _used(usage: Usage) -> str:
    used = f"{output.size(usage.pack_bytes)} in {output.count(usage.packs, 'pack')}"
    freed = f", {output.size(usage.pooled_bytes)} recyclable"
    return used + freed if usage.pooled_packs else used


def _show_checkpoints(heading: str, checkpoints: list[Checkpoint], locations: Locations | None, status: int) -> None:
    click.echo(heading)
    if not checkpoints:
        click.echo("no checkpoints yet")
        return
    # The newest complete checkpoint on the line of each run.
    newest = {item.run: item.save_id for item in checkpoints if item.complete and item.on_line}
    is_shared = any(item.world_size > 1 for item in checkpoints)
    rows = [
        {
            **identity,
            "saved (UTC)": output.timestamp(item.created_ns),
            "age": output.age(item.created_ns).removesuffix(" ago"),
            "ranks": item.ranks if is_shared else None,
            "size": output.size(item.state_bytes),
            "status": output.status(item) or ("newest" if newest.get(item.run) == item.save_id else ""),
            "stored": None if locations is None else locations.describe(item),
            "metrics": output.metrics(item.metrics, _METRICS_SHOWN),
        }
        for identity, item in zip(output.identity_columns(checkpoints), checkpoints, strict=True)
    ]
    output.print_table(rows, numbers=("step", "generation", "ranks", "size"))
    if status:
        click.echo("some checkpoints are damaged or incomplete; run 'asymcheck verify' for details")


def _list_of(value: StoredValue) -> tuple[object, str, bool]:
    """Return the rank and the list that a value belongs to, or else its own name."""
    name, _, number = value.name.rpartition(".")
    return (value.rank, name, True) if number.isdigit() else (value.rank, value.name, False)


def _show_values(
    checkpoint: Checkpoint, values: list[StoredValue], merged: Mapping[str, object] | None, *, everything: bool
) -> None:
    is_shared = checkpoint.world_size > 1
    _show_heading(checkpoint, output.count(len(values), "plain value"), merged)
    rows: list[dict[str, object]] = []
    for _, items in itertools.groupby(values, _list_of):
        shown = list(items)
        rows += [
            {"rank": item.rank if is_shared else None, "name": item.name, "value": shortened(item.text) or ""}
            for item in (shown if everything else shown[:_ITEMS_SHOWN])
        ]
        if not everything and len(shown) > _ITEMS_SHOWN:
            name = f"{shown[0].name.rpartition('.')[0]}.*"
            rows.append({"rank": None, "name": name, "value": f"… {len(shown) - _ITEMS_SHOWN:,} more"})
    output.print_table(rows, numbers=["rank"])


def _show_heading(checkpoint: Checkpoint, content: str, merged: Mapping[str, object] | None) -> None:
    ranks = f", {checkpoint.world_size} ranks" if checkpoint.world_size > 1 else ""
    title = f"run {checkpoint.run}, step {checkpoint.step}, generation {checkpoint.generation}"
    click.echo(f"{title}: {content}{ranks}")
    show_sources(merged)


def _show_tensors(
    checkpoint: Checkpoint,
    tensors: list[StoredTensor],
    missing: int,
    merged: Mapping[str, object] | None,
    *,
    where: bool,
) -> None:
    groups = _group_by_tensor(tensors)
    content = f"{output.count(len(groups), 'tensor')}, {output.size(sum(map(_nbytes, groups)))}"
    _show_heading(checkpoint, content, merged)
    rows = [
        {
            "tensor": " = ".join((shards[0].name, *shards[0].aliases)),
            "dtype": shards[0].dtype,
            "shape": output.shape(shards[0].global_shape),
            "shards": len(_distinct(shards)) if checkpoint.world_size > 1 else None,
            "size": output.size(_nbytes(shards)),
            "role": shards[0].role,
            "stored in": ", ".join(dict.fromkeys(map(_location, shards))) if where else None,
        }
        for shards in groups
    ]
    output.print_table(rows, numbers=("shards", "size"))
    _show_encodings(tensors)
    if missing:
        partitions = "1 partition is" if missing == 1 else f"{missing} partitions are"
        click.echo(f"MISSING: {partitions} in no readable pack; run 'asymcheck verify' for details")


def _group_by_tensor(tensors: list[StoredTensor]) -> list[list[StoredTensor]]:
    groups: dict[object, list[StoredTensor]] = {}
    for number, tensor in enumerate(tensors):
        key: tuple[object, ...] = (tensor.name, tensor.dtype, tensor.global_shape)
        # Different tensors of one rank may have the same name.
        if any(shard.rank == tensor.rank for shard in groups.get(key, ())):
            key = (*key, number)
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _distinct(shards: list[StoredTensor]) -> list[StoredTensor]:
    """Return the shards of a tensor without replicas."""
    return list({(shard.offset, shard.shape): shard for shard in reversed(shards)}.values())


def _nbytes(shards: list[StoredTensor]) -> int:
    return sum(shard.nbytes for shard in _distinct(shards))


def _show_encodings(tensors: list[StoredTensor]) -> None:
    """Print the stored bytes per role and codec, if any partition is encoded.

    A partition with bytes of several roles is counted once, in a row of these roles.
    """
    roles: dict[str, dict[str, None]] = {}
    stored_partitions: dict[str, StoredPartition] = {}
    for tensor in tensors:
        for partition in tensor.partitions:
            roles.setdefault(partition.digest, {})[tensor.role] = None
            stored_partitions[partition.digest] = partition
    encoded: dict[tuple[tuple[str, ...], str], list[StoredPartition]] = {}
    for digest, partition in stored_partitions.items():
        if partition.codec is not None:
            encoded.setdefault((tuple(roles[digest]), partition.codec), []).append(partition)
    if all(codec == "identity" for _, codec in encoded):
        return
    reasons = {(tensor.role, codec): why for tensor in tensors for codec, why in tensor.why.items()}
    rows = []
    for (names, codec), partitions in encoded.items():
        plain = sum(partition.partition_length for partition in partitions)
        stored = sum(partition.stored_length or 0 for partition in partitions)
        rows.append(
            {
                "role": ", ".join(names),
                "codec": codec,
                "partitions": len(partitions),
                "plain": output.size(plain),
                "stored": output.size(stored),
                "ratio": f"{plain / stored:,.2f}" if stored else "",
                "reason": ", ".join(dict.fromkeys(reasons[name, codec] for name in names if (name, codec) in reasons)),
            }
        )
    output.print_table(rows, numbers=("partitions", "plain", "stored", "ratio"))


def _location(tensor: StoredTensor) -> str:
    if tensor.inline:
        return "manifest"
    packs: dict[str, list[int]] = {}
    missing = 0
    for partition in tensor.partitions:
        if partition.pack is None or partition.frame is None:
            missing += 1
        else:
            packs.setdefault(partition.pack[:_HEX_SHOWN], []).append(partition.frame)
    locations = [f"pack {pack} frame {shown_spans(spans_of(frames))}" for pack, frames in packs.items()]
    return ", ".join([*locations, *([f"{missing} MISSING"] if missing else [])])
