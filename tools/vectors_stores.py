"""Create the frozen stores: a small store with every feature, and the files that a crash at each step of a save leaves.

The library writes the stores, so their ids and times differ in every run. They are made once for each version.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lmdb

import asymcheck
from asymcheck import events
from asymcheck.format.catalog_records import decode_pin, encode_pin
from asymcheck.format.digest import digest
from asymcheck.format.registry import SHIFTED_PAYLOAD
from asymcheck.state.walk import flatten
from asymcheck.types import Owner
from tools.vectors_base import json_text
from tools.vectors_states import everything, training_state

NAME = f"v1-by-{asymcheck.__version__}-{SHIFTED_PAYLOAD}"
REGISTRY = Path(__file__).resolve().parents[1] / "format_spec" / "registry.json"
CONFIG = asymcheck.StoreConfig(partition_bytes=4096, bundle_below_bytes=4096, inline_bytes=64, slots=1)
LARGE = asymcheck.StoreConfig(partition_bytes=69632, bundle_below_bytes=65536, inline_bytes=64, slots=1)
DATABASES = ("meta", "partitions", "packs", "manifests", "pins")

# In a frozen catalog pins belong to a process that is dead on every machine.
DEAD_OWNER = Owner(1, 1, "00000000-0000-0000-0000-000000000000", "pid:[1]")

Facts = dict[str, object]

_STEPS = {
    "pack.created": (1, "an empty or recycled file under a temporary name"),
    "frame.written": (1, "one frame of several lies in the temporary file"),
    "pack.index_written": (2, "the temporary file is complete"),
    "pack.synced": (2, "the temporary file is complete and synced"),
    "pack.renamed": (2, "a complete pack that no manifest names and no catalog knows"),
    "pack.sealed": (2, "the same, and the name is durable"),
    "catalog.pinned": (3, "the catalog knows the pack, and a pin of a dead owner holds it"),
    "manifest.directory_created": (4, "the checkpoint's directory is empty"),
    "manifest.written": (4, "the manifest lies under a temporary name"),
    "manifest.synced": (4, "the manifest lies under a temporary name and is synced"),
    "manifest.renamed": (4, "the manifest has its name: the checkpoint is committed"),
    "manifest.committed": (4, "the same, and the name is durable"),
    "catalog.committed": (5, "nothing is left to do"),
}
"""For each event, the step of SPEC.md §B2 and the files that a crash right after it leaves."""


def make_stores(out: Path) -> list[Path]:
    """Write the frozen store and the torn stores below ``out``, replacing those of this version; return the paths."""
    intact, torn = out / NAME, out / f"{NAME}-torn"
    for path in (intact, torn):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        expected = _make_store(store)
        freeze(store, intact / "store", intact / "catalog.json")
        write_expected(intact, expected)
        shutil.copyfile(REGISTRY, intact / "registry.json")
        _make_torn(store, expected, intact / "store", torn)
    return [intact, *sorted(torn.iterdir())]


def describe(checkpoint: asymcheck.Checkpoint, state: object) -> Facts:
    """Return the expected result of a reader, from the saved state and not from the restored state."""
    flat = flatten(state)
    tensors = []
    for leaf in flat.leaves:
        data = bytearray(leaf.nbytes)
        if data:
            leaf.copy_bytes(0, memoryview(data))
        tensors.append(
            {
                "name": leaf.name,
                "aliases": leaf.aliases,
                "dtype": leaf.dtype,
                "role": leaf.role,
                "shape": list(leaf.shape),
                "nbytes": leaf.nbytes,
                "digest": digest(data).hex(),
            }
        )
    return {
        "run": checkpoint.run,
        "generation": checkpoint.generation,
        "step": checkpoint.step,
        "save_id": checkpoint.save_id,
        "world_size": checkpoint.world_size,
        "metrics": dict(checkpoint.metrics),
        "tree": flat.tree,
        "tensors": tensors,
    }


def _make_store(path: Path) -> Facts:
    """Save two runs. The run ``default`` gets an abandoned branch, a reused pack file and a freed pack."""
    found: list[Facts] = []

    def save(store: asymcheck.Store, run: str, generation: int, step: int, state: object) -> asymcheck.Checkpoint:
        metrics = {"loss": 4.0 / (step + 1)}
        checkpoint = store.save(state, step=step, metrics=metrics, run=run, generation=generation)
        found.append(describe(checkpoint, state))
        return checkpoint

    def forget(store: asymcheck.Store, step: int) -> None:
        store.delete(step)
        assert store.gc().pooled_packs == 1
        found.pop()

    with asymcheck.Store.open(path, config=LARGE, create=True) as store:
        save(store, "values", 1, 0, everything())
    with asymcheck.Store.open(path, config=CONFIG, create=True) as store:
        first = store.training.begin_generation(None)
        parent = save(store, "default", first, 20, training_state(20))
        save(store, "default", first, 30, training_state(30))
        second = store.training.begin_generation(parent)
        save(store, "default", second, 30, training_state(31))
        # Free a larger pack, which the next pack overwrites. The next pack then ends with old bytes.
        save(store, "default", second, 35, training_state(35, change=0))
        forget(store, 35)
        newest = save(store, "default", second, 40, training_state(40, change=2))
        # Free a pack that stays in the pool.
        save(store, "default", second, 45, training_state(45, change=1))
        forget(store, 45)
        on_line = {(item.run, item.save_id): item.on_line for item in store.checkpoints()}
    for facts in found:
        facts["on_line"] = on_line[str(facts["run"]), str(facts["save_id"])]
    return {
        "why": "everything that version 1 has: see format_spec/README.md",
        "checkpoints": found,
        "newest": {"default": newest.save_id, "values": found[0]["save_id"]},
    }


def _make_torn(store: Path, expected: Facts, frozen: Path, out: Path) -> None:
    """Save step 50, and keep a copy of the store after each event of SPEC.md §B2."""
    state = training_state(50)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "work"
        shutil.copytree(store, work)
        seen: list[str] = []

        def keep(event: events.Event) -> None:
            if event.name in _STEPS and event.name not in seen:
                seen.append(event.name)
                shutil.copytree(work, Path(scratch) / event.name)

        with asymcheck.Store.open(work, config=CONFIG, create=True) as opened, events.observe(keep):
            checkpoint = opened.save(state, step=50, metrics={"loss": 0.5})
        assert tuple(seen) == events.COMMIT_ORDER
        for number, name in enumerate(seen):
            crashed, target = Path(scratch) / name, out / f"{number:02d}-{name}"
            committed = number >= seen.index("manifest.renamed")
            step, why = _STEPS[name]
            facts: Facts = {
                "why": why,
                "event": name,
                "step_of_8_1": step,
                "removed": _keep_differences(frozen, crashed, target),
                "empty_directories": _empty_directories(crashed),
                "newest": checkpoint.save_id if committed else expected["newest"]["default"],  # type: ignore[index]  # made above
                "checkpoints": [{**describe(checkpoint, state), "on_line": True}] if committed else [],
            }
            write_expected(target, facts)


def write_expected(folder: Path, facts: Facts) -> None:
    """Write one line for each fact. With one line for each number, the file would be larger than the store."""
    lines = (f"{json.dumps(key)}: {json.dumps(facts[key], sort_keys=True)}" for key in sorted(facts))
    (folder / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


def freeze(store: Path, target: Path, dump: Path) -> None:
    """Copy a store without its catalog to ``target``, and write the entries of the catalog to ``dump``."""
    shutil.copytree(store, target, ignore=lambda _, names: {"catalog"} & set(names))
    dump.write_text(json_text(dump_catalog(store / "catalog")), encoding="ascii")


def _keep_differences(base: Path, crashed: Path, target: Path) -> list[str]:
    """Write the files that the crash added or changed, and the catalog; return the names of removed files."""
    intact = target / "whole"
    freeze(crashed, intact, target / "catalog.json")
    files = {path.relative_to(intact) for path in intact.rglob("*") if path.is_file()}
    for name in sorted(files):
        if not (base / name).exists() or not filecmp.cmp(base / name, intact / name, shallow=False):
            (target / "overlay" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(intact / name, target / "overlay" / name)
    shutil.rmtree(intact)
    return sorted(
        str(name) for path in base.rglob("*") if path.is_file() and (name := path.relative_to(base)) not in files
    )


def _empty_directories(store: Path) -> list[str]:
    """Return the empty directories, which git would not keep."""
    found = [path for path in store.rglob("*") if path.is_dir() and not any(path.iterdir())]
    return sorted(str(path.relative_to(store)) for path in found if path.relative_to(store).parts[0] != "catalog")


def dump_catalog(path: Path) -> dict[str, dict[str, str]]:
    """Return every entry of a catalog in hexadecimal, by database; pins have no owner."""
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=len(DATABASES)) as environment:
        dump = {name: {key.hex(): value.hex() for key, value in _entries(environment, name)} for name in DATABASES}
    for key, value in dump["pins"].items():
        pin = decode_pin(bytes.fromhex(key), bytes.fromhex(value))
        assert pin is not None
        dump["pins"][key] = encode_pin(bytes.fromhex(key), DEAD_OWNER, pin[1]).hex()
    return dump


def _entries(environment: lmdb.Environment, name: str) -> Iterator[tuple[bytes, bytes]]:
    database = environment.open_db(name.encode(), create=False)
    with environment.begin(db=database) as transaction:
        for key, value in transaction.cursor():
            yield bytes(key), bytes(value)
