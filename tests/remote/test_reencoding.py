"""Test that plain partitions are encoded for a slower location, and decode to the same bytes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, Push, RemoteConfig, Store, StoreConfig
from asymcheck.errors import DamagedPartitionError
from asymcheck.format import registry
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.storage.throughput import ThroughputMeter
from asymcheck.types import PackId
from tests.damage.flips import flip
from tests.store.deltas import entries_of

MIB = 1 << 20
REMOTE = RemoteConfig(compression="smallest", pack_bytes=2 * MIB, uploads=2, grace_s=0.0)
CONFIG = StoreConfig(
    compression="off", partition_bytes=256 << 10, bundle_below_bytes=16 << 10, inline_bytes=64, remote=REMOTE
)


def changed(**fields: object) -> StoreConfig:
    """Return the configuration with changed settings of the location."""
    return dataclasses.replace(CONFIG, remote=dataclasses.replace(REMOTE, **fields))  # type: ignore[arg-type]  # as named


def state_of(step: int) -> dict[str, object]:
    """Return weights that change little from step to step, integers, and small tensors that share a partition."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(300_000, generator=random)
    noise = torch.randn(300_000, generator=torch.Generator().manual_seed(step + 1))
    small = {str(number): torch.randn(1000, generator=random) + step for number in range(30)}
    counts = torch.arange(50_000) * (step + 1)
    return {"w": weights * (1 + 1e-4 * step * noise), "counts": counts, "small": small, "half": weights.bfloat16()}


def check(state: object, step: int) -> None:
    """Compare bit for bit."""
    expected = state_of(step)
    assert isinstance(state, dict)
    for name in ("w", "counts", "half"):
        assert torch.equal(state[name], expected[name])  # type: ignore[arg-type]  # tensors
    assert all(torch.equal(state["small"][name], tensor) for name, tensor in expected["small"].items())  # type: ignore[attr-defined]  # a dict


def names_in(store: Store) -> list[str]:
    """Return the partitions of the newest checkpoint."""
    return [partition.digest for tensor in store.tensors()[1] for partition in tensor.partitions]


def rows(location: str) -> Iterator[np.void]:
    """Return the index of every pack at the location."""
    remote = RemoteTier(parse_location(location), CONFIG)
    for index in remote.read_indexes(remote.pack_ids()).values():
        yield from index.entries
    remote.close()


@pytest.fixture
def store(store_path: Path) -> Path:
    """Return a store with steps 0 to 2, without encoding."""
    with Store.open(store_path, config=CONFIG, create=True) as opened:
        for step in range(3):
            opened.save(state_of(step), step=step)
    return store_path


@pytest.mark.slow(long=["hdfs"])
def test_plain_frames_arrive_encoded_and_come_back_plain(store: Path, any_location: str, tmp_path: Path) -> None:
    """Test fewer bytes at the location, deltas on older remote states, equal names, and exact bytes."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        first, second, third = (
            opened.push(any_location, 0),
            opened.push(any_location, 1),
            opened.push(any_location, everything=True),
        )
        assert first.moved_bytes < 0.95 * first.plain_bytes
        assert second.moved_bytes < 0.8 * second.plain_bytes
        assert third.present == 2
        local_names = names_in(opened)
    with Store.open(any_location, config=CONFIG, create=True) as remote:
        for step in range(3):
            check(remote.load(step), step)
        assert remote.verify() == []
        assert names_in(remote) == local_names
    kinds = {int(row["kind"]) for row in rows(any_location)}
    assert kinds == {registry.KIND_FULL, registry.KIND_DELTA}
    remote_bytes = {row["digest"].tobytes() for row in rows(any_location)}
    assert all(
        row["base_digest"].tobytes() in remote_bytes for row in rows(any_location) if row["kind"] == registry.KIND_DELTA
    )
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as new:
        assert new.pull(any_location).moved_partitions > 0
        check(new.load(), 2)
        assert new.verify() == []


def test_remote_base_stays_while_needed(store: Path, folder: str) -> None:
    """Test that the delta stays readable after the checkpoint of its base is deleted."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 0)
        opened.push(folder, 1)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        remote.delete(0)
        remote.gc()
        check(remote.load(1), 1)
        assert remote.verify() == []


def test_no_delta_without_a_remote_base(store: Path, folder: str) -> None:
    """Test that no delta is sent without its base."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 2)
    assert {int(row["kind"]) for row in rows(folder)} == {registry.KIND_FULL}
    assert registry.CODEC_BYTE_PLANES in {int(row["codec"]) for row in rows(folder)}


def test_lost_remote_base_is_not_used(store: Path, folder: str) -> None:
    """Test a base whose checkpoint is listed, but which no pack contains."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 0)
        for pack in Path(folder.removeprefix("file://"), "packs").iterdir():
            pack.unlink()
        opened.push(folder, 1)
    assert {int(row["kind"]) for row in rows(folder)} == {registry.KIND_FULL}
    with Store.open(folder, config=CONFIG, create=True) as remote:
        check(remote.load(1), 1)


def longest_chain(location: str) -> int:
    """Return the maximum number of deltas at the location between a partition and a full frame."""
    bases = {row["digest"].tobytes(): row["base_digest"].tobytes() for row in rows(location)}

    def depth(name: bytes) -> int:
        return 1 + depth(bases[name]) if any(bases[name]) else 0

    return max(map(depth, bases))


@pytest.mark.slow
def test_chains_of_deltas_end(store_path: Path, folder: str) -> None:
    """Test that a partition is sent in full after the maximum number of deltas."""
    with Store.open(store_path, config=CONFIG, create=True) as opened:
        for step in range(registry.DELTA_DEPTH_MAX + 3):
            opened.save(state_of(step), step=step)
            opened.push(folder)
    assert longest_chain(folder) == registry.DELTA_DEPTH_MAX
    with Store.open(folder, config=CONFIG, create=True) as remote:
        check(remote.load(), registry.DELTA_DEPTH_MAX + 2)
        assert remote.verify() == []


