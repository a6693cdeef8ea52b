"""Test export to and import from other formats: round trips, refusals, and memory."""

from __future__ import annotations

import argparse
import collections
import errno
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from asymcheck import RngState, Store
from asymcheck.convert.convert import Output, export_checkpoint, foreign_state
from asymcheck.convert.part import TIED
from asymcheck.errors import ForeignFileError, InvalidInputError, OutOfSpaceError, StorageError
from tests.convert.files import import_checkpoint
from tests.store.equality import assert_same

BIG = 600_000


def _state() -> dict[str, Any]:
    shared = torch.randn(BIG)
    return {
        "model": collections.OrderedDict(
            [
                ("embed.weight", shared),
                ("half", torch.randn(7, 5).to(torch.bfloat16)),
                ("eight", torch.randn(9).to(torch.float8_e4m3fn)),
                ("flags", torch.tensor([True, False])),
                ("count", torch.tensor(3)),
                ("none", torch.empty(0, 4)),
                ("head.weight", shared),
            ]
        ),
        "optimizer": {"state": {0: {"exp_avg": torch.randn(BIG)}}, "lr": 0.1},
        "array": np.arange(5, dtype=np.uint32),
        "number": np.float32(2.5),
        "epoch": 3,
    }


def test_a_part_becomes_a_safetensors_file(store: Store, tmp_path: Path) -> None:
    """Test names without the part, every dtype, and tied tensors, which are stored once with their names."""
    state = _state()
    store.save(state, step=5)
    done = export_checkpoint(store, Output(tmp_path / "m.safetensors"), part="model")
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    expected = {name: tensor for name, tensor in state["model"].items() if name != "head.weight"}
    assert_same(dict(sorted(loaded.items())), dict(sorted(expected.items())))
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata[TIED]) == {"head.weight": "embed.weight"}
    assert (done.tensors, done.checkpoint.step, done.left_out, done.skipped) == (6, 5, (), ())
    assert done.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert [path.name for path in tmp_path.glob("*m.safetensors*")] == ["m.safetensors"]


def test_unsupported_safetensors_content_is_named(store: Store, tmp_path: Path) -> None:
    """Test that plain values are listed, and that an unsupported dtype is an error before any file exists."""
    store.save(_state(), step=1)
    done = export_checkpoint(store, Output(tmp_path / "all.safetensors"))
    assert done.left_out == ("optimizer.lr", "number", "epoch")
    store.save({"z": torch.zeros(3, dtype=torch.complex128)}, step=2)
    with pytest.raises(InvalidInputError, match=r"complex128.*\.pt"):
        export_checkpoint(store, Output(tmp_path / "z.safetensors"))
    assert not list(tmp_path.glob("*z.safetensors*"))


def test_a_whole_state_becomes_a_torch_file(store: Store, tmp_path: Path) -> None:
    """Test structure, plain values and ties; arrays become tensors, and zip tools accept the file."""
    state = _state()
    store.save(state, step=1)
    export_checkpoint(store, Output(tmp_path / "all.pt"))
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    state["array"], state["number"] = torch.from_numpy(state["array"]), 2.5
    assert_same(loaded, state)
    assert loaded["model"]["embed.weight"].data_ptr() == loaded["model"]["head.weight"].data_ptr()
    assert type(loaded["model"]) is collections.OrderedDict
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None
        assert all(member.CRC for member in archive.infolist() if member.file_size)


