"""Small states that follow from their step, so that any process can check a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from asymcheck.config import StoreConfig

CONFIG = StoreConfig(
    partition_bytes=16 * 1024,
    bundle_below_bytes=8 * 1024,
    inline_bytes=256,
    slots=2,
    # Half of a state. A save fills two packs, so that events happen between them.
    pack_bytes=96 * 1024,
    pool_bytes=512 * 1024,
    catalog_map_bytes=64 << 20,
    lock_timeout_s=20.0,
    read_lock_timeout_s=10.0,
)
"""Configuration with which checkpoints of 120 KiB use the same code paths as checkpoints of gigabytes."""


def make_state(step: int, *, salt: int = 0) -> dict[str, object]:
    """Return the state of a step. Parts of it change at every step, at every second step, or never."""
    new = torch.Generator().manual_seed(1_000_003 * salt + step)
    slow = torch.Generator().manual_seed(7_000_003 * (salt + 1) + step // 2)
    constant = torch.Generator().manual_seed(11)
    weight = torch.randn(96, 128, generator=new)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "bias": torch.randn(600, generator=new),
            "frozen": torch.randn(64, 128, generator=constant),
        },
        "optimizer": [{"moment": torch.randn(64, 128, generator=slow), "steps": torch.tensor(step)}],
        "step": step,
        "salt": salt,
    }


def fingerprint(state: object) -> str:
    """Return a hash of all names, types, shapes and bytes of a state."""
    hasher = hashlib.sha256()
    _feed(hasher, "", state)
    return hasher.hexdigest()


def _feed(hasher: hashlib._Hash, name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(f"{name} {value.dtype} {list(value.shape)}".encode() + flat.numpy().tobytes())
    elif isinstance(value, Mapping):
        hasher.update(f"{name} {type(value).__name__} {list(value)}".encode())
        for key, item in value.items():
            _feed(hasher, f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        hasher.update(f"{name} {type(value).__name__} {len(value)}".encode())
        for number, item in enumerate(value):
            _feed(hasher, f"{name}.{number}", item)
    else:
        hasher.update(f"{name} {value!r}".encode())


@dataclasses.dataclass
class Promises:
    """Promises of a store after the lines of a journal, by run and step."""

    durable: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    """Checkpoints that were reported as saved and not deleted since. They must exist with this fingerprint."""
    begun: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    """Checkpoints that were begun. Every existing checkpoint must be one of them."""
    deleted: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """Checkpoints whose deletion was reported. They must not return."""
    newest: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    """Possible newest steps of a run: the current one, and those of unfinished saves or restores.

    An empty or missing entry means that nothing is known.
    """


class Journal:
    """The reports of a store to a process, line by line, in a file that survives the process."""

    def __init__(self, path: Path) -> None:
        """Append to ``path``."""
        self.path = path

    def note(self, word: str, **fields: object) -> None:
        """Add a line."""
        line = json.dumps({"word": word, **fields}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lines(self, word: str | None = None) -> list[dict[str, object]]:
        """Return all lines, or the lines that begin with a word."""
        if not self.path.exists():
            return []
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if word in (None, line["word"])]

    def promises(self) -> Promises:
        """Return the promises of the store after all lines."""
        return promises(self.lines())


def promises(lines: list[dict[str, object]]) -> Promises:
    """Return the promises of a store after some lines of a journal."""
    promised = Promises()
    for line in lines:
        word, run = line["word"], str(line.get("run", "default"))
        key = (run, int(str(line.get("step", -1))))
        if word in ("saving", "restoring"):
            promised.newest.setdefault(run, set()).add(key[1])
        elif word in ("saved", "restored"):
            promised.newest[run] = {key[1]}
        elif word == "deleted":
            promised.newest.setdefault(run, set()).discard(key[1])
        if word == "saving":
            promised.begun[key] = str(line["fingerprint"])
            promised.deleted.discard(key)
        elif word == "saved":
            promised.durable[key] = promised.begun[key]
        elif word == "deleting":
            promised.durable.pop(key, None)
        elif word == "deleted":
            promised.deleted.add(key)
    return promised
