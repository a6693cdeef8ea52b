"""Test pulls of some tensors: what is requested, what is stored, and that no training continues from the copy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path, PurePath

import jsonschema
import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, Store, TensorShard
from asymcheck.commit.transaction import CommitTransaction
from asymcheck.errors import DamagedPartitionError, InvalidInputError, OutOfSpaceError, StateMismatchError
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import CheckpointRef, Digest
from tests.cli.conftest import run_command
from tests.damage.flips import flip
from tests.remote.conftest import CONFIG
from tests.reshard.ranks import save_ranks

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "schemas" / "pull.json"
Requested = list[tuple[str, int, int]]


def state_of(step: int) -> dict[str, object]:
    """Return a state whose optimizer state is stored between parts of the model."""
    weight = torch.randn(20_000, generator=torch.Generator().manual_seed(step))
    return {
        "model": {"w": weight, "tied": weight, "array": np.arange(3000), "buffers": [torch.ones(2), None]},
        "optimizer": {"state": {0: torch.full((300,), float(step))}, "param_groups": [{"lr": 0.1}]},
        "model_ema": {"w": weight * 2},
        "step": step,
        # Each of these tensors has a frame of one block.
        **{
            f"{part}_{i}": {"x": torch.full((300,), i + 0.5 * (part == "model"))}
            for i in range(12)
            for part in ("model", "optimizer")
        },
    }


def save(path: Path, location: str, *steps: int) -> None:
    """Save and push steps."""
    with Store.open(path, config=CONFIG, create=True) as store:
        for step in steps:
            store.save(state_of(step), step=step)
            store.push(location, step)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Requested:
    """Return a list to which each range that is read from a location is added: file, start and end."""
    ranges: Requested = []
    read = RemoteFiles.read_range

    def recorded(self: RemoteFiles, path: PurePath, offset: int, length: int, *rest: object) -> object:
        ranges.append((path.name, offset, offset + length))
        return read(self, path, offset, length, *rest)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(RemoteFiles, "read_range", recorded)
    return ranges


def optimizer_frames(location: str) -> Requested:
    """Return file, start and end of each frame at a location that only optimizer state needs."""
    tier = RemoteTier(parse_location(location), CONFIG)
    needs: dict[Digest, set[str]] = {}
    for listing in tier.manifests.checkpoints("default"):
        for manifest in tier.manifests.read_all(listing):
            for row in manifest.rows():
                for extent in row.extents:
                    needs.setdefault(extent.digest, set()).add(row.name.partition(".")[0])
    packs = [tier.open_pack(pack_id) for pack_id in tier.pack_ids()]
    tier.close()
    return [
        (pack.path.name, int(entry["offset"]), int(entry["offset"]) + int(entry["stored_length"]))
        for pack in packs
        for entry in pack.entries
        if all(part.startswith("optimizer") for part in needs[Digest(entry["digest"].tobytes())])
    ]


@pytest.mark.slow(quick=["file"])
def test_only_matching_tensors_are_requested(
    store_path: Path, any_location: str, tmp_path: Path, requested: Requested
) -> None:
    """Test that no byte of the optimizer state is read, and that every bit of the model and its structure arrive."""
    save(store_path, any_location, 7)
    frames = optimizer_frames(any_location)
    assert frames
    requested.clear()
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        done = new.pull(any_location, tensors="model*")
        pairs = itertools.product(requested, frames)
        assert [(a, b) for a, b in pairs if a[0] == b[0] and a[1] < b[2] and b[1] < a[2]] == []
        assert [name.split(" (")[0] for name in done.committed] == ["run partial, step 7"]
        loaded = new.load(run="partial")
        assert isinstance(loaded, dict)
        expected = state_of(7)
        assert list(loaded) == ["model", "model_ema", *(f"model_{i}" for i in range(12))]
        assert torch.equal(loaded["model"]["w"], expected["model"]["w"])  # type: ignore[index]  # a mapping
        assert loaded["model"]["tied"] is loaded["model"]["w"]
        assert np.array_equal(loaded["model"]["array"], np.arange(3000))
        assert isinstance(loaded["model"]["array"], np.ndarray)
        assert loaded["model"]["buffers"][1] is None
        assert torch.equal(loaded["model_ema"]["w"], expected["model_ema"]["w"])  # type: ignore[index]  # a mapping
        assert new.verify() == []
        again = new.pull(any_location, tensors="model*")
        assert (again.committed, again.present, again.moved_bytes) == ((), 1, 0)
        # The partitions are those of the whole checkpoint.
        whole = new.pull(any_location)
        assert whole.reused_partitions == done.moved_partitions
        assert whole.moved_partitions == len(frames)


def test_selections_of_one_checkpoint(store_path: Path, tmp_path: Path) -> None:
    """Test two globs and all steps in one run, names of a tied tensor, and the glob of one plain value."""
    location = (tmp_path / "far").as_uri()
    save(store_path, location, 1, 2)
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        new.pull(location, tensors="model.tied", everything=True)
        assert [one.step for one in new.checkpoints("partial")] == [1, 2]
        (tensor,) = new.tensors(2, run="partial")[1]
        assert (tensor.name, tensor.aliases) == ("model.tied", ())
        new.pull(location, 2, tensors="step", to_run="steps")
        assert new.load(run="steps") == {"step": 2}
        new.pull(location, 2, tensors="step")
        saves = [one.save_id[:12] for one in new.checkpoints("partial") if one.step == 2]
        assert len(set(saves)) == 2
        # Collection and a push treat the copies like any checkpoint.
        new.gc()
        new.push((tmp_path / "copies").as_uri(), run="partial")
        assert new.verify() == []


def test_ranks_and_an_interrupted_copy(store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that shards stay shards, that a rank may have no matching tensor, and that a later pull completes a copy."""
    location, full = (tmp_path / "far").as_uri(), torch.randn(400, 30)
    parts = [TensorShard(full[first : first + 200].clone(), (400, 30), (first, 0)) for first in (0, 200)]
    states = [*({"model": {"w": part}, "optimizer": {"m": torch.ones(900)}} for part in parts), {"optimizer": {"m": 1}}]
    with Store.open(store_path, config=CONFIG, create=True) as store:
        save_ranks(store, states, 5)
        store.push(location)
    publish = CommitTransaction.publish

    def fail_on_rank_1(self: CommitTransaction, run: str, ref: CheckpointRef, *rest: object, **more: object) -> None:
        if self._rank == 1:
            raise OutOfSpaceError("the drive is full")
        publish(self, run, ref, *rest, **more)  # type: ignore[arg-type]  # passed on

    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        with monkeypatch.context() as patch:
            patch.setattr(CommitTransaction, "publish", fail_on_rank_1)
            with pytest.raises(OutOfSpaceError):
                new.pull(location, tensors="model.*")
        assert not new.checkpoints("partial")[0].complete
        # The manifest of rank 0 names the other URI. A second one would make the copy unreadable.
        (tmp_path / "other").symlink_to(tmp_path / "far")
        new.pull((tmp_path / "other").as_uri(), tensors="model.*")
        (copy,) = new.checkpoints("partial")
        assert (copy.complete, copy.world_size) == (True, 3)
        assert torch.equal(new.load(run="partial")["model"]["w"], full)  # type: ignore[index]  # a mapping
        assert new.load(run="partial", rank=2) == {}
        assert new.verify() == []


