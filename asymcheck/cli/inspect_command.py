"""``asymcheck inspect``: what is in a store."""

from __future__ import annotations

import click

from asymcheck.cli import exits, output
from asymcheck.config import DEFAULT_RUN
from asymcheck.recovery.inventory import StoredTensor
from asymcheck.recovery.resolve import check_run_exists
from asymcheck.store import Store
from asymcheck.types import Checkpoint

_HEX_SHOWN = 8
_METRICS_SHOWN = 3


@click.command(epilog=exits.HELP, short_help="List checkpoints, or the tensors of one.")
@click.argument("store", type=click.Path())
@click.option("--run", default=None, help="Only this run; for tensors, the run to look into [default: 'default'].")
@click.option("--step", type=int, default=None, help="List the tensors of this step's checkpoint.")
@click.option(
    "--tensors", "pattern", default=None, help="List tensors whose name matches this glob, for instance 'model.*'."
)
@click.option("--where", is_flag=True, help="Also say in which frames of which packs each tensor lies.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.pass_context
def inspect(
    ctx: click.Context,
    store: str,
    run: str | None,
    step: int | None,
    pattern: str | None,
    where: bool,  # noqa: FBT001 - click's way
    as_json: bool,  # noqa: FBT001 - click's way
) -> None:
    """Show the checkpoints of STORE, or the tensors of one of them.

    Without --step and --tensors: the checkpoints. With --step: the tensors of that step. With --tensors alone: those
    of the newest checkpoint.
    Reads manifests and pack indexes only, never a tensor; 'asymcheck verify' checks the bytes.
    """
    with Store.open(store, read_only=True) as opened:
        if step is None and pattern is None:
            ctx.exit(_show_checkpoints(opened, run, as_json=as_json))
        checkpoint, tensors = opened.tensors(step, pattern or "*", run=run or DEFAULT_RUN)
        _show_tensors(checkpoint, tensors, where=where, as_json=as_json)
        missing = sum(part.pack is None for tensor in tensors for part in tensor.partitions)
        if missing and not as_json:
            click.echo(
                f"MISSING: {output.count(missing, 'partition')} of them in no readable pack; see asymcheck verify"
            )
        ctx.exit(exits.WARNINGS if missing else exits.OK)


def _show_checkpoints(store: Store, run: str | None, *, as_json: bool) -> int:
    """Print them; return the exit status, which tells whether something seen is damaged."""
    if run is not None:
        check_run_exists(store.path, run, store.runs())
    checkpoints, usage = store.checkpoints(run), store.usage()
    status = exits.OK if all(item.complete and item.on_line is not None for item in checkpoints) else exits.WARNINGS
    if as_json:
        output.print_json({"store": str(store.path), "usage": usage, "checkpoints": checkpoints})
        return status
    freed = f", {output.size(usage.pooled_bytes)} in {output.count(usage.pooled_packs, 'freed pack')}"
    used = (
        f"{output.size(usage.pack_bytes)} in {output.count(usage.packs, 'pack')}{freed if usage.pooled_packs else ''}"
    )
    click.echo(f"store {store.path}  id {usage.store_id[:_HEX_SHOWN]}  {used}")
    if not checkpoints:
        click.echo("no checkpoints yet")
        return status
    newest, is_repeated = _newest(checkpoints), output.has_repeated_steps(checkpoints)
    output.print_table(
        [
            ("run", "left"),
            ("step", "right"),
            ("generation", "right"),
            *([("save", "left")] if is_repeated else []),
            ("saved (UTC)", "left"),
            ("state", "right"),
            ("is", "left"),
            ("metrics", "left"),
        ],
        [
            [
                item.run,
                str(item.step),
                str(item.generation),
                *([output.save(item.save_id)] if is_repeated else []),
                output.moment(item.created_ns),
                output.size(item.state_bytes),
                _standing(item, newest),
                _metrics(item),
            ]
            for item in checkpoints
        ],
    )
    if status:
        click.echo("something is damaged or unfinished: 'asymcheck verify' says what")
    return status


def _newest(checkpoints: list[Checkpoint]) -> dict[str, str]:
    """Return the save id of each run's newest complete checkpoint on its line."""
    return {item.run: item.save_id for item in checkpoints if item.complete and item.on_line}


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


def _show_tensors(checkpoint: Checkpoint, tensors: list[StoredTensor], *, where: bool, as_json: bool) -> None:
    if as_json:
        output.print_json({"checkpoint": checkpoint, "tensors": tensors})
        return
    total = output.size(sum(tensor.nbytes for tensor in tensors))
    click.echo(
        f"{checkpoint.run} step {checkpoint.step} generation {checkpoint.generation}: "
        f"{output.count(len(tensors), 'tensor')}, {total}"
    )
    output.print_table(
        [
            ("tensor", "left"),
            ("dtype", "left"),
            ("shape", "left"),
            ("bytes", "right"),
            ("role", "left"),
            *([("lies in", "left")] if where else []),
        ],
        [
            [
                " = ".join((tensor.name, *tensor.aliases)),
                tensor.dtype,
                "×".join(map(str, tensor.shape)) or "scalar",
                output.size(tensor.nbytes),
                tensor.role,
                *([_place(tensor)] if where else []),
            ]
            for tensor in tensors
        ],
    )


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
    ordered = sorted(frames)
    starts = [
        number
        for number, before in zip(ordered, [None, *ordered], strict=False)
        if before is None or number != before + 1
    ]
    ends = [
        number
        for number, after in zip(ordered, [*ordered[1:], None], strict=True)
        if after is None or after != number + 1
    ]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in zip(starts, ends, strict=True))
