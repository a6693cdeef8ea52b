"""Test that large tensors are read directly into their memory if address and file offset are congruent."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from asymcheck import Checkpointer, Store, StoreConfig
from asymcheck.errors import (
    InconsistentCheckpointError,
    PartialRestoreError,
    SkippedCheckpointWarning,
    StateMismatchError,
)
from asymcheck.format.manifest import TensorRow
from asymcheck.restore import frame_reader
from asymcheck.restore.assemble import allocate
from asymcheck.storage.local_files import Files, set_direct, translated
from asymcheck.storage.nvme import NvmeTier, pack_reader
from asymcheck.types import PackId
from tests.damage.flips import flip

BLOCK = 4096
CONFIG = StoreConfig(partition_bytes=1 << 20, bundle_below_bytes=1 << 16, compression="off")
NBYTES = (5 << 19) + 300
"""Size of two whole partitions and a part of one, which ends inside a block."""


class Watching(Files):
    """Records the address and length of every buffer into which a frame is read."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int]] = []

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Record and read."""
        if path.parent.name == "packs" and sum(map(len, buffers)) > 1 << 16:
            self.buffers += [(_address(buffer), len(buffer)) for buffer in buffers]
        return super().pread(descriptor, buffers, offset, path)

    def bytes_into(self, tensor: torch.Tensor) -> int:
        """Return how many bytes were read into the memory of a tensor."""
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return sum(length for address, length in self.buffers if first <= address and address + length <= last)


def _address(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() if len(buffer) else 0


def _at(offset: int, nbytes: int = NBYTES, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return a tensor of zeros whose address is ``offset`` modulo a block."""
    memory = torch.zeros(nbytes + BLOCK, dtype=torch.uint8)
    start = (offset - memory.data_ptr()) % BLOCK
    return memory[start : start + nbytes].view(dtype)


def _random(offset: int, nbytes: int = NBYTES) -> torch.Tensor:
    return _at(offset, nbytes).random_(0, 256)


def _opened(path: Path, files: Files) -> Store:
    return Store(NvmeTier(path, CONFIG, read_only=True, files=files))


@pytest.fixture(autouse=True)
def _direct_io(tmp_path: Path) -> None:
    """Skip the test if the file system has no direct I/O."""
    descriptor = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    found = set_direct(descriptor)
    os.close(descriptor)
    if not found:
        pytest.skip("this file system has no direct I/O")


@pytest.fixture
def files() -> Watching:
    """Return a disk that records reads."""
    return Watching()


def _save(path: Path, *states: dict[str, Any]) -> None:
    with Store.open(path, config=CONFIG, create=True) as store:
        for step, state in enumerate(states, 1):
            store.save(state, step=step)


@pytest.mark.parametrize("offset", [0, 1, 64, 2_048, 4_095])
def test_an_existing_tensor_at_such_an_address_is_filled_directly(
    store_path: Path, files: Watching, offset: int
) -> None:
    """Test all blocks but the first and the last of each partition, and every byte."""
    state = {"w": _random(offset)}
    _save(store_path, state)
    into = {"w": _at(offset)}
    with _opened(store_path, files) as store:
        store.load(into=into)
    assert torch.equal(into["w"], state["w"])
    assert files.bytes_into(into["w"]) > NBYTES - 3 * 2 * BLOCK


