"""``asymcheck convert``: files of other formats into a store, and back."""

from __future__ import annotations

from pathlib import Path

import click

from asymcheck.arguments import check_step
from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option
from asymcheck.cli.restore_command import report
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import InvalidInputError, NotFoundError
from asymcheck.format.layout import check_run
from asymcheck.interop.target import format_of, is_store
from asymcheck.store import Store
from asymcheck.tiers.files import translated
from asymcheck.types import Checkpoint


@click.command(
    epilog=exits.HELP, short_help="Convert a .safetensors or .pt file or a model folder to a store, or back."
)
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--step", type=int, default=None, help="Step to save as [default: 0], or to read [default: the newest].")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run to save to or to read.")
@click.option("--part", default=None, help="Of a store, only what lies under this key, as 'asymcheck restore' has it.")
@click.option("--overwrite", is_flag=True, help="Replace DST when it is a file or a model folder.")
@json_option
@click.pass_context
def convert(
    ctx: click.Context,
    src: Path,
    dst: Path,
    step: int | None,
    run: str,
    part: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert SRC to DST, one of which is a store; memory stays bounded however large they are.

    The other is a .safetensors file, a Hugging Face model folder, or a .pt (.pth, .bin) file of torch.save; SRC may
    also be a folder of torch.distributed.checkpoint, or of DeepSpeed (ZeRO 1 to 3). Nothing in them is executed. What
    another program's file held comes back as it was, but that a safetensors file whose metadata names no format gets
    the format pt, which transformers asks for; 'asymcheck restore' has more options for the way out. Bytes that the
    store has already are not stored again.

    \b
    Examples:
      asymcheck convert gpt2/ store            the model folder becomes step 0 of the store
      asymcheck convert tuned.pt store --step 1
      asymcheck convert dcp/step-100 store --step 100
      asymcheck convert store gpt2-again/ --step 0
    """
    from asymcheck.interop.convert import Output, export_checkpoint, foreign_state

    if step is not None:
        check_step(step)
    check_run(run)
    with translated("look at", src):
        if not src.exists():
            raise NotFoundError(f"{src} does not exist")
    if is_store(src):
        _check_no_store(dst)
        with Store.open(src, read_only=True) as opened, output.progress("convert") as progress:
            place = Output(dst, overwrite=overwrite)
            done = export_checkpoint(opened, place, step=step, run=run, part=part, progress=progress)
        report(done, as_json=as_json)
        ctx.exit(exits.WARNINGS if done.skipped else exits.OK)
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
        Store.open(dst) as opened,
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
    if as_json:
        output.print_json(saved)
    else:
        click.echo(f"{dst}: {run} step {saved.step}, {output.size(saved.state_bytes)}, {new}")


def _new(store: Store, saved: Checkpoint) -> str:
    """Say how much was written of a checkpoint; tensors of a few bytes are in every manifest anew."""
    if not saved.written_bytes and saved.state_bytes:
        _, tensors = store.tensors(f"save:{saved.save_id}", run=saved.run)
        if all(tensor.inline for tensor in tensors):
            return "all of it in the manifest"
    return f"of which {output.size(saved.written_bytes or 0)} were new"


def _check_no_store(dst: Path) -> None:
    if is_store(dst):
        raise InvalidInputError(f"{dst} is a store as well; copy the directory to copy a store")
