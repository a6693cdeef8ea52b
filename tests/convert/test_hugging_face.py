"""Test folders of Hugging Face models: read, refused if contradictory or hostile, and written."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.convert import hugging_face
from asymcheck.convert.convert import foreign_state
from asymcheck.convert.export_target import NewTensor
from asymcheck.convert.hugging_face import INDEX_NAME, Shard, encode_index, other_files, plan_shards
from asymcheck.errors import ForeignFileError, InvalidInputError, NotFoundError
from tests.convert.files import byte_tensor, folder_of, write

SHARDS = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
FIRST, SECOND = SHARDS


def put(path: Path, names: list[str], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file in which the size of each tensor is the length of its name."""
    write(path, [(byte_tensor(name, len(name)), name.encode()) for name in names], metadata)


def put_index(folder: Path, weight_map: object) -> None:
    """Write an index with that weight map."""
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


WEIGHT_MAP = {name: shard for shard, names in SHARDS.items() for name in names}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model in two shards with its index and two small files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for shard, names in SHARDS.items():
        put(folder / shard, names, {"format": "pt"})
    put_index(folder, WEIGHT_MAP)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\0")
    return folder


def test_shards_with_an_index(folder: Path) -> None:
    """Test tensors of all shards by file and position, metadata, and small files without the index."""
    model = folder_of(folder)
    assert [(t.path, t.name) for t in model.tensors] == [(folder / WEIGHT_MAP[name], name) for name in "abc"]
    assert model.metadata == {"format": "pt"}
    assert other_files(folder) == ["config.json", "tokenizer.model"]


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_a_single_file(name: str, tmp_path: Path) -> None:
    """Test a file of any name."""
    put(tmp_path / name, ["w", "v"], {"k": "1"})
    (tmp_path / "config.json").write_text("{}")
    model = folder_of(tmp_path)
    assert [(t.path, t.name) for t in model.tensors] == [(tmp_path / name, "v"), (tmp_path / name, "w")]
    assert (model.metadata, other_files(tmp_path)) == ({"k": "1"}, ["config.json"])


def test_the_usual_name_goes_first(tmp_path: Path) -> None:
    """Test that model.safetensors is read, and that the other files are listed as ignored."""
    put(tmp_path / "model.safetensors", ["w"])
    put(tmp_path / "consolidated.safetensors", ["x"])
    left_out: list[str] = []
    with foreign_state(tmp_path, left_out=left_out) as state:
        assert isinstance(state, dict)
        assert list(state["model"]) == ["w"]
    assert left_out == ["consolidated.safetensors"]


def test_an_index_of_a_single_file(tmp_path: Path) -> None:
    """Test an index that only names model.safetensors."""
    put(tmp_path / "model.safetensors", ["w"])
    put_index(tmp_path, {"w": "model.safetensors"})
    assert [t.name for t in folder_of(tmp_path).tensors] == ["w"]


