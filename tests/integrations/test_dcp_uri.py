"""Test checkpoint ids for programs that only take a path, and differences between a checkpoint and a given state."""

import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.registry import _registry, known_implementations
from torch.distributed.checkpoint import _storage_utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from asymcheck import Store
from asymcheck.errors import InvalidInputError, StateDifferenceWarning
from asymcheck.integrations.dcp import AsymcheckReader, AsymcheckWriter, register
from asymcheck.integrations.dcp_uri import CheckpointURI
from tests.store.equality import assert_same
from tests.zygote import Zygote

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the URIs for one test."""
    for name in ("FileSystemWriter", "FileSystemReader"):
        monkeypatch.setattr(_storage_utils, name, getattr(_storage_utils, name))
    register()
    yield
    _registry.pop("asymcheck", None)
    known_implementations.pop("asymcheck", None)


def state(value: float = 1.0) -> dict[str, Any]:
    """Return a state of two entries."""
    return {"model": {"w": torch.full((4,), value)}, "step": int(value)}


# Since torch 2.14, DCP warns of file systems without fsync, such as the one in memory.
@pytest.mark.filterwarnings("ignore:fsync not supported:UserWarning")
@pytest.mark.usefixtures("registered")
def test_path_selects_run_and_step(store_path: Path, tmp_path: Path) -> None:
    """Test save, async_save and load by path, as programs compose it; folders of DCP are still written and read."""
    base = f"asymcheck://{store_path}?run=mine"
    register()  # a second call changes nothing
    dcp.save(state(3), checkpoint_id=f"{base}/step-3")
    dcp.async_save(state(20), checkpoint_id=Path(base) / "checkpoint_20", no_dist=True).result()
    for uri, expected in ((base, 20), (f"{base}/step-3", 3), (Path(base) / "step-3", 3), (f"{base}/", 20)):
        again = state(0)
        dcp.load(again, checkpoint_id=uri)
        assert_same(again, state(expected))
    with Store.open(store_path) as store:
        assert [(one.run, one.step) for one in store.checkpoints()] == [("mine", 3), ("mine", 20)]
    for folder in (tmp_path / "folder", str(tmp_path / "other"), f"memory://{tmp_path}"):
        dcp.save(state(5), checkpoint_id=folder)
        dcp.load(again, checkpoint_id=folder)
        assert_same(again, state(5))


def test_uri_needs_no_registration_as_writer_and_reader(store_path: Path) -> None:
    """Test classes with a URI; a writer is used again after torch has passed another id."""
    base = f"asymcheck://{store_path}?run=mine"
    writer = AsymcheckWriter(f"{base}/step-1", metrics={"loss": 2.5})
    dcp.save(state(1), storage_writer=writer)
    with pytest.raises(CheckpointException, match="already saved step 1"):
        dcp.save(state(1), storage_writer=writer)
    dcp.save(state(2), storage_writer=writer, checkpoint_id=f"{base}/step-2")
    again = state(0)
    dcp.load(again, storage_reader=AsymcheckReader(f"{base}/step-1"))
    assert_same(again, state(1))
    with Store.open(store_path) as store:
        dcp.load(again, storage_reader=AsymcheckReader(store), checkpoint_id=base)
        assert_same(again, state(2))
        other = f"asymcheck://{store_path}-other?run=mine/step-3"
        with pytest.raises(InvalidInputError, match="is not supported by store"):
            dcp.save(state(), storage_writer=AsymcheckWriter(store, step=3), checkpoint_id=other)
        copy = pickle.loads(pickle.dumps(AsymcheckWriter(store, step=3, run="mine")))
        dcp.save(state(3), storage_writer=copy)
        assert [one.step for one in store.checkpoints("mine")] == [1, 2, 3]


@pytest.mark.parametrize(
    "uri",
    [
        "asymcheck:///store",
        "asymcheck:///store/step-3",
        "asymcheck://store?run=a/step-3",
        "asymcheck:///store?step=3",
        "asymcheck:///store?run=a&steps=3",
        "asymcheck:///store?run=a/best",
        "asymcheck:///store?run=a/checkpoints/step-3",
    ],
)
def test_uri_of_another_form_is_refused(uri: str) -> None:
    """Test URIs that would be read as another store, run or step."""
    with pytest.raises(InvalidInputError, match=r"give asymcheck:///PATH/OF/STORE\?run=RUN"):
        CheckpointURI.parse(uri)


@pytest.mark.usefixtures("registered")
def test_uri_errors_say_what_to_do(store_path: Path) -> None:
    """Test a URI without a step, with invalid values, and with arguments that it contains already."""
    base = f"asymcheck://{store_path}?run=mine"
    with pytest.raises(CheckpointException, match=r"no step is given; .*\?run=mine/step-100"):
        dcp.save(state(), checkpoint_id=base)
    with pytest.raises(InvalidInputError, match="strict is 0 or 1"):
        dcp.load(state(), checkpoint_id=f"{base}&strict=yes")
    with pytest.raises(InvalidInputError, match="invalid run name"):
        dcp.load(state(), checkpoint_id=f"asymcheck://{store_path}?run=-x")
    with pytest.raises(InvalidInputError, match="leave out run= and step="):
        AsymcheckWriter(f"{base}/step-3", step=3)
    assert not store_path.exists()


@pytest.mark.usefixtures("registered")
def test_checkpoints_are_listed_as_directories(store_path: Path) -> None:
    """Test what programs ask a file system: which steps are complete, and to delete one."""
    base = f"asymcheck://{store_path}?run=mine"
    files, path = fsspec.core.url_to_fs(base)
    assert not files.exists(path)
    for step in (5, 10):
        dcp.save({"w": torch.full((1 << 16,), step)}, checkpoint_id=f"{base}/step-{step}")
    assert files.ls(path, detail=False) == [f"{base}/step-5", f"{base}/step-10"]
    assert files.isdir(path)
    assert files.isdir(f"{path}/step-5")
    assert files.isfile(f"{path}/step-5/.metadata")
    assert not files.exists(f"{path}/step-7")
    assert not files.exists(f"{path}/step-7/.metadata")
    files.rm(f"{path}/step-5", recursive=True)
    with Store.open(store_path) as store:
        assert [one.step for one in store.checkpoints()] == [10]
        assert store.resources.usage().pooled_packs == 1
    with pytest.raises(FileNotFoundError, match="no such run or complete checkpoint"):
        files.ls(f"{path}/step-5")
    with pytest.raises(FileNotFoundError):
        files.rm(f"{path}/step-5", recursive=True)
    with pytest.raises(InvalidInputError, match="not runs"):
        files.rm(path, recursive=True)
    for write in (lambda: files.makedirs(path), lambda: files.open(f"{path}/step-10/.metadata", "rb")):
        with pytest.raises(InvalidInputError, match="register"):
            write()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer with state."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.slow
def test_optimizer_state_that_is_not_requested_is_named(store_path: Path) -> None:
    """Test a new optimizer, which has no state before its first step: its stored state would be lost in silence."""
    model, optimizer = trained()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "nothing": torch.zeros(0)}
    new = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    given = {"model": torch.nn.Linear(3, 2).state_dict(), "optimizer": new.state_dict(), "nothing": torch.zeros(0)}
    named = r"6 stored entries not requested: each is lost \(optimizer.state.0.step, .* and 2 more\)"
    with Store.open(store_path, create=True) as store:
        dcp.save(saved, storage_writer=AsymcheckWriter(store, step=1))
        before = given["model"]["weight"].clone()
        with pytest.raises(CheckpointException, match=named):
            dcp.load(given, storage_reader=AsymcheckReader(store, strict=True))
        with pytest.raises(CheckpointException, match=named):
            dcp.load(given, storage_reader=AsymcheckReader(f"asymcheck://{store_path}?run=default&strict=1"))
        assert torch.equal(given["model"]["weight"], before), "strict is checked before anything is overwritten"
        with pytest.warns(StateDifferenceWarning, match=named) as caught:
            dcp.load(given, storage_reader=AsymcheckReader(store))
        assert [one.filename for one in caught if one.category is StateDifferenceWarning] == [__file__]
        assert torch.equal(given["model"]["weight"], model.weight)
        dcp.load(saved, storage_reader=AsymcheckReader(store, strict=True))


def test_checkpoint_id_keeps_the_options_of_the_reader(store_path: Path) -> None:
    """Test a reader with options that also gets a URI without them."""
    uri = f"asymcheck://{store_path}?run=default/step-1"
    with Store.open(store_path, create=True) as store:
        dcp.save(state(), storage_writer=AsymcheckWriter(store, step=1))
        with pytest.raises(CheckpointException, match="StateMismatchError"):
            dcp.load({}, checkpoint_id=uri, storage_reader=AsymcheckReader(store, strict=True))
        reader = AsymcheckReader(store, strict=True, tensors="none*")
        dcp.load({}, checkpoint_id=uri, storage_reader=reader)


def test_partial_load_is_not_reported_if_intended(store_path: Path) -> None:
    """Test a glob of names, as an argument and as an option of a URI, and names that are only requested."""
    partly = {"model": {"w": torch.zeros(4), "new": torch.ones(2)}}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    named = r"1 stored entry not requested: each is lost \(step\); 1 requested entry not stored: .* \(model.new\)"
    with Store.open(store_path, create=True) as store, warnings.catch_warnings():
        warnings.filterwarnings("error", category=StateDifferenceWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state(), storage_writer=AsymcheckWriter(store, step=1))
        with pytest.raises(CheckpointException, match=named):
            dcp.load(partly, storage_reader=AsymcheckReader(store, strict=True), planner=planner)
        for reader in (
            AsymcheckReader(store, tensors="model.w", strict=True),
            AsymcheckReader(f"asymcheck://{store_path}?run=default&strict=1&tensors=model.w"),
            AsymcheckReader(f"asymcheck://{store_path}?run=default", tensors="model.w", strict=True),
        ):
            partly["model"]["w"].zero_()
            dcp.load(partly, storage_reader=reader, planner=planner)
            assert_same(partly["model"], {"w": torch.ones(4), "new": torch.ones(2)})


def test_unregistered_uri_is_not_a_folder(store_path: Path) -> None:
    """Test a program that has forgotten to register: nothing is created."""
    before = os.listdir()
    with pytest.raises(Exception, match=r"register|Cannot detect which StorageReader"):
        dcp.save(state(), checkpoint_id=f"asymcheck://{store_path}?run=mine/step-1")
    assert os.listdir() == before
    assert not store_path.exists()


@pytest.mark.slow
def test_ranks_save_and_load_by_path(zygote: Zygote, tmp_path: Path) -> None:
    """Test save, async_save with threads and with processes, other numbers of ranks, and errors and kills of a rank."""
    base = f"asymcheck://{tmp_path}/store?run=mine"
    program = "tests.integrations.dcp_uri_ranks"
    zygote.run_ranks(2, program, ["save", base], tmp_path)
    for count in (1, 3):
        zygote.run_ranks(count, program, ["load", base], tmp_path)
    ranks = zygote.start_ranks(2, program, ["kill", base], tmp_path)
    ranks[1].wait_killed()
    ranks[0].kill()
    ranks[0].wait()
    with Store.open(tmp_path / "store") as store:
        assert [one.step for one in store.checkpoints() if one.complete] == [1, 2, 3]
        assert store.restore(run="mine").checkpoint.step == 3
        # What remains of the saves that failed.
        assert {finding.kind for finding in store.verify()} <= {"incomplete-checkpoint", "empty-checkpoint"}
