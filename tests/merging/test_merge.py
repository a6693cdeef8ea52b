"""Test merges of stored checkpoints: values, reuse, provenance, refusals, and kills."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import asymcheck
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.errors import (
    CheckpointNotFoundError,
    InvalidInputError,
    StateMismatchError,
)
from asymcheck.format.manifest import TensorRow
from asymcheck.inspect.inventory import merge_of
from asymcheck.merging import merge as merging
from asymcheck.merging import sources
from asymcheck.merging.sources import SourceName
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.reshard import ShardSet
from asymcheck.types import Part
from tests.convert.files import import_checkpoint
from tests.merging.conftest import CONFIG, STEPS, model_of, state_of
from tests.zygote import REPOSITORY

SHARDS = 3


def merged_model(store: asymcheck.Store, run: str = "merged") -> dict[str, Any]:
    """Return the model of the newest merged checkpoint."""
    state = store.load(run=run)
    assert isinstance(state, dict)
    model: dict[str, Any] = state["model"]
    return model


def mean_of(name: str, steps: tuple[int, ...] = STEPS) -> torch.Tensor:
    """Return a mean in float64. That of few bfloat16 values is exact in float32."""
    values = [model_of(step)[name].double() for step in steps]  # type: ignore[attr-defined]  # tensors
    return torch.stack(values).sum(dim=0) / len(steps)


def test_a_mean_is_saved_without_optimizer_state(store: asymcheck.Store) -> None:
    """Test values, dtypes, ties, integers, plain values, and that the result verifies."""
    done = asymcheck.merge(store, STEPS)
    assert store.load(run="merged", tensors="*").keys() == {"model"}  # type: ignore[attr-defined]  # a dict
    model = merged_model(store)
    assert torch.equal(model["embedding"], mean_of("embedding").float())
    assert model["head"] is model["embedding"]
    assert model["half"].dtype == torch.bfloat16
    assert torch.equal(model["half"], mean_of("half").float().bfloat16())
    assert model["bias"].dtype == torch.float16
    assert model["scale"].item() == 25.0
    assert torch.equal(model["frozen"], torch.arange(9000, dtype=torch.float32))
    assert (model["batches"].item(), model["name"]) == (40, "after 40")
    assert (done.checkpoint.step, done.tensors, done.left_out) == (40, 6, ("optimizer", "scheduler"))
    assert store.verify() == []


def test_equal_partitions_are_neither_read_nor_written(store: asymcheck.Store) -> None:
    """Test the bytes that are read and written, and the partitions of a frozen tensor."""
    read: list[int] = []
    frozen = {part.digest for item in store.tensors(10, "*frozen")[1] for part in item.partitions}
    with asymcheck.events.watch(lambda interval: read.append(interval.bytes if interval.name == "read" else 0)):
        done = asymcheck.merge(store, STEPS)
    merged = store.tensors(None, "*frozen", run="merged")[1]
    assert {part.digest for item in merged for part in item.partitions} == frozen
    assert done.reused_bytes == 36_000
    assert done.checkpoint.written_bytes == 18_000 + 9_800
    assert sum(read) == len(STEPS) * (18_000 + 9_800)
    assert asymcheck.merge(store, STEPS).checkpoint.written_bytes == 0


def test_repeated_merge_names_the_earlier_one(store: asymcheck.Store) -> None:
    """Test an equal merge, one beside a damaged manifest, and merges of other methods and tensors."""
    first = asymcheck.merge(store, STEPS)
    assert first.duplicate_of is None
    assert asymcheck.merge(store, STEPS, method="lawa").duplicate_of is None
    assert asymcheck.merge(store, STEPS, tensors="model.half").duplicate_of is None
    again = asymcheck.merge(store, STEPS)
    assert again.duplicate_of == first.checkpoint.save_id
    assert again.checkpoint.save_id != first.checkpoint.save_id
    (folder,) = (store.path / "manifests" / "merged").glob(f"*-{first.checkpoint.save_id}")
    (manifest,) = folder.iterdir()
    manifest.write_bytes(b"x")
    assert asymcheck.merge(store, STEPS).duplicate_of == again.checkpoint.save_id


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("ema", {"alpha": 0.3}),
        ("wsm", {"schedule": "cosine"}),
        ("lawa", {}),
        ("weighted", {"weights": (1.0, 2.0, 3.0)}),
        ("ties", {"base": 10, "density": 0.4}),
        ("dare", {"base": 10, "density": 0.4, "seed": 5}),
    ],
)
def test_results_do_not_depend_on_partitions(
    store: asymcheck.Store, tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    """Test that a store with another cut gives the same bits."""
    other = asymcheck.StoreConfig(partition_bytes=4096, bundle_below_bytes=0, inline_bytes=0)
    with asymcheck.Store.open(tmp_path / "other", config=other, create=True) as second:
        for step in STEPS:
            second.save(state_of(step), step=step)
        models = []
        for opened in (store, second):
            asymcheck.merge(opened, STEPS[1:], method=method, **settings)
            models.append(merged_model(opened))
    for name in ("embedding", "half", "bias", "scale"):
        assert torch.equal(models[0][name], models[1][name]), name
    assert not torch.equal(models[0]["half"], model_of(40)["half"])  # type: ignore[arg-type]  # a tensor


@pytest.mark.parametrize("method", ["mean", "slerp", "ties", "dare"])
def test_empty_tensors_of_several_dtypes_are_merged(tmp_path: Path, method: str) -> None:
    """Test a tensor without elements in sources of different dtypes, which are never equal."""
    base = 0 if method in ("ties", "dare") else None
    with asymcheck.Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16)):
            store.save({"model": {"w": torch.rand(9, dtype=dtype), "none": torch.ones(0, 3, dtype=dtype)}}, step=step)
        asymcheck.merge(store, [1, 2], method=method, base=base)
        assert merged_model(store)["none"].shape == (0, 3)


def test_slerp_has_the_angle_of_each_whole_tensor(store: asymcheck.Store) -> None:
    """Test a tensor of several partitions against the formula."""
    asymcheck.merge(store, [10, 40], method="slerp", t=0.25)
    x, y = (model_of(step)["embedding"].double() for step in (10, 40))  # type: ignore[attr-defined]  # tensors
    angle = torch.acos((x * y).sum() / x.norm() / y.norm())
    expected = (torch.sin(0.75 * angle) * x + torch.sin(0.25 * angle) * y) / torch.sin(angle)
    torch.testing.assert_close(merged_model(store)["embedding"], expected.float(), rtol=1e-6, atol=1e-7)


def test_slerp_scales_partitions_that_are_equal(store: asymcheck.Store) -> None:
    """Test a tensor whose first partition is equal in both checkpoints: the weights of its angle are not 1 in sum."""
    x = model_of(10)["embedding"]
    y = model_of(40)["embedding"]
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    y.view(-1)[:2048] = x.view(-1)[:2048]
    for step, value in ((1, x), (2, y)):
        store.save({"model": {"embedding": value}}, step=step, run="half")
    asymcheck.merge(store, [1, 2], run="half", method="slerp", t=0.25)
    x, y = x.double(), y.double()
    angle = torch.acos((x * y).sum() / x.norm() / y.norm())
    expected = (torch.sin(0.75 * angle) * x + torch.sin(0.25 * angle) * y) / torch.sin(angle)
    torch.testing.assert_close(merged_model(store)["embedding"], expected.float(), rtol=1e-6, atol=1e-7)


def test_memory_limit_does_not_change_the_result(store: asymcheck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test reads of a partition in several parts."""
    asymcheck.merge(store, STEPS)
    monkeypatch.setattr(merging, "_MEMORY_BYTES", 1000)
    monkeypatch.setattr(merging, "BLOCK_ELEMENTS", 100)
    asymcheck.merge(store, STEPS, to_run="again")
    for name in ("embedding", "half"):
        assert torch.equal(merged_model(store)[name], merged_model(store, "again")[name])


