"""``asymcheck restore``: a checkpoint as a file or folder that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option, parse_size, ring_options, step_option
from asymcheck.config import DEFAULT_RUN
from asymcheck.store import Store

if TYPE_CHECKING:
    from asymcheck.interop.convert import Exported


@click.command(epilog=exits.HELP, short_help="Write a checkpoint to a .safetensors or .pt file, or a model folder.")
@click.argument("store", type=click.Path())
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
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@json_option
@click.pass_context
def restore(
    ctx: click.Context,
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
    as_json: bool,
) -> None:
    """Write a checkpoint of STORE to a file or folder, every byte verified.

    Memory stays bounded however large the checkpoint is, and the file gets its name when it is complete. Safetensors
    hold tensors only; a .pt file, read with torch.load(weights_only=True), holds plain values as well.

    Of what several ranks saved, the parts of each tensor are put together, unless --rank names one of them.

    STORE may also be a remote location, such as hdfs://namenode:8020/runs/gpt2: nothing else is needed on this machine.

    With --tier dram it is one that a killed process left complete in memory, durable or not: nothing but its ring is
    read, and the ring stays as it is. The ring of a living process is refused. Of several ranks all have to be there.

    \b
    Examples:
      asymcheck restore checkpoints --to weights.safetensors --part model
      asymcheck restore checkpoints --to my-model --part model --files-from gpt2
      asymcheck restore checkpoints --step 900 --to step-900.pt
      asymcheck restore checkpoints --tier dram --to last.pt
      asymcheck restore hdfs://namenode:8020/runs/gpt2 --to last.pt
    """
    from asymcheck.interop.convert import SHARD_BYTES, Output, export_checkpoint

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
    report(done, as_json=as_json)
    if max_shard_size is not None and done.format != "folder":
        output.note(f"{target} is one file, so --max-shard-size has no effect")
    ctx.exit(exits.WARNINGS if done.skipped else exits.OK)


def report(done: Exported, *, as_json: bool) -> None:
    """Say what was written, what was left out, which newer checkpoints were passed over, and what may be missing."""
    for reason in done.skipped:
        output.note(f"passed over {reason}")
    for hint in done.hints:
        output.note(hint)
    if as_json:
        output.print_json(done)
        return
    at = f"{done.checkpoint.run} step {done.checkpoint.step}"
    click.echo(f"{done.path}: {output.count(done.tensors, 'tensor')}, {output.size(done.nbytes)}, from {at}")
    if done.left_out:
        values = "value that is no tensor" if len(done.left_out) == 1 else "values that are no tensors"
        click.echo(f"left out: {len(done.left_out)} {values} ({output.few(done.left_out)}); a .pt file keeps them")
