"""Test that equal bytes are stored once, between saves and within one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig
from tests.store.equality import assert_same

MIB = 1 << 20


def _packs(store: Store) -> set[str]:
    return {path.name for path in (store.path / "packs").iterdir()}


def _random(mebibytes: int) -> torch.Tensor:
    return torch.randint(256, (mebibytes * MIB,), dtype=torch.uint8)


def test_a_second_save_of_the_same_state_writes_nothing(store: Store) -> None:
    """Test that no payload and no pack is written, and that the checkpoint is complete."""
    state = {"large": _random(20), "small": [torch.randn(3000) for _ in range(10)], "tiny": torch.ones(3)}
    first = store.save(state, step=1)
    packs = _packs(store)
    second = store.save(state, step=2)
    assert first.written_bytes == 20 * MIB + 10 * 12_000
    assert second.written_bytes == 0
    assert second.state_bytes == first.state_bytes
    assert _packs(store) == packs
    assert_same(store.load(2), state)


def test_equal_bytes_of_other_objects_are_found_as_well(store: Store) -> None:
    """Test that only content counts, neither identity nor name, as for another process with the same values."""
    large = _random(4)
    store.save({"a": large}, step=1)
    assert store.save({"other": {"name": large.clone()}}, step=2, run="elsewhere").written_bytes == 0


@pytest.mark.slow
def test_only_changed_partitions_are_written(store: Store) -> None:
    """Test a changed element in 64 MiB: only its partition of 4 MiB is written."""
    large = _random(64)
    store.save({"x": large}, step=1)
    large[30 * MIB] += 1
    assert store.save({"x": large}, step=2).written_bytes == 4 * MIB
    assert_same(store.load(), {"x": large})


def test_the_frozen_part_of_a_model_costs_nothing(store: Store) -> None:
    """Test a frozen trunk and a trained head: each save writes only the head."""
    trunk = {f"layer{i}": torch.randn(MIB) for i in range(4)}
    head = torch.randn(MIB // 4)
    written = []
    for step in range(4):
        head += 1
        written.append(store.save({"trunk": trunk, "head": head}, step=step).written_bytes)
    assert written == [17 * MIB, MIB, MIB, MIB]


def test_identical_partitions_of_one_save_are_written_once(store: Store) -> None:
    """Test zeroed moments of a new optimizer, the usual case."""
    state = {"zeros": torch.zeros(8 * MIB), "copies": [torch.ones(MIB) for _ in range(8)]}
    saved = store.save(state, step=1)
    assert saved.state_bytes == 64 * MIB
    assert saved.written_bytes == 4 * MIB + 4 * MIB
    assert_same(store.load(), state)


def test_growing_one_tensor_does_not_move_the_others(store: Store) -> None:
    """Test a vocabulary that grew by a token: the rest of the model keeps its partitions."""
    model = {"embedding": torch.randn(1000, 300), "a": torch.randn(MIB), "b": torch.randn(2 * MIB)}
    store.save({"model": model}, step=1)
    model["embedding"] = torch.cat([model["embedding"], torch.randn(1, 300)])
    assert store.save({"model": model}, step=2).written_bytes == 1_201_200


def test_a_state_that_was_changed_back_is_known(store: Store) -> None:
    """Test that any earlier save of the bytes counts, not only the last."""
    first, second = _random(4), _random(4)
    for step, tensor in enumerate([first, second]):
        store.save({"x": tensor}, step=step)
    assert store.save({"x": first}, step=2).written_bytes == 0


def test_bytes_are_shared_between_runs(store: Store) -> None:
    """Test two runs that start from the same weights."""
    state = {"x": _random(8)}
    store.save(state, step=1, run="a")
    assert store.save(state, step=1, run="b").written_bytes == 0
    store.delete(1, run="a")
    store.gc()
    assert_same(store.load(run="b"), state)


@pytest.fixture
def reopened(store_path: Path) -> Iterator[Store]:
    """Return a store that was written, closed, and opened again."""
    with Store.open(store_path, create=True) as store:
        store.save({"x": torch.arange(2 * MIB)}, step=1)
    with Store.open(store_path, create=True) as store:
        yield store


def test_partitions_of_earlier_processes_are_known(reopened: Store) -> None:
    """Test that the catalog persists."""
    assert reopened.save({"x": torch.arange(2 * MIB)}, step=2).written_bytes == 0


def test_the_catalog_is_believed_only_when_the_pack_agrees(reopened: Store) -> None:
    """Test that a stale catalog entry for a missing pack costs a write, and never a checkpoint."""
    for path in (reopened.path / "packs").iterdir():
        path.unlink()
    assert reopened.save({"x": torch.arange(2 * MIB)}, step=2).written_bytes == 16 * MIB
    assert_same(reopened.load(2), {"x": torch.arange(2 * MIB)})


def test_each_frame_in_a_pack_of_its_own(store_path: Path) -> None:
    """Test that packs are closed at the configured size, and that a checkpoint of many packs is deduplicated."""
    config = StoreConfig(pack_bytes=1, partition_bytes=64 * 1024, bundle_below_bytes=1024)
    with Store.open(store_path, config=config, create=True) as store:
        state = {"x": _random(4)}
        store.save(state, step=1)
        assert len(_packs(store)) == 64
        assert_same(store.load(), state)
        assert store.save(state, step=2).written_bytes == 0
        state["x"][0] += 1
        assert store.save(state, step=3).written_bytes == 64 * 1024
        assert len(_packs(store)) == 65


def test_packs_keep_about_the_size_asked_for(store_path: Path) -> None:
    """Test that a pack is closed before the frame that would exceed its size."""
    config = StoreConfig(pack_bytes=4 * MIB, partition_bytes=MIB, slots=1)
    with Store.open(store_path, config=config, create=True) as store:
        store.save({"x": _random(20)}, step=1)
        sizes = [path.stat().st_size for path in (store.path / "packs").iterdir()]
    assert len(sizes) == 7
    assert max(sizes) <= 4 * MIB + 4096


def test_another_cut_stores_the_bytes_again(store_path: Path) -> None:
    """Test that another partition size costs one full save, because the digests differ."""
    state = {"x": _random(4)}
    for step, size in enumerate([MIB, 2 * MIB, MIB]):
        config = StoreConfig(partition_bytes=size, bundle_below_bytes=1024)
        with Store.open(store_path, config=config, create=True) as store:
            written = store.save(state, step=step).written_bytes
            assert written == (4 * MIB if step < 2 else 0)
            assert_same(store.load(), state)