def test_memory_in_small_pages_is_copied_on_a_paravirtual_drive(
    store_path: Path, files: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that no buffer of a read is in the tensor."""
    state, into = {"w": _random(64)}, {"w": _at(64)}
    _save(store_path, state)
    asked: list[int] = []

    def needs_slot(_device: int, memory: memoryview) -> bool:
        asked.append(len(memory))
        return True

    monkeypatch.setattr(pack_reader, "needs_slot", needs_slot)
    with _opened(store_path, files) as store:
        store.load(into=into)
    assert torch.equal(into["w"], state["w"])
    assert files.bytes_into(into["w"]) == 0
    # Only the first of three partitions asked.
    assert len(asked) == 1


@pytest.mark.parametrize(("saved", "given"), [(0, 64), (64, 0), (64, 65)])
def test_an_existing_tensor_at_another_address_is_copied(
    store_path: Path, files: Watching, saved: int, given: int
) -> None:
    """Test that bytes are checked before they are copied into the tensor."""
    state = {"w": _random(saved)}
    _save(store_path, state)
    into = {"w": _at(given)}
    with _opened(store_path, files) as store:
        store.load(into=into)
    assert torch.equal(into["w"], state["w"])
    assert files.bytes_into(into["w"]) == 0


@pytest.mark.parametrize("offset", [0, 64, 2_048, 4_092])
def test_a_new_tensor_is_made_at_such_an_address(store_path: Path, files: Watching, offset: int) -> None:
    """Test that the memory is at most a block larger, and that the tensor is otherwise ordinary."""
    state = {"w": _random(offset).view(torch.float32)}
    _save(store_path, state)
    with _opened(store_path, files) as store:
        loaded = store.load()
    assert isinstance(loaded, dict)
    tensor = loaded["w"]
    assert torch.equal(tensor.view(torch.uint8), state["w"].view(torch.uint8))
    assert tensor.data_ptr() % BLOCK == offset
    assert files.bytes_into(tensor) > NBYTES - 3 * 2 * BLOCK
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    assert tensor.untyped_storage().nbytes() <= NBYTES + BLOCK
    assert torch.equal(pickle.loads(pickle.dumps(tensor)).view(torch.uint8), state["w"].view(torch.uint8))
    assert tensor.requires_grad_().is_leaf
    assert not tensor.detach().zero_().any()


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 1), (torch.complex128, 8), (torch.int16, 4_095)])
def test_new_tensor_is_aligned_to_its_elements(dtype: torch.dtype, shift: int) -> None:
    """Test any stored address."""
    count = 1 << 18
    row = TensorRow(
        "w", (), str(dtype).removeprefix("torch."), "other", (count,), (count,), (0,), count * dtype.itemsize, None, ()
    )
    tensor = allocate(row, torch.device("cpu"), shift)
    assert tensor.data_ptr() % dtype.itemsize == 0
    assert tensor.fill_(1).sum() == count


def test_partitions_of_one_tensor_may_ask_for_different_addresses(store_path: Path, files: Watching) -> None:
    """Test partitions that were stored for another tensor; the address is that of most partitions."""
    first = _random(64, 1 << 20)
    second = torch.cat([first, _random(0, 3 << 20)])
    moved = _at(0, len(second))
    moved.copy_(second)
    _save(store_path, {"w": first}, {"w": moved})
    with _opened(store_path, files) as store:
        loaded = store.load()
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["w"], second)
    assert loaded["w"].data_ptr() % BLOCK == 0
    assert (3 << 20) - 3 * 2 * BLOCK < files.bytes_into(loaded["w"]) <= 3 << 20


def test_common_partition_is_copied_to_two_tensors(store_path: Path, files: Watching) -> None:
    """Test that the partition is stored and read once."""
    state = {"a": _random(64)}
    state["b"] = state["a"].clone()
    _save(store_path, state)
    into = {name: _at(64) for name in state}
    with _opened(store_path, files) as store:
        store.load(into=into)
    for name, tensor in into.items():
        assert torch.equal(tensor, state[name])
        assert files.bytes_into(tensor) == 0


def test_tensors_that_share_memory_are_copied(store_path: Path, files: Watching) -> None:
    """Test that no thread checks bytes that another overwrites; separate tensors are read directly."""
    whole = _random(64)
    state = {"whole": whole, "part": whole[: 1 << 20], "apart": _random(64)}
    _save(store_path, state)
    memory = _at(64)
    into = {"whole": memory, "part": memory[: 1 << 20], "apart": _at(64)}
    with _opened(store_path, files) as store:
        store.load(into=into)
        assert torch.equal(memory, whole)
        assert files.bytes_into(memory) == 0
        assert files.bytes_into(into["apart"]) > 0
        other = _at(64, NBYTES + 64)
        with pytest.raises(StateMismatchError, match="shares memory"):
            store.load(into={"whole": other[:NBYTES], "apart": other[64:]})


def test_encoded_frames_are_decoded_into_place(store_path: Path, files: Watching) -> None:
    """Test payloads that are not the plain bytes."""
    state = {"w": torch.zeros(1 << 20)}
    with Store.open(store_path, config=StoreConfig(compression="smallest"), create=True) as store:
        store.save(state, step=1)
    into = {"w": torch.ones(1 << 20)}
    with _opened(store_path, files) as store:
        store.load(into=into)
    assert torch.equal(into["w"], state["w"])
    assert files.bytes_into(into["w"]) == 0


def test_strided_tensors_are_copied(store_path: Path, files: Watching) -> None:
    """Test also two given tensors for one stored tensor."""
    state = {"w": torch.randn(1_000, 1_000)}
    _save(store_path, state)
    into = {"w": torch.zeros(1_000, 1_000).t()}
    with _opened(store_path, files) as store:
        store.load(into=into)
    assert torch.equal(into["w"], state["w"])
    assert files.bytes_into(into["w"].t()) == 0


PLACES = {
    "header": (0, 20),
    "padding": (0, BLOCK + 3),
    "first block": (0, BLOCK + 64 + 10),
    "interior": (0, BLOCK + 64 + 100_000),
    "last block": (1, BLOCK + 64 - 1),
    "padding at the end": (1, BLOCK + 64 + 5),
}
"""Offsets in a frame of shift 64: in lengths of the payload, and in bytes."""


def _newest(path: Path) -> Path:
    return max((path / "packs").iterdir(), key=lambda one: one.stat().st_mtime_ns)


def _flip(pack: Path, place: str) -> None:
    """Flip a bit in the shortest frame of a pack, which has the end of a tensor."""
    tier = NvmeTier(pack.parent.parent, CONFIG, read_only=True)
    with contextlib.closing(tier.open_pack(PackId(bytes.fromhex(pack.stem)))) as opened:
        length, offset = min((int(one["stored_length"]), int(one["offset"])) for one in opened.entries)
    times, before = PLACES[place]
    flip(pack, 8 * (offset + times * length + before) + 4)


@pytest.mark.parametrize("place", PLACES)
def test_damage_of_an_existing_tensor_is_found(store_path: Path, place: str) -> None:
    """Test damage at any position; the error names the tensor with bytes of the damaged checkpoint."""
    _save(store_path, {"w": _random(64), "x": torch.zeros(5)}, {"w": _random(64), "x": torch.ones(5)})
    _flip(_newest(store_path), place)
    into = {"w": _at(64), "x": torch.full((5,), 7.0)}
    with Store.open(store_path, create=True) as store, pytest.raises(PartialRestoreError, match="w") as caught:
        store.load(into=into)
    assert caught.value.overwritten == ("w",)
    assert caught.value.next_step == 1
    assert set(into["x"].tolist()) == {7.0}


def test_damage_of_an_encoded_partition_overwrites_nothing(store_path: Path) -> None:
    """Test that encoded partitions are decoded into new tensors in place, but not into existing ones."""
    with Store.open(store_path, create=True, config=dataclasses.replace(CONFIG, compression="smallest")) as store:
        for step in (1, 2):
            store.save({"w": step + torch.rand(1 << 17)}, step=step)
    into = {"w": torch.zeros(1 << 17)}
    with Store.open(store_path) as store:
        with mock.patch.object(frame_reader, "decode_checked", wraps=frame_reader.decode_checked) as decoding:
            state: Any = store.load()
            store.load(into=into)
        assert torch.equal(state["w"], into["w"])
        new, existing = (call.kwargs["room"] for call in decoding.call_args_list)
        assert _address(new) == state["w"].data_ptr()
        assert existing is None
    _flip(_newest(store_path), "interior")
    with Store.open(store_path) as store, pytest.warns(SkippedCheckpointWarning, match="step 2"):
        store.load(into=into)
    assert 1 <= into["w"].min() <= into["w"].max() <= 2


@pytest.mark.parametrize("place", PLACES)
def test_a_new_tensor_is_made_of_the_next_older_checkpoint(store_path: Path, place: str) -> None:
    """Test that no caller gets the damaged bytes."""
    states = [{"w": _random(64)}, {"w": _random(64)}]
    _save(store_path, *states)
    _flip(_newest(store_path), place)
    with Store.open(store_path, create=True) as store, pytest.warns(SkippedCheckpointWarning, match="step 2"):
        loaded = store.load()
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["w"], states[0]["w"])


def test_a_training_goes_on_from_the_next_older_checkpoint(store_path: Path) -> None:
    """Test that the older checkpoint overwrites the damaged bytes."""
    states = [{"w": _random(64)}, {"w": _random(64)}]
    _save(store_path, *states)
    _flip(_newest(store_path), "interior")
    into = {"w": _at(64)}
    with Store.open(store_path, create=True) as store, pytest.warns(SkippedCheckpointWarning, match="digest mismatch"):
        checkpoint = Checkpointer(store, into, every=1, keep=None).restore()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert torch.equal(into["w"], states[0]["w"])


def test_another_copy_is_copied_over_damage(store_path: Path) -> None:
    """Test damage of the first copy: the other copy fills the tensor."""
    state = {"w": _random(64)}
    _save(store_path, state)
    packs, away = store_path / "packs", store_path / "away.tmp"
    packs.rename(away)
    packs.mkdir()
    _save(store_path, state)
    for pack in packs.iterdir():
        pack.rename(away / pack.name)
    packs.rmdir()
    away.rename(packs)
    names = [path.name for path in packs.iterdir()]
    assert len(names) == 2
    for name in names:
        whole = (packs / name).read_bytes()
        _flip(packs / name, "interior")
        into = {"w": _at(64)}
        with Store.open(store_path, read_only=True) as store:
            store.load(into=into)
            loaded = store.load()
        assert isinstance(loaded, dict)
        assert torch.equal(into["w"], state["w"])
        assert torch.equal(loaded["w"], state["w"])
        (packs / name).write_bytes(whole)


class Acting(Watching):
    """Runs an action before each read of a frame."""

    def __init__(self, act: Callable[[int, Sequence[memoryview], Path], object]) -> None:
        super().__init__()
        self._act = act

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Act, then read."""
        if path.parent.name == "packs" and sum(map(len, buffers)) > 1 << 16:
            self._act(descriptor, buffers, path)
        return super().pread(descriptor, buffers, offset, path)


def test_a_file_that_ends_early_is_damage(store_path: Path) -> None:
    """Test a file that was truncated after its index was read."""
    _save(store_path, {"w": _random(64)})
    files = Acting(lambda _descriptor, _buffers, path: os.truncate(path, 3 * BLOCK))
    into = {"w": _at(64)}
    with _opened(store_path, files) as store:
        with pytest.raises(PartialRestoreError, match="the file ends after"):
            store.load(into=into)
        with pytest.raises(InconsistentCheckpointError):
            store.load()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_memory_that_the_device_refuses_is_filled_by_a_copy(store_path: Path, number: int) -> None:
    """Test memory that a driver maps, and a file system that refuses direct I/O late."""

    def refuse(_descriptor: int, buffers: Sequence[memoryview], path: Path) -> None:
        if len(buffers) > 1:
            with translated("read", path):
                raise OSError(number, os.strerror(number))

    state, into, files = {"w": _random(64)}, {"w": _at(64)}, Acting(refuse)
    _save(store_path, state)
    with _opened(store_path, files) as store:
        store.load(into=into)
    assert torch.equal(into["w"], state["w"])


def test_an_error_of_the_device_is_no_refusal(store_path: Path) -> None:
    """Test that the error counts as damage of the frame."""

    def fail(_descriptor: int, _buffers: Sequence[memoryview], path: Path) -> None:
        with translated("read", path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    _save(store_path, {"w": _random(64)})
    with _opened(store_path, Acting(fail)) as store, pytest.raises(PartialRestoreError, match=os.strerror(errno.EIO)):
        store.load(into={"w": _at(64)})


def test_without_direct_access_everything_is_copied(
    store_path: Path, files: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the bytes are read through the page cache."""
    state, into = {"w": _random(64)}, {"w": _at(64)}
    _save(store_path, state)
    monkeypatch.setattr("asymcheck.storage.local_files.set_direct", lambda _descriptor: False)
    with _opened(store_path, files) as store:
        store.load(into=into)
    assert torch.equal(into["w"], state["w"])
    assert files.bytes_into(into["w"]) == 0
