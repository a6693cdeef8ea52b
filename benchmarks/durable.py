"""``durable``: seconds from the call of ``save`` until the checkpoint is durable.

Compare with a raw O_DIRECT write of the same number of bytes, from memory in huge pages and in small pages, and with
other libraries, whose files are made as durable as the files of asymcheck. Each round measures all systems after a
sync, and starts with a different system. *New* writes new files. *Recycled* overwrites existing files: packs that
garbage collection freed, or the old file of a peer that users save to one name.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import asymcheck
from benchmarks import environment, peers, raw, states
from benchmarks.report import Report, best, rotated, row, seconds_of

OVER = "over its old file"


def run(folder: Path | None, *, quick: bool, state: dict[str, object] | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``state`` replaces GPT-2 with AdamW."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        state = state or states.gpt2_adamw(2 if quick else 12)
        gigabytes = sum(tensor.nbytes for tensor in states.tensors_of(state)) / 1e9
        times = _Durable(Path(scratch), state).measure(rounds=2 if quick else 7)
        described = environment.describe(Path(scratch))
    described["state"] = states.describe(state)
    results = [row(name, "time to durable", "s", values) for name, values in times.items()]
    results += [
        row(name, "throughput", "GB/s", [gigabytes / value for value in values]) for name, values in times.items()
    ]
    medians = {name: statistics.median(values) for name, values in times.items()}
    peer = best(medians, [name for name in medians if not name.startswith(("raw", "asymcheck"))])
    described["best peer"] = peer
    ratios = {}
    for mode in ("new", "recycled"):
        ours = medians[f"asymcheck {mode}"]
        ratios[f"durable_{mode}/limit"] = medians[f"raw {mode}"] / ours
        ratios[f"durable_{mode}/limit_small_pages"] = medians[f"raw {mode}, small pages"] / ours
        ratios[f"durable_{mode}/best_peer"] = medians[peer] / ours
    return Report("durable", described, results, ratios)


class _Durable:
    """Folders and state of the measurement."""

    def __init__(self, scratch: Path, state: dict[str, object]) -> None:
        self._scratch, self._state = scratch, state
        self._tensors = states.named_tensors(state)
        tensors = states.tensors_of(state)
        self._limits = {"": raw.Limit(tensors), ", small pages": raw.Limit(tensors, huge=False)}
        self._raw_file = scratch / "raw"
        self._step = 0

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each system's saves. The first round is a warm-up."""
        times: dict[str, list[float]] = {}
        with asymcheck.Store.open(self._scratch / "store", create=True) as store:
            for number in range(rounds + 1):
                self._begin_with_nothing(store)
                for systems in (self._new(store), self._over(store)):
                    # The order rotates, because the drive may still be busy with the previous library.
                    for name, save in rotated(list(systems.items()), number):
                        states.change_everything(self._state)
                        os.sync()
                        seconds = save()
                        if number > 0:
                            times.setdefault(name, []).append(seconds)
                    # Move freed packs into the pool or out of it, so that the next save finds packs to overwrite, or
                    # none.
                    store.delete(self._step)
                    store.gc()
        return times

    def _begin_with_nothing(self, store: asymcheck.Store) -> None:
        for path in self._scratch.glob(f"{self._raw_file.name}*"):
            path.unlink()
        for peer in peers.PEERS:
            peers.remove(self._path_of(peer))
        for path in (store.path / "pool").iterdir():
            path.unlink()

    def _new(self, store: asymcheck.Store) -> dict[str, Callable[[], float]]:
        systems = {
            **{f"raw new{pages}": self._raw(pages) for pages in self._limits},
            "asymcheck new": lambda: self._save(store),
        }
        return systems | {f"{peer.name} new": self._saver(peer) for peer in peers.PEERS}

    def _over(self, store: asymcheck.Store) -> dict[str, Callable[[], float]]:
        systems = {
            **{f"raw recycled{pages}": self._raw(pages) for pages in self._limits},
            "asymcheck recycled": lambda: self._save(store),
        }
        return systems | {f"{peer.name} {OVER}": self._saver(peer) for peer in peers.PEERS if peer.overwrites}

    def _raw(self, pages: str) -> Callable[[], float]:
        path = self._raw_file.with_suffix(".small" if pages else "")
        return lambda: self._limits[pages].write(path)

    def _save(self, store: asymcheck.Store) -> float:
        self._step += 1
        return seconds_of(lambda: store.save(self._state, step=self._step))

    def _saver(self, peer: peers.Peer) -> Callable[[], float]:
        return lambda: peers.save_durably(peer, self._tensors, self._path_of(peer))

    def _path_of(self, peer: peers.Peer) -> Path:
        return self._scratch / f"peer {peer.name}"
