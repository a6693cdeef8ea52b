"""Child process that a damaged catalog may kill: loads, a save, a collection, and loads."""

import json
import os
import traceback
from pathlib import Path

import lmdb
import torch

from asymcheck import events
from asymcheck.config import StoreConfig
from asymcheck.errors import AsymcheckError
from asymcheck.store import Store
from tests.damage.small_store import same

CONFIG = StoreConfig(
    partition_bytes=4096,
    bundle_below_bytes=512,
    inline_bytes=16,
    slots=1,
    catalog_map_bytes=1 << 24,
    lock_timeout_s=5.0,
    read_lock_timeout_s=0.5,
)


def state(step: int, tensors: int) -> dict[str, object]:
    """Return a state of which each step changes every fourth tensor."""
    return {
        f"t{number}": torch.full((160,), number + (step if number % 4 == 0 else 0) / 8) for number in range(tensors)
    }


def build(path: str, tensors: int, *, killed: bool = False, compact: bool = False) -> None:
    """Save, delete and collect, so that the catalog has free pages, unless ``compact``.

    If ``killed``, end in the middle of a save, which leaves a pin of a dead owner, and the mark of a process that did
    not close the catalog.
    """

    def stop(event: events.Event) -> None:
        if event.name == "catalog.pinned":
            os._exit(0)

    with Store.open(path, config=CONFIG, create=True) as store:
        for step in range(1, 5):
            store.save(state(step, tensors), step=step)
        store.delete(2)
        store.gc()
        if killed:
            with events.observe(stop):
                store.save(state(9, tensors), step=9)
    if compact:
        catalog = Path(path, "catalog")
        with lmdb.open(str(catalog), map_size=CONFIG.catalog_map_bytes, lock=False, readonly=True) as environment:
            environment.copy(path, compact=True)
        Path(path, "data.mdb").rename(catalog / "data.mdb")


def check(path: str, tensors: int, steps: list[int]) -> None:
    """Load every existing checkpoint; the checkpoints of ``steps`` must exist."""
    with Store.open(path, read_only=True, config=CONFIG) as store:
        found = {checkpoint.step for checkpoint in store.checkpoints()}
        assert found >= set(steps), f"checkpoints were lost: {found}"
        for step in found:
            assert same(store.load(step), state(step, tensors)), f"step {step} has other bytes"
        assert same(store.load(), state(max(found), tensors))


def _note(path: str, name: str, step: int) -> None:
    with Path(path, "notes.tmp").open("a") as notes:
        notes.write(json.dumps([name, step]) + "\n")


def saved_and_kept(path: str) -> list[int]:
    """Return steps whose save had returned, and whose deletion was not requested."""
    notes = Path(path, "notes.tmp")
    done = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    saved = {step for name, step in done if name == "saved"}
    return sorted(saved - {step for name, step in done if name == "deleting"})


def use(path: str, tensors: int, step: int) -> list[str]:
    """Load, save ``step``, delete an earlier step, collect, and load everything; return the refused operations.

    Note the operations in a file, because the process may be killed.
    """
    with Store.open(path, read_only=True, config=CONFIG) as store:
        store.load()
    refused: list[str] = []
    with Store.open(path, config=CONFIG, create=True) as store:
        old = saved_and_kept(path)[:-1]
        try:
            store.save(state(step, tensors), step=step)
            _note(path, "saved", step)
            for unwanted in old:
                _note(path, "deleting", unwanted)
                store.delete(unwanted)
            store.gc()
        except AsymcheckError as error:
            refused.append(f"{error.kind}: {error}")
    check(path, tensors, [1, 3, 4, *saved_and_kept(path)])
    return refused


def use_each(paths: list[str], tensors: int, step: int) -> None:
    """Run :func:`use` with one store after another; write a file ``result.tmp`` for each store that was survived."""
    for path in paths:
        try:
            result = {"refused": use(path, tensors, step), "error": ""}
        except BaseException:  # noqa: BLE001 - whatever it is, the test is told
            result = {"refused": [], "error": traceback.format_exc()}
        Path(path, "result.tmp").write_text(json.dumps(result))