def test_partitions_of_many_small_tensors_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a hundred tensors in one partition of each of two sources."""
    read: list[str] = []
    monkeypatch.setattr(sources, "read_any", lambda *arguments: read.append("partition") or read_any(*arguments))
    with asymcheck.Store.open(tmp_path, create=True) as store:
        for step in (1, 2):
            torch.manual_seed(step)
            store.save({"model": {str(number): torch.randn(300) for number in range(100)}}, step=step)
        asymcheck.merge(store, (1, 2))
    assert len(read) == 2


@pytest.mark.parametrize("method", ["mean", "ties"])
def test_small_files_of_model_folders_are_those_of_the_last(tmp_path: Path, method: str) -> None:
    """Test files that differ in length, as trainer_state.json does, and files that only one folder has."""
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        for step, files in enumerate(({"config.json": "{}", "log.txt": "1"}, {"config.json": '{"a": 1}', "vocab": ""})):
            folder = tmp_path / f"{step}"
            folder.mkdir()
            safetensors.torch.save_file({"w": torch.full((3,), float(step))}, folder / "model.safetensors")
            for name, text in files.items():
                (folder / name).write_text(text)
            import_checkpoint(store, folder, step=step)
        merged = asymcheck.merge(store, (0, 1), method=method, base=0 if method == "ties" else None)
        export_checkpoint(store, Output(tmp_path / "out"), run="merged")
        assert store.verify() == []
    assert merged.tensors == 3
    texts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert texts == {"config.json": '{"a": 1}', "vocab": ""}
    weights = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert weights["w"].tolist() == [1.0 if method == "ties" else 0.5] * 3


def test_other_stores_runs_and_names_are_sources(store: asymcheck.Store, tmp_path: Path) -> None:
    """Test a step of another run, a save id, and a checkpoint of another store."""
    store.save(state_of(50), step=50, run="side")
    saved = store.checkpoints("default")[0].save_id
    with asymcheck.Store.open(tmp_path / "other", config=CONFIG, create=True) as other:
        other.save(state_of(60), step=60)
        done = asymcheck.merge(store, [f"save:{saved[:20]}", "side@50", SourceName(other, 60)])
    assert [source["step"] for source in done.sources] == [10, 50, 60]
    assert len({source["store_id"] for source in done.sources}) == 2
    assert torch.equal(merged_model(store)["embedding"], mean_of("embedding", (10, 50, 60)).float())
    assert store.verify() == []


def test_shards_of_several_ranks_are_merged_as_whole_tensors(store: asymcheck.Store, tmp_path: Path) -> None:
    """Test sources with shards along either dimension, and a source of one rank."""
    save_id = time.time_ns().to_bytes(8, "big").hex() + os.urandom(8).hex()
    whole = model_of(50)
    for rank in range(SHARDS):
        part = Part(rank, SHARDS, save_id)
        rows, columns = slice(30 * rank, 30 * rank + 30), slice(20 * rank, min(70, 20 * rank + 20 + 10 * (rank == 2)))
        shard = asymcheck.TensorShard(whole["embedding"][rows], (90, 50), (30 * rank, 0))  # type: ignore[index]  # a tensor
        half = asymcheck.TensorShard(whole["half"][:, columns].contiguous(), (70, 70), (0, 20 * rank))  # type: ignore[index]  # a tensor
        store.save(
            {"model": whole | {"embedding": shard, "head": shard, "half": half}}, step=50, run="ranks", part=part
        )
    asymcheck.merge(store, [10, "ranks@50"])
    model = merged_model(store)
    assert torch.equal(model["embedding"], mean_of("embedding", (10, 50)).float())
    assert torch.equal(model["half"], mean_of("half", (10, 50)).float().bfloat16())


def test_float32_masters_are_preferred_to_their_copies(tmp_path: Path) -> None:
    """Test masters in optimizer state with the names of the weights."""
    masters = [torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    with asymcheck.Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step, master in enumerate(masters):
            optimizer = {"layer.weight": {"master": master, "exp_avg": torch.zeros(3)}}
            store.save({"model": {"layer.weight": master.bfloat16()}, "optimizer": optimizer}, step=step)
        done = asymcheck.merge(store, [0, 1])
        assert done.masters == 1
        expected = ((masters[0].double() + masters[1].double()) / 2).float().bfloat16()
        assert torch.equal(merged_model(store)["layer.weight"], expected)


def test_masters_of_other_weights_are_not_used(tmp_path: Path) -> None:
    """Test weights without a master whose names are those of a model in training, or ends of longer names."""
    with asymcheck.Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step in (1, 2):
            state = {
                "model": {name: torch.full((64,), float(step)).bfloat16() for name in ("head", "norm", "deep.norm")},
                "teacher": {"head": torch.full((64,), step + 10.0).bfloat16()},
                "optimizer": {name: {"master": torch.full((64,), step + 20.0)} for name in ("head", "deep.norm")},
            }
            store.save(state, step=step)
        assert asymcheck.merge(store, [1, 2]).masters == 1
        values = {name: tensor[0].item() for name, tensor in merged_model(store).items()}
        assert values == {"head": 1.5, "norm": 1.5, "deep.norm": 21.5}
        merged = store.load(run="merged")
        assert merged["teacher"]["head"][0] == 11.5  # type: ignore[index]  # a dict


def test_masters_of_many_weights_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the search does not look at all masters for each weight."""
    count, looks = 200, list[int]()
    row = ShardSet.row

    def counted(parts: ShardSet, number: int) -> TensorRow:
        looks.append(number)
        return row(parts, number)

    with asymcheck.Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step in (1, 2):
            master = torch.full((4,), float(step))
            names = [f"layer{number}.weight" for number in range(count)]
            state = {
                "model": {name: master.bfloat16() for name in names},
                "optimizer": {name: {"master": master.clone()} for name in names},
            }
            store.save(state, step=step)
        monkeypatch.setattr(ShardSet, "row", counted)
        assert asymcheck.merge(store, [1, 2]).masters == count
    assert len(looks) < 50 * count