def test_torch_files_of_one_checkpoint_are_equal(store: Store, tmp_path: Path) -> None:
    """Test that a checksum of the file identifies the checkpoint."""
    store.save(_state(), step=1)
    for name in ("a.pt", "b.pt"):
        export_checkpoint(store, Output(tmp_path / name))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_real_training_state_goes_through_a_torch_file(store: Store, tmp_path: Path) -> None:
    """Test model, optimizer, schedule and random numbers, as in a training loop."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    model(torch.randn(4, 100)).sum().backward()
    optimizer.step()
    store.save({"model": model, "optimizer": optimizer, "schedule": schedule, "rng": RngState()}, step=1)
    export_checkpoint(store, Output(tmp_path / "a.pt"))
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert_same(loaded["model"], model.state_dict())
    assert_same(loaded["optimizer"], optimizer.state_dict())
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])


def test_torch_file_round_trip(store: Store, tmp_path: Path) -> None:
    """Test views, transposes, conjugates and ties; the bytes are read from the file, not loaded."""
    base = torch.randn(40, 50)
    state = {
        "base": base,
        "again": base,
        "transposed": base.t(),
        "every second": torch.arange(10)[::2],
        "inner": torch.arange(100)[20:30],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "nothing": torch.empty(0),
        "nothing turned": torch.empty(0, 3, dtype=torch.complex64).t().conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "plain": [1, 2.5, None, "x", (True, {"deep": torch.ones(BIG)})],
    }
    torch.save(state, tmp_path / "a.pt")
    import_checkpoint(store, tmp_path / "a.pt", step=3)
    expected = {**state, "conj": state["conj"].resolve_conj(), "parameter": state["parameter"].detach()}  # type: ignore[attr-defined]  # a tensor
    loaded: Any = store.load(3)
    assert_same(loaded, expected)
    assert loaded["base"] is loaded["again"]
    export_checkpoint(store, Output(tmp_path / "b.pt"))
    assert_same(torch.load(tmp_path / "b.pt", weights_only=True), expected)


def test_state_dict_of_a_module_keeps_its_type_and_versions(store: Store, tmp_path: Path) -> None:
    """Test a file without an outer mapping: load_state_dict() reads the versions of the modules."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    torch.save(state, tmp_path / "a.pt")
    import_checkpoint(store, tmp_path / "a.pt")
    assert_same(store.load(), state)


def test_an_old_torch_file_is_read_as_well(store: Store, tmp_path: Path) -> None:
    """Test a file of the format before torch 1.6, which is not a zip file; tied tensors stay tied."""
    base = torch.randn(40, 50)
    state = {"a": torch.arange(5), "base": base, "again": base, "turned": base.t(), "half": torch.ones(3).half()}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    import_checkpoint(store, tmp_path / "a.pt")
    loaded: Any = store.load()
    assert_same(loaded, state)
    assert loaded["base"] is loaded["again"]
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-8])
    with pytest.raises(ForeignFileError, match="truncated"):
        import_checkpoint(store, tmp_path / "a.pt")


OFFSETS = """
import sys, torch
from pathlib import Path
from asymcheck import Store
from asymcheck.convert.convert import foreign_state
path = Path(sys.argv[1])
with Store.open(path / "store", create=True) as store:
    for pad in range(16):
        numbers = torch.arange(64).reshape(8, 8).to(torch.complex128)
        views = {"turned": numbers.t(), "conj": numbers.conj(), "expanded": numbers[1, 1].expand(3)}
        state = {"x" * pad: 0, **views}
        torch.save(state, path / "a.pt", _use_new_zipfile_serialization=False)
        with foreign_state(path / "a.pt") as read:
            store.save(read, step=pad)
        loaded = store.load(pad)
        assert all(torch.equal(state[name], loaded[name]) for name in views), pad
"""


