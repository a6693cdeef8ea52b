"""Commands for releases of weights: publish and subscribe."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.follow import FollowedCheckpoints
from asymcheck.cli.options import (
    Report,
    command,
    open_existing,
    parse_duration,
    step_option,
    store_argument,
    target_option,
)
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import (
    AsymcheckError,
    CheckpointNotFoundError,
    FormatError,
    RecoveryError,
    RemoteUnreachableError,
    StoreNotFoundError,
    UnsupportedFormatError,
)
from asymcheck.storage.remote import is_uri
from asymcheck.store import Store
from asymcheck.types import Checkpoint

if TYPE_CHECKING:
    from asymcheck.publish.release import Publisher

Document = dict[str, Any]
_DTYPES = ("bfloat16", "float16", "float32")
_DAMAGE = (FormatError, RecoveryError)
follow_option = click.option(
    "--follow", is_flag=True, help="Continue with each newer checkpoint or release until interrupted."
)
poll_option = click.option(
    "--poll",
    "poll_s",
    metavar="TIME",
    type=parse_duration,
    default="1s",
    show_default=True,
    help="With --follow: time between two checks.",
)


@command("Publish the weights of a checkpoint to inference processes.")
@store_argument
@click.option("--to", "location", required=True, help="Directory or URI of the releases; created if missing.")
@click.option("--tensors", default="model.*", show_default=True, help="Publish tensors whose name matches this glob.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Cast floating-point tensors to this dtype.")
@step_option
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="Run of the checkpoint.")
@click.option("--full-every", type=int, default=8, show_default=True, help="Make one of this many releases full.")
@click.option("--keep", type=int, default=3, show_default=True, help="Number of newest releases to keep.")
@click.option("--create", is_flag=True, help="Create a remote location that was emptied since the last release.")
@follow_option
@poll_option
def publish(
    store: str,
    location: str,
    tensors: str,
    dtype: str | None,
    step: int | str | None,
    run: str,
    full_every: int,
    keep: int,
    create: bool,
    follow: bool,
    poll_s: float,
) -> Report:
    """Publish the weights of the newest checkpoint of STORE as a new release at LOCATION.

    A release appears with all its tensors, or not at all, and has a number. Releases are stored as differences from the
    previous one where that is smaller. If LOCATION is remote, releases are committed to STORE first, in the run
    "release".

    With --follow, each newer checkpoint is published. A line is printed for each release, also with --json.

    \b
    Examples:
      asymcheck publish checkpoints --to releases --dtype bfloat16
      asymcheck publish checkpoints --to hdfs://namenode:8020/releases/gpt2 --follow
    """
    import torch

    from asymcheck.publish.release import Publish, Publisher

    if follow and step is not None:
        raise click.UsageError("--follow publishes the newest checkpoints: leave out --step")
    cast = None if dtype is None else getattr(torch, dtype)
    rules = Publish(location, tensors, dtype=cast, full_every=full_every, keep=keep)
    opened = open_existing(store) if is_uri(location) else Store.open(store, read_only=True)
    with opened, Publisher(rules, opened, create=create) as publisher:
        newest = _Newest(opened, run, publisher)
        if follow:
            _repeat(newest.publish_newer, _show_release, poll_s)
        document = newest.publish(step)
    status = exit_status.WARNINGS if newest.has_skipped else exit_status.OK
    return Report(document, partial(_show_release, document), status)


class _Newest:
    """Publishes checkpoints of one run."""

    def __init__(self, store: Store, run: str, publisher: Publisher) -> None:
        self._store, self._run, self._publisher = store, run, publisher
        self._followed = FollowedCheckpoints(store)
        # Newest checkpoint at the last look. If it is damaged, an older one was published in its place.
        self._seen: str | None = None
        self._published: str | None = None  # save id of the checkpoint that was published last
        self.has_skipped = False  # whether the last release is of an older checkpoint

    def publish(self, step: int | str | None) -> Document:
        """Publish a checkpoint; return the document."""
        return self._commit(*self._restored(step))

    def publish_newer(self) -> Document | None:
        """Publish the newest checkpoint if this process or an earlier one has not published it; return the document."""
        line, _ = self._followed.readable_line(self._run)
        if not line or line[-1].save_id == self._seen:
            return None
        document = None
        if not self._is_published(line[-1]):
            checkpoint, copies = self._restored(None)
            # In place of a damaged checkpoint, an older one was restored.
            if not self._is_published(checkpoint):
                document = self._commit(checkpoint, copies)
        self._seen = line[-1].save_id
        return document

    def _is_published(self, checkpoint: Checkpoint) -> bool:
        """Tell whether the newest release has the weights of a checkpoint."""
        if self._published is not None:
            return checkpoint.save_id == self._published
        # An earlier process may have published another save of the step, of an abandoned generation.
        return self._publisher.last_step(since_ns=checkpoint.created_ns) == checkpoint.step

    def _restored(self, step: int | str | None) -> tuple[Checkpoint, dict[str, object]]:
        """Return a checkpoint and its weights, cast. The tensors that were cast are freed."""
        restored = self._store.restore(step, tensors=self._publisher.rules.tensors, run=self._run)
        for reason in restored.skipped:
            output.note(f"skipped {reason}")
        self.has_skipped = bool(restored.skipped)
        return restored.checkpoint, self._publisher.take(restored.state, copies=False)

    def _commit(self, checkpoint: Checkpoint, copies: dict[str, object]) -> Document:
        release = self._publisher.commit(copies, checkpoint.step)
        self._published = checkpoint.save_id
        return {"location": self._publisher.rules.location, **dataclasses.asdict(release)}


def _show_release(document: Document) -> None:
    kind = f"delta {document['deltas']} since a full release" if document["deltas"] else "full"
    sizes = f"{output.size(document['written_bytes'])} of {output.size(document['state_bytes'])}"
    click.echo(f"{document['location']}: release {document['number']}, step {document['step']}, {sizes}, {kind}")


@command("Write the newest release of weights to a file.")
@click.argument("location")
@target_option
@click.option("--part", help="Write only this part, for example 'model', without the prefix in names.")
@follow_option
@poll_option
def subscribe(location: str, target: Path, part: str | None, follow: bool, poll_s: float) -> Report:
    """Write the newest release at LOCATION to a file, verify every byte, and replace the file atomically.

    With --follow, the file is replaced by each newer release, and a line is printed for each one, also with --json.
    LOCATION need not exist yet. A damaged release is reported, and the file keeps its content until the next release.
    Readers of the file see a whole release at any time, because the new file is renamed to the old name.

    \b
    Examples:
      asymcheck subscribe releases --to model.safetensors --part model
      asymcheck subscribe hdfs://namenode:8020/releases/gpt2 --to model.safetensors --follow
    """
    if follow:
        _follow_releases(location, target, part, poll_s)
    document = _write_release(location, target, part)
    return Report(document, partial(_show_file, document))


def _follow_releases(location: str, target: Path, part: str | None, poll_s: float) -> None:
    """Write each newer release until interrupted. Wait for the first release, and for the next after a damaged one."""
    number, is_noted = 0, False

    def write_newer() -> Document | None:
        nonlocal number, is_noted
        try:
            document = _write_release(location, target, part, number, follows=True)
        except (StoreNotFoundError, CheckpointNotFoundError) as error:
            if number:
                raise
            if not is_noted:
                output.note(f"{error}. Waiting for the first release")
                is_noted = True
            return None
        number = document["number"]
        return document if "path" in document else None

    _repeat(write_newer, _show_file, poll_s)


def _write_release(location: str, target: Path, part: str | None, known: int = 0, *, follows: bool = False) -> Document:
    """Write the newest release and return the document, or only its number if it is ``known``.

    With ``follows``, print a message about a damaged release, and return its number.

    Raises:
        StoreNotFoundError, CheckpointNotFoundError: there is no release, or the location was deleted or replaced.
    """
    from asymcheck.convert.convert import Output, export_checkpoint
    from asymcheck.publish.release import RUN, training_step

    with Store.open(location, read_only=True) as opened:
        while True:
            complete = [row for row in opened.checkpoints(RUN) if row.complete]
            newest = max(complete, key=lambda row: row.step, default=None)
            if newest is None or newest.step < known:
                raise CheckpointNotFoundError(
                    f"{location} has no release{f' {known}' if known else ''}; {target} was not changed. Check the "
                    "location, and whether a training publishes there"
                )
            if newest.step == known:
                return {"number": known}
            # This release and no other one: an older one must not replace the file.
            step, destination = f"save:{newest.save_id}", Output(target, overwrite=True)
            try:
                done = export_checkpoint(opened, destination, step=step, run=RUN, part=part)
            except AsymcheckError as error:
                if all(row.save_id != newest.save_id for row in opened.checkpoints(RUN)):
                    # The training deleted the release, because it published newer ones meanwhile.
                    continue
                if not follows or isinstance(error, UnsupportedFormatError) or not isinstance(error, _DAMAGE):
                    raise
                output.note(f"release {newest.step} is damaged; waiting for the next one: {error}")
                return {"number": newest.step}
            return {
                "path": str(done.path),
                "number": newest.step,
                "step": training_step(opened, newest),
                "tensors": done.tensors,
                "bytes": done.nbytes,
            }


def _show_file(document: Document) -> None:
    content = f"{output.count(document['tensors'], 'tensor')}, {output.size(document['bytes'])}"
    click.echo(f"{document['path']}: release {document['number']}, step {document['step']}, {content}")


def _repeat(call: Callable[[], Document | None], show: Callable[[Document], None], poll_s: float) -> None:
    """Call until interrupted, and print each result. A location that does not answer is asked again."""
    as_json = click.get_current_context().params["as_json"]
    while True:
        try:
            document = call()
        except RemoteUnreachableError as error:
            output.note(str(error))
        else:
            if document is not None:
                output.print_json(document, indent=None) if as_json else show(document)
        time.sleep(poll_s)
