"""Commands that copy checkpoints: push and pull to and from a location, restore and convert to and from files."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import Report, command, parse_size, ring_options, step_option, store_argument
from asymcheck.config import DEFAULT_RUN, StoreConfig
from asymcheck.convert.export_target import format_of, is_store
from asymcheck.errors import InvalidInputError, NotFoundError, SkippedCheckpointWarning
from asymcheck.format.layout import check_run
from asymcheck.replication.transfer_plan import selected
from asymcheck.replication.transfer_stats import Moved
from asymcheck.storage.local_files import translated
from asymcheck.storage.remote import RemoteTier, is_uri, parse_location
from asymcheck.store import Store
from asymcheck.types import Checkpoint
from asymcheck.validation import check_step

if TYPE_CHECKING:
    from asymcheck.convert.convert import Exported


def _selection(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--all", "everything", is_flag=True, help="All complete checkpoints on the line of training."),
        click.option("--run", default=None, help="Whose [default: 'default'; with --all: all]."),
        step_option,
    ):
        function = option(function)
    return function


@command("Copy checkpoints to HDFS or a shared file system.")
@store_argument
@click.argument("location")
@_selection
def push(store: str, location: str, step: int | str | None, run: str | None, everything: bool) -> Report:
    """Copy checkpoints of STORE to LOCATION, where they survive the loss of this machine.

    LOCATION is hdfs://namenode:port/path, file:///path (a shared file system), or another URI that pyarrow
    knows. Data that the location has already is not sent again; an interrupted push goes on where it was.

    \b
    Examples:
      asymcheck push checkpoints hdfs://namenode:8020/runs/gpt2
      asymcheck push checkpoints 'hdfs://namenode:8020/runs/gpt2?dfs.replication=2' --all
    """
    _check_one(step, everything=everything)
    with Store.open(store, read_only=True) as opened, output.progress("push") as progress:
        done = opened.push(location, step, run=run, everything=everything, progress=progress)
    return Report(done, partial(_show_moved, done, "sent"))


@command("Copy checkpoints from HDFS or a shared file system.")
@click.argument("location")
@click.argument("store", type=click.Path(path_type=Path))
@_selection
def pull(location: str, store: Path, step: int | str | None, run: str | None, everything: bool) -> Report:
    """Copy checkpoints from LOCATION into STORE, every byte verified; STORE is made when there is none.

    'asymcheck restore LOCATION --to FILE' and Store.open(LOCATION) read a checkpoint without that.

    \b
    Examples:
      asymcheck pull hdfs://namenode:8020/runs/gpt2 checkpoints
      asymcheck pull file:///mnt/shared/gpt2 checkpoints --step 900
    """
    _check_one(step, everything=everything)
    if not is_uri(location):
        raise InvalidInputError(f"location {location!r}: give a URI; a store on this machine needs no pull")
    if not is_store(store):
        _check_selection(location, step, run, everything=everything)
    with Store.open(store, create=True) as opened, output.progress("pull") as progress:
        done = opened.pull(location, step, run=run, everything=everything, progress=progress)
    return Report(done, partial(_show_moved, done, "fetched"))


def _check_selection(location: str, step: int | str | None, run: str | None, *, everything: bool) -> None:
    """Make sure that there is something to fetch: to open the store for writing makes one."""
    there = RemoteTier(parse_location(location), StoreConfig())
    with contextlib.closing(there), warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedCheckpointWarning)  # the pull says it
        selected(there, None if run is None else check_run(run), step, everything=everything)


def _check_one(step: int | str | None, *, everything: bool) -> None:
    if everything and step is not None:
        raise click.UsageError("--all copies every step: leave out --step")


def _show_moved(done: Moved, verb: str) -> None:
    for name in done.committed:
        click.echo(f"{verb} {name}")
    plain = f" ({output.size(done.plain_bytes)} plain)" if done.plain_bytes > done.moved_bytes else ""
    moved = f"{output.size(done.moved_bytes)}{plain} in {output.count(done.packs, 'pack')}"
    there = f"; {output.count(done.present, 'checkpoint')} there already" if done.present else ""
    reused = f"; {output.count(done.reused_partitions, 'partition')} there already" if done.reused_partitions else ""
    click.echo(f"{output.count(len(done.committed), 'checkpoint')} {verb}, {moved}{reused}{there}")


@command("Write a checkpoint to a .safetensors or .pt file, or a model folder.")
@store_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="*.safetensors, *.pt (.pth, .bin), or a folder: the layout of Hugging Face.",
)
@step_option
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Whose checkpoint.")
@click.option("--part", default=None, help="Only what lies under this key, for instance 'model', by its names there.")
@click.option("--tensors", default="*", help="Only tensors whose whole name matches this glob.")
@click.option("--rank", type=int, default=None, help="Only what this rank saved [default: all, as whole tensors].")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=parse_size,
    default=None,
    help="Most bytes of tensors in one file of a folder, for instance 200MB or 2GiB [default: 5GB].",
)
@click.option(
    "--files-from",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="Copy the small files (config.json, tokenizer …) of this model folder into the new one.",
)
@ring_options
@click.option("--remote", default=None, help="Read from this location what is missing or damaged in STORE.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file or folder.")
def restore(
    store: str,
    target: Path,
    step: int | str | None,
    run: str,
    part: str | None,
    tensors: str,
    rank: int | None,
    max_shard_size: int | None,
    files_from: Path | None,
    tier: str,
    ring_folder: Path,
    remote: str | None,
    overwrite: bool,
) -> Report:
    """Write a checkpoint of STORE to a file or folder, every byte verified.

    Memory stays bounded however large the checkpoint is, and the file gets its name when it is complete. Safetensors
    hold tensors only; a .pt file, read with torch.load(weights_only=True), holds plain values as well.

    The parts of a tensor that several ranks saved are put together, unless --rank names one rank.

    STORE may also be a remote location, such as hdfs://namenode:8020/runs/gpt2: nothing else is needed on this machine.

    With --tier dram it is one that a killed process left complete in memory, durable or not: nothing but its ring is
    read, and the ring stays as it is. The ring of a living process is refused. The rings of all
    ranks are needed.

    \b
    Examples:
      asymcheck restore checkpoints --to weights.safetensors --part model
      asymcheck restore checkpoints --to my-model --part model --files-from gpt2
      asymcheck restore checkpoints --step 900 --to step-900.pt
      asymcheck restore checkpoints --tier dram --to last.pt
      asymcheck restore hdfs://namenode:8020/runs/gpt2 --to last.pt
    """
    from asymcheck.convert.convert import SHARD_BYTES, Output, export_checkpoint

    if rank is not None and tier == "dram":
        raise click.UsageError("--tier dram puts together what all ranks left in memory: leave out --rank")
    if remote is not None and tier == "dram":
        raise click.UsageError("--tier dram reads nothing but what is left in memory: leave out --remote")
    place = Output(target, overwrite=overwrite, max_shard_bytes=max_shard_size or SHARD_BYTES, files_from=files_from)
    with Store.open(store, read_only=True, remote=remote) as opened, output.progress("restore") as progress:
        done = export_checkpoint(
            opened,
            place,
            step=step,
            run=run,
            part=part,
            tensors=tensors,
            rank=rank,
            ring_folder=ring_folder if tier == "dram" else None,
            progress=progress,
        )
    if max_shard_size is not None and done.format != "folder":
        output.note(f"{target} is one file, so --max-shard-size has no effect")
    return _report_export(done)


def _report_export(done: Exported) -> Report:
    """Note passed-over checkpoints and what may be missing; report what was written."""
    for reason in done.skipped:
        output.note(f"passed over {reason}")
    for hint in done.hints:
        output.note(hint)
    return Report(done, partial(_show_export, done), exit_status.WARNINGS if done.skipped else exit_status.OK)


def _show_export(done: Exported) -> None:
    at = f"{done.checkpoint.run} step {done.checkpoint.step}"
    click.echo(f"{done.path}: {output.count(done.tensors, 'tensor')}, {output.size(done.nbytes)}, from {at}")
    if done.left_out:
        values = "value that is no tensor" if len(done.left_out) == 1 else "values that are no tensors"
        click.echo(f"left out: {len(done.left_out)} {values} ({output.few(done.left_out)}); a .pt file keeps them")


@command("Convert a .safetensors or .pt file or a model folder to a store, or back.")
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--step", type=int, default=None, help="Step to save as [default: 0], or to read [default: the newest].")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run to save to or to read.")
@click.option("--part", default=None, help="Of a store, only what lies under this key, as 'asymcheck restore' has it.")
@click.option("--overwrite", is_flag=True, help="Replace DST when it is a file or a model folder.")
def convert(src: Path, dst: Path, step: int | None, run: str, part: str | None, overwrite: bool) -> Report:
    """Convert SRC to DST, one of which is a store; memory stays bounded however large they are.

    The other is a .safetensors file, a Hugging Face model folder, or a .pt (.pth, .bin) file of torch.save; SRC may
    also be a folder of torch.distributed.checkpoint, or of DeepSpeed (ZeRO 1 to 3). Nothing in them is executed. The
    content of another program's file comes back unchanged, with one exception: a safetensors file whose metadata names
    no format gets the format pt, which transformers asks for. 'asymcheck restore' has more options for exports. Bytes
    that the store has already are not stored again.

    \b
    Examples:
      asymcheck convert gpt2/ store            the model folder becomes step 0 of the store
      asymcheck convert tuned.pt store --step 1
      asymcheck convert dcp/step-100 store --step 100
      asymcheck convert store gpt2-again/ --step 0
    """
    from asymcheck.convert.convert import Output, export_checkpoint, foreign_state

    if step is not None:
        check_step(step)
    check_run(run)
    with translated("look at", src):
        if not src.exists():
            raise NotFoundError(f"{src} does not exist")
    if is_store(src):
        if is_store(dst):
            raise InvalidInputError(f"{dst} is a store as well; copy the directory to copy a store")
        with Store.open(src, read_only=True) as opened, output.progress("convert") as progress:
            place = Output(dst, overwrite=overwrite)
            done = export_checkpoint(opened, place, step=step, run=run, part=part, progress=progress)
        return _report_export(done)
    if format_of(dst) != "folder":
        raise InvalidInputError(
            f"{dst}: one of SRC and DST must be a store, and {src} is none; the name of a new store has no suffix"
        )
    if part is not None:
        raise InvalidInputError(f"--part chooses from a checkpoint, and {src} is no store; leave it out")
    left_out: list[str] = []
    # What cannot be read is refused before there is a store.
    with (
        output.progress("convert") as progress,
        foreign_state(src, progress, left_out) as state,
        Store.open(dst, create=True) as opened,
    ):
        there = [item for item in opened.checkpoints(run) if item.step == (step or 0)]
        saved = opened.save(state, step=step or 0, run=run)
        new = _new(opened, saved)
    if there:
        output.note(
            f"{dst} had step {saved.step} of run {run!r} already, and has {len(there) + 1} of it now; this one is "
            f"save:{output.save(saved.save_id)}, and another --step keeps them apart"
        )
    if left_out:
        output.note(
            f"left out of {src}: {output.few(left_out)}, neither the model's weights nor small files beside them; "
            "keep the folder"
        )
    return Report(
        saved, partial(click.echo, f"{dst}: {run} step {saved.step}, {output.size(saved.state_bytes)}, {new}")
    )


def _new(store: Store, saved: Checkpoint) -> str:
    """Say how much was written of a checkpoint; tensors of a few bytes are in every manifest anew."""
    if not saved.written_bytes and saved.state_bytes:
        _, tensors = store.tensors(f"save:{saved.save_id}", run=saved.run)
        if all(tensor.inline for tensor in tensors):
            return "all of it in the manifest"
    return f"of which {output.size(saved.written_bytes or 0)} were new"