def test_a_copy_is_fetched_again_where_the_store_has_lost_it(store_path: Path, tmp_path: Path) -> None:
    """Test lost packs, with the same and with another URI."""
    location = (tmp_path / "far").as_uri()
    save(store_path, location, 1)
    (tmp_path / "other").symlink_to(tmp_path / "far")
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        new.pull(location, tensors="model.w")
        for place in (location, (tmp_path / "other").as_uri()):
            for pack in (tmp_path / "new" / "packs").iterdir():
                pack.unlink()
            assert new.pull(place, tensors="model.w").moved_partitions
            assert torch.equal(new.load(run="partial")["model"]["w"], state_of(1)["model"]["w"])  # type: ignore[index]  # mappings


def test_no_training_continues_from_a_copy(store_path: Path, tmp_path: Path) -> None:
    """Test that restore() for training refuses with the reason, and that a run of a training takes no copies."""
    location = (tmp_path / "far").as_uri()
    save(store_path, location, 1)
    with Store.open(store_path, config=CONFIG) as store:
        with pytest.raises(InvalidInputError, match=r"run 'default' of .* has checkpoints of a training; give another"):
            store.pull(location, tensors="model.*", to_run="default")
        store.pull(location, tensors="model.w")
        model = {"model": {"w": torch.zeros(20_000)}}
        with (
            Checkpointer(store, model, every=1, run="partial") as checkpointer,
            pytest.raises(StateMismatchError, match=r"pulled with the tensors 'model\.w' only\. Load its weights with"),
        ):
            checkpointer.restore()
        store.load(run="partial", into=model)
        assert torch.equal(model["model"]["w"], state_of(1)["model"]["w"])  # type: ignore[index]  # a mapping


def test_copies_that_fail(store_path: Path, tmp_path: Path) -> None:
    """Test a glob without a match, and a damaged frame: nothing is committed."""
    location = (tmp_path / "far").as_uri()
    save(store_path, location, 1)
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        with pytest.raises(
            InvalidInputError, match="tensors='weights' matches no name in the checkpoint; it has model"
        ):
            new.pull(location, tensors="weights")
        for pack in (tmp_path / "far" / "packs").iterdir():
            flip(pack, 8 * (4096 + 2000))
        with pytest.raises(DamagedPartitionError):
            new.pull(location, tensors="*")
        assert new.checkpoints() == []


def test_command(store_path: Path, tmp_path: Path) -> None:
    """Test text and document of the command, and that inspect shows the origin."""
    location, new = (tmp_path / "far").as_uri(), tmp_path / "new"
    save(store_path, location, 3)
    outcome = run_command("pull", location, new, "--tensors", "model.*", "--json")
    jsonschema.validate(outcome.json, json.loads(SCHEMA.read_text("utf-8")))
    assert outcome.json["moved_partitions"]
    again = run_command("pull", location, new, "--tensors", "model.*")
    assert again.out == "0 checkpoints fetched, 0 B in 0 packs; already present: 1 checkpoint\n"
    shown = run_command("inspect", new, "--run", "partial", "--step", 3)
    assert f"pulled in part from this checkpoint, location {location}, tensors model.*:\n" in shown.out
    merged = run_command("inspect", new, "--run", "partial", "--step", 3, "--json").json["merged"]
    with Store.open(location) as remote:
        (source,) = remote.checkpoints()
        store_id = remote.resources.tier.descriptor.store_id.hex()
    identity = {"store_id": store_id, "run": "default", "step": 3, "generation": 1, "save_id": source.save_id}
    origin = {"location": location, "tensors": "model.*"}
    assert merged == {"method": "pull", "sources": [{**identity, "weight": 1.0}], "base": None, **origin}
    for more in (("--tensors", "nothing.*"), ("--tensors", "model.*", "--to-run", "a/b")):
        refused = run_command("pull", location, tmp_path / "unused", *more)
        assert (refused.status, (tmp_path / "unused").exists()) == (2, False)
    refused = run_command("pull", location, new, "--to-run", "other")
    assert (refused.status, "--tensors" in refused.err) == (2, True)
