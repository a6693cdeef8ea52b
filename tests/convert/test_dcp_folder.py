"""Test folders of torch's DCP: imported exactly, and refused if damaged or hostile."""

import argparse
import io
import itertools
import os
import pickle
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from asymcheck import Store
from asymcheck.cli.main import commands
from asymcheck.convert.convert import foreign_state
from asymcheck.convert.dcp_folder import _METADATA, _Joined, _read_metadata
from asymcheck.errors import AsymcheckError, ForeignFileError, InvalidInputError
from asymcheck.state.boxes import Box
from asymcheck.state.leaves import TensorBytes
from tests.convert.files import import_checkpoint
from tests.integrations.test_dcp import example
from tests.store.equality import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    """Return a state that DCP flattens, without arrays, which DCP would pickle."""
    return {key: value for key, value in example().items() if key != "array"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that DCP wrote."""
    folder = tmp_path_factory.mktemp("dcp") / "folder"
    dcp.save(state(), checkpoint_id=folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "folder"))


def test_a_folder_is_converted(written: Path, tmp_path: Path) -> None:
    """Test the command: every tensor and value is restored, lists as lists."""
    done = CliRunner().invoke(commands, ["convert", str(written), str(tmp_path / "store"), "--step", "7"])
    assert done.exit_code == 0, done.output
    with Store.open(tmp_path / "store", read_only=True) as store:
        loaded: Any = store.load(7)
    assert_same({key: loaded[key] for key in state()}, state())
    assert "did not convert" not in done.output


def test_part_is_imported_beside_an_object_of_a_custom_class(tmp_path: Path) -> None:
    """Test that the error names the value, and parts without it, also inside of a value that DCP does not flatten."""
    model, optimizer = {"w": torch.ones(3), "groups": [{"lr": 0.1}, {"lr": torch.ones(1)}]}, {"state": {0: 1}, "n": 2}
    saved = {"model": model, "args": {"path": [argparse.Namespace(lr=0.1)], "n": 1}}
    dcp.save({**saved, "optimizer": optimizer}, checkpoint_id=tmp_path / "flat")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({"args": saved["args"], "optimizer": optimizer}, checkpoint_id=tmp_path / "deep", planner=planner)
    problem = (
        r"the value args\S* holds a pickled object of argparse.Namespace, which is never executed; pass --part to "
    )
    for folder in (tmp_path / "flat", tmp_path / "deep"):
        with pytest.raises(ForeignFileError, match=problem), foreign_state(folder):
            pass
    with foreign_state(tmp_path / "flat", parts=["model.groups", "args.n"]) as state:
        assert isinstance(state, dict)
        assert (state.keys(), state["model"].keys(), state["args"]) == ({"model", "args"}, {"groups"}, {"n": 1})
        assert [type(group["lr"]) for group in state["model"]["groups"]] != [type(None)] * 2
    with foreign_state(tmp_path / "deep", parts=["optimizer.n"]) as state:
        assert state == {"optimizer": {"n": 2}}
    with (
        pytest.raises(InvalidInputError, match="no part 'mod'; it has "),
        foreign_state(tmp_path / "flat", parts=["mod"]),
    ):
        pass


def test_other_files_of_a_folder_are_named(folder: Path) -> None:
    """Test a file and a sub-folder beside those of DCP, which the import leaves out."""
    (folder / "config.json").write_text("{}")
    (folder / "logs").mkdir()
    left_out: list[str] = []
    with foreign_state(folder, left_out=left_out):
        assert left_out == ["config.json", "logs"]


def test_tensors_in_another_order_are_converted(store_path: Path, tmp_path: Path) -> None:
    """Test weights in channels_last, which DCP writes in memory order."""
    weights = {
        "last": torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last),
        "turned": torch.arange(12.0).view(3, 4).t(),
    }
    dcp.save(weights, checkpoint_id=tmp_path / "folder")
    with Store.open(store_path, create=True) as store:
        import_checkpoint(store, tmp_path / "folder")
        assert_same(store.load(), weights)


def test_unsplit_values_are_unchanged(store_path: Path, tmp_path: Path) -> None:
    """Test that a mapping with integer keys becomes a list only if DCP has flattened it."""
    whole = {"state": {0: {"step": 3}, 1: {"step": 4}}, "groups": [{"lr": 0.1}]}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({"optimizer": whole}, checkpoint_id=tmp_path / "folder", planner=planner)
    with Store.open(store_path, create=True) as store:
        import_checkpoint(store, tmp_path / "folder")
        assert_same(store.load(), {"optimizer": whole})


class _InMemory(TensorBytes):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("int32", tuple(tensor.shape))
        self._data = tensor.contiguous().numpy().tobytes()

        self.count = 0

    def read(self, start: int, target: memoryview) -> None:
        self.count += len(target)
        target[:] = self._data[start : start + len(target)]


@pytest.mark.parametrize("cuts", [((0, 5),), ((0, 2, 5), (0, 3, 4)), ((0, 1, 5), (0, 4), (0, 2, 6))])
def test_parts_are_put_together(cuts: tuple[tuple[int, ...], ...]) -> None:
    """Test shards along one dimension or several, in row-major order or not; every range has the right bytes."""
    shape = tuple(places[-1] for places in cuts)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    pieces = []
    for edges in itertools.product(*(itertools.pairwise(places) for places in cuts)):
        part = whole[tuple(slice(*edge) for edge in edges)]
        pieces.append((Box(shape, tuple(low for low, _ in edges), tuple(part.shape)), _InMemory(part)))
    joined = _Joined("int32", shape, pieces)
    data = whole.numpy().tobytes()
    for start, length in itertools.product(range(0, len(data), 3), (0, 1, 7, 40, len(data))):
        target = bytearray(min(length, len(data) - start))
        joined.read(start, memoryview(target))
        assert target == data[start : start + length]
        assert sum(part.count for _, part in pieces) == len(target)
        for _, part in pieces:
            part.count = 0


class _Runs:
    def __init__(self, function: Any, *arguments: object) -> None:  # noqa: ANN401 - any function
        self.call = function, arguments

    def __reduce__(self) -> Any:  # noqa: ANN401 - as pickle has it
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, torch.load, torch.Tensor])
def test_nothing_that_a_pickle_names_is_run(function: Callable[..., object], folder: Path, tmp_path: Path) -> None:
    """Test that the name of the pickled object is refused."""
    argument = f"__import__('os').mkdir({str(tmp_path / 'made')!r})" if function is eval else str(tmp_path / "made")
    (folder / _METADATA).write_bytes(pickle.dumps(_Runs(function, argument)))
    with pytest.raises(ForeignFileError, match=f"names .*{function.__name__}.*never executed"):
        _read_metadata(folder / _METADATA)
    assert not (tmp_path / "made").exists()


class _Reader(pickle.Unpickler):
    """Torch's own classes, with changeable content."""


def changed(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Write changed metadata."""
    metadata = _Reader(io.BytesIO((folder / _METADATA).read_bytes())).load()
    change(metadata)
    (folder / _METADATA).write_bytes(pickle.dumps(metadata))


def _elsewhere(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"


def _less(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.layer.weight"].chunks[0].sizes = torch.Size([5, 4])


def _outside(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.layer.weight"].chunks[0].offsets = torch.Size([1, 0])


def _twice(metadata: Metadata) -> None:
    description = metadata.state_dict_metadata["model.layer.weight"]
    description.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 4]))] * 2


def _other_form(metadata: Metadata) -> None:
    description = metadata.state_dict_metadata["model.layer.weight"]
    description.size = description.chunks[0].sizes = torch.Size([4, 6])


def _compressed(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


def _of_torch_2_2(metadata: Metadata) -> None:
    for description in metadata.state_dict_metadata.values():
        if isinstance(description, TensorStorageMetadata):
            properties: Any = OldProperties(dtype=description.properties.dtype)
            description.properties = properties


def test_folder_of_an_older_torch_is_converted(folder: Path, store_path: Path) -> None:
    """Test the class of properties that torch 2.0 to 2.2 wrote, which torch still has."""
    changed(folder, _of_torch_2_2)
    assert b"torch.distributed._shard.sharded_tensor.metadata" in (folder / _METADATA).read_bytes()
    with Store.open(store_path, create=True) as store:
        import_checkpoint(store, folder)
        loaded: Any = store.load()
    assert_same({key: loaded[key] for key in state()}, state())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_elsewhere, "not a file of the folder"),
        (_less, "do not cover the tensor"),
        (_twice, "do not cover the tensor"),
        (_outside, "outside of the tensor"),
        (_other_form, "contradicts the metadata"),
        (_compressed, "zstd"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(
    change: Callable[[Metadata], None], problem: str, folder: Path, store_path: Path
) -> None:
    """Test that the error is raised before anything is stored."""
    changed(folder, change)
    with Store.open(store_path, create=True) as store:
        with pytest.raises(ForeignFileError, match=problem):
            import_checkpoint(store, folder)
        assert store.checkpoints() == []


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (("none",), "same path"),
        (("empty", "x"), "same path"),
        (("model",), "same path"),
        ((), "is invalid"),
        ((("x",),), "is invalid"),
        (("x",) * 5000, "is invalid"),
    ],
    ids=["that of a value", "below a tensor", "above a tensor", "nowhere", "a tuple", "deep"],
)
def test_a_place_that_cannot_be_is_refused(
    place: tuple[Any, ...], problem: str, folder: Path, store_path: Path
) -> None:
    """Test two values at one position, of which one would be lost."""
    changed(folder, lambda metadata: metadata.planner_data.update(number=place))
    with Store.open(store_path, create=True) as store, pytest.raises(ForeignFileError, match=problem):
        import_checkpoint(store, folder)


def test_damaged_metadata_is_refused(folder: Path) -> None:
    """Test that a changed byte or an early end is an error of the package, or changes nothing."""
    whole = (folder / _METADATA).read_bytes()
    dice = random.Random(4)
    refused = 0
    for _ in range(600):
        data = bytearray(whole)
        data[dice.randrange(len(data))] = dice.randrange(256)
        (folder / _METADATA).write_bytes(data[: dice.randrange(len(data))] if dice.random() < 0.2 else data)
        try:
            _read_metadata(folder / _METADATA)
        except AsymcheckError:
            refused += 1
    assert refused > 300


SHARED_KEY = b"\x80\x04})" + b"\x94h%c\x86" * 40 % tuple(range(40)) + b"K\x01s."
MANY_OBJECTS = (
    b"\x80\x04](\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0dMetadataIndex\x93\x94)\x94"
    + b"h\x00h\x01\x81" * 300_000
    + b"e."
)
FAR_NUMBER = b"\x80\x02]r\xff\xff\xff\x7f."
LONG_BYTES = b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"."


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (SHARED_KEY, "more than 500,000 values"),
        (MANY_OBJECTS, "more than 20,000 tensors or objects"),
        (FAR_NUMBER, "more than 500,000 values"),
        (LONG_BYTES, "damaged or truncated"),
    ],
    ids=["shared key", "objects", "number", "bytes"],
)
def test_hostile_metadata_is_refused_in_bounded_time_and_memory(folder: Path, content: bytes, problem: str) -> None:
    """Test a key whose hash takes days, objects of few bytes, and memory that Python would reserve first."""
    (folder / _METADATA).write_bytes(content)
    start = time.process_time()
    with pytest.raises(ForeignFileError, match=problem):
        _read_metadata(folder / _METADATA)
    duration = time.process_time() - start
    # The trace takes longer than the read.
    tracemalloc.start()
    with pytest.raises(ForeignFileError, match=problem):
        _read_metadata(folder / _METADATA)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert duration < 5
    assert peak < 4 * len(content) + (16 << 20)


def test_huge_metadata_is_not_read(folder: Path) -> None:
    """Test a sparse file of 4 TiB."""
    os.truncate(folder / _METADATA, 1 << 42)
    with pytest.raises(ForeignFileError, match=r"larger than 1,073,741,824 bytes"):
        _read_metadata(folder / _METADATA)


def test_long_shape_that_pieces_share_is_refused(folder: Path) -> None:
    """Test a shape that each piece of a tensor would copy."""

    def lengthen(metadata: Metadata) -> None:
        chunks = next(iter(metadata.state_dict_metadata.values())).chunks  # type: ignore[union-attr]  # of a tensor
        chunks[0].offsets = [0] * 100_000  # type: ignore[assignment]  # wrong on purpose

    changed(folder, lengthen)
    with pytest.raises(ForeignFileError, match="a shape or a name of its state is invalid"):
        _read_metadata(folder / _METADATA)


def test_unfinished_dcp_save_is_recognised(folder: Path, store_path: Path) -> None:
    """Test a folder without metadata, which is not mistaken for another format."""
    (folder / _METADATA).unlink()
    with (
        Store.open(store_path, create=True) as store,
        pytest.raises(ForeignFileError, match="which a save writes last"),
    ):
        import_checkpoint(store, folder)
