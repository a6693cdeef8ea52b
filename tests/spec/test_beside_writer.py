"""Test both readers in the cases of ``format_spec/beside_writer.json``: a writer acts while they read.

An audit hook stops the reader at its first open of a file, and lets a store in this process write. No file operation is
replaced.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asymcheck
from asymcheck import events
from asymcheck.errors import SkippedCheckpointWarning
from tests.spec.corpus import FORMAT_SPEC
from tests.spec.frozen import found_tensors
from tests.spec.test_readers_agree import reader

CASES: list[dict[str, Any]] = json.loads((FORMAT_SPEC / "beside_writer.json").read_text("utf-8"))["cases"]
CONFIG = asymcheck.StoreConfig(
    partition_bytes=1 << 14, bundle_below_bytes=4096, inline_bytes=64, slots=2, lock_timeout_s=5.0
)


class KilledError(Exception):
    """Ends a save as a kill would, at an event."""


def state_of(names: list[str]) -> dict[str, torch.Tensor]:
    """Return the state with these tensors. Equal names give equal bytes."""
    state = {}
    for name in names:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        count = (1 << 18 if name.startswith("large") else 1 << 14) // 8
        state[name] = torch.from_numpy(np.random.default_rng(seed).standard_normal(count))
    return state


class Writer:
    """A store that follows the steps of a case."""

    def __init__(self, path: Path) -> None:
        self.store = asymcheck.Store.open(path, config=CONFIG, create=True)
        self.saved: dict[int, tuple[asymcheck.Checkpoint, dict[str, torch.Tensor]]] = {}
        self.generation: int | None = None

    def follow(self, steps: list[str]) -> None:
        """Do the steps in order."""
        for step in steps:
            word, *rest = step.split()
            getattr(self, f"_{word.replace('-', '_')}")(*rest)

    def _save(self, step: str, *names: str) -> None:
        state = state_of(list(names))
        self.saved[int(step)] = self.store.save(state, step=int(step), generation=self.generation), state

    def _kill_save(self, step: str, *names: str) -> None:
        def kill(event: events.Event) -> None:
            if event.name == "manifest.directory_created":
                raise KilledError

        with events.observe(kill), contextlib.suppress(KilledError):
            self._save(step, *names)

    def _delete(self, step: str) -> None:
        self.store.delete(int(step))

    def _collect(self) -> None:
        self.store.gc()

    def _generation(self, step: str = "") -> None:
        self.generation = self.store.training.begin_generation(self.saved[int(step)][0] if step else None)


_at_open: list[Callable[[str], None]] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _at_open and isinstance(arguments[0], (str, bytes)):
        _at_open[-1](str(arguments[0]))


sys.addaudithook(_audit)


@contextlib.contextmanager
def stopped_at(store: Path, pattern: str, act: Callable[[], None]) -> Iterator[list[str]]:
    """Call ``act`` once, before a file whose path in the store matches is opened; yield the path."""
    seen: list[str] = []

    def check(name: str) -> None:
        with contextlib.suppress(ValueError):
            path = Path(name).relative_to(store).as_posix()
            if not seen and fnmatch.fnmatch(path, pattern):
                seen.append(path)
                act()

    _at_open.append(check)
    try:
        yield seen
    finally:
        _at_open.pop()


def read_with_library(path: Path) -> tuple[str, object]:
    """Return the save id that the library restores, and the tensors."""
    with asymcheck.Store.open(path, read_only=True) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedCheckpointWarning)
        restored = store.restore()
        return restored.checkpoint.save_id, found_tensors(restored.state)[1]


def read_with_reference(path: Path) -> tuple[str, object]:
    """Return the same from the reference reader."""
    chosen = reader()["read_store"](path).resolve()
    return chosen["save_id"], chosen["tensors"]


@pytest.mark.parametrize("read", [read_with_library, read_with_reference], ids=["library", "reference"])
@pytest.mark.parametrize("case", CASES, ids=[case["name"].replace(" ", "-") for case in CASES])
def test_a_reader_beside_a_writer(
    case: dict[str, Any], read: Callable[[Path], tuple[str, object]], store_path: Path
) -> None:
    """Test that the reader returns a permitted checkpoint, bit for bit, after the writer acted."""
    writer = Writer(store_path)
    with contextlib.closing(writer.store):
        writer.follow(case["before"])
        with stopped_at(store_path, case["at"], lambda: writer.follow(case["meanwhile"])) as stopped:
            save_id, tensors = read(store_path)
        assert stopped, "the reader opened no such file"
        by_id = {checkpoint.save_id: (step, state) for step, (checkpoint, state) in writer.saved.items()}
        step, state = by_id[save_id]
        assert step in case["newest"]
        assert tensors == found_tensors(state)[1]
