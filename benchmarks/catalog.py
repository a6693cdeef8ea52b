"""``catalog``: costs of a large store apart from its bytes.

Build a synthetic store of a million partitions in a thousand checkpoints. The newest checkpoint references every
partition. Measure small saves in this store and in a store with one checkpoint, alternating.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

import asymcheck
from asymcheck.config import StoreConfig
from asymcheck.restore.resolve import candidates, resolve_one
from asymcheck.storage.nvme import NvmeTier
from benchmarks import environment, synthetic
from benchmarks.report import Report, Row, row, seconds_of
from benchmarks.synthetic import Shape

FULL = Shape(partitions=1_000_000, checkpoints=1_000)
QUICK = Shape(partitions=20_000, checkpoints=50)
_SAVED_BYTES = 1 << 20
_STEP = 999_999_999


def run(folder: Path | None, *, quick: bool, shape: Shape | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces the size of the store."""
    shape = shape or (QUICK if quick else FULL)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        large, lone = Path(scratch) / "large", Path(scratch) / "lone"
        seconds = synthetic.build(large, shape)
        synthetic.build(lone, Shape(shape.added, 1))
        print(
            f"a store of {shape.partitions} partitions in {shape.checkpoints} checkpoints was built in {seconds:.1f} s"
        )
        label = f"{shape.checkpoints} checkpoints"
        results = [row(label, "build", "s", [seconds])]
        results += _reads(large, label, rounds=2 if quick else 5)
        commits = _commits({"1 checkpoint": lone, label: large}, rounds=10 if quick else 20)
        results += [row(name, "commit of a small save", "ms", values) for name, values in commits.items()]
        results += _sizes(large, label, shape)
        results += _collections(large, label, shape)
        described = environment.describe(Path(scratch))
    described["store"] = f"{shape.partitions} partitions in {shape.checkpoints} checkpoints"
    at_1, at_all = (statistics.median(values) for values in commits.values())
    resolved = next(one.median for one in results if one.metric == "resolve")
    names = ("commit_ms_at_1000/commit_ms_at_1", "resolve_s_1m")
    if shape != FULL:
        # These names are reserved for the full size.
        names = (f"commit_ms_at_{shape.checkpoints}/commit_ms_at_1", f"resolve_s_{shape.partitions}")
    return Report("catalog", described, results, dict(zip(names, (at_all / at_1, resolved), strict=True)))


def _reads(where: Path, label: str, rounds: int) -> list[Row]:
    """Measure read-only operations: open, resolve the newest checkpoint, list all."""
    opens, resolves, listings = [], [], []
    for _ in range(rounds):
        opens.append(seconds_of(lambda: asymcheck.Store.open(where, read_only=True).close()))
        resolves.append(seconds_of(lambda: _resolve(where)))
        with asymcheck.Store.open(where, read_only=True) as store:
            listings.append(seconds_of(store.checkpoints))
    return [
        row(label, "open", "s", opens),
        row(label, "resolve", "s", resolves),
        row(label, "checkpoints()", "s", listings),
    ]


def _resolve(where: Path) -> None:
    """Open the store and locate every partition of its newest checkpoint."""
    tier = NvmeTier(where, StoreConfig(), read_only=True)
    resolved = resolve_one(tier, candidates(tier, synthetic.RUN, None)[0])
    resolved.sources.close()
    tier.close()


def _commits(stores: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Measure milliseconds of small saves in each store in turn; delete each saved checkpoint, untimed."""
    times: dict[str, list[float]] = {name: [] for name in stores}
    opened = {name: asymcheck.Store.open(path, create=True) for name, path in stores.items()}
    try:
        # The first round opens the catalogs.
        for number in range(rounds + 1):
            for name, store in opened.items():
                seconds = seconds_of(partial(store.save, {"weights": torch.randn(_SAVED_BYTES // 4)}, step=_STEP))
                store.delete(_STEP)
                if number > 0:
                    times[name].append(seconds * 1e3)
    finally:
        for store in opened.values():
            store.close()
    return times


def _sizes(where: Path, label: str, shape: Shape) -> list[Row]:
    """Return the disk usage of catalog and manifests."""
    sizes = [path.stat().st_size for path in (where / "manifests").rglob("*.manifest")]
    catalog = (where / "catalog" / "data.mdb").stat().st_blocks * 512
    return [
        row(label, "manifest", "bytes", sizes),
        row(label, "catalog per checkpoint", "bytes", [catalog / shape.checkpoints]),
        row(label, "catalog per partition", "bytes", [catalog / shape.partitions]),
    ]


def _collections(where: Path, label: str, shape: Shape) -> list[Row]:
    """Delete the newest checkpoint, which references every partition, and a tenth of the others; collect garbage."""
    with asymcheck.Store.open(where, create=True) as store:
        steps = [shape.checkpoints - 1, *range(shape.checkpoints // 10)]
        deletions = [seconds_of(partial(store.delete, step)) * 1e3 for step in steps]
        dry = seconds_of(lambda: store.gc(dry_run=True))
        real = seconds_of(store.gc)
        again = seconds_of(store.gc)
    return [
        row(label, "delete", "ms", deletions),
        row(label, "gc, dry run", "s", [dry]),
        row(label, f"gc of {len(steps)} deleted", "s", [real]),
        row(label, "gc of nothing", "s", [again]),
    ]
