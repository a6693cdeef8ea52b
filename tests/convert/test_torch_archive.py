"""Test torch.save files that other programs have repacked: the same tensors as in torch, or an error."""

import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Store
from asymcheck.convert import restricted_pickle, torch_file
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.convert.torch_sink import hollow_tensor
from asymcheck.errors import AsymcheckError, ForeignFileError
from asymcheck.format.manifest import TensorRow
from tests.convert.files import import_checkpoint
from tests.store.equality import assert_same

PICKLE = "data.pkl"
Change = Callable[[str, bytes], bytes]


def example() -> dict[str, Any]:
    """Return tensors of all sizes, including a view and a tensor that is not in row-major order."""
    dice = torch.Generator().manual_seed(4)
    state: dict[str, Any] = {f"w{size}": torch.randn(size, generator=dice) for size in (0, 1, 3, 100, 5000)}
    return {
        **state,
        "inner": state["w100"][20:30],
        "none": torch.empty(3)[3:],
        "turned": torch.randn(30, 40, generator=dice).t(),
        "step": 3,
    }


def packed(path: Path, compression: int = zipfile.ZIP_STORED, change: Change | None = None) -> Path:
    """Rewrite the archive like a zip tool; ``change`` maps names of records to other bytes."""
    target = path.with_name(f"packed-{path.name}")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w", compression) as archive:
        for name in source.namelist():
            data = source.read(name)
            archive.writestr(name, data if change is None else change(name.partition("/")[2], data))
    return target


def unpacked(path: Path) -> Path:
    """Rewrite the archive with its files in another order, folders as members, and a comment."""
    target = path.with_name(f"unpacked-{path.name}")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        names = sorted(source.namelist(), reverse=True)
        folder = names[0].partition("/")[0]
        for name in (f"{folder}/", f"{folder}/data/", *names):
            archive.writestr(name, b"" if name.endswith("/") else source.read(name))
        archive.comment = b"a note"
    return target


def compressed_pickle(path: Path) -> Path:
    """Compress only the pickle."""
    target = path.with_name(f"smaller-{path.name}")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            kind = zipfile.ZIP_DEFLATED if name.endswith(PICKLE) else zipfile.ZIP_STORED
            archive.writestr(name, source.read(name), compress_type=kind)
    return target


@pytest.mark.parametrize("pack", [lambda path: path, packed, unpacked, compressed_pickle])
def test_torch_reads_the_stored_bytes(store: Store, tmp_path: Path, pack: Callable[[Path], Path]) -> None:
    """Test any position of the records."""
    torch.save(example(), tmp_path / "a.pt")
    path = pack(tmp_path / "a.pt")
    assert_same(torch.load(path, weights_only=True), example())
    import_checkpoint(store, path)
    assert_same(store.load(), example())


