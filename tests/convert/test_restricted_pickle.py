"""Small files of torch.save that would cost much time, memory or stack are refused before they are loaded."""

import collections
import io
import pickle
import pickletools
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

from asymcheck.convert import restricted_pickle
from asymcheck.convert.convert import foreign_state
from asymcheck.convert.restricted_pickle import load_pickle
from asymcheck.errors import ForeignFileError, StructureError

PROTOCOL = b"\x80\x02"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\nq\x01"
ARGUMENTS = (
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x00tQ"
    b"K\x00K\x00\x85K\x01\x85\x89ccollections\nOrderedDict\n)Rtq\x02"
)
TENSOR = b"h\x01h\x02R"
"""Operations that build one more empty tensor, in five bytes."""
MANY_TENSORS = PROTOCOL + b"](" + REBUILD + ARGUMENTS + b"R" + TENSOR * 600_000 + b"e."
DEEP_KEY = PROTOCOL + b"})" + b"\x85" * 3_000_000 + b"K\x01s."
SHARED_KEY = PROTOCOL + b"})" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(40)) + b"K\x01s."
LONG_TEXT = b"X" + (200_000).to_bytes(4, "little") + b"x" * 200_000
GROWN = b"]q\x03(" + b"K\x01" * 200_000 + b"e0"
"""Operations that remember a list as number 3 while it is empty, and then append items."""
MANY_COPIES = {
    "text": b"c_codecs\nencode\nq\x01(" + LONG_TEXT + b"X\x07\x00\x00\x00latin-1tq\x020](" + b"h\x01h\x02R" * 500,
    "list": b"cbuiltins\nset\nq\x01" + GROWN + b"0](" + b"h\x01h\x03\x85R" * 500,
    "tuple": b"ctorch\nSize\nq\x01(" + b"K\x01" * 200_000 + b"tq\x020](" + b"h\x01h\x02\x85R" * 500,
    "attributes": b"ccollections\nOrderedDict\nq\x01}q\x03("
    + b"".join(b"X\x05\x00\x00\x00%05dK\x01" % number for number in range(50_000))
    + b"u0]("
    + b"h\x01)Rh\x03b" * 500,
}
"""Pickles of 500 objects, each with a copy of the same content."""
MANY_LISTS = PROTOCOL + b"(" + b"]" * 15_000_000 + b"l."


def archive(path: Path, content: bytes, *, legacy: bool = False) -> Path:
    """Write a file of torch.save with this pickle, which is compressed unless the format is the old one."""
    if legacy:
        torch.save(None, path, _use_new_zipfile_serialization=False)
        file = io.BytesIO(path.read_bytes())
        for _ in range(3):
            pickletools.dis(file, io.StringIO())
        path.write_bytes(file.getvalue()[: file.tell()] + content + PROTOCOL + b"].")
        return path
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("a/data.pkl", content, compress_type=zipfile.ZIP_DEFLATED)
        target.writestr("a/version", "3")
        target.writestr("a/data/0", b"")
    return path


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (MANY_TENSORS, "more than 20,000 tensors"),
        (DEEP_KEY, "tuples are nested deeper"),
        (SHARED_KEY, "more than 500,000 values"),
    ],
    ids=["tensors", "key", "shared key"],
)
def test_hostile_pickle_is_refused_in_bounded_time_and_memory(
    tmp_path: Path, content: bytes, problem: str, *, legacy: bool
) -> None:
    """Test 600,000 empty tensors, a key whose hash overflows the stack, and a key whose hash takes days."""
    path = archive(tmp_path / "a.pt", content, legacy=legacy)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ForeignFileError, match=problem), foreign_state(path):
        pass
    duration = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert duration < 5
    assert peak < 4 * len(content) + (16 << 20)


def test_compressed_pickle_of_many_values_is_refused(tmp_path: Path) -> None:
    """Test 15 million empty lists in 15 kilobytes."""
    path = archive(tmp_path / "a.pt", MANY_LISTS)
    assert path.stat().st_size < 20_000
    with pytest.raises(ForeignFileError, match="more than 500,000 values"), foreign_state(path):
        pass