def test_provenance_is_in_the_manifest(store: asymcheck.Store) -> None:
    """Test method, save ids, weights and settings, and that a trained checkpoint has none."""
    asymcheck.merge(store, [20, 40], method="ties", base=10, density=0.25, weights=(1, 3))
    checkpoint = store.checkpoints("merged")[0]
    merged = merge_of(store.resources.tier, checkpoint)
    assert merged is not None
    ids = {item.step: item.save_id for item in store.checkpoints("default")}
    assert [(item["save_id"], item["weight"]) for item in merged["sources"]] == [(ids[20], 1), (ids[40], 3)]  # type: ignore[attr-defined]  # a list
    assert merged["base"]["save_id"] == ids[10]  # type: ignore[index]  # an object
    assert (merged["method"], merged["density"]) == ("ties", 0.25)
    assert merge_of(store.resources.tier, store.checkpoints("default")[0]) is None


def test_a_training_does_not_continue_from_a_merge(store: asymcheck.Store) -> None:
    """Test the reason, that the state is unchanged, and that the weights can be loaded."""
    asymcheck.merge(store, STEPS)
    state = {"model": {key: value for key, value in model_of(1).items() if key != "name"}}
    with (
        asymcheck.Checkpointer(store, state, run="merged", every=1, keep=None) as checkpointer,
        pytest.raises(StateMismatchError, match=r"no optimizer state\. Load its weights with Store\.load"),
    ):
        checkpointer.restore()
    assert torch.equal(state["model"]["half"], model_of(1)["half"])  # type: ignore[arg-type]  # tensors
    store.load(run="merged", into=state)
    assert torch.equal(state["model"]["half"], merged_model(store)["half"])  # type: ignore[arg-type]  # a tensor


