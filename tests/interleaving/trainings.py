"""Trainings that capture into a ring, and commands that look at the ring of another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from asymcheck import Checkpointer, events
from asymcheck.config import CaptureConfig
from asymcheck.distributed import Ranks
from asymcheck.events import Event
from asymcheck.format import layout
from asymcheck.gc.collect import collect_rings
from asymcheck.policies.retention import Retention
from asymcheck.storage.nvme.run_lock import Trainer
from asymcheck.storage.process_identity import this_process
from asymcheck.storage.shm.orphaned_rings import newer_than_stored, survey_rings
from asymcheck.store import Store
from tests.checkpointer.loops import copy_of
from tests.crash.actions import Action
from tests.crash.states import Journal, fingerprint

RUN = "training"
_KEPT = 2
ACTIONS = ("train", "train-pruned", "train-other", "rank", "rings", "gc-rings")


class _Keys:
    """Key-value store in a folder, so that each access is a step of the schedule."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._rank = folder, rank

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def set(self, key: str, value: str | bytes) -> None:
        written = self._path(f"new-{self._rank}-{key}")
        written.write_bytes(value.encode() if isinstance(value, str) else value)
        written.replace(self._path(key))

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def delete_key(self, key: str) -> bool:
        self._path(key).unlink(missing_ok=True)
        return True


def leave_lock(store_path: Path) -> None:
    """Leave the lock of a killed training in a store."""
    folder = store_path / layout.LOCKS
    folder.mkdir()
    owner = dataclasses.replace(this_process(), start_ticks=1)
    (folder / layout.lock_name(RUN)).write_bytes(Trainer(owner, "host", 0).encode())


def _config(base: Path) -> CaptureConfig:
    folder = base / "rings"
    folder.mkdir(exist_ok=True)
    return CaptureConfig(ring_bytes=256 << 10, ring_folder=str(folder), proof="full")


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, object]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(48, 48)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, {"model": model, "optimizer": optimizer, "epoch": [0]}


def act(store: Store, base: Path, journal: Journal, action: Action) -> None:
    """Run an action.

    ``["train", 3]`` continues a training by three steps, ``["train-pruned", 3]`` with retention, ``["rank", 0, 3, 1]``
    as rank 0 in the job with number 1, and ``["train-other", 3]`` another run; ``["rings"]`` and ``["gc-rings"]`` are
    commands.
    """
    word, *arguments = action
    numbers = [int(str(argument)) for argument in arguments]
    if word == "rank":
        keys = _Keys(base / f"keys-{numbers[2]}", numbers[0])
        train(store, base, journal, numbers[1], ranks=Ranks(numbers[0], 2, keys, timeout_s=5.0))
    elif word in ("train", "train-pruned", "train-other"):
        keep = Retention(keep_last=_KEPT) if word == "train-pruned" else None
        train(store, base, journal, numbers[0], run="other" if word == "train-other" else RUN, keep=keep)
    elif word == "gc-rings":
        collect_rings(store.resources.writable(), base / "rings", discard=False, dry_run=False)
    else:
        rings = survey_rings(store.resources.tier, base / "rings", None, check=True)
        problems = [found.problem for ring in rings for found in (ring, *ring.captures) if found.problem]
        assert not any("partitions" in problem for problem in problems), problems
        newer_than_stored(store.resources.tier, rings)


def train(
    store: Store,
    base: Path,
    journal: Journal,
    steps: int,
    *,
    run: str = RUN,
    keep: Retention | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Continue the training by some steps; note the restored step, and what becomes complete and durable."""

    def observe(event: Event) -> None:
        if event.name == "capture.lost" and ranks is not None:
            journal.note("lost", run=run)
        if event.name not in ("capture.complete", "capture.durable"):
            return
        step, save = int(event.detail.split()[1]), event.detail.split()[-1]
        if event.name == "capture.complete":
            rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
            journal.note("complete", run=run, step=step, save=save, rank=rank, world_size=world_size)
            return
        journal.note("saved", run=run, step=step)
        for old in range(0 if keep is None else step - _KEPT + 1):
            journal.note("deleting", run=run, step=old)

    model, optimizer, state = _training()
    # An optimizer has no state to fill before its first step.
    _iterate(model, optimizer, 0)
    with (
        events.observe(observe),
        Checkpointer(store, state, run=run, every=1, keep=keep, capture=_config(base), ranks=ranks) as checkpointer,
    ):
        restored = checkpointer.restore()
        first = 0 if restored is None else restored.step + 1
        if restored is None:
            model, optimizer, fresh = _training()
            state.update(fresh)
        found = fingerprint(copy_of(state))
        journal.note("resumed", run=run, step=first - 1, fingerprint=found if first else "")
        for step in range(first, first + steps):
            _iterate(model, optimizer, step)
            journal.note("saving", run=run, step=step, fingerprint=fingerprint(copy_of(state)))
            checkpointer.step(step)


def _iterate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + step + number)
    optimizer.step()


def check_resumes(notes: Sequence[Mapping[str, object]]) -> None:
    """Check that each training has continued from the newest step that all ranks had completed, with its bytes."""
    begun: dict[object, object] = {}
    lacking: dict[object, tuple[int, set[object]]] = {}
    durable = -1
    for note in notes:
        step, word = int(str(note.get("step", -1))), note["word"]
        if note.get("run") != RUN:
            continue
        if word == "saving":
            begun[step] = note["fingerprint"]
        elif word == "complete":
            lacking.setdefault(note["save"], (step, set(range(int(str(note["world_size"]))))))[1].discard(note["rank"])
        elif word == "lost":
            # A rank that goes on without the others frees captures that they have.
            lacking.clear()
        elif word == "saved":
            durable = max(durable, step)
        elif word == "resumed":
            newest = max([durable, *(at for at, ranks in lacking.values() if not ranks)])
            assert step >= newest, f"a training resumed from step {step}, and step {newest} was complete"
            assert step < 0 or note["fingerprint"] == begun[step], f"step {step} was resumed with other bytes"
