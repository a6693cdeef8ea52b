"""Test that measurements of memory, codecs and the drive are plausible, and leave no files."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import asymcheck
from asymcheck.config import ring_folder_of
from asymcheck.inspect.sample import measure_store, sample
from asymcheck.measurement import QUICK, measure_drive, planned_bytes
from asymcheck.storage.nvme import Files, NvmeTier, scratch
from tests.damage.flips import flip

SMALL = asymcheck.StoreConfig(partition_bytes=65536, bundle_below_bytes=4096)


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def _state(step: int) -> dict[str, object]:
    weight = torch.linspace(-1, 1, 200_000) + step * 1e-5
    moments = {"exp_avg": torch.linspace(0, 1e-3, 50_000) * step, "exp_avg_sq": torch.full((60_000,), 1e-6)}
    half = weight[:40_000].bfloat16()
    return {"model": {"weight": weight, "half": half, "bias": torch.ones(3)}, "optimizer": {0: moments}, "n": step}


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


@pytest.mark.slow
def test_facts_of_a_store(store_path: Path) -> None:
    """Test that speeds are positive, latencies ordered, and codecs are measured on the newest checkpoint."""
    with asymcheck.Store.open(store_path, config=SMALL, create=True) as store:
        for step in (1, 2):
            store.save(_state(step), step=step)
        before = _files(store_path)
        facts = measure_store(store.resources.nvme, ring_folder_of(None), quick=True)
        assert _files(store_path) == before
        assert store.verify() == []
    assert facts.sample == "step 2 of run default"
    assert facts.state_bytes == store_bytes(2)
    speeds = [value for name, value in dataclasses.asdict(facts).items() if name.endswith("_per_s") and value]
    speeds += [value for name, value in dataclasses.asdict(facts.drive).items() if name.endswith(("_per_s", "_s"))]
    assert all(map(_positive, speeds))
    assert facts.drive.write_latency_median_s <= facts.drive.write_latency_p95_s
    assert facts.drive.durable_write_bytes_per_s <= facts.drive.write_bytes_per_s
    assert 0 < facts.written_bytes <= planned_bytes(quick=True) + (1 << 20)
    kinds = {(one.role, one.dtype, one.codec) for one in facts.codecs}
    codecs = ("zstd", "byte-planes", "ordered-integer-delta")
    assert {("weights", dtype, codec) for dtype in ("float32", "bfloat16") for codec in codecs} <= kinds
    assert ("first_moment", "float32", "ordered-integer-delta") in kinds
    # The bytes are equal in both checkpoints, so a delta would be empty.
    assert ("second_moment", "float32", "ordered-integer-delta") not in kinds
    assert all(_positive(value) for one in facts.codecs for value in (one.ratio, one.sample_bytes))


def store_bytes(step: int) -> int:
    """Return the bytes of the tensors of a state."""
    return 200_000 * 4 + 40_000 * 2 + 3 * 4 + 110_000 * 4 + 0 * step


@pytest.mark.slow
def test_an_empty_store_has_no_codecs_to_measure(store_path: Path) -> None:
    """Test that memory and drive are measured, and that no codec is measured on made-up data."""
    with asymcheck.Store.open(store_path, create=True) as store:
        facts = measure_store(store.resources.nvme, ring_folder_of(None), quick=True)
    assert (facts.sample, facts.codecs, facts.state_bytes) == ("", (), None)
    assert facts.drive.durable_write_bytes_per_s > 0


def test_samples_are_bytes_of_the_newest_checkpoint(store_path: Path) -> None:
    """Test the largest tensors of each role and dtype, with the same ranges of the previous checkpoint."""
    with asymcheck.Store.open(store_path, config=SMALL, create=True) as store:
        for step in (1, 2, 3):
            store.save(_state(step), step=step)
        store.save({"model": {"weight": torch.zeros(5000)}}, step=9, run="older")
        store.save(_state(4), step=4)
        samples, described, _ = sample(store.resources.tier, 100_000)
    assert described == "step 4 of run default"
    found = {(one.role, one.dtype): one for one in samples}
    assert set(found) == {
        ("weights", "float32"),
        ("weights", "bfloat16"),
        ("first_moment", "float32"),
        ("second_moment", "float32"),
    }
    weights = found["weights", "float32"]
    assert len(weights.plain) == 100_000
    expected, older = (_state(step)["model"]["weight"].numpy().tobytes() for step in (4, 3))  # type: ignore[index]  # a dict
    assert weights.plain == expected[:100_000]
    assert weights.older == older[:100_000]


def test_a_sample_takes_several_tensors(store_path: Path) -> None:
    """Test one piece of each tensor in turn, so that one unusual tensor does not dominate."""
    tensors = {f"t{number}": torch.full((100_000,), float(number)) for number in range(3)}
    with asymcheck.Store.open(store_path, config=SMALL, create=True) as store:
        store.save({"model": tensors}, step=1)
        (only,), *_ = sample(store.resources.tier, 150_000)
    assert set(np.frombuffer(only.plain, dtype=np.float32).tolist()) == {0.0, 1.0, 2.0}
    assert only.older is None


def test_a_sample_of_tensors_that_share_a_partition(store_path: Path) -> None:
    """Test the offset of each tensor in the partition."""
    tensors = {f"t{number}": torch.full((800,), float(number)) for number in range(3)}
    with asymcheck.Store.open(store_path, config=SMALL, create=True) as store:
        store.save({"model": tensors}, step=1)
        assert len({one.partitions[0].digest for one in store.tensors()[1]}) == 1
        samples, *_ = sample(store.resources.tier, 1 << 20)
    assert samples[0].plain == b"".join(tensor.numpy().tobytes() for tensor in tensors.values())


@pytest.mark.slow
def test_a_damaged_partition_is_no_sample(store_path: Path) -> None:
    """Test that the measurement continues without codecs, because it does not search for damage.

    The size of the state comes from the manifest.
    """
    with asymcheck.Store.open(store_path, config=SMALL, create=True) as store:
        store.save({"model": {"weight": torch.randn(50_000)}}, step=1)
    (pack,) = (store_path / "packs").iterdir()
    flip(pack, 8 * (3 * 4096 + 100))
    with asymcheck.Store.open(store_path, config=SMALL, create=True) as store:
        assert sample(store.resources.tier, 1 << 20) == ((), "step 1 of run default", 200_000)
        assert measure_store(store.resources.nvme, ring_folder_of(None), quick=True).codecs == ()
        store.save({"other": torch.zeros(500)}, step=2)
        (manifest,) = max((store_path / "manifests" / "default").iterdir()).iterdir()
        flip(manifest, 8 * 500)
        assert sample(store.resources.tier, 1 << 20)[1:] == ("step 1 of run default", 200_000)


def test_full_drive_is_reported_first(store_path: Path) -> None:
    """Test that nothing is written, and that the message has the remedy."""

    class Full(Files):
        def free_bytes(self, path: Path) -> int:
            return 100 << 20

        def pwrite(self, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
            raise AssertionError

    asymcheck.Store.open(store_path, create=True).close()
    tier = NvmeTier(store_path, asymcheck.StoreConfig(), files=Full())
    with pytest.raises(asymcheck.errors.OutOfSpaceError, match="measure with --quick"):
        measure_drive(tier, QUICK)
    assert list((store_path / "packs").iterdir()) == []


def test_a_store_that_is_only_read_is_not_measured(store_path: Path) -> None:
    """Test a read-only store."""
    asymcheck.Store.open(store_path, create=True).close()
    with (
        asymcheck.Store.open(store_path, read_only=True) as store,
        pytest.raises(asymcheck.errors.ReadOnlyStoreError),
    ):
        measure_store(store.resources.nvme, ring_folder_of(None), quick=True)


def test_a_failing_drive_leaves_no_file(store_path: Path) -> None:
    """Test that the temporary file is deleted."""

    class Broken(Files):
        def sync(self, descriptor: int, path: Path) -> None:
            raise asymcheck.errors.StorageError("broken")

    asymcheck.Store.open(store_path, create=True).close()
    tier = NvmeTier(store_path, asymcheck.StoreConfig(), files=Broken())
    slow = dataclasses.replace(QUICK, file_bytes=8 << 20)
    with pytest.raises(asymcheck.errors.StorageError, match="broken"):
        measure_drive(tier, slow)
    assert list((store_path / "packs").iterdir()) == []


def test_collection_leaves_a_file_in_use_alone(store_path: Path) -> None:
    """Test a temporary file whose lock is held, like a pack in progress."""
    with asymcheck.Store.open(store_path, create=True) as store:
        with scratch(store.resources.tier) as file:
            assert store.gc().removed_temporaries == 0
            assert file.path.exists()
        assert not file.path.exists()


KILLED = """
import os, signal, sys
import asymcheck
from asymcheck.storage.nvme import scratch
with asymcheck.Store.open(sys.argv[1], create=True) as store, scratch(store.resources.tier):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_collection_removes_a_killed_measurement(store_path: Path) -> None:
    """Test a temporary file whose lock ended with the process."""
    asymcheck.Store.open(store_path, create=True).close()
    ended = subprocess.run([sys.executable, "-c", KILLED, str(store_path)], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert len(list((store_path / "packs").iterdir())) == 1
    with asymcheck.Store.open(store_path, create=True) as store:
        assert store.gc().removed_temporaries == 1
    assert list((store_path / "packs").iterdir()) == []