def _change(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(model: dict[str, Any]) -> None:
        model[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_change("half", torch.zeros(70, 71)), r"tensor model.half has shape \[70, 71\] in step 50"),
        (lambda model: model.pop("half"), "step 50 of run 'default' in .* has no tensor model.half"),
        (
            _change("extra", torch.zeros(3)),
            "has model.extra, which step 40 .* lacks; merge checkpoints of one architec",
        ),
        (
            lambda model: model.update(head=model["head"] + 1),
            "model.embedding, model.head are one .* in step 50",
        ),
    ],
    ids=["shape", "missing", "extra", "untied"],
)
def test_other_architectures_are_refused(
    store: asymcheck.Store, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    """Test a shape, a missing and a further tensor, and that nothing is saved."""
    model = model_of(50)
    change(model)
    store.save({"model": model}, step=50)
    with pytest.raises(StateMismatchError, match=problem):
        asymcheck.merge(store, [50, 40])
    assert "merged" not in store.runs()


def test_two_tensors_of_one_name_are_refused(store: asymcheck.Store) -> None:
    """Test names that tell tensors apart for a restore only, because keys may contain dots."""
    for step in (1, 2):
        store.save({"a.b": torch.full((3,), 10.0 * step), "a": {"b": torch.full((3,), step)}}, step=step, run="dots")
    with pytest.raises(
        InvalidInputError, match=r"step 1 of run 'dots' in .* has two tensors of the name a\.b, which a"
    ):
        asymcheck.merge(store, [1, 2], run="dots")
    assert "merged" not in store.runs()


def test_wrong_requests_change_nothing(store: asymcheck.Store) -> None:
    """Test missing steps, wrong orders, settings and runs, and a state without weights."""
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 99"):
        asymcheck.merge(store, [10, 99])
    with pytest.raises(InvalidInputError, match="ascending order"):
        asymcheck.merge(store, [40, 10], method="ema")
    with pytest.raises(InvalidInputError, match="unknown setting 'beta'"):
        asymcheck.merge(store, [10, 40], beta=1)
    with pytest.raises(InvalidInputError, match=r"mean has no setting density; .*, or choose method ties or dare"):
        asymcheck.merge(store, [10, 40], density=0.5)
    with pytest.raises(InvalidInputError, match=r"run 'default' of .* has checkpoints of a training"):
        asymcheck.merge(store, [10, 40], to_run="default")
    store.save({"optimizer": state_of(1)["optimizer"]}, step=1, run="bare")
    with pytest.raises(InvalidInputError, match="name the tensors to merge"):
        asymcheck.merge(store, ["bare@1", "bare@1"])
    assert store.runs() == ["bare", "default"]


def test_a_damaged_or_deleted_source_is_named(store: asymcheck.Store) -> None:
    """Test that a source that is deleted while the merge reads it is an error, and that nothing is saved."""
    is_first = True

    def delete(_done: int, _total: int) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            store.delete(10)
            for pack in (store.path / "packs").iterdir():
                os.truncate(pack, 4096)

    # With two threads, the merge has more to read after the first partition.
    narrow = asymcheck.Store.open(store.path, config=dataclasses.replace(CONFIG, slots=1))
    message = r"step 10 of run 'default' .* was deleted while it was merged"
    with narrow, pytest.raises(CheckpointNotFoundError, match=message):
        asymcheck.merge(narrow, STEPS, progress=delete)
    assert "merged" not in store.runs()


KILLED = """
import sys, asymcheck
from tests.merging.conftest import CONFIG, STEPS
with asymcheck.Store.open(sys.argv[1], config=CONFIG) as store:
    print("ready", flush=True)
    while True:
        asymcheck.merge(store, STEPS, method=sys.argv[2], base=None if sys.argv[2] == "mean" else 10)
        store.delete(40, run="merged")
        store.gc()
"""


@pytest.mark.slow(long=["*-20"])
@pytest.mark.parametrize(("method", "kills"), [("mean", 1), ("ties", 1), ("mean", 20), ("dare", 20)], ids=str)
def test_a_killed_merge_leaves_no_half_result(store: asymcheck.Store, method: str, kills: int) -> None:
    """Test that after SIGKILL at a random time, every checkpoint of the run is complete and intact."""
    path = store.path
    store.close()
    numbers = random.Random(method)
    for _ in range(kills):
        command = [sys.executable, "-c", KILLED, str(path), method]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(numbers.uniform(0.01, 0.5))
            child.send_signal(signal.SIGKILL)
        with asymcheck.Store.open(path, config=CONFIG) as opened:
            assert [finding for finding in opened.verify() if finding.severity != "hint"] == []
            assert {item.complete for item in opened.checkpoints()} == {True}
            asymcheck.merge(opened, STEPS)
            assert torch.equal(merged_model(opened)["embedding"], mean_of("embedding").float())
            opened.delete(40, run="merged")