@pytest.mark.parametrize("kind", MANY_COPIES)
def test_copies_of_the_same_content_are_limited(tmp_path: Path, kind: str) -> None:
    """Test calls that would need hundreds of megabytes for a file of at most half a megabyte."""
    path = archive(tmp_path / "a.pt", PROTOCOL + MANY_COPIES[kind] + b"e.")
    tracemalloc.start()
    with pytest.raises(ForeignFileError, match="its calls copy more than 500,000"), foreign_state(path):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 26


def test_compressed_record_is_limited_by_the_size_of_the_file(tmp_path: Path) -> None:
    """Test a pickle of 32 MiB in a file of 32 KiB: it is not expanded."""
    path = archive(tmp_path / "a.pt", bytes(1 << 25))
    tracemalloc.start()
    with pytest.raises(ForeignFileError, match="33554432 uncompressed bytes"), foreign_state(path):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


def test_many_classes_are_refused() -> None:
    """Test 2,000 names of classes, in which torch would search at each call."""
    content = PROTOCOL + b"".join(b"cm\nc%d\n" % number for number in range(2000)) + b"."
    with pytest.raises(StructureError, match="more than 500 times"):
        load_pickle(io.BytesIO(content), len(content), lambda _module, _name: object)


def test_overlapping_records_are_refused(tmp_path: Path) -> None:
    """Test two directory entries for one record, which make a small file look large."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as target:
        for name in ("data.pkl", "data/0", "data/1"):
            target.writestr(f"a/{name}", bytes(1000))
        target.getinfo("a/data/1").header_offset = target.getinfo("a/data/0").header_offset
    with pytest.raises(ForeignFileError, match="overlap"), foreign_state(path):
        pass


def test_too_many_records_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a file with more records than its size allows."""
    monkeypatch.setattr(restricted_pickle, "_OBJECTS_MAX", 50)
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as target:
        for number in range(300):
            target.writestr(f"a/data/{number}", b"")
    with pytest.raises(ForeignFileError, match="records are too many"), foreign_state(tmp_path / "a.pt"):
        pass


def test_tiny_tensors_of_torch_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a file of the smallest tensors that torch.save() writes, such as the step counts of an optimizer."""
    monkeypatch.setattr(restricted_pickle, "_OBJECTS_MAX", 50)
    torch.save([torch.tensor(float(number)) for number in range(500)], tmp_path / "a.pt")
    with foreign_state(tmp_path / "a.pt") as state:
        assert isinstance(state, list)
        assert len(state) == 500


@pytest.mark.slow
def test_hostile_key_does_not_kill_the_command(tmp_path: Path) -> None:
    """Test the command, which torch would end with a segmentation fault."""
    path = archive(tmp_path / "a.pt", DEEP_KEY)
    command = [sys.executable, "-m", "asymcheck", "convert", str(path), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "nested deeper" in done.stderr) == (2, True), done.stderr


COUNTER = b"ccollections\nCounter\n"
UPDATE = b"N}X\x06\x00\x00\x00updateK\x01s\x86b."
"""Operations that set an attribute of an object with slots."""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (COUNTER + UPDATE, "changes attributes of a class"),
        (COUNTER + b"q\x00h\x00" + UPDATE, "changes attributes of a class"),
        (b"ctorch._utils\n_rebuild_parameter\n" + COUNTER + b"NN\x87R" + UPDATE, "is not a tensor"),
        (b"(X\x06\x00\x00\x00module" + COUNTER + b"NNtQ" + UPDATE, "torch.nn.Module"),
    ],
    ids=["named", "remembered", "returned", "persistent"],
)
def test_class_is_not_changed(tmp_path: Path, content: bytes, problem: str) -> None:
    """Test a state that would replace a method of a class for the whole process."""
    path = archive(tmp_path / "a.pt", PROTOCOL + content)
    with pytest.raises(ForeignFileError, match=problem), foreign_state(path):
        pass
    assert callable(collections.Counter.update)


def test_pickle_after_another_is_loaded() -> None:
    """Test a file with several pickles of different protocols: each load ends where its pickle ends."""
    values: list[object] = [{"a": [1, (2.5, "x")], 1 << 40: None}, b"bytes", ["x" * 100_000], frozenset({1, 2})]
    file = io.BytesIO(b"".join(pickle.dumps(value, 2 + number) for number, value in enumerate(values)))
    size = len(file.getvalue())
    for value in values:
        assert load_pickle(file, size, lambda _module, _name: str.encode) == value
    assert file.tell() == size