def test_nothing_in_the_folder_goes_unmentioned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test other weights, hidden and large files, folders, and broken or outside links, which are listed."""
    monkeypatch.setattr(hugging_face, "OTHER_BYTES_MAX", 1000)
    (folder.parent / "secret.json").write_text("{}")
    (folder / "secret.json").symlink_to("../secret.json")
    (folder / "nowhere.json").symlink_to("missing.json")
    (folder / "inside.json").symlink_to("config.json")
    (folder / "onnx").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "large.json").write_bytes(bytes(1001))
    (folder / "full.json").write_bytes(bytes(1000))
    for name in (".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json", "old.safetensors"):
        (folder / name).write_text("")
    others = ["config.json", "full.json", "inside.json", "tokenizer.model"]
    left_out: list[str] = []
    with foreign_state(folder, left_out=left_out) as state:
        assert isinstance(state, dict)
        assert list(state["safetensors"]["files"]) == others
    assert sorted([*others, *left_out, INDEX_NAME, *SHARDS]) == sorted(os.listdir(folder))


def test_metadata_on_which_shards_disagree(folder: Path) -> None:
    """Test that a key with two values is left out, and that a key of only some shards is kept."""
    put(folder / FIRST, SHARDS[FIRST], {"format": "pt", "part": "1", "x": "y"})
    put(folder / SECOND, SHARDS[SECOND], {"format": "pt", "part": "2"})
    assert folder_of(folder).metadata == {"format": "pt", "x": "y"}


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/x.safetensors", "../x.safetensors", "sub/x.safetensors", "..", "", ".safetensors", "C:x.safetensors"),
        *("sub\\x.safetensors", "x\0.safetensors", "x\n.safetensors", "pytorch_model.bin", "x" * 250 + ".safetensors"),
        *(".hidden.safetensors", INDEX_NAME),
    ],
)
def test_names_that_may_lead_elsewhere(name: str, folder: Path) -> None:
    """Test shards with paths instead of names, even if the file exists."""
    (folder / "sub").mkdir()
    for place in (folder.parent / "x.safetensors", folder / "sub" / "x.safetensors"):
        put(place, ["c"])
    put_index(folder, WEIGHT_MAP | {"c": name})
    with pytest.raises(ForeignFileError, match=r"which is not a .safetensors file in this folder"):
        folder_of(folder)


@pytest.mark.parametrize("shard", [None, 1, ["x"], {"x": "y"}], ids=str)
def test_shards_that_are_no_names(shard: object, folder: Path) -> None:
    """Test every type of JSON other than text."""
    put_index(folder, WEIGHT_MAP | {"c": shard})
    with pytest.raises(ForeignFileError, match="which is not a"):
        folder_of(folder)


@pytest.mark.parametrize("name", [FIRST, INDEX_NAME])
@pytest.mark.parametrize("absolute", [False, True])
def test_links_that_lead_outside(name: str, absolute: bool, folder: Path) -> None:
    """Test a shard and an index behind a link out of the folder, and a link inside of it."""
    inside, outside = folder / f"moved-{name}", folder.parent / f"moved-{name}"
    (folder / name).rename(inside)
    (folder / name).symlink_to(inside.name)
    assert len(folder_of(folder).tensors) == 3
    inside.rename(outside)
    (folder / name).unlink()
    (folder / name).symlink_to(outside if absolute else f"../{outside.name}")
    with pytest.raises(ForeignFileError, match="link that leads out of the folder") as caught:
        folder_of(folder)
    assert name in caught.value.path


def test_a_link_by_way_of_a_folder(folder: Path) -> None:
    """Test that a link into a linked folder is resolved completely."""
    (folder.parent / "elsewhere").mkdir()
    (folder / FIRST).rename(folder.parent / "elsewhere" / "x")
    (folder / "sub").symlink_to("../elsewhere")
    (folder / FIRST).symlink_to("sub/x")
    with pytest.raises(ForeignFileError, match="link that leads out"):
        folder_of(folder)


def test_a_single_file_behind_a_link(tmp_path: Path) -> None:
    """Test a folder without an index."""
    (tmp_path / "model").mkdir()
    put(tmp_path / "x", ["w"])
    (tmp_path / "model" / "model.safetensors").symlink_to("../x")
    with pytest.raises(ForeignFileError, match="link that leads out"):
        folder_of(tmp_path / "model")


def test_the_cache_of_the_hub(folder: Path) -> None:
    """Test snapshots/<revision>, with links to blobs, and other links, which are refused."""
    cache = folder.parent / "models--x--y"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "main").mkdir(parents=True)
    for number, name in enumerate(os.listdir(folder)):
        (folder / name).rename(cache / "blobs" / str(number))
        (cache / "snapshots" / "main" / name).symlink_to(f"../../blobs/{number}")
    (cache / "snapshots" / "current").symlink_to("main")
    for revision in ("main", "current"):
        model = folder_of(cache / "snapshots" / revision)
        assert [t.name for t in model.tensors] == ["a", "b", "c"]
        assert other_files(cache / "snapshots" / revision) == ["config.json", "tokenizer.model"]
    (cache / "snapshots").rename(cache / "revisions")
    with pytest.raises(ForeignFileError, match="link that leads out"):
        folder_of(cache / "revisions" / "main")
    (cache / "revisions").rename(cache / "snapshots")
    (cache / "blobs").rename(cache / "refs")
    (cache / "blobs").symlink_to("refs")
    with pytest.raises(ForeignFileError, match="link that leads out"):
        folder_of(cache / "snapshots" / "main")


def test_a_missing_shard(folder: Path) -> None:
    """Test that an incomplete folder is not a NotFoundError."""
    (folder / SECOND).unlink()
    with pytest.raises(ForeignFileError, match=rf"{SECOND}: the weights file is missing"):
        folder_of(folder)


def test_a_tensor_that_is_not_where_the_index_says(folder: Path) -> None:
    """Test a tensor in another shard, and in none: the error names both."""
    put_index(folder, WEIGHT_MAP | {"b": SECOND})
    with pytest.raises(ForeignFileError, match=f"'b' is in {FIRST}, but in {SECOND} according"):
        folder_of(folder)
    put_index(folder, WEIGHT_MAP | {"d": SECOND})
    with pytest.raises(ForeignFileError, match=f"'d' is in no shard, but in {SECOND} according"):
        folder_of(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    """Test a tensor of which two versions exist."""
    put(folder / SECOND, ["c", "a"])
    with pytest.raises(ForeignFileError, match=f"'a' is in {FIRST} and in {SECOND}"):
        folder_of(folder)


def test_a_tensor_that_the_index_lacks(folder: Path) -> None:
    """Test a tensor that only some readers would load."""
    put(folder / SECOND, ["c", "d"])
    with pytest.raises(ForeignFileError, match=f"'d' is in {SECOND}, but in no shard according"):
        folder_of(folder)


def test_index_and_single_file(folder: Path) -> None:
    """Test two possible sources, between which readers differ."""
    put(folder / "model.safetensors", ["a", "b", "c"])
    with pytest.raises(ForeignFileError, match=r"also has model.safetensors"):
        folder_of(folder)


def test_no_weights_and_too_many(tmp_path: Path) -> None:
    """Test a foreign folder and an ambiguous one; the error says what to pass."""
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ForeignFileError, match=r"no file ends in .safetensors; .*pytorch_model.bin"):
        folder_of(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        put(tmp_path / name, ["w"])
    with pytest.raises(ForeignFileError, match=r"2 files end in .safetensors, .*x.safetensors', 'y"):
        folder_of(tmp_path)


def test_non_folders_are_refused(tmp_path: Path) -> None:
    """Test a missing folder, and a link to itself."""
    (tmp_path / "loop").symlink_to("loop")
    for name in ("missing", "loop"):
        with pytest.raises(NotFoundError, match="does not exist"), foreign_state(tmp_path / name):
            pass


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not valid JSON"),
        ("[]", "not a JSON object with a non-empty weight_map"),
        ("{}", "not a JSON object with a non-empty weight_map"),
        ('{"weight_map":{}}', "not a JSON object with a non-empty weight_map"),
        ('{"weight_map":[]}', "not a JSON object with a non-empty weight_map"),
        ('{"weight_map":{"a":"x","a":"y"}}', "a key twice"),
        ('{"weight_map":' + "[" * 50_000, "recursion"),
    ],
    ids=["empty", "list", "object", "map", "list-map", "twice", "deep"],
)
def test_an_index_that_is_none(text: str, what: str, folder: Path) -> None:
    """Test that the index is parsed as strictly as a header."""
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(ForeignFileError, match=what) as caught:
        folder_of(folder)
    assert caught.value.path == str(folder / INDEX_NAME)


def test_an_index_beyond_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the limit, and one byte more."""
    monkeypatch.setattr(hugging_face, "OTHER_BYTES_MAX", (folder / INDEX_NAME).stat().st_size)
    folder_of(folder)
    with (folder / INDEX_NAME).open("a") as file:
        file.write(" ")
    with pytest.raises(ForeignFileError, match="more than the maximum"):
        folder_of(folder)


