"""Locate frozen stores, assemble copies, and compare with the expected content."""

import dataclasses
import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import lmdb
import pytest

import asymcheck
from asymcheck.errors import StateMismatchError
from asymcheck.format.digest import digest
from asymcheck.state.walk import flatten
from tests.spec.corpus import FORMAT_SPEC

STORES = FORMAT_SPEC / "stores"
DATABASES = ("meta", "partitions", "packs", "manifests", "pins")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A store as an earlier version wrote it, or as a crash left it."""

    whole: Path
    """Folder of the complete store."""
    torn: Path | None = None
    """Folder of the changes by a crash."""

    def __str__(self) -> str:
        return self.whole.name if self.torn is None else f"{self.torn.parent.name}/{self.torn.name}"

    @cached_property
    def _expected(self) -> dict[str, Any]:
        expected: dict[str, Any] = json.loads((self.whole / "expected.json").read_text("ascii"))
        return expected

    @cached_property
    def _crash(self) -> dict[str, Any]:
        if self.torn is None:
            return {}
        crash: dict[str, Any] = json.loads((self.torn / "expected.json").read_text("ascii"))
        return crash

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the expected checkpoints, with their tree and the digest of every tensor."""
        return [*self._expected["checkpoints"], *self._crash.get("checkpoints", [])]

    @property
    def newest(self) -> dict[str, str]:
        """Return the save id of the newest checkpoint of each run."""
        newest = dict(self._expected["newest"])
        if self._crash:
            newest["default"] = self._crash["newest"]
        return newest

    @property
    def event(self) -> str:
        """Return the last event before the crash; empty for a complete store."""
        return str(self._crash.get("event", ""))

    def copy_to(self, path: Path, *, with_catalog: bool = False) -> Path:
        """Assemble the store at ``path``, as the crash left it; return ``path``."""
        shutil.copytree(self.whole / "store", path)
        for name in self._crash.get("removed", []):
            (path / name).unlink()
        if self.torn is not None and (self.torn / "overlay").exists():
            shutil.copytree(self.torn / "overlay", path, dirs_exist_ok=True)
        for name in self._crash.get("empty_directories", []):
            (path / name).mkdir(parents=True, exist_ok=True)
        if with_catalog:
            self._write_catalog(path / "catalog")
        return path

    @property
    def catalog(self) -> dict[str, dict[str, str]]:
        """Return the catalog's entries in hexadecimal, by database."""
        dump: dict[str, dict[str, str]] = json.loads(((self.torn or self.whole) / "catalog.json").read_text("ascii"))
        return dump

    def _write_catalog(self, path: Path) -> None:
        path.mkdir()
        with lmdb.open(str(path), map_size=1 << 26, max_dbs=len(DATABASES)) as environment:
            databases = {name: environment.open_db(name.encode()) for name in DATABASES}
            with environment.begin(write=True) as transaction:
                for name, entries in self.catalog.items():
                    for key, value in entries.items():
                        transaction.put(bytes.fromhex(key), bytes.fromhex(value), db=databases[name])


@dataclasses.dataclass(frozen=True)
class FrozenParts(Frozen):
    """The stores of one job, one per machine (SPEC.md §C6)."""

    machines: tuple[int, ...] = (0, 1)
    """Stores whose manifests and packs a copy brings together."""

    def copy_to(self, path: Path, *, with_catalog: bool = False) -> Path:
        """Copy the stores into one at ``path``, with the catalog if there is one store; return ``path``."""
        for machine in self.machines:
            shutil.copytree(self.whole / f"store-{machine}", path, dirs_exist_ok=True)
        if with_catalog:
            self._write_catalog(path / "catalog")
        return path

    @property
    def catalog(self) -> dict[str, dict[str, str]]:
        """Return the catalog's entries of the only store."""
        (machine,) = self.machines
        dump: dict[str, dict[str, str]] = json.loads((self.whole / f"catalog-{machine}.json").read_text("ascii"))
        return dump

    def of(self, machine: int) -> "FrozenParts":
        """Return the store of one machine."""
        return dataclasses.replace(self, machines=(machine,))


OTHERS = ("-torn", "-codecs", "-remote", "-typed-value", "-nested-tensor", "-parts")
"""Ends of the names of folders with other contents than the run ``default`` and the run ``values``."""


