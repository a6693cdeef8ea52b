"""Commands that copy checkpoints: push, pull, restore and convert."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import Report, command, parse_size, ring_options, step_option, store_argument, target_option
from asymcheck.config import DEFAULT_RUN, PARTIAL_RUN, RemoteConfig, StoreConfig
from asymcheck.convert.export_target import format_of, is_store
from asymcheck.errors import InvalidInputError, NotFoundError, SkippedCheckpointWarning, StoreNotFoundError
from asymcheck.format.layout import check_run
from asymcheck.policies.push_selection import Push
from asymcheck.replication.push_loop import PushLoop, follow
from asymcheck.replication.push_status import PushStatus
from asymcheck.replication.transfer_plan import selected
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.local_files import translated
from asymcheck.storage.remote import RemoteTier, is_uri, parse_location
from asymcheck.store import Store
from asymcheck.types import Checkpoint, Progress
from asymcheck.validation import check_no_uri, check_step

if TYPE_CHECKING:
    from asymcheck.convert.convert import Exported, Planned
    from asymcheck.convert.rename import Renames

_POLL_S = 0.5


def _selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--all", "everything", is_flag=True, help="Copy all complete checkpoints on the line of training."
        ),
        click.option("--run", help="Run to copy [default: 'default'; with --all: all runs]."),
        step_option,
    ):
        function = option(function)
    return function


@command("Copy checkpoints to a remote location, such as HDFS or S3.")
@store_argument
@click.argument("location")
@_selection_options
@click.option(
    "--follow", "follows", is_flag=True, help="Push each checkpoint as it becomes durable, until Ctrl-C or SIGTERM."
)
@click.option("--every", type=int, help="With --follow: push steps that are multiples of this.")
@click.option("--create", is_flag=True, help="Create a location that was emptied since an earlier push.")
@click.option("--limit-rate", metavar="SIZE", type=parse_size, help="Send at most SIZE per second, such as 50MB.")
def push(
    store: str,
    location: str,
    step: int | str | None,
    run: str | None,
    everything: bool,
    follows: bool,
    every: int | None,
    create: bool,
    limit_rate: int | None,
) -> Report:
    """Copy checkpoints of STORE to LOCATION, where they survive the loss of this machine.

    LOCATION is hdfs://namenode:port/path, s3://bucket/prefix, file:///path (a shared file system), or another URI.
    The first push creates LOCATION. Later pushes refuse a missing LOCATION, because its file system may not be mounted.
    Data that is already at LOCATION is not sent again. An interrupted push continues where it stopped.

    --follow pushes the checkpoints of one run, newest first, and waits for new ones. If STORE does not exist yet, the
    command first waits until a training creates it. A failed upload is tried again. Ctrl-C or SIGTERM ends the
    command after the present upload. A second signal cancels the upload.

    \b
    Examples:
      asymcheck push checkpoints hdfs://namenode:8020/runs/gpt2
      asymcheck push checkpoints 'hdfs://namenode:8020/runs/gpt2?dfs.replication=2' --all
      asymcheck push checkpoints hdfs://namenode:8020/runs/gpt2 --follow --limit-rate 50MB
    """
    _check_step_or_all(step, everything=everything)
    config = StoreConfig(remote=RemoteConfig(bytes_per_s=limit_rate))
    if follows and (everything or step is not None):
        raise click.UsageError("--follow pushes all checkpoints: leave out --all and --step")
    if follows and create:
        raise click.UsageError("--create applies to a push without --follow only")
    if every is not None and not follows:
        raise click.UsageError("--every applies to --follow only")
    if follows:
        return _follow_store(store, Push(location, every=every), run or DEFAULT_RUN, config)
    with Store.open(store, read_only=True, config=config) as opened, output.progress("push") as progress:
        done = opened.push(location, step, run=run, everything=everything, create=create, progress=progress)
    return Report(done, partial(_show_moved, done, "sent"))


def _follow_store(store: str, rules: Push, run: str, config: StoreConfig) -> Report:
    """Push the checkpoints of a run until a signal, and wait for the store before."""
    # Refuse invalid arguments now, not after the wait.
    check_run(run)
    parse_location(rules.remote)
    moved = Moved(rules.remote)
    try:
        opened = _open_when_created(store, config)
    except (KeyboardInterrupt, SystemExit):
        # A signal is the regular end, as during the pushes.
        return Report(moved, partial(_show_total, moved, "sent"))
    with opened, output.progress("push") as progress:
        loop = opened.training.push_loop(rules, run=run)
        _follow_loop(loop, progress)
    return Report(loop.moved, partial(_show_total, loop.moved, "sent"))


def _open_when_created(store: str, config: StoreConfig) -> Store:
    """Open a store for reading; wait until a training creates a missing one."""
    is_noted = False
    while True:
        try:
            return Store.open(store, read_only=True, config=config)
        except StoreNotFoundError as error:
            if not error.is_empty:
                raise
            if not is_noted:
                output.note(f"{error}. Waiting until a training creates the store")
                is_noted = True
        time.sleep(_POLL_S)


def _follow_loop(loop: PushLoop, progress: Progress) -> None:
    """Run a push loop until a signal, and report each upload and each new problem on standard error."""
    shown, problem, is_ending = 0, "", False

    def tick(status: PushStatus) -> None:
        nonlocal shown, problem, is_ending
        now = status.statistics
        new = status.intervals_since(shown)
        shown = status.traced
        for upload in [upload for upload in new if "failed" not in upload.detail]:
            sent = int(upload.detail["sent"])
            speed = output.size(round(sent / max(upload.seconds, 1e-3)))
            took = f"{output.size(sent)} in {upload.seconds:.1f} s, {speed}/s"
            output.note(f"sent step {upload.detail['step']}: {took}; {output.count(now.backlog, 'checkpoint')} waiting")
        if loop.is_ending and not is_ending and now.sending_step is not None:
            is_ending = True
            output.note(f"ending after the upload of step {now.sending_step}; a second signal cancels the upload")
        if now.problem != problem:
            problem = now.problem
            remedy = "the next push sends the rest" if loop.is_ending else "trying again"
            output.note(f"{problem}; {remedy}" if problem else "the push works again")
        if now.sending_step is not None:
            progress(now.done_bytes, now.total_bytes)

    follow(loop, tick, lets_signals_end_it=True)


@command("Copy checkpoints from a remote location into a store.")
@click.argument("location")
@click.argument("store", type=click.Path(path_type=Path, readable=False))
@_selection_options
@click.option("--tensors", help="Copy only tensors and plain values whose full name matches this glob.")
@click.option("--to-run", default=PARTIAL_RUN, show_default=True, help="With --tensors: run of the copy.")
def pull(
    location: str,
    store: Path,
    step: int | str | None,
    run: str | None,
    everything: bool,
    tensors: str | None,
    to_run: str,
) -> Report:
    """Copy checkpoints from LOCATION into STORE, and verify every byte. STORE is created if it does not exist.

    To read a checkpoint without copying it, use 'asymcheck restore LOCATION --to FILE' or Store.open(LOCATION).

    With --tensors, data of other tensors is not requested. The copy is a checkpoint of another run, which can be loaded
    and exported. No training can continue from it.

    \b
    Examples:
      asymcheck pull hdfs://namenode:8020/runs/gpt2 checkpoints
      asymcheck pull file:///mnt/shared/gpt2 checkpoints --step 900
      asymcheck pull s3://bucket/gpt2 checkpoints --tensors 'model.*'
    """
    _check_step_or_all(step, everything=everything)
    if tensors is None and to_run != PARTIAL_RUN:
        raise click.UsageError("--to-run applies to --tensors only")
    if not is_uri(location):
        raise InvalidInputError(
            f"location {location!r} is not a URI. Give a URI such as file:///mnt/checkpoints, or use a local store "
            "without a pull"
        )
    if not is_store(store):
        _check_selection(location, step, run, tensors, to_run, everything=everything)
    with Store.open(store, create=True) as opened, output.progress("pull") as progress:
        done = opened.pull(
            location, step, run=run, everything=everything, tensors=tensors, to_run=to_run, progress=progress
        )
    return Report(done, partial(_show_moved, done, "fetched"))


def _check_selection(
    location: str, step: int | str | None, run: str | None, tensors: str | None, to_run: str, *, everything: bool
) -> None:
    """Check that the location has the selected checkpoints and tensors, before the pull creates a store."""
    check_run(to_run)
    tier = RemoteTier(parse_location(location), StoreConfig())
    with contextlib.closing(tier), warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedCheckpointWarning)  # the pull warns again
        listings = selected(tier, None if run is None else check_run(run), step, everything=everything)
        if tensors is not None and not everything:
            from asymcheck.replication.partial_copy import Selection

            Selection(tensors, to_run).cut(tier, listings[0], read_manifests(tier, listings[0]))


def _check_step_or_all(step: int | str | None, *, everything: bool) -> None:
    if everything and step is not None:
        raise click.UsageError("--all copies every step: leave out --step")


def _show_moved(done: Moved, verb: str) -> None:
    for name in done.committed:
        click.echo(f"{verb} {name}")
    _show_total(done, verb)


def _show_total(done: Moved, verb: str) -> None:
    plain = f" ({output.size(done.plain_bytes)} uncompressed)" if done.plain_bytes > done.moved_bytes else ""
    moved = f"{output.size(done.moved_bytes)}{plain} in {output.count(done.packs, 'pack')}"
    present = [
        output.count(number, noun)
        for number, noun in ((done.reused_partitions, "partition"), (done.present, "checkpoint"))
        if number
    ]
    already_present = f"; already present: {', '.join(present)}" if present else ""
    click.echo(f"{output.count(len(done.committed), 'checkpoint')} {verb}, {moved}{already_present}")


@command("Write a checkpoint to a .safetensors or .pt file, or to a model folder.")
@store_argument
@target_option
@step_option
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run of the checkpoint.")
@click.option("--part", help="Write only this part of the state, for example 'model', without the prefix in names.")
@click.option("--tensors", default="*", help="Write only tensors whose full name matches this glob.")
@click.option("--rank", type=int, help="Write only the shards of this rank [default: whole tensors of all ranks].")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    type=parse_size,
    help="Maximum size of one file in a model folder, for example 200MB or 2GiB [default: 5GB].",
)
@click.option(
    "--files-from",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Copy small files (config.json, tokenizer …) from this model folder.",
)
@ring_options
@click.option("--remote", help="Read data that is missing or damaged in STORE from this remote location.")
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
    """Write a checkpoint of STORE to a file or folder, and verify every byte.

    The checkpoint is streamed, so memory use is bounded. The output appears under its name when it is complete. A
    .safetensors file holds tensors only. A .pt file also holds plain values, for torch.load(weights_only=True).

    Shards of several ranks are assembled to whole tensors, unless --rank selects one rank.

    STORE may also be a remote location, such as hdfs://namenode:8020/runs/gpt2.

    --tier memory exports a complete capture from the ring of a killed process, durable or not. Only the ring is read,
    and it is not changed. The rings of all ranks are needed. A ring of a running process is refused.

    \b
    Examples:
      asymcheck restore checkpoints --to weights.safetensors --part model
      asymcheck restore checkpoints --to my-model --part model --files-from gpt2
      asymcheck restore checkpoints --step 900 --to step-900.pt
      asymcheck restore checkpoints --tier memory --to last.pt
      asymcheck restore hdfs://namenode:8020/runs/gpt2 --to last.pt
    """
    from asymcheck.convert.convert import SHARD_BYTES, Output, export_checkpoint

    if rank is not None and tier == "memory":
        raise click.UsageError("--tier memory assembles the captures of all ranks: leave out --rank")
    if remote is not None and tier == "memory":
        raise click.UsageError("--tier memory reads ring files only: leave out --remote")
    destination = Output(
        target, overwrite=overwrite, max_shard_bytes=max_shard_size or SHARD_BYTES, files_from=files_from
    )
    with Store.open(store, read_only=True, remote=remote) as opened, output.progress("restore") as progress:
        done = export_checkpoint(
            opened,
            destination,
            step=step,
            run=run,
            part=part,
            tensors=tensors,
            rank=rank,
            ring_folder=ring_folder if tier == "memory" else None,
            progress=progress,
        )
    if max_shard_size is not None and done.format != "folder":
        output.note(f"--max-shard-size has no effect: {target} is a single file")
    return _report_export(done)


def _report_export(done: Exported) -> Report:
    from asymcheck.convert.convert import PlannedExport

    for reason in done.skipped:
        output.note(f"skipped {reason}")
    for hint in done.hints:
        output.note(hint)
    status = exit_status.WARNINGS if done.skipped else exit_status.OK
    if isinstance(done, PlannedExport):
        return Report(done.planned, partial(_show_planned, done.planned, done.left_out), status)
    return Report(done, partial(_show_export, done), status)


def _show_export(done: Exported) -> None:
    source = f"run {done.checkpoint.run}, step {done.checkpoint.step}"
    click.echo(f"{done.path}: {output.count(done.tensors, 'tensor')}, {output.size(done.nbytes)}, from {source}")
    _show_left_out(done.left_out)


def _show_left_out(names: Sequence[str]) -> None:
    if names:
        values = output.count(len(names), "plain value")
        click.echo(f"left out {values} ({output.abbreviated(names)}); write a .pt file to keep plain values")


@command("Convert a .safetensors file, .pt file or model folder to a store, or back.")
@click.argument("src", type=click.Path(path_type=Path, readable=False))
@click.argument("dst", type=click.Path(path_type=Path, readable=False))
@click.option(
    "--step",
    type=int,
    help="Step to save [default: that of a Trainer checkpoint, else 0] or to read [default: newest].",
)
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run to save or to read.")
@click.option(
    "--part", "parts", multiple=True, help="Convert only this part of the state, for example 'model'. May be repeated."
)
@click.option(
    "--rename",
    "pairs",
    type=(str, str),
    multiple=True,
    metavar="REGEX REPLACEMENT",
    help="Rename tensors as re.sub does, by the names that --dry-run prints. May be repeated.",
)
@click.option("--all", "everything", is_flag=True, help="Import all complete checkpoints of a Trainer's output folder.")
@click.option("--dry-run", is_flag=True, help="List the tensors that would be written, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST if it is a file or a model folder.")
def convert(
    src: Path,
    dst: Path,
    step: int | None,
    run: str,
    parts: tuple[str, ...],
    pairs: tuple[tuple[str, str], ...],
    everything: bool,
    dry_run: bool,
    overwrite: bool,
) -> Report:
    """Convert SRC to DST. One of them must be a store.

    The other one is a .safetensors file, a Hugging Face model folder, or a file of torch.save: .pt, .pth, .bin, or a
    .ckpt file of Lightning. SRC may also be a folder of torch.distributed.checkpoint or of DeepSpeed (ZeRO 1 to 3), or
    the output folder of a Trainer, whose newest complete checkpoint is imported. No code in SRC is executed.

    Data is streamed, so memory use is bounded. Data that the store already has is not stored again. An imported file is
    exported unchanged, with one exception: if the metadata of a safetensors file has no format entry, the export adds
    format=pt, which transformers requires. 'asymcheck restore' has more options for exports.

    \b
    Examples:
      asymcheck convert gpt2/ store            saves the model folder as step 0 of the store
      asymcheck convert tuned.pt store --step 1
      asymcheck convert last.ckpt store --part state_dict --rename '^state_dict' model
      asymcheck convert output/ store          saves the newest checkpoint of a Trainer
      asymcheck convert dcp/step-100 store --step 100
      asymcheck convert store gpt2-again/ --step 0
    """
    from asymcheck.convert.convert import Output, export_checkpoint
    from asymcheck.convert.rename import compile_renames

    if step is not None:
        check_step(step)
    check_run(run)
    renames = compile_renames(pairs)
    check_no_uri(src)
    with translated("access", src):
        if not src.exists():
            raise NotFoundError(f"{src} does not exist")
    if is_store(src):
        if is_store(dst):
            raise InvalidInputError(f"{src} and {dst} are both stores; to copy a store, copy its directory")
        if len(parts) > 1 or everything:
            raise click.UsageError("an export writes one part of one checkpoint: leave out --all and the second --part")
        with Store.open(src, read_only=True) as opened, output.progress("convert") as progress:
            destination = Output(dst, overwrite=overwrite, renames=renames, is_dry_run=dry_run)
            part = parts[0] if parts else None
            done = export_checkpoint(opened, destination, step=step, run=run, part=part, progress=progress)
        return _report_export(done)
    if format_of(dst) != "folder":
        raise InvalidInputError(
            f"neither {src} nor {dst} is a store; one must be a store, and the name of a new store has no suffix"
        )
    sources, status = _sources(src, dst, step, everything=everything)
    reports: list[Report] = []
    try:
        for path, number in sources:
            reports.append(_import(path, dst, number, run, parts, renames, dry_run=dry_run))
    except BaseException:
        if reports and not dry_run:
            saved = ", ".join(str(number) for _, number in sources[: len(reports)])
            output.note(
                f"{dst} already has step {saved} of {src}; to save no step twice, import the others from their folders"
            )
        raise
    document = {"imported": [report.document for report in reports]} if everything else reports[0].document

    def show() -> None:
        for report in reports:
            report.show()

    return Report(document, show, status)


def _sources(src: Path, dst: Path, step: int | None, *, everything: bool) -> tuple[list[tuple[Path, int]], int]:
    """Return the files or folders to import with their steps, and the exit status."""
    from asymcheck.convert.trainer_folder import is_checkpoint_folder, trainer_folder, trainer_step

    trainer = trainer_folder(src)
    if everything and step is not None:
        raise click.UsageError("--all imports every step: leave out --step")
    if not trainer.complete and (everything or (trainer.incomplete and not trainer.has_weights)):
        raise InvalidInputError(
            f"{src} has no complete checkpoint of a Trainer; give a folder such as {src}/checkpoint-500"
        )
    if not trainer.complete or (trainer.has_weights and not everything):
        if trainer.complete:
            newest = list(trainer.complete.values())[-1]
            output.note(
                f"importing the model in {src}; the folder also has "
                f"{output.count(len(trainer.complete), 'checkpoint')} of a Trainer. "
                f"Import the newest with 'asymcheck convert {newest} {dst}', or all with --all"
            )
        default = trainer_step(src) if src.is_dir() else None
        if default is None and step is None and is_checkpoint_folder(src):
            output.note(
                f"{src} has no valid trainer_state.json, so the Trainer may not have finished it. It is imported as "
                "step 0; pass --step for another one"
            )
        return [(src, (default or 0) if step is None else step)], exit_status.OK
    if trainer.incomplete:
        output.note(
            f"skipped unfinished {output.abbreviated(trainer.incomplete)} in {src}: no valid trainer_state.json"
        )
    status = exit_status.WARNINGS if trainer.incomplete else exit_status.OK
    if everything:
        return [(path, number) for number, path in trainer.complete.items()], status
    number, newest = list(trainer.complete.items())[-1]
    if len(trainer.complete) > 1:
        output.note(f"importing {newest}, the newest of {len(trainer.complete)} checkpoints; pass --all to import all")
    return [(newest, number if step is None else step)], status


def _import(
    src: Path, dst: Path, step: int, run: str, parts: tuple[str, ...], renames: Renames, *, dry_run: bool
) -> Report:
    """Save the content of SRC as one checkpoint of the store DST."""
    from asymcheck.convert.convert import foreign_state, plan_import

    left_out: list[str] = []
    # SRC is opened first, so that an unreadable SRC leaves no new store.
    with (
        output.progress("convert") as progress,
        foreign_state(src, progress, left_out, parts=parts, renames=renames) as state,
    ):
        if left_out:
            will = "would" if dry_run else "did"
            output.note(
                f"{will} not convert {output.abbreviated(left_out)} in {src}. Keep the folder if you need this data"
            )
        if dry_run:
            planned = plan_import(state, dst, step=step, run=run)
            return Report(planned, partial(_show_planned, planned))
        with Store.open(dst, create=True) as opened:
            earlier = sum(item.step == step for item in opened.checkpoints(run))
            saved = opened.save(state, step=step, run=run)
            written = _written(opened, saved)
    if earlier:
        output.note(
            f"{dst} already had step {saved.step} of run {run!r}, and now has {earlier + 1} checkpoints of this step. "
            f"The new one is save:{output.short_save_id(saved.save_id)}; pass another --step or --run"
        )
    return Report(
        saved, partial(click.echo, f"{dst}: run {run}, step {saved.step}, {output.size(saved.state_bytes)}, {written}")
    )


def _show_planned(planned: Planned, left_out: Sequence[str] = ()) -> None:
    rows = [
        {"tensor": item.name, "dtype": item.dtype, "shape": output.shape(item.shape), "size": output.size(item.nbytes)}
        for item in planned.tensors
    ]
    output.print_table(rows, numbers=("size",))
    _show_left_out(left_out)
    content = f"{output.count(len(rows), 'tensor')}, {output.size(planned.nbytes)}"
    click.echo(f"dry run, nothing was written: {planned.path}: run {planned.run}, step {planned.step}, {content}")


def _written(store: Store, saved: Checkpoint) -> str:
    written = saved.written_bytes or 0
    if not written and saved.state_bytes:
        _, tensors = store.tensors(f"save:{saved.save_id}", run=saved.run)
        if all(tensor.inline for tensor in tensors):
            # The bytes are in the manifest, which every checkpoint writes.
            written = saved.state_bytes
    return f"{output.size(written)} newly stored"