def test_a_broken_shard_is_named(folder: Path) -> None:
    """Test that the error is that of the file."""
    os.truncate(folder / SECOND, 9)
    with pytest.raises(ForeignFileError, match="truncated") as caught:
        folder_of(folder)
    assert caught.value.path == str(folder / SECOND)


sizes = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@given(sizes, st.integers(1, 20))
def test_shards_are_those_of_huggingface_hub(sizes: list[int], limit: int) -> None:
    """Test names, order and sizes, for tensors without shared storage."""
    hub = pytest.importorskip("huggingface_hub", reason="comes with transformers")
    state = {f"t{i}": size for i, size in enumerate(sizes)}
    split = hub.split_state_dict_into_shards_factory(
        state, get_storage_size=lambda size: size, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    shards = plan_shards([byte_tensor(name, size) for name, size in state.items()], limit)
    assert {shard.name: [tensor.name for tensor in shard.tensors] for shard in shards} == split.filename_to_tensors
    index = json.loads(encode_index(shards))
    assert index == {"metadata": split.metadata, "weight_map": split.tensor_to_filename}


def test_no_tensors_make_one_file() -> None:
    """Test a model without tensors."""
    assert plan_shards([], 1) == [Shard("model.safetensors", ())]


def test_a_limit_of_nothing_is_refused() -> None:
    """Test a limit of zero bytes."""
    with pytest.raises(InvalidInputError, match="max_shard_bytes is 0"):
        plan_shards([byte_tensor("a", 1)], 0)


def test_a_limit_that_holds_nothing_is_refused() -> None:
    """Test that the smallest limit is one byte."""
    with pytest.raises(InvalidInputError, match="max_shard_bytes is 0"):
        plan_shards([byte_tensor("a", 1)], 0)


def test_the_text_of_an_index() -> None:
    """Test order, indentation and end, as in transformers."""
    shards = plan_shards([byte_tensor("b", 2), byte_tensor("a", 2)], 2)
    assert encode_index(shards).decode() == (
        '{\n  "metadata": {\n    "total_size": 4\n  },\n'
        '  "weight_map": {\n    "a": "model-00002-of-00002.safetensors",\n'
        '    "b": "model-00001-of-00002.safetensors"\n  }\n}\n'
    )


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))


