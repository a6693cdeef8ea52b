"""Test torch.distributed.checkpoint with a store, for any number of ranks."""

import io
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.optim.lr_scheduler import MultiStepLR

from asymcheck import Checkpointer, Store
from asymcheck.errors import (
    InconsistentCheckpointError,
    InvalidInputError,
    RanksError,
    SkippedCheckpointWarning,
    StateDifferenceWarning,
)
from asymcheck.integrations.dcp import AsymcheckReader, AsymcheckWriter
from asymcheck.types import CheckpointRef, SaveId
from tests.convert.files import import_checkpoint
from tests.store.equality import assert_same
from tests.zygote import Zygote

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def example() -> dict[str, Any]:
    """Return a state that DCP flattens, with entries that it keeps as one value."""
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {"layer.weight": torch.randn(6, 4, generator=generator), "half": torch.ones(3).bfloat16()},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.8, 0.9)}],
        "list": [torch.arange(3), torch.tensor(2.5)],
        "pair": (torch.zeros(2, 2), 7),
        "array": np.arange(5, dtype=np.int16),
        "empty": torch.zeros(0, 4),
        "note": "text",
        "number": 3,
        "none": None,
    }


def emptied(value: object) -> Any:  # noqa: ANN401 - of the type of what is given
    """Return a state of the same form, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 9)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    return [emptied(item) for item in value] if isinstance(value, list) else "other"


def test_a_state_comes_back(store_path: Path) -> None:
    """Test a restore in place by DCP, and by the store, which sees an ordinary checkpoint."""
    with Store.open(store_path, create=True) as store:
        writer = AsymcheckWriter(store, step=5, metrics={"loss": 2.5}, run="dcp")
        dcp.save(example(), storage_writer=writer)
        state = emptied(example())
        weight = state["model"]["layer.weight"]
        dcp.load(state, storage_reader=AsymcheckReader(store, run="dcp"))
        assert_same(state, example())
        assert state["model"]["layer.weight"] is weight
        assert_same(store.load(run="dcp"), example())
        checkpoint = store.checkpoints("dcp")[0]
        assert (checkpoint.step, checkpoint.metrics, checkpoint.world_size) == (5, {"loss": 2.5}, 1)
        assert writer.checkpoint is not None
        assert writer.checkpoint.save_id == checkpoint.save_id
        assert store.verify() == []


def test_state_is_created_from_metadata(store_path: Path) -> None:
    """Test a load like that of torch's own converter."""
    with Store.open(store_path, create=True) as store:
        dcp.save(example(), storage_writer=AsymcheckWriter(store, step=0))
        state: dict[str, Any] = {}
        _load_state_dict(
            state, storage_reader=AsymcheckReader(store), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    assert_same({key: state[key] for key in example()}, example())


def test_missing_step_is_named_once(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Test that DCP does not try a second read, and reports that it failed, too."""
    with Store.open(store_path, create=True) as store:
        dcp.save(example(), storage_writer=AsymcheckWriter(store, step=5))
        with pytest.raises(CheckpointException) as caught:
            dcp.load(emptied(example()), storage_reader=AsymcheckReader(store, step=9))
    assert str(caught.value).count("has no checkpoint of step 9 of run 'default'; it has steps 5") == 1
    assert len([record for record in caplog.records if record.exc_info]) <= 1


def test_values_are_not_pickled(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test values for which DCP would call torch.save."""
    with Store.open(store_path, create=True) as store:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "save", None)
            dcp.save(example(), storage_writer=AsymcheckWriter(store, step=0))
        with pytest.raises(CheckpointException, match="at value: values of type object"):
            dcp.save({"value": object()}, storage_writer=AsymcheckWriter(store, step=1))
        assert [item.step for item in store.checkpoints()] == [0]


def test_files_in_memory_come_back(store_path: Path) -> None:
    """Test a state with an io.BytesIO, as older trainers have; without one to fill, a load gives its bytes."""
    with Store.open(store_path, create=True) as store:
        losses = io.BytesIO(b"losses")
        losses.seek(3)
        dcp.save({"trainer": {"losses": losses}}, storage_writer=AsymcheckWriter(store, step=0))
        state: dict[str, Any] = {"trainer": {"losses": io.BytesIO()}}
        dcp.load(state, storage_reader=AsymcheckReader(store))
        assert state["trainer"]["losses"].read() == b"losses"
        state = {"trainer": {"losses": b""}}
        dcp.load(state, storage_reader=AsymcheckReader(store))
        assert state == store.load() == {"trainer": {"losses": b"losses"}}


def test_empty_mapping_in_a_list_is_lost(store_path: Path) -> None:
    """Test that other entries keep their numbers, as in a load by DCP."""
    with Store.open(store_path, create=True) as store:
        dcp.save({"list": [{}, {"a": torch.ones(1)}]}, storage_writer=AsymcheckWriter(store, step=0))
        assert_same(store.load(), {"list": {1: {"a": torch.ones(1)}}})
        state = {"list": [5, {"a": torch.zeros(1)}]}
        with pytest.warns(
            StateDifferenceWarning, match=r"1 requested entry not stored: each keeps its value \(list.0\)"
        ):
            dcp.load(state, storage_reader=AsymcheckReader(store), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(state, {"list": [5, {"a": torch.ones(1)}]})


@pytest.mark.parametrize("value", [{"w": torch.ones(1), "n": 3}, [torch.ones(1)], [[{"n": 3}]]])
def test_a_planner_that_leaves_the_state_whole_is_refused(store_path: Path, value: object) -> None:
    """Test a state that would be flattened and not found by its names; a flat state is allowed."""
    flat = {"t": torch.ones(3), "pair": (torch.zeros(2), 7), "numbers": [1, [2, 3]], "none": None}
    with Store.open(store_path, create=True) as store:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        with pytest.raises(CheckpointException, match=r"mapping value.*flatten_state_dict=True"):
            dcp.save({"value": value}, storage_writer=AsymcheckWriter(store, step=0), planner=planner)
        assert store.checkpoints() == []
        dcp.save(flat, storage_writer=AsymcheckWriter(store, step=0), planner=planner)
        assert_same(store.load(), flat)
        again = {"t": torch.zeros(3)}
        reader = AsymcheckReader(store, tensors="t")
        dcp.load(again, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert_same(again["t"], flat["t"])


def test_other_dtypes_are_converted(store_path: Path) -> None:
    """Test a float32 checkpoint and a bfloat16 model, as with DCP's own reader."""
    weights = torch.randn(5, 3)
    with Store.open(store_path, create=True) as store:
        dcp.save({"w": weights}, storage_writer=AsymcheckWriter(store, step=0))
        state = {"w": torch.zeros(5, 3, dtype=torch.bfloat16)}
        dcp.load(state, storage_reader=AsymcheckReader(store))
    assert_same(state["w"], weights.bfloat16())


def test_checkpoints_of_a_checkpointer_can_be_loaded(store_path: Path) -> None:
    """Test that DCP's names are the dotted names of a state."""
    model = torch.nn.Linear(4, 2)
    with Store.open(store_path, create=True) as store:
        with Checkpointer(
            store, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, every=1, keep=None
        ) as checkpointer:
            checkpointer.save(4)
        other = torch.nn.Linear(4, 2)
        dcp.load({"model": other}, storage_reader=AsymcheckReader(store, step=4, tensors="model.*"))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_checkpointer_continues_objects_that_dcp_saved(store_path: Path) -> None:
    """Test numbers of parameters and milestones of a schedule, which DCP stores as strings."""
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer, fresh = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    schedule, again = (MultiStepLR(each, [2, 5]) for each in (optimizer, fresh))
    with Store.open(store_path, create=True) as store:
        saved = {"model": model, "optimizer": optimizer, "schedule": schedule}
        state = {name: part.state_dict() for name, part in saved.items()}
        dcp.save(state, storage_writer=AsymcheckWriter(store, step=5))
        with Checkpointer(store, {"model": other, "optimizer": fresh, "schedule": again}) as checkpointer:
            checkpointer.restore()
    assert_same([fresh.state_dict(), again.state_dict()], [optimizer.state_dict(), schedule.state_dict()])


def test_a_damaged_checkpoint_gives_way(store_path: Path) -> None:
    """Test that the newest checkpoint with existing packs is loaded, with a warning."""
    with Store.open(store_path, create=True) as store:
        dcp.save({"w": torch.ones(1 << 16)}, storage_writer=AsymcheckWriter(store, step=1))
        first = set((store_path / "packs").rglob("*"))
        dcp.save({"w": torch.zeros(1 << 16)}, storage_writer=AsymcheckWriter(store, step=2))
        for path in set((store_path / "packs").rglob("*")) - first:
            path.unlink()
        state = {"w": torch.full((1 << 16,), 9.0)}
        reader = AsymcheckReader(store)
        with pytest.warns(SkippedCheckpointWarning, match="step 2"):
            dcp.load(state, storage_reader=reader)
    assert reader.checkpoint is not None
    assert reader.checkpoint.step == 1
    assert torch.equal(state["w"], torch.ones(1 << 16))


def test_save_without_collectives_is_refused(store_path: Path) -> None:
    """Test a save without an exchange of plans, which carries the save id."""
    with Store.open(store_path, create=True) as store:
        with pytest.raises(InvalidInputError, match="use_collectives=True"):
            dcp.save({"w": torch.ones(3)}, storage_writer=AsymcheckWriter(store, step=1), use_collectives=False)
        assert store.checkpoints() == []


def test_plan_caching_does_not_repeat_a_save_id(store_path: Path, tmp_path: Path) -> None:
    """Test a planner that caches plans in a class of torch; another writer may not leave its plans there."""
    state = {"w": torch.zeros(3), "model": {"b": torch.zeros(2)}}
    with Store.open(store_path, create=True) as store:
        for step in (1, 2, 3):
            state["w"] += 1
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, storage_writer=AsymcheckWriter(store, step=step), planner=planner)
        assert [(one.step, one.complete) for one in store.checkpoints()] == [(1, True), (2, True), (3, True)]
        assert torch.equal(store.load(2)["w"], torch.full((3,), 2.0))
        dcp.save(state, checkpoint_id=tmp_path / "folder", planner=DefaultSavePlanner(enable_plan_caching=True))
        planner = DefaultSavePlanner(enable_plan_caching=True)
        with pytest.raises(CheckpointException, match="enable_plan_caching=False"):
            dcp.save(state, storage_writer=AsymcheckWriter(store, step=4), planner=planner)
        planner = DefaultSavePlanner(enable_plan_caching=False)
        dcp.save(state, storage_writer=AsymcheckWriter(store, step=4), planner=planner)


def test_an_id_of_dcp_and_a_second_use_are_refused(store_path: Path) -> None:
    """Test arguments that would be ignored, so that another checkpoint would be saved or loaded."""
    with Store.open(store_path, create=True) as store:
        writer = AsymcheckWriter(store, step=1)
        for call in (
            lambda: dcp.save(example(), storage_writer=writer, checkpoint_id="step-1"),
            lambda: dcp.async_save(
                example(), storage_writer=writer, checkpoint_id=Path("step-1"), no_dist=True
            ).result(),
            lambda: dcp.load(emptied(example()), storage_reader=AsymcheckReader(store), checkpoint_id="step-1"),
        ):
            with pytest.raises(InvalidInputError, match=r"checkpoint_id=.*step-1'.* by Asymcheck.*er\(store, step=…\)"):
                call()
        assert store.checkpoints() == []
        # Frameworks may pass the path of the store, which is correct.
        dcp.save(example(), storage_writer=writer, checkpoint_id=store_path)
        with pytest.raises(CheckpointException, match="already saved step 1 of run 'default'"):
            dcp.save(example(), storage_writer=writer)
        dcp.async_save(example(), storage_writer=AsymcheckWriter(store, step=2), no_dist=True).result()
        assert [one.step for one in store.checkpoints()] == [1, 2]


def test_ranks_with_different_checkpoints_are_refused(store_path: Path) -> None:
    """Test ranks between whose reads another checkpoint was saved: all must load the same one."""
    refs = [CheckpointRef(1, step, SaveId(bytes([step] * 16))) for step in (3, 3, 4)]
    with Store.open(store_path, create=True) as store:
        reader = AsymcheckReader(store)
        plans = [LoadPlan([], storage_data=(ref, [])) for ref in refs]
        assert reader.prepare_global_plan(plans[:2]) == plans[:2]
        with pytest.raises(InconsistentCheckpointError, match=r"step 3.*step 4.*same step="):
            reader.prepare_global_plan(plans)


@pytest.mark.parametrize(("stores", "steps"), [((0, 0), (1, 1)), ((0, 1), (1, 1)), ((0, 0), (1, 2))])
def test_ranks_that_save_no_common_checkpoint_are_refused(
    tmp_path: Path, stores: tuple[int, int], steps: tuple[int, int]
) -> None:
    """Test ranks on two machines with the same local path, and ranks at different steps: no load would find a whole."""
    with ExitStack() as opened:
        writers, planners = [], []
        for number, step in zip(stores, steps, strict=True):
            store = opened.enter_context(Store.open(tmp_path / str(number), create=True))
            writers.append(AsymcheckWriter(store, step=step))
            planners.append(DefaultSavePlanner())
            planners[-1].set_up_planner({"w": torch.ones(3)}, is_coordinator=number == 0)
        plans = writers[0].prepare_global_plan([planner.create_local_plan() for planner in planners])
        for writer, plan, planner in zip(writers, plans, planners, strict=True):
            writer.write_data(plan, planner).wait()
        is_common = stores == (0, 0) and steps == (1, 1)
        refused = pytest.raises(RanksError, match=r"step 1 .* lacks the parts of rank 1\. On all ranks, open")
        with nullcontext() if is_common else refused:
            writers[0].finish(Metadata({}), [])


def in_order(value: object) -> object:
    """Return a state with the keys of every mapping in sorted order."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(item) for item in value] if isinstance(value, list) else value


def ranks(zygote: Zygote, count: int, what: str, folder: Path) -> dict[str, Any]:
    """Save or load on that many ranks; return their whole state."""
    zygote.run_ranks(count, "tests.integrations.dcp_ranks", [what, folder], folder)
    return torch.load(folder / f"{what}-{count}.pt", weights_only=True)


@pytest.mark.slow
def test_saved_by_four_ranks_and_loaded_by_two(zygote: Zygote, tmp_path: Path) -> None:
    """Test FSDP2 with save and async_save; one process can also load the state."""
    saved = ranks(zygote, 4, "save", tmp_path)
    assert_same(ranks(zygote, 2, "load", tmp_path), saved)
    with Store.open(tmp_path / "store", read_only=True) as store:
        assert [(item.step, item.world_size, item.complete) for item in store.checkpoints()] == [
            (3, 4, True),
            (6, 4, True),
        ]
        assert store.verify() == []
        assert_same(dict(store.load(tensors="app.model.*")["app"]["model"]), dict(saved["app"]["model"]))
        state = {"app": {"model": emptied(dict(saved["app"]["model"]))}}
        dcp.load(state, storage_reader=AsymcheckReader(store, tensors="app.model.*"))
        assert_same(state["app"]["model"], dict(saved["app"]["model"]))
    with Store.open(tmp_path / "converted", create=True) as store:
        import_checkpoint(store, tmp_path / "folder")
        assert_same(in_order(store.load()), in_order(saved))


@pytest.mark.parametrize("make", [partial(AsymcheckWriter, step=1), AsymcheckReader])
def test_invalid_store_is_refused_at_once(make: Callable[[object], object]) -> None:
    """Test a path, which would otherwise fail in the middle of a save."""
    with pytest.raises(InvalidInputError, match="is not a Store"):
        make("checkpoints")