def test_an_old_torch_file_with_tensors_at_any_offset_is_read(tmp_path: Path) -> None:
    """Test offsets at which torch would end the process with a segmentation fault."""
    command = [sys.executable, "-c", OFFSETS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_many_strided_tensors_need_no_file_each(tmp_path: Path, store: Store) -> None:
    """Test the open files of a model whose weights are in channels-last order, and the progress of its import."""
    state = {f"w{number}": torch.randn(4, 5).t() for number in range(100)}
    torch.save(state, tmp_path / "a.pt")
    reported: list[tuple[int, int]] = []
    before = len(os.listdir("/proc/self/fd"))
    with foreign_state(tmp_path / "a.pt", lambda done, total: reported.append((done, total))) as read:
        assert len(os.listdir("/proc/self/fd")) - before < 10
        store.save(read, step=0)
    assert reported[-1] == (8000, 8000)
    assert_same(store.load(), state)


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_torch_file_is_executed(store: Store, tmp_path: Path, zipped: bool) -> None:
    """Test that an object in the file is an error with a remedy."""
    torch.save({"a": _Touch(tmp_path / "touched")}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ForeignFileError, match=r"a\.pt.*Store\.save"):
        import_checkpoint(store, tmp_path / "a.pt")
    assert not (tmp_path / "touched").exists()
    assert store.checkpoints() == []


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_class_is_named(store: Store, tmp_path: Path, zipped: bool) -> None:
    """Test that the error does not repeat torch's advice to trust the file."""
    torch.save({"args": argparse.Namespace(a=1)}, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ForeignFileError) as caught:
        import_checkpoint(store, tmp_path / "f.pt")
    assert caught.value.path == str(tmp_path / "f.pt")
    assert "argparse.Namespace" in caught.value.problem
    assert "\n" not in str(caught.value)


class _Scaled(torch.Tensor):
    """A tensor whose elements are to be multiplied by an attribute."""


def test_a_tensor_subclass_is_named(store: Store, tmp_path: Path) -> None:
    """Test a class that needs more than its elements, as Store.save() does, and a part without such tensors."""
    scaled = torch.ones(3).as_subclass(_Scaled)
    scaled.factor = 2.0  # type: ignore[attr-defined]  # an attribute of this tensor
    torch.save({"a": {"b": scaled}, "c": torch.ones(2)}, tmp_path / "f.pt")
    with pytest.raises(ForeignFileError, match=r"object of tests.convert.test_convert._Scaled.*pass --part c "):
        import_checkpoint(store, tmp_path / "f.pt")


@pytest.mark.parametrize("is_full", [True, False])
def test_torch_write_failure_is_an_error_of_the_package(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Test a failure for which torch names neither file nor cause; a second write shows the system's error."""
    store.save({"a": torch.ones(3)}, step=1)
    pwritev = os.pwritev

    def fail(*_arguments: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nmore")

    def refuse(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr("asymcheck.convert.torch_sink.torch.save", fail)
    monkeypatch.setattr("asymcheck.storage.local_files.os.pwritev", refuse)
    (tmp_path / "below").mkdir()
    with pytest.raises(StorageError, match=r"m\.pt") as caught:
        export_checkpoint(store, Output(tmp_path / "below" / "m.pt"))
    assert isinstance(caught.value, OutOfSpaceError) == is_full
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "below").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(1000), b"not at all", bytes(5000)])
def test_invalid_torch_file_is_refused(store: Store, tmp_path: Path, content: bytes) -> None:
    """Test that the error names the file, without a traceback of torch."""
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ForeignFileError, match=r"a\.pt"):
        import_checkpoint(store, tmp_path / "a.pt")


