"""``asymcheck push`` and ``asymcheck pull``: checkpoints to a remote location and back."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from asymcheck.cli import exits, output
from asymcheck.cli.options import json_option, step_option
from asymcheck.config import StoreConfig
from asymcheck.errors import InvalidInputError, SkippedCheckpointWarning
from asymcheck.format import layout
from asymcheck.interop.target import is_store
from asymcheck.migration.transfer_plan import selected
from asymcheck.migration.transfer_stats import Moved
from asymcheck.store import Store
from asymcheck.tiers.remote import RemoteTier, is_uri, parse_location


def _selection(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_option,
        click.option("--all", "everything", is_flag=True, help="All complete checkpoints on the line of training."),
        click.option("--run", default=None, help="Whose [default: 'default'; with --all: all]."),
        step_option,
    ):
        command = option(command)
    return command


@click.command(epilog=exits.HELP, short_help="Copy checkpoints to HDFS or a shared file system.")
@click.argument("store", type=click.Path())
@click.argument("location")
@_selection
def push(store: str, location: str, step: int | str | None, run: str | None, everything: bool, as_json: bool) -> None:
    """Copy checkpoints of STORE to LOCATION, where they survive the loss of this machine.

    LOCATION is hdfs://namenode:port/path, file:///path (a shared file system), or another URI that pyarrow knows. What
    is there already is not sent again; a push that was interrupted goes on where it was.

    \b
    Examples:
      asymcheck push checkpoints hdfs://namenode:8020/runs/gpt2
      asymcheck push checkpoints 'hdfs://namenode:8020/runs/gpt2?dfs.replication=2' --all
    """
    _check_one(step, everything=everything)
    with Store.open(store, read_only=True) as opened, output.progress("push") as progress:
        done = opened.push(location, step, run=run, everything=everything, progress=progress)
    _report(done, "sent", as_json=as_json)


@click.command(epilog=exits.HELP, short_help="Copy checkpoints from HDFS or a shared file system.")
@click.argument("location")
@click.argument("store", type=click.Path(path_type=Path))
@_selection
def pull(location: str, store: Path, step: int | str | None, run: str | None, everything: bool, as_json: bool) -> None:
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
    with Store.open(store) as opened, output.progress("pull") as progress:
        done = opened.pull(location, step, run=run, everything=everything, progress=progress)
    _report(done, "fetched", as_json=as_json)


def _check_selection(location: str, step: int | str | None, run: str | None, *, everything: bool) -> None:
    """Make sure that there is something to fetch: to open the store for writing makes one."""
    there = RemoteTier(parse_location(location), StoreConfig())
    with contextlib.closing(there), warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedCheckpointWarning)  # the pull says it
        selected(there, None if run is None else layout.check_run(run), step, everything=everything)


def _check_one(step: int | str | None, *, everything: bool) -> None:
    if everything and step is not None:
        raise click.UsageError("--all copies every step: leave out --step")


def _report(done: Moved, verb: str, *, as_json: bool) -> None:
    if as_json:
        output.print_json(done)
        return
    for name in done.committed:
        click.echo(f"{verb} {name}")
    plain = f" ({output.size(done.plain_bytes)} plain)" if done.plain_bytes > done.moved_bytes else ""
    moved = f"{output.size(done.moved_bytes)}{plain} in {output.count(done.packs, 'pack')}"
    there = f"; {output.count(done.present, 'checkpoint')} there already" if done.present else ""
    reused = f"; {output.count(done.reused_partitions, 'partition')} there already" if done.reused_partitions else ""
    click.echo(f"{output.count(len(done.committed), 'checkpoint')} {verb}, {moved}{reused}{there}")