@pytest.mark.parametrize("limit", [64, 10_000], ids=["shards", "one-file"])
def test_reads_folders_of_huggingface_hub(limit: int, tmp_path: Path) -> None:
    """Test the bytes of each tensor, in one file and in several."""
    hub = pytest.importorskip("huggingface_hub", reason="comes with transformers")
    state = _model().state_dict()
    hub.save_torch_state_dict(state, tmp_path, max_shard_size=limit)
    model = folder_of(tmp_path)
    assert {t.name for t in model.tensors} == state.keys()
    assert (len({t.path for t in model.tensors}) > 1) == (limit == 64)
    for tensor in model.tensors:
        data = tensor.path.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), state[tensor.name].reshape(-1))
    assert model.metadata["format"] == "pt"


@pytest.mark.parametrize("limit", [64, 10_000], ids=["shards", "one-file"])
def test_huggingface_hub_reads_our_folders(limit: int, tmp_path: Path) -> None:
    """Test a strict load into a model, and our own reader."""
    hub = pytest.importorskip("huggingface_hub", reason="comes with transformers")
    state = _model().state_dict()
    news = [NewTensor(name, "float32", tuple(t.shape), t.nbytes) for name, t in state.items()]
    shards = plan_shards(news, limit)
    for shard in shards:
        write(tmp_path / shard.name, [(t, state[t.name].numpy().tobytes()) for t in shard.tensors], {"format": "pt"})
    if len(shards) > 1:
        (tmp_path / INDEX_NAME).write_bytes(encode_index(shards))
    loaded = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    hub.load_torch_model(loaded, tmp_path, strict=True)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())
    assert {t.name for t in folder_of(tmp_path).tensors} == state.keys()
    assert {name for shard in shards for name in safetensors.torch.load_file(tmp_path / shard.name)} == state.keys()