def whole_stores() -> list[Frozen]:
    """Return every complete store of every version, with codec identity and one rank."""
    return [Frozen(path) for path in sorted(STORES.iterdir()) if path.is_dir() and not path.name.endswith(OTHERS)]


def encoded_stores() -> list[Frozen]:
    """Return every store, and every remote layout, with all codecs and a checkpoint of several ranks."""
    return [Frozen(path) for path in sorted(STORES.iterdir()) if path.name.endswith(OTHERS[1:3])]


def typed_stores() -> list[Frozen]:
    """Return every store of typed values."""
    return [Frozen(path) for path in sorted(STORES.iterdir()) if path.name.endswith(OTHERS[3:5])]


def part_stores() -> list[FrozenParts]:
    """Return the stores of each job with one store per machine."""
    return [FrozenParts(path) for path in sorted(STORES.iterdir()) if path.name.endswith(OTHERS[5])]


def torn_stores() -> list[Frozen]:
    """Return every store that a crash left, of every version."""
    return [
        Frozen(whole.whole, path)
        for whole in whole_stores()
        for path in sorted(whole.whole.with_name(f"{whole.whole.name}-torn").iterdir())
    ]


def found_tensors(state: object) -> tuple[object, list[dict[str, Any]]]:
    """Return the tree of a restored state, and the properties of tensors that `expected.json` lists."""
    flat = flatten(state)
    tensors = []
    for leaf in flat.leaves:
        data = bytearray(leaf.nbytes)
        if data:
            leaf.copy_bytes(0, memoryview(data))
        facts = {"name": leaf.name, "aliases": list(leaf.aliases), "dtype": leaf.dtype, "role": leaf.role}
        tensors.append({**facts, "shape": list(leaf.shape), "nbytes": leaf.nbytes, "digest": digest(data).hex()})
    return flat.tree, tensors


def expected_wholes(facts: dict[str, Any]) -> dict[str, str | None]:
    """Return the digest of each whole tensor of a checkpoint by name, None where elements are in no part."""
    tensors = facts.get("merged", {"tensors": []})["tensors"]
    found: dict[str, str | None] = {
        name: tensor["digest"] for tensor in tensors for name in [tensor["name"], *tensor["aliases"]]
    }
    return found | dict.fromkeys(facts.get("lacks", []))


def check_everything(store: asymcheck.Store, frozen: Frozen) -> None:
    """Check that every expected checkpoint exists and restores bit for bit, and the newest one."""
    listed = {(item.run, item.save_id): item for item in store.checkpoints()}
    assert set(listed) == {(facts["run"], facts["save_id"]) for facts in frozen.checkpoints}
    for facts in frozen.checkpoints:
        item = listed[facts["run"], facts["save_id"]]
        assert item.complete
        assert item.on_line == facts["on_line"]
        assert (item.generation, item.step, item.world_size) == (
            facts["generation"],
            facts["step"],
            facts["world_size"],
        )
        assert dict(item.metrics) == facts["metrics"]
        steps = [other["step"] for other in frozen.checkpoints if other["run"] == facts["run"] and other["on_line"]]
        if not facts["on_line"] and facts["step"] in steps:
            # An abandoned checkpoint whose step was trained again cannot be requested by its step alone.
            continue
        for rank, part in enumerate(facts.get("parts", [])):
            state = store.load(facts["step"], run=facts["run"], rank=rank)
            assert found_tensors(state) == (part["tree"], part["tensors"])
        selected = "*"
        for name in facts.get("lacks", []):
            with pytest.raises(StateMismatchError, match=name):
                store.load(facts["step"], run=facts["run"], tensors=name)
            (selected,) = (tensor["name"] for tensor in facts["merged"]["tensors"])
        restored = store.restore(facts["step"], run=facts["run"], tensors=selected)
        assert restored.checkpoint.save_id == facts["save_id"]
        # The library merges the trees of several ranks.
        whole = facts.get("merged", facts)
        assert found_tensors(restored.state) == (whole["tree"], whole["tensors"])
    for run, save_id in frozen.newest.items():
        restored = store.restore(run=run, rank=0)
        assert restored.skipped == ()
        assert restored.checkpoint.save_id == save_id