def test_checksums_are_not_needed(store: Store, tmp_path: Path) -> None:
    """Test files without checksums, an option of torch."""
    had = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(example(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(had)
    import_checkpoint(store, tmp_path / "a.pt")
    assert_same(store.load(), example())


def test_a_record_may_be_longer_than_its_tensors(store: Store, tmp_path: Path) -> None:
    """Test a storage of ten bytes with two numbers of four bytes."""
    state = {"two": torch.arange(10, dtype=torch.uint8)[:8].view(torch.float32)}
    torch.save(state, tmp_path / "a.pt")
    import_checkpoint(store, tmp_path / "a.pt")
    assert_same(store.load(), state)


def test_compressed_tensors_are_refused(store: Store, tmp_path: Path) -> None:
    """Test that the error has a remedy, and that compressed bytes are not used as tensors."""
    torch.save(example(), tmp_path / "a.pt")
    with pytest.raises(ForeignFileError, match=r"record data/\d is compressed; .*zip -0"):
        import_checkpoint(store, packed(tmp_path / "a.pt", zipfile.ZIP_DEFLATED))
    assert store.checkpoints() == []


@pytest.mark.slow(quick=["200000-byteorder"])
@pytest.mark.parametrize("record", [PICKLE, "byteorder"])
@pytest.mark.parametrize("said", [None, 1000, 200_000])
def test_a_record_that_expands_without_end_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, said: int | None
) -> None:
    """Test the length in the directory, and a false length, beyond which nothing is expanded."""
    monkeypatch.setattr(torch_file, "_INFLATED_BYTES_MAX", 1 << 20)
    torch.save(example(), tmp_path / "a.pt")
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(tmp_path / "a.pt") as source, zipfile.ZipFile(path, "w") as archive:
        for name in source.namelist():
            is_it = name.partition("/")[2] == record
            kind = zipfile.ZIP_DEFLATED if is_it else zipfile.ZIP_STORED
            archive.writestr(name, bytes(64 << 20) if is_it else source.read(name), compress_type=kind)
            if is_it and said is not None:
                archive.getinfo(name).file_size = said
    tracemalloc.start()
    with pytest.raises(ForeignFileError, match=f"record {record} "):
        import_checkpoint(store, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_compressed_record_that_ends_too_soon_is_refused(store: Store, tmp_path: Path) -> None:
    """Test a stream with all bytes, but without an end."""
    torch.save(example(), tmp_path / "a.pt")
    path = compressed_pickle(tmp_path / "a.pt")
    with zipfile.ZipFile(path) as archive:
        (member,) = (one for one in archive.infolist() if one.filename.endswith(PICKLE))
    data = path.read_bytes()
    stored = struct.pack("<II", member.compress_size, member.file_size)
    assert data.count(stored) == 2
    path.write_bytes(data.replace(stored, struct.pack("<II", member.compress_size - 1, member.file_size)))
    with pytest.raises(ForeignFileError, match="contradicts the zip directory"):
        import_checkpoint(store, path)


@pytest.mark.slow
def test_another_byte_order_is_refused(tmp_path: Path) -> None:
    """Test the command; torch would crash with a segmentation fault."""
    torch.save(example(), tmp_path / "a.pt")
    path = packed(tmp_path / "a.pt", change=lambda name, data: b"big" if name == "byteorder" else data)
    command = [sys.executable, "-m", "asymcheck", "convert", str(path), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "byte order is 'big'" in done.stderr


def _larger(name: str, data: bytes) -> bytes:
    # BININT1 0 and 4: storage offset and size of the first tensor.
    assert name != PICKLE or b"K\x00K\x04\x85" in data
    return data.replace(b"K\x00K\x04\x85", b"K\x00K\x40\x85", 1) if name == PICKLE else data


def _beyond(name: str, data: bytes) -> bytes:
    return data.replace(b"K\x00K\x04\x85", b"K\x01K\x04\x85", 1) if name == PICKLE else data


def _shorter(name: str, data: bytes) -> bytes:
    return data[:-4] if name == "data/0" else data


@pytest.mark.parametrize("change", [_larger, _beyond, _shorter])
def test_a_tensor_that_is_larger_than_its_storage_is_refused(store: Store, tmp_path: Path, change: Change) -> None:
    """Test that the tensor gets no foreign bytes."""
    torch.save({"first": torch.arange(4.0), "second": torch.arange(1000.0)}, tmp_path / "a.pt")
    with pytest.raises(ForeignFileError, match="larger than its storage data/0"):
        import_checkpoint(store, packed(tmp_path / "a.pt", change=change))
    assert store.checkpoints() == []


@pytest.mark.parametrize("twin", ["a/data/0", "a/DATA/0"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(store: Store, tmp_path: Path, twin: str) -> None:
    """Test a file of which readers use different records."""
    torch.save(example(), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.writestr(twin, b"other")
    with pytest.raises(ForeignFileError, match="two records have the same name"):
        import_checkpoint(store, tmp_path / "a.pt")


def test_a_file_behind_another_is_refused(store: Store, tmp_path: Path) -> None:
    """Test a wrong length in the metadata of a DCP folder, so that two files look like one."""
    for name in ("a.pt", "b.pt"):
        torch.save(example(), tmp_path / name)
    with (tmp_path / "a.pt").open("ab") as file:
        file.write((tmp_path / "b.pt").read_bytes())
    with pytest.raises(ForeignFileError, match="describes another archive"):
        import_checkpoint(store, tmp_path / "a.pt")


def test_an_archive_that_is_none_of_torch_is_refused(store: Store, tmp_path: Path) -> None:
    """Test an archive without a pickle."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/b", b"c")
    with pytest.raises(ForeignFileError, match=r"no record data\.pkl"):
        import_checkpoint(store, tmp_path / "a.pt")


def test_a_state_that_contains_itself_is_refused(store: Store, tmp_path: Path) -> None:
    """Test a cycle, and a state that is nested too deep."""
    loop: list[object] = []
    loop.append(loop)
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(ForeignFileError, match="contain each other"):
        import_checkpoint(store, tmp_path / "loop.pt")
    data = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    with zipfile.ZipFile(tmp_path / "deep.pt", "w") as archive:
        archive.writestr("deep/data.pkl", data)
        archive.writestr("deep/version", "3")
    with pytest.raises(ForeignFileError, match=r"recursion|cannot read"):
        import_checkpoint(store, tmp_path / "deep.pt")


_EXPANDED = {
    "one tensor": lambda: {"a": torch.zeros(1).expand(2**33)},
    "many tensors": lambda: {f"a{number}": torch.zeros(1).expand(2**26) for number in range(40)},
    "overlapping views": lambda: {"a": torch.zeros(2**20).as_strided((2**19, 2**19), (1, 1))},
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", _EXPANDED)
def test_small_file_with_huge_views_is_refused(store: Store, tmp_path: Path, kind: str, *, legacy: bool) -> None:
    """Test views that repeat the bytes of their storage: nothing of their size is allocated."""
    torch.save(_EXPANDED[kind](), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ForeignFileError, match="expanded views; clone"):
        import_checkpoint(store, tmp_path / "a.pt")
    assert store.checkpoints() == []


@pytest.mark.parametrize("legacy", [False, True])
def test_shared_containers_that_expand_without_end_are_refused(store: Store, tmp_path: Path, *, legacy: bool) -> None:
    """Test nested lists that contain each list ten times, of which a file stores each once."""
    laughs: list[object] = ["ha"] * 10
    for _ in range(9):
        laughs = [laughs] * 10
    torch.save({"laughs": laughs}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ForeignFileError, match="expand to millions of values"):
        import_checkpoint(store, tmp_path / "a.pt")


def test_small_expanded_views_are_stored(store: Store, tmp_path: Path) -> None:
    """Test a mask of one stored element."""
    torch.save({"mask": torch.ones(1).expand(1000)}, tmp_path / "a.pt")
    import_checkpoint(store, tmp_path / "a.pt")
    assert_same(store.load(), {"mask": torch.ones(1000)})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_file_is_an_error_of_the_package(tmp_path: Path) -> None:
    """Test that damage is an error of the package, has no effect, or changes values, which have no checksums."""
    torch.save({"a": torch.arange(9.0), "b": [torch.ones(3, 2).t(), 2.5]}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    dice = random.Random(5)
    refused = 0
    with Store.open(tmp_path / "store", create=True) as store:
        for step in range(120):
            data = bytearray(whole)
            for _ in range(dice.randrange(1, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            (tmp_path / "a.pt").write_bytes(data[: dice.randrange(len(data))] if dice.random() < 0.1 else data)
            try:
                import_checkpoint(store, tmp_path / "a.pt", step=step)
            except AsymcheckError:
                refused += 1
    assert refused > 30


def test_an_export_may_have_more_tensors_than_an_untrusted_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test tiny tensors, of which an import takes only a limited number."""
    monkeypatch.setattr(restricted_pickle, "_OBJECTS_MAX", 50)
    state = {f"t{number}": torch.full((2,), float(number)) for number in range(80)}
    store.save(state, step=1)
    export_checkpoint(store, Output(tmp_path / "out.pt"))
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), state)


def test_an_export_reserves_no_memory_for_a_tensor_that_is_larger_than_the_machine() -> None:
    """Test the stand-in that torch.save() gets for a tensor of 4 TiB."""
    shape = (1 << 40,)
    row = TensorRow("large", (), "float32", "weights", shape, shape, (0,), 4 << 40, None, ())
    assert hollow_tensor(row).nbytes == row.nbytes
