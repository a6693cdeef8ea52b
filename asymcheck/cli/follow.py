"""``asymcheck inspect --follow``: a live view of the checkpoints of a running training. Read-only."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table

from asymcheck.cli import output
from asymcheck.errors import AsymcheckError, StorageError
from asymcheck.format.layout import check_run
from asymcheck.inspect.history import describe
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.storage.shm.orphaned_rings import survey_rings
from asymcheck.store import Store
from asymcheck.types import Checkpoint

_PAUSE_S = 1.0


@dataclasses.dataclass(frozen=True)
class RunView:
    """State of one run at one moment."""

    run: str
    is_running: bool  # whether a process holds a ring of the run
    step: int | None  # newest durable step on the line; None for none
    age_s: float | None  # time since the save of this step began [s]
    every_s: float | None  # time between the two newest checkpoints [s]
    state_bytes: int  # bytes of all tensors of the newest checkpoint
    memory_step: int | None  # newest step that is complete in memory
    remote_step: int | None  # newest step at the remote location; None also without one
    waiting: int | None  # checkpoints of the store that the remote location does not have; None without a location


def follow(location: str, run: str | None, ring_folder: Path, remote: str | None, *, as_json: bool) -> None:
    """Print the runs of a store again and again, until Ctrl-C."""
    if run is not None:
        check_run(run)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Store.open(location, read_only=True) as store,
        contextlib.ExitStack() as opened,
    ):
        console, live = output.console(), None
        if console.is_terminal and not as_json:
            live = opened.enter_context(Live(console=console, auto_refresh=False))
        before = used = store.resources.usage().pack_bytes
        here, there = FollowedCheckpoints(store), None
        while True:
            views, problem = [], None
            try:
                if there is None and remote is not None:
                    there = FollowedCheckpoints(opened.enter_context(Store.open(remote, read_only=True)))
                views = list(_look(here, there, run, ring_folder))
                used = store.resources.usage().pack_bytes
            except AsymcheckError as error:
                # The next look may succeed, for instance after the first push, or if the location answers again.
                problem = str(error)
                with contextlib.suppress(AsymcheckError):
                    views = list(_look(here, None, run, ring_folder))
                    used = store.resources.usage().pack_bytes
            if as_json:
                line = {"time_ns": time.time_ns(), "pack_bytes": used, "problem": problem}
                click.echo(json.dumps({**line, "runs": [dataclasses.asdict(view) for view in views]}))
            elif live is None:
                console.print(_table(views, used, used - before, problem or ""))
            else:
                live.update(_table(views, used, used - before, problem or ""), refresh=True)
            before = used
            time.sleep(_PAUSE_S)


class FollowedCheckpoints:
    """Complete checkpoints of one store or location. A look reads only the manifests of each newest checkpoint."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[str, CheckpointCache] = {}
        # Save id and bytes of the newest readable checkpoint of each run.
        self._sizes: dict[str, tuple[str, int]] = {}

    def of(self, run: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, oldest first. Their bytes and metrics are unknown."""
        return self._cache(run).refresh()

    def readable_line(self, run: str) -> tuple[list[Checkpoint], int]:
        """Return the checkpoints on the line up to the newest readable one, and the bytes of its tensors."""
        line = [item for item in self.of(run) if item.on_line]
        while line:
            size = self._size(run, line[-1])
            if size is not None:
                return line, size
            line.pop()
        return [], 0

    def _cache(self, run: str) -> CheckpointCache:
        return self._known.setdefault(run, CheckpointCache(self.store.resources.tier, check_run(run), metrics=False))

    def _size(self, run: str, item: Checkpoint) -> int | None:
        listing, (save_id, size) = self._cache(run).listing(item), self._sizes.get(run, ("", 0))
        if item.save_id == save_id:
            return size
        described = None if listing is None else describe(self.store.resources.tier, listing, None)
        if described is None or not described.complete:
            return None
        self._sizes[run] = item.save_id, described.state_bytes
        return described.state_bytes


def _look(
    here: FollowedCheckpoints, there: FollowedCheckpoints | None, run: str | None, ring_folder: Path
) -> Iterator[RunView]:
    """Yield the state of each run, from names, manifests and rings; reads no tensor data.

    Raises:
        AsymcheckError: the store or the location cannot be read.
    """
    rings = []
    # Without the ring folder of the training, only the column of the memory is empty.
    with contextlib.suppress(StorageError):
        rings = survey_rings(here.store.resources.tier, ring_folder, run, check=False)
    runs = {*here.store.runs(), *(ring.run for ring in rings if ring.run is not None)}
    for name in [run] if run is not None else sorted(runs):
        line, state_bytes = here.readable_line(name)
        newest = line[-1] if line else None
        own = [ring for ring in rings if ring.run == name]
        steps = [capture.step for ring in own for capture in ring.captures if capture.step is not None]
        copies = None if there is None else there.of(name)
        yield RunView(
            run=name,
            is_running=any(ring.is_alive for ring in own),
            step=None if newest is None else newest.step,
            age_s=None if newest is None else (time.time_ns() - newest.created_ns) / 1e9,
            every_s=None if len(line) < 2 else (line[-1].created_ns - line[-2].created_ns) / 1e9,  # noqa: PLR2004 - two ends
            state_bytes=state_bytes,
            memory_step=max(steps, default=None),
            remote_step=None if not copies else copies[-1].step,
            waiting=None if copies is None else len({row.save_id for row in line} - {row.save_id for row in copies}),
        )


def _table(views: list[RunView], used: int, grown: int, problem: str) -> Table:
    text = f"{output.size(used)} in packs, {output.size(abs(grown))} {'less' if grown < 0 else 'more'}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left", caption_justify="left")
    table.title, table.caption = f"{time.strftime('%H:%M:%S')}  {text}", output.printable(problem) or "Ctrl-C ends"
    for heading in ("run", "process", "durable", "age", "every", "state", "memory", "remote", "queue"):
        table.add_column(heading, no_wrap=True)
    for view in views:
        cells = [view.run, "running" if view.is_running else "none", _cell(view.step)]
        cells += [
            "" if seconds is None else output.duration(int(seconds * 1e9)) for seconds in (view.age_s, view.every_s)
        ]
        cells += [output.size(view.state_bytes), *map(_cell, (view.memory_step, view.remote_step, view.waiting))]
        table.add_row(*map(output.printable, cells))
    return table


def _cell(number: int | None) -> str:
    return "" if number is None else str(number)