@pytest.mark.parametrize("kept", [0, 3, 4, 700, -1])
def test_a_torch_file_that_was_cut_short_is_to_be_fetched_again(store: Store, tmp_path: Path, kept: int) -> None:
    """Test that the error does not repeat torch's advice to trust the file."""
    torch.save({"a": torch.randn(1000)}, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:kept])
    with pytest.raises(ForeignFileError, match="truncated"):
        import_checkpoint(store, tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_pickle_protocol_is_read(store: Store, tmp_path: Path, protocol: int) -> None:
    """Test all values that torch allows, and tensors with attributes."""
    noted = torch.nn.Parameter(torch.ones(2))
    noted.note = "kept out"  # type: ignore[attr-defined]  # an attribute of this tensor
    state = {
        "a": torch.randn(10),
        "bytes": b"\x00\xff",
        "no bytes": b"",
        "set": {1, 2},
        "complex": 1 + 2j,
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "unsigned": torch.ones(3, dtype=torch.uint16),
        "small": torch.ones(3, dtype=torch.float8_e4m3fn),
        "noted": noted,
        "buffer": torch.nn.Buffer(torch.ones(2)) if hasattr(torch.nn, "Buffer") else torch.ones(2),
    }
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    import_checkpoint(store, tmp_path / "a.pt")
    assert_same(store.load(), {**state, "noted": torch.ones(2), "buffer": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("zipped", [True, False])
def test_unsupported_tensors_are_named(store: Store, tmp_path: Path, zipped: bool) -> None:
    """Test a tensor that is negated by a flag, a quantized one and a sparse one."""
    for number, (tensor, problem) in enumerate(
        (
            (torch.randn(3, dtype=torch.complex64).conj().imag, r"torch\.float32 is negated by a flag"),
            (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "_rebuild_qtensor"),
            (torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
        )
    ):
        path = tmp_path / f"{number}.pt"
        torch.save({"a": tensor}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ForeignFileError, match=problem):
            import_checkpoint(store, path)


@pytest.mark.parametrize("content", [{}, [], {"optimizer_state_dict": {"zero_stage": "x"}}])
def test_fake_deepspeed_folder_is_refused(store: Store, tmp_path: Path, content: object) -> None:
    """Test that the error names the path, without a traceback."""
    torch.save(content, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ForeignFileError, match=r"not written by engine\.save_checkpoint"):
        import_checkpoint(store, tmp_path)


def test_a_pipe_is_refused(store: Store, tmp_path: Path) -> None:
    """Test that the command does not wait for a writer of the pipe."""
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(ForeignFileError, match="not a regular file"):
        import_checkpoint(store, tmp_path / "a.pt")


def test_a_value_that_cannot_be_stored_is_named(store: Store, tmp_path: Path) -> None:
    """Test keys that torch allows in its files, and the store does not."""
    torch.save({"a": {"deep": torch.Size([1, 2]), "bad": {(1, 2): 3}}}, tmp_path / "a.pt")
    with pytest.raises(ForeignFileError, match=r"a\.pt: .* at a\.bad: mapping key"):
        import_checkpoint(store, tmp_path / "a.pt")


def _model() -> Any:  # noqa: ANN401 - transformers has no types
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.slow
def test_a_restored_folder_is_a_model_for_transformers(store: Store, tmp_path: Path) -> None:
    """Test `from_pretrained` offline: equal logits from a folder of several files."""
    transformers = pytest.importorskip("transformers")
    model = _model()
    model.save_pretrained(tmp_path / "first")
    store.save({"model": model, "epoch": 1}, step=1)
    output = Output(tmp_path / "again", max_shard_bytes=100_000, files_from=tmp_path / "first")
    export_checkpoint(store, output, part="model")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", local_files_only=True).eval()
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_model_folder_round_trip(store: Store, tmp_path: Path) -> None:
    """Test tensors, metadata and small files; a model with one changed tensor stores only that tensor."""
    model = _model()
    model.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "merges.txt").write_text("a b\n")
    (tmp_path / "first" / "empty.txt").write_text("")
    import_checkpoint(store, tmp_path / "first", step=1)
    export_checkpoint(store, Output(tmp_path / "again"), step=1)
    for path in (tmp_path / "first").iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    first = safetensors.torch.load_file(tmp_path / "first" / "model.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "again" / "model.safetensors"), first)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight += 1
    model.save_pretrained(tmp_path / "second")
    saved = import_checkpoint(store, tmp_path / "second", step=2)
    assert saved.written_bytes is not None
    assert saved.written_bytes < saved.state_bytes


def test_ties_survive_a_safetensors_file(store: Store, tmp_path: Path) -> None:
    """Test that names of tied tensors are restored from the metadata of the file."""
    store.save(_state(), step=1)
    export_checkpoint(store, Output(tmp_path / "m.safetensors"), part="model")
    import_checkpoint(store, tmp_path / "m.safetensors", step=2)
    loaded: Any = store.load(2)
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]
    assert TIED not in loaded["safetensors"]["metadata"]


@pytest.mark.parametrize(
    "entry", ["{", "[]", '{"x": "gone"}', '{"a": "a"}', '{"b": 3}', '{"b": ["a"]}', '{"b": {}}', "[" * 100_000]
)
def test_a_note_of_ties_that_is_wrong_is_refused(store: Store, tmp_path: Path, entry: str) -> None:
    """Test metadata that names a missing tensor, or that has a wrong format."""
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors", metadata={TIED: entry})
    with pytest.raises(ForeignFileError, match=TIED):
        import_checkpoint(store, tmp_path / "m.safetensors")


def test_parts_are_found_by_their_dotted_name(store: Store, tmp_path: Path) -> None:
    """Test keys with dots, and numbers; the error lists the existing parts."""
    store.save({"a.b": {"c": torch.ones(1)}, "a": {"x": {3: {"y": torch.zeros(2)}}}}, step=1)
    for part, names in {"a.b": ["c"], "a.x.3": ["y"], "a": ["x.3.y"], "a.x": ["3.y"]}.items():
        export_checkpoint(store, Output(tmp_path / "o.safetensors", overwrite=True), part=part)
        assert list(safetensors.torch.load_file(tmp_path / "o.safetensors")) == names
    with pytest.raises(InvalidInputError, match=r"no part 'b'; it has a\.b, a"):
        export_checkpoint(store, Output(tmp_path / "p.safetensors"), part="b")


def test_part_of_dotted_keys_is_a_prefix(store: Store, tmp_path: Path) -> None:
    """Test a prefix of dotted keys, as in the state of a module; a part of a word does not match."""
    names = ["transformer.h.0.w", "transformer.h.1.w", "transformers", "head"]
    store.save({"model": {name: torch.ones(place + 1) for place, name in enumerate(names)}}, step=1)
    for part, expected in {"model.transformer": ["h.0.w", "h.1.w"], "model.transformer.h.1": ["w"]}.items():
        export_checkpoint(store, Output(tmp_path / "o.safetensors", overwrite=True), part=part)
        assert list(safetensors.torch.load_file(tmp_path / "o.safetensors")) == expected
    with pytest.raises(InvalidInputError, match=r"no part 'model\.trans'"):
        export_checkpoint(store, Output(tmp_path / "p.safetensors"), part="model.trans")


def test_two_tensors_of_one_dotted_name_are_refused(store: Store, tmp_path: Path) -> None:
    """Test that no tensor is lost silently."""
    store.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, step=1)
    with pytest.raises(InvalidInputError, match=r"'a\.b'.*\.pt"):
        export_checkpoint(store, Output(tmp_path / "o.safetensors"))
    export_checkpoint(store, Output(tmp_path / "o.pt"))


PEAK = """
import sys, resource, torch
from pathlib import Path
from asymcheck import Store
from asymcheck.convert.convert import Output, export_checkpoint, foreign_state

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) // 1024

folder = Path(sys.argv[1])
with Store.open(folder / "store", create=True) as store, Store.open(folder / "other", create=True) as other:
    # Whatever torch imports on first use is not counted.
    store.save({"a": torch.ones(5)}, step=0, run="small")
    export_checkpoint(store, Output(folder / f"small-{sys.argv[2]}"), run="small")
    with foreign_state(folder / f"small-{sys.argv[2]}") as state:
        other.save(state, step=0, run="small")
    before = peak()
    export_checkpoint(store, Output(folder / sys.argv[2]))
    exported = peak()
    with foreign_state(folder / sys.argv[2]) as state:
        other.save(state, step=0)
    print(exported - before, peak() - exported)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["big.safetensors", "big.pt", "big"])
def test_memory_stays_bounded(store: Store, tmp_path: Path, name: str) -> None:
    """Test that a state of 240 MB needs less than 64 MiB more than a small state, in both directions."""
    store.save({f"t{i}": torch.randn(15_000_000) for i in range(4)}, step=1)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    exported, imported = map(int, done.stdout.split())
    assert exported < 64, f"export took {exported} MiB"
    assert imported < 64, f"import took {imported} MiB"
