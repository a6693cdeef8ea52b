"""``restore``: seconds from the call until a state's bytes are in memory, read from the device and not from a cache.

Drop the files from the page cache before each read, for all libraries. asymcheck verifies every byte, and the peers
verify none. *Into* fills existing tensors. All other rows allocate new tensors. The timed part touches one byte in each
page of new tensors, because some libraries only map their file and read later. The limit is a raw O_DIRECT read of the
same number of bytes into existing memory in huge pages. Two more limits read into small pages, which torch uses by
default, and into new memory. The last part splits the time of a restore into phases, for each tier (see
:mod:`benchmarks.tiers`).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

import asymcheck
from benchmarks import coldness, environment, peers, raw, states, tiers
from benchmarks.report import Report, best, rotated, row

_PAGE = os.sysconf("SC_PAGE_SIZE")
LIMIT = "raw read"
LIMIT_SMALL = "raw read, small pages"
LIMIT_NEW = "raw read, new memory"
OURS = "asymcheck load"
OURS_INTO = "asymcheck load into"


def run(folder: Path | None, *, quick: bool, state: dict[str, object] | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``state`` replaces GPT-2 with AdamW."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        state = state or states.gpt2_adamw(2 if quick else 12)
        gigabytes = sum(tensor.nbytes for tensor in states.tensors_of(state)) / 1e9
        restore = _Restore(Path(scratch), state)
        times = restore.measure(rounds=2 if quick else 7)
        by_tier = tiers.measure(restore.store, restore.into, rounds=1 if quick else 3)
        described = environment.describe(Path(scratch))
    described |= {"state": states.describe(state), "made cold by": ", ".join(sorted(restore.made_cold))}
    results = [row(name, "time to restore", "s", values) for name, values in times.items()]
    results += [
        row(name, "throughput", "GB/s", [gigabytes / value for value in values]) for name, values in times.items()
    ]
    results += by_tier
    medians = {name: statistics.median(values) for name, values in times.items()}
    peer_rows = [name for name in medians if not name.startswith(("raw", "asymcheck"))]
    ratios = {
        "restore/limit_small_pages": medians[LIMIT_SMALL] / medians[OURS_INTO],
        "restore_fresh/limit_new_memory": medians[LIMIT_NEW] / medians[OURS],
    }
    for label, ours, rivals in (
        ("restore", OURS_INTO, [name for name in peer_rows if name.endswith(" into")]),
        ("restore_fresh", OURS, [name for name in peer_rows if not name.endswith(" into")]),
    ):
        peer = best(medians, rivals)
        described[f"best peer of {label}"] = peer
        ratios[f"{label}/limit"] = medians[LIMIT] / medians[ours]
        ratios[f"{label}/best_peer"] = medians[peer] / medians[ours]
    return Report("restore", described, results, ratios)


class _Restore:
    """One state, saved once and read repeatedly by every system."""

    def __init__(self, scratch: Path, state: dict[str, object]) -> None:
        self._scratch, self._state = scratch, state
        self.into = states.empty_like(state)
        """A state whose tensors are filled by restores."""
        self.store = scratch / "store"
        """Store with the checkpoints of asymcheck."""
        self.made_cold: set[str] = set()
        """How the files were dropped from the page cache."""

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each system's restores.

        A first round warms up memory and checks that each system restores the saved state.

        Raises:
            RuntimeError: one system restored a different state.
        """
        systems = self._systems()
        times: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(rounds + 1):
            for name, (where, read) in rotated(list(systems.items()), number):
                os.sync()
                self.made_cold.add(coldness.make_cold(peers.files_in(where)))
                if number > 0:
                    times[name].append(read()[0])
                else:
                    self._check(name, read)
        return times

    def _check(self, name: str, read: Callable[[], tuple[float, object]]) -> None:
        for tensor in states.tensors_of(self.into):
            tensor.zero_()
        restored = read()[1]
        wrong = [] if restored is None else states.differing(self._state, states.named_tensors(restored))
        if wrong:
            raise RuntimeError(
                f"{name} restored {len(wrong)} tensors that differ from the saved ones, the first: {wrong[0]}"
            )

    def _systems(self) -> dict[str, tuple[Path, Callable[[], tuple[float, object]]]]:
        """Save with every system; return the paths, and functions that read the state again and return the seconds."""
        tensors, raw_file = states.tensors_of(self._state), self._scratch / "raw"
        limit, small_pages = raw.Limit(tensors), raw.Limit(tensors, huge=False)
        limit.write(raw_file)
        store = self.store
        with asymcheck.Store.open(store, create=True) as opened:
            opened.save(self._state, step=1)
        into, named = self.into, states.named_tensors(self.into)
        systems: dict[str, tuple[Path, Callable[[], tuple[float, object]]]] = {
            LIMIT: (raw_file, lambda: (limit.read(raw_file), None)),
            LIMIT_SMALL: (raw_file, lambda: (small_pages.read(raw_file), None)),
            LIMIT_NEW: (raw_file, lambda: (limit.read(raw_file, new_memory=True), None)),
            OURS: (store, partial(_timed, partial(_load, store, None))),
            OURS_INTO: (store, partial(_timed, partial(_load, store, into))),
        }
        for peer in peers.PEERS:
            where = self._scratch / f"peer {peer.name}"
            peers.save_durably(peer, states.named_tensors(self._state), where)
            for name, load in peer.loads().items():
                systems[name] = where, partial(_timed, partial(load, where))
            for name, fill in peer.fills().items():
                systems[f"{name} into"] = where, partial(_timed, partial(fill, where, named), filled=named)
        return systems


def _load(store: Path, into: object) -> object:
    with asymcheck.Store.open(store, read_only=True) as opened:
        return opened.load(into=into)


def _timed(read: Callable[[], object], filled: object = None) -> tuple[float, object]:
    began = time.perf_counter()
    restored = read()
    if restored is not None:
        _touch(states.tensors_of(restored))
    return time.perf_counter() - began, filled if restored is None else restored


def _touch(tensors: Iterable[torch.Tensor]) -> None:
    """Touch one byte in each page, so that the bytes of mapped files are read."""
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::_PAGE].sum()
