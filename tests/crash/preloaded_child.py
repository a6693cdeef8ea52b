"""Saves, deletions and collections while system calls fail; prints the steps that were reported durable."""

import contextlib
import json
import sys

import torch

from asymcheck import Store, StoreConfig
from asymcheck.errors import AsymcheckError, StorageError

ATTEMPTS = 50
MIB = 1 << 20


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a step: one tensor stays the same."""
    generator = torch.Generator().manual_seed(step)
    return {
        "own": torch.randn(80_000, generator=generator),
        "small": torch.full((7,), step),
        "same": torch.ones(60_000),
    }


def open_store(path: str) -> Store:
    """Open or create the store, which may take several attempts."""
    for attempt in range(ATTEMPTS):
        try:
            return Store.open(path, create=True, config=StoreConfig(pool_bytes=MIB))
        except AsymcheckError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def main(path: str, steps: int) -> None:
    """Save ``steps`` steps; delete and collect now and then."""
    durable: list[int] = []
    failed = 0
    store = open_store(path)
    for step in range(steps):
        try:
            store.save(state_of(step), step=step)
            durable.append(step)
        except AsymcheckError:
            failed += 1
        if step % 4 == 3 and len(durable) > 2:
            # A deletion that failed may have removed the manifest.
            gone = durable.pop(0)
            try:
                store.delete(gone)
                store.gc()
            except AsymcheckError:
                failed += 1
    # The last sync of the catalog may fail.
    with contextlib.suppress(StorageError):
        store.close()
    sys.stdout.write(json.dumps({"durable": durable, "failed": failed}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