@pytest.mark.slow
def test_base_of_deltas_is_not_reencoded(store_path: Path, folder: str) -> None:
    """Test the base of a chain, which was counted from the plain partition."""
    random = torch.Generator().manual_seed(0)
    newest = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32, generator=random)
    state = {"newest": newest, "before": newest.clone()}
    snapshots = {}
    config = dataclasses.replace(CONFIG, compression="smallest")
    with (
        Store.open(store_path, config=config, create=True) as opened,
        Checkpointer(opened, state, every=1, keep=None) as checkpointer,
    ):
        for step in range(registry.DELTA_DEPTH_MAX + 5):
            state["before"].copy_(newest)
            newest += torch.randint(0, 3, (100_000,), dtype=torch.int32, generator=random)
            checkpointer.step(step)
            checkpointer.wait()
            if step % 2 == 0:
                opened.push(folder)
                snapshots[step] = newest.clone()
    assert longest_chain(folder) == registry.DELTA_DEPTH_MAX
    with Store.open(folder, config=CONFIG, create=True) as remote:
        for step, expected in snapshots.items():
            loaded = remote.load(step)
            assert isinstance(loaded, dict)
            assert torch.equal(loaded["newest"], expected)


@pytest.mark.slow(quick=["auto-1000000000000.0-False"])
@pytest.mark.parametrize(
    ("mode", "bytes_per_s", "is_encoded"),
    [("off", 1.0, False), ("auto", 1e12, False), ("auto", 1e6, True), ("smallest", 1e12, True)],
)
def test_link_speed_decides_about_encoding(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch, mode: str, bytes_per_s: float, is_encoded: bool
) -> None:
    """Test that a fast location receives plain bytes."""
    monkeypatch.setattr(ThroughputMeter, "bytes_per_s", bytes_per_s)
    with Store.open(store, config=changed(compression=mode), create=True) as opened:
        done = opened.push(folder)
    assert (done.moved_bytes < done.plain_bytes) == is_encoded
    with Store.open(folder, config=CONFIG, create=True) as remote:
        check(remote.load(), 2)


def test_the_speed_is_measured_before_most_is_sent(
    store_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a first part is sent plain, and that the same push encodes the rest if the link was slow."""
    monkeypatch.setattr("asymcheck.replication.pack_sender._PROBE_BYTES", MIB)
    monkeypatch.setattr("asymcheck.storage.throughput._ENOUGH_BYTES", MIB // 2)
    noted = ThroughputMeter.note
    monkeypatch.setattr(ThroughputMeter, "note", lambda self, count, _seconds: noted(self, count, count / 1e6))
    with Store.open(store_path, config=changed(compression="auto", pack_bytes=1 << 30), create=True) as opened:
        opened.save(state_of(0), step=0)
        done = opened.push(folder)
    assert done.packs == 2
    codecs = [int(row["codec"]) for row in rows(folder)]
    assert codecs.count(registry.CODEC_IDENTITY) >= 3
    assert codecs.count(registry.CODEC_BYTE_PLANES) >= 3


@pytest.mark.usefixtures("on_thread")
def test_background_push_keeps_its_measurements(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that one encoder serves all pushes."""
    monkeypatch.setattr(ThroughputMeter, "bytes_per_s", 1e6)
    rules = Push(folder)
    with (
        Store.open(store, config=changed(compression="auto"), create=True) as opened,
        opened.training.push_in_background(rules) as pushing,
    ):
        pass
    assert pushing.statistics().pushed == 3
    with Store.open(folder, config=CONFIG, create=True) as remote:
        for step in range(3):
            check(remote.load(step), step)
        assert remote.verify() == []


def test_memory_of_encoded_frames_is_bounded(store: Path, folder: str) -> None:
    """Test that the pack size limits the memory."""
    with Store.open(store, config=changed(encoded_bytes=MIB, pack_bytes=1 << 30), create=True) as opened:
        done = opened.push(folder)
    assert done.packs >= done.plain_bytes // (MIB // 2)


def test_local_damage_is_found_before_encoding(store: Path, folder: str) -> None:
    """Test that the damaged frame is named, and not uploaded."""
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    flip(newest, 8 * (4096 + 8192))
    with (
        Store.open(store, config=CONFIG, create=True) as opened,
        pytest.raises(DamagedPartitionError, match="digest mismatch"),
    ):
        opened.push(folder)


def test_frames_sent_before_damage_are_not_sent_again(store_path: Path, folder: str, tmp_path: Path) -> None:
    """Test that the rest is sent, with another copy of the damaged partition, decoded."""
    for where in (store_path, tmp_path / "copy"):
        with Store.open(where, config=CONFIG, create=True) as opened:
            opened.save(state_of(0), step=0)
    (pack,) = (store_path / "packs").iterdir()
    last = entries_of(NvmeTier(store_path, CONFIG, read_only=True), PackId(bytes.fromhex(pack.stem)))[-1]
    flip(pack, 8 * (int(last["offset"]) + 4096))
    (copy,) = (tmp_path / "copy" / "packs").iterdir()
    shutil.copy(copy, store_path / "packs")
    with Store.open(store_path, config=changed(compression="off", uploads=1, pack_bytes=MIB), create=True) as opened:
        done = opened.push(folder)
    assert done.moved_bytes <= pack.stat().st_size
    with Store.open(folder, config=CONFIG, create=True) as remote:
        check(remote.load(), 0)
