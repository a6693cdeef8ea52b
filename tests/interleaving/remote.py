"""Pushes of a store to a mounted file system and pulls from there, and deletions and collections there."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from asymcheck.config import DEFAULT_RUN, RemoteConfig
from asymcheck.executor import carry_out
from asymcheck.format import layout
from asymcheck.replication import pack_sender, push
from asymcheck.storage.remote import deadline
from asymcheck.storage.remote.readers import Readers
from asymcheck.store import Store
from tests.crash import states
from tests.crash.actions import Action
from tests.crash.states import Journal, fingerprint, make_state
from tests.interleaving.gate import EPOCH_S

_T = TypeVar("_T")
_LONG_AGO_S = 1_000_000_000
"""Time of files that are older than the grace period of a collection. Files of the processes are younger."""
CONFIG = dataclasses.replace(
    states.CONFIG,
    slots=1,
    remote=RemoteConfig(uploads=1, reads=1, compression="off", grace_s=EPOCH_S - _LONG_AGO_S - 1),
)
ACTIONS = ("push", "pull", "far-delete", "far-gc")


def uri_of(base: Path) -> str:
    """Return the location for the store in ``base/store``."""
    return (base / "remote").as_uri()


def run_without_threads() -> None:
    """Let the calling thread run the operations of clients and the reads of frames, because a gate stops one thread."""

    def begin(call: Callable[[], _T], _name: str) -> Future[_T]:
        done: Future[_T] = Future()
        carry_out(done, call)
        return done

    def submit(_readers: Readers, call: Callable[..., _T], *arguments: object) -> Future[_T]:
        return begin(partial(call, *arguments), "")

    deadline.begin = pack_sender.begin = push.begin = begin
    Readers.submit = submit  # type: ignore[method-assign, assignment]  # calls without named arguments
    pack_sender.together = lambda work, _count, _name, _stop: work()


def act(store: Store, base: Path, journal: Journal, action: Action) -> None:
    """Run ``["push", 1]``, ``["pull", 1]``, ``["far-delete", 0]`` or ``["far-gc"]``, and note it in the journal."""
    word, *numbers = action
    step = int(str(numbers[0])) if numbers else 0
    if word == "push":
        store.push(uri_of(base), step)
        journal.note("pushed", step=step)
        return
    if word == "pull":
        # For the store, this is a save of the same state.
        journal.note("saving", run=DEFAULT_RUN, step=step, fingerprint=fingerprint(make_state(step)))
        store.pull(uri_of(base), step)
        journal.note("saved", run=DEFAULT_RUN, step=step)
        return
    with Store.open(uri_of(base), config=CONFIG) as far:
        if word == "far-delete":
            journal.note("far-deleting", step=step)
            far.delete(step)
        else:
            far.gc()


def push_before(*steps: int) -> Callable[[Path], None]:
    """Return a function that pushes steps of a store, long ago."""

    def prepare(store_path: Path) -> None:
        with Store.open(store_path, config=CONFIG) as store:
            for step in steps:
                store.push(uri_of(store_path.parent), step)
        # The log of the store's making does not have the note of the location.
        shutil.rmtree(store_path / layout.LOCKS)
        for path in (store_path.parent / "remote").rglob("*"):
            os.utime(path, (_LONG_AGO_S, _LONG_AGO_S))

    return prepare


def check_far(base: Path, pushed_before: Sequence[int], notes: Sequence[Mapping[str, object]]) -> None:
    """Check that each pushed checkpoint is whole, also after a collection of all garbage."""
    steps = set(pushed_before)
    for note in notes:
        if note["word"] == "pushed":
            steps.add(int(str(note["step"])))
        elif note["word"] == "far-deleting":
            steps.discard(int(str(note["step"])))
    config = dataclasses.replace(CONFIG, remote=RemoteConfig(grace_s=0.0))
    with Store.open(uri_of(base), config=config) as far:
        for attempt in ("before", "after"):
            errors = [finding for finding in far.verify() if finding.checkpoints]
            assert errors == [], f"{attempt} the collection: {errors}"
            for step in steps:
                assert fingerprint(far.load(step)) == fingerprint(make_state(step)), f"step {step}: other bytes"
            far.gc()
        assert far.gc().freed_packs == 0, "a collection leaves packs to the next one"
